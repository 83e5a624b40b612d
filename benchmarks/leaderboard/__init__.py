"""The leaderboard: submissions, their verification, and the static site."""
