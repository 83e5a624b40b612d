"""The config of a run: one typed tree, importable without torch."""
