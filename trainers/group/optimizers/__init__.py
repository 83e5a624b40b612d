"""Optimizers of a learner: torch's AdamW, or one that needs less memory.

adam.py                 AdamW with moments in 8 bits and parameters in bfloat16, each by choice
moments_8bit.py         moments in one byte each
stochastic_rounding.py  the chance with which a number is rounded up.
"""
