"""Evaluation of a team: episodes, figures with intervals, and their provenance."""
