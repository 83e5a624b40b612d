"""The controller's side of the star: episodes, the table of decisions, statistics, and the loop of a run."""
