"""Old names of types: a module that renamed one still gives it, with a warning."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping


def renamed(module: str, names: Mapping[str, str]) -> Callable[[str], object]:
    """Return the `__getattr__` of a module, for old names of its types: `__getattr__ = renamed(__name__, {"Old": "New"})`."""

    def find(name: str) -> object:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warnings.warn(f"{module}.{name} is now {names[name]}", DeprecationWarning, stacklevel=2)
        new: object = getattr(sys.modules[module], names[name])
        return new

    return find
