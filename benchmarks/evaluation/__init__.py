"""Evaluation: episodes to figures with intervals, and what they are figures of."""
