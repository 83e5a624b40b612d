"""Engines: who generates tokens. The torch engine, vLLM, and how tokens are sampled."""
