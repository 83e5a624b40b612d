"""vLLM as an engine: the engine, its version and options, and how weights reach it."""
