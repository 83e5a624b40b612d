"""The thin table of decisions, and all statistics on it: exact, in one process."""
