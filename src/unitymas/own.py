"""Users' own code: files and modules to import, `module:name`, plug-ins, and the place of an error in it."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import re
import sys
import sysconfig
import traceback
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep
STDLIB = tuple(p + os.sep for key in ("stdlib", "platstdlib") if (p := sysconfig.get_path(key)))
INSTALLED = tuple(p + os.sep for key in ("purelib", "platlib") if (p := sysconfig.get_path(key)))


_PLACED = re.compile(r"\(\S+:\d+\)$")  # a message that tells its place already


class OwnCodeError(ValueError):
    """Raised when a user's module cannot be imported or lacks a name. The message names file and line."""


class BrokenPlugin(OwnCodeError, ModuleNotFoundError):
    """Raised when an installed plug-in cannot be loaded."""


def load(target: str, package: str | None = None) -> ModuleType:
    """Import a module by its name (`my_pkg.my_mod`, also from the current directory), or a file by its path
    (`my_team.py`).
    """
    try:
        if target.endswith(".py"):
            return _file(Path(target))
        if "/" in target:
            raise OwnCodeError(
                f"{target!r} is no module; a file is named with its ending, {target.rstrip('/')}.py"
            )
        if not target.startswith(".") and "" not in sys.path and os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())  # last, so that nothing of the user's hides an installed module
        module = importlib.import_module(target, package)
        if getattr(module, "__file__", "") is None:  # Python takes any folder for an empty module
            raise OwnCodeError(
                f"{target} is a folder without __init__.py, so nothing of it is imported; name a file in it"
            )
        return module
    except OwnCodeError:
        raise
    except SystemExit as error:
        raise OwnCodeError(
            f"{target} cannot be imported: it ends the program (sys.exit({'' if error.code is None else error.code})){at(place(error))}; "
            'put what runs under `if __name__ == "__main__":`'
        ) from error
    except ModuleNotFoundError as error:
        if error.name is not None and (target == error.name or target.startswith(f"{error.name}.")):
            hint = f"; a file is named with its ending, {target}.py" if Path(f"{target}.py").is_file() else ""
            raise OwnCodeError(f"there is no module {target!r}{hint}") from error
        raise OwnCodeError(f"{target} cannot be imported: {told(error)}") from error
    except Exception as error:
        raise OwnCodeError(f"{target} cannot be imported: {told(error)}") from error


def find(target: str, package: str | None = None) -> Any:
    """Return the object that `module:name` or `file.py:name` names."""
    module, colon, name = target.rpartition(":")
    if not colon or not module or not name:
        raise OwnCodeError(f"{target!r} is no entry point; write 'package.module:name' or 'file.py:name'")
    thing: object = load(module, package)
    for part in name.split("."):
        if not hasattr(thing, part):
            raise OwnCodeError(f"{module} has no {name!r}")
        thing = getattr(thing, part)
    return thing


def plugins(group: str) -> dict[str, EntryPoint]:
    """Return the entry points of a group by name, without loading them. A broken one fails at its first use."""
    return {point.name: point for point in entry_points(group=group)}


def load_plugin(point: EntryPoint) -> Any:
    """Return the object that an entry point names. The error for a broken one names the plug-in."""
    try:
        return point.load()
    except Exception as error:
        raise BrokenPlugin(f"the plug-in {point.name!r} ({point.value}) is broken: {told(error)}") from error


def _file(path: Path) -> ModuleType:
    """Return the module of a file. If the file's name is free, it is the module's name, so that its objects can be
    pickled.
    """
    path = path.resolve()
    if not path.is_file():
        raise OwnCodeError(f"there is no file {path}")
    for module in list(sys.modules.values()):
        known = getattr(module, "__file__", None)
        if known is not None and os.path.abspath(known) == str(path) and module.__name__ != "__main__":
            return module
    free = path.stem not in sys.modules and importlib.util.find_spec(path.stem) is None
    name = path.stem if free and path.stem.isidentifier() else f"own_{abs(hash(str(path)))}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # so that the file can import its neighbours
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        if not place(error, own=True):  # the file itself cannot be read as a program
            error.where = path.name  # type: ignore[attr-defined]
        del sys.modules[name]
        raise
    return module


def told(error: BaseException) -> str:
    """Return an error in one line, with its place in the code: `NameError: … (my_team.py:12)`."""
    said = error.msg if isinstance(error, SyntaxError) else str(error)
    where = place(error)
    name = getattr(error, "told_as", "") or type(error).__name__
    return f"{name}: {said}" + ("" if _PLACED.search(said) else at(where))


def place(error: BaseException, own: bool = False) -> str:
    """Return the file and line of an error: the innermost frame outside of this package, the standard library and
    site-packages.

    If there is no such frame, return the innermost one outside of the standard library, or nothing with `own`.
    """
    where: str = getattr(error, "where", "")
    if where:
        return where
    if isinstance(error, SyntaxError) and error.filename:
        return f"{os.path.basename(error.filename)}:{error.lineno}"
    frames = [(f.f_code.co_filename, line) for f, line in traceback.walk_tb(error.__traceback__)]
    for elsewhere in (foreign,) if own else (foreign, _standard):
        for file, line in reversed(frames):
            if not elsewhere(file):
                return f"{os.path.basename(file)}:{line}"
    return ""


def defined(thing: Any) -> str:
    """Return the file and line where a function or a method is defined, or nothing if they are not known."""
    code = getattr(inspect.unwrap(thing), "__code__", None)
    return "" if code is None else f"{os.path.basename(code.co_filename)}:{code.co_firstlineno}"


def at(where: str) -> str:
    """Return a place as the end of a message."""
    return f" ({where})" if where else ""


def _standard(file: str) -> bool:
    return (
        file.startswith(("<frozen", "<string>")) or file.startswith(STDLIB) and not file.startswith(INSTALLED)
    )


def foreign(file: str) -> bool:
    """Tell whether a file belongs to this package, to the standard library, or to an installed package."""
    return _standard(file) or file.startswith((PACKAGE, *INSTALLED))
