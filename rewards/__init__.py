"""Rewards: metrics, rules and wrappers, the published allocations, shaping, monitors."""
