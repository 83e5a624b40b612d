"""The teams: one file per workflow family, with its rules, its program and its expert."""
