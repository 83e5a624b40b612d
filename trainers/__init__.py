"""How it learns: collector, model groups, algorithms, losses, runs."""
