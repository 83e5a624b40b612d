"""Overlap compared with the synchronous run on the same budget: simulated time of a node, and scores of real runs."""
