"""Sandbox: runs Python programs of models without harm to the host."""

from .runner import run_python as run_python
