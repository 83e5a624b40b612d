"""Verification of programs by their tests, in the sandbox."""

from .verify import verify_code as verify_code
