"""GPU kit: update, engine and publishing on a machine's GPU, compared with plain torch and transformers."""
