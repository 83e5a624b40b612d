"""Workflows of the package: one file for each family, with its rules, its program and its expert."""
