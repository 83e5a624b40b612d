"""The decoder of the Llama family: its shape, weights, attention and log-probs."""
