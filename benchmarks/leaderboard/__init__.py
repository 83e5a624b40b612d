"""Leaderboard: submissions, their verification, and the static site."""
