"""Equality of mathematical answers: exact where it can be, symbolic in a process of its own."""

from .equal import math_equal as math_equal
