"""Bringing what is not on this machine: models of the hub, models in registry packages, and where they are kept."""
