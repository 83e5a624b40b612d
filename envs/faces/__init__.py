"""Faces of a workflow: PettingZoo's AEC environment, spaces, bridges, a terminal."""
