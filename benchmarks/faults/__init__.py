"""Test of faults: runs whose processes are killed, compared with an undisturbed run."""
