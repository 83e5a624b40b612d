"""The folder that is a room's PYTHONPATH. Nothing here is imported by the package."""
