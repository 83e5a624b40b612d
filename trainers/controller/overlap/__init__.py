"""Overlap: episodes are collected during the update. A log records all that happens, and a run can be replayed
from it.
"""
