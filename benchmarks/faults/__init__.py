"""Faults: runs whose processes are killed at random and at chosen moments, beside the run that nobody disturbs."""
