"""Measuring: evaluation, leaderboard, viewer, reports, speed, the demo."""
