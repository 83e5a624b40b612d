"""Interfaces to a workflow: PettingZoo's AEC environment, spaces, Gymnasium, and a human player at a terminal."""
