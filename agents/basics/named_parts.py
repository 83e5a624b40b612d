"""Named parts: one registry for environments' tools, rewards, algorithms, recipes, engines, loggers and players.

    ENGINES: Registry[type[Engine]] = Registry("engine", "unitymas.engines", __name__, {"torch": ".torch_engine:TorchEngine"})
    ENGINES.register("echo", "my_package.echo:Echo")       # the thing itself, or where it is
    ENGINES.find("echo")                                   # by name, or by its place: "my_package.echo:Echo"

The registries: ENVIRONMENTS (envs/registry.py), TOOLS and REWARDS (envs/making.py), PLAYERS (agents/team.py), ENGINES
(agents/engines/engine.py), ALGORITHMS, RECIPES (trainers/) and LOGGERS (trainers/controller/reporting/loggers.py).

A name stands for a thing, or for the text "package.module:name" that says where the thing is. Nothing is imported
before it is asked for. Plug-ins come from an entry-point group. They are found without being loaded, so a broken one
fails, by name, only when it is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.metadata import EntryPoint
from typing import Generic, TypeVar, cast

from ...own import find, load_plugin, plugins
from .hints import nearest

T = TypeVar("T")


class UnknownName(ValueError, KeyError):
    """Raised for a name that is not registered. The message names the nearest ones."""

    def __str__(self) -> str:
        return str(self.args[0])


def is_place(name: str) -> bool:
    """Tell whether a name says where a thing is: module:name, or file.py:name."""
    module, colon, attribute = name.rpartition(":")
    return bool(colon and module) and all(part.isidentifier() for part in attribute.split("."))


class Registry(Generic[T]):
    """Things of one kind by name."""

    def __init__(
        self, kind: str, group: str = "", package: str = "", own: Mapping[str, T | str] | None = None
    ) -> None:
        """`kind` is the noun of error messages, `group` an entry-point group. A place in `own` that begins with
        a dot is relative to `package`.
        """
        self.kind, self.group, self.package = kind, group, package or None
        self._named: dict[str, T | str] = dict(own or {})

    def register(self, name: str, thing: T | str, *, again: bool = False) -> None:
        """Add a part, or the place where it is. A name of another part is refused, unless `again` is true."""
        if not again and name in self._named and self._named[name] != thing:
            article = "an" if self.kind[0] in "aeiou" else "a"
            raise ValueError(
                f"{article} {self.kind} named {name!r} is already registered ({self._named[name]}): choose another name"
            )
        self._named[name] = thing

    def unregister(self, name: str) -> None:
        """Forget a name, for tests and notebooks."""
        self._named.pop(name, None)

    def names(self) -> list[str]:
        """Return all names, sorted, with those of plug-ins."""
        return sorted({*self._named, *self._plugins()})

    def _plugins(self) -> Mapping[str, EntryPoint]:
        return plugins(self.group) if self.group else {}

    def find(self, name: str) -> T:
        """Return the thing of a name, or of "module:name" or "file.py:name"."""
        thing = self._named.get(name)
        # checked first, because reading the entry points of all packages takes 20 ms
        if thing is None and is_place(name):
            return cast(T, find(name))
        if thing is None and name in (points := self._plugins()):
            return cast(T, load_plugin(points[name]))
        if thing is None:
            raise self.unknown(name)
        return cast(T, find(thing, self.package) if isinstance(thing, str) else thing)

    def unknown(self, name: str) -> UnknownName:
        """Return the error for a name that is not registered."""
        return UnknownName(f"unknown {self.kind} {name!r}: {nearest(name, self.names())}")

    def named(self, thing: T | str) -> T:
        """Return the part that a text names. Anything else is returned unchanged."""
        return self.find(thing) if isinstance(thing, str) else thing

    def __contains__(self, name: object) -> bool:
        return name in self._named or name in self._plugins()

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())
