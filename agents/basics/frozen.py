"""Plain data that cannot be changed, so that episodes and their forks can share it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from .hints import nearest
from .json_types import JsonObject


class FrozenDict(JsonObject):
    """A dict that refuses to change. It equals, prints, pickles and serialises like a dict."""

    __slots__ = ()

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise TypeError(
            "this data belongs to the task or to a journal and cannot be changed; copy it first: dict(x)"
        )

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (dict(self),))

    def __copy__(self) -> FrozenDict:
        return self

    def __deepcopy__(self, memo: object) -> FrozenDict:
        return self


class View(FrozenDict):
    """A frozen dict whose keys also read as attributes: `task.question`."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(
                f"there is no field {name!r} here; {nearest(name, self, 'fields:')}"
            ) from None


def freeze(value: Any) -> Any:
    """Freeze deeply: dicts to `FrozenDict`, lists to tuples, sets to frozensets; atoms as they are."""
    kind = type(value)
    if kind in FROZEN:
        return value
    if kind is dict:
        for inner in value.values():
            if type(inner) not in FROZEN:
                return FrozenDict({k: freeze(v) for k, v in value.items()})
        return FrozenDict(value)
    if issubclass(kind, tuple):
        for inner in value:
            if type(inner) not in FROZEN:
                frozen = [freeze(v) for v in value]
                return kind(*frozen) if hasattr(kind, "_fields") else tuple(frozen)  # a named tuple stays one
        return value
    if issubclass(kind, list):
        return tuple([freeze(v) for v in value])
    if issubclass(kind, FrozenDict):
        return value
    if issubclass(kind, Mapping):
        return FrozenDict({k: freeze(v) for k, v in value.items()})
    if issubclass(kind, set | frozenset):
        return frozenset(map(freeze, value))
    return value


def thaw(value: object) -> Any:
    """Turn frozen JSON into JSON's own kinds, which may be changed: tuples to lists, deeply."""
    if isinstance(value, Mapping):
        return {key: thaw(item) for key, item in value.items()}
    return [thaw(item) for item in value] if isinstance(value, list | tuple) else value


# kinds that `freeze` leaves as they are
FROZEN = frozenset({str, int, float, bool, type(None), bytes, FrozenDict, View})
