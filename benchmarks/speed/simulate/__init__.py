"""Simulation of a star with many groups: the real controller, workflows, Ray and messages; groups that only keep time."""
