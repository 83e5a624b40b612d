"""Overlap beside the synchronous run on the same budget: time by models of a node, and scores of real runs."""
