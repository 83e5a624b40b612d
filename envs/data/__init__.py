"""Data: the embedded mini world, published data sets, and files of one's own, as tasks."""
