"""The GPU kit: what a machine's GPU does with the update, the engine and the publish, beside plain torch and transformers."""
