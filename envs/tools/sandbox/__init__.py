"""The sandbox: model-written Python where it can do no harm."""

from .runner import run_python as run_python
