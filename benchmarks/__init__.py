"""How good it is: evaluation, leaderboard, viewer, reports, speed, the demo."""
