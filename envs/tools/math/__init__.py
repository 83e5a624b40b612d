"""Equality of mathematical answers: exact for plain numbers, else symbolic, in a separate process."""

from .equal import math_equal as math_equal
