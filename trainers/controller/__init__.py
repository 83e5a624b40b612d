"""The controller's side of the star: episodes, the thin table, statistics, the loop of a run."""
