"""Evaluation, leaderboard, viewer, reports, benchmarks of speed, and the demo."""
