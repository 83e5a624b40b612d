"""Former names of modules: commands that use them still work, and a warning names the new ones."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType


class FormerNames(MetaPathFinder):
    """Finder and loader of the modules of a package that have moved into its folders."""

    def __init__(self, package: str, homes: Mapping[str, str]) -> None:
        self.homes = {f"{package}.{name}": f"{package}.{home}" for name, home in homes.items()}

    @classmethod
    def serve(cls, package: str, homes: Mapping[str, str]) -> None:
        """Let imports and `python -m` find the modules of a package under their former names: {former: new}."""
        sys.meta_path.append(cls(package, homes))

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec for a former name, else None."""
        home = self.homes.get(fullname)
        if home is None:
            return None
        warnings.warn(f"{fullname} has moved to {home}", DeprecationWarning, stacklevel=2)
        return ModuleSpec(fullname, self, origin=fullname)  # type: ignore[arg-type]  # it needs no loader's base class

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Let Python make an empty module."""
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Copy the names of the moved module into this one."""
        vars(module).update(
            {
                k: v
                for k, v in vars(importlib.import_module(self.homes[module.__name__])).items()
                if k[:2] != "__"
            }
        )

    def get_code(self, fullname: str) -> CodeType:
        """Return the code that `python -m` runs: the moved module, as the main module."""
        text = (
            f"import runpy; runpy.run_module({self.homes[fullname]!r}, run_name='__main__', alter_sys=True)"
        )
        return compile(text, fullname, "exec")
