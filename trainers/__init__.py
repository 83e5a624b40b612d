"""Training: collector, model groups, algorithms, losses, runs."""
