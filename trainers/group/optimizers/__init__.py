"""Optimizers of a learner: torch's AdamW, or one that needs less memory.

adam.py        AdamW with moments in 8 bits and parameters in bfloat16, each by choice
blocks.py      moments in one byte each
chance.py      the chance of stochastic rounding.
"""
