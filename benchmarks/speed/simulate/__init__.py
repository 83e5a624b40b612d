"""Simulation of a star with many groups. Controller, workflows, Ray and messages are real, and the groups only keep time."""
