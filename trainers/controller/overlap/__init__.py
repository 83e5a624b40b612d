"""Collection beside the update: how episodes are admitted, the log of all that happened, and its replay."""
