"""Tasks from the embedded mini world, from published data sets, and from the user's own files."""
