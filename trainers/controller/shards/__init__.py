"""Several controllers: each shard plays a range of a step's tasks, and returns small rows to the main controller."""
