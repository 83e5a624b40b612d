"""Folder that is the PYTHONPATH of a room. The package imports nothing from it."""
