"""Decoders: shapes, weights, attention, log-probs and adapters."""
