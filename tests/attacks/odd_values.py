"""Small changes of an honest entry, one for each value in it: other types, other values, more and fewer keys, another order.

The forger signs again what follows from a change. What then still passes may be another word of its makers (a name, a
date, a number of tokens that can be), and nothing else: `WORDS` lists these places.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from yaml import YAMLError

from unitymas.benchmarks.leaderboard.as_written import metadata_text

from .forging import Entry

Change = Callable[[Any, Any], Any]
"""A change of a container at a key."""


class Oddity(NamedTuple):
    """One change, and where: `place` is written as in `results.run.date`."""

    place: str
    name: str
    path: tuple[Any, ...]
    change: Change


WORDS = re.compile(
    r"metadata\.(name|authors|description|url|parameters)"
    r"|results\.run\.(date|command|python|system|cpus|gpu)"
    r"|results\.provenance\.(libraries\..*|git|git\.(commit|dirty))"
    r"|results\.price\[\d\]"
    r"|results\.provenance\.roles\.answerer\.(player|weights|template_sha|adapter|sampling\..*)"
    r"|traces\[\d\]\.tags\.seconds"
    r"|traces\[\d\]\.nodes\[\d+\]\.(reply|meta\.(version|tokens_in|tokens_out|finish_reason))"
)
"""Places whose value is its makers' word, within its bounds."""
GROWING = re.compile(
    r"results\.provenance\.(libraries|roles\.answerer)|metadata|traces\[\d\]\.nodes\[\d+\]\.meta"
)
"""Tables in which keys may be missing that an honest entry can lack, too."""


def _set(value: Any) -> Change:
    def change(at: Any, key: Any) -> None:
        at[key] = copy.deepcopy(value)

    return change


def _made(make: Callable[[Any], Any]) -> Change:
    def change(at: Any, key: Any) -> None:
        at[key] = make(at[key])

    return change


def _gone(at: Any, key: Any) -> None:
    del at[key]


def _turned(table: dict[str, Any]) -> dict[str, Any]:
    return dict(reversed(table.items()))


def _with_more(table: dict[str, Any]) -> dict[str, Any]:
    return {**table, "smuggled": "x"}


_OTHERS: dict[type, tuple[tuple[str, Change], ...]] = {
    bool: (("the other", _made(lambda v: not v)), ("a number", _made(int)), ("null", _set(None))),
    int: (
        ("one more", _made(lambda v: v + 1)), ("with a point", _made(float)), ("a text", _made(str)), ("true", _set(True)),
        ("huge", _set(10**30)), ("negative", _set(-7)), ("null", _set(None)),
    ),
    float: (
        ("a little more", _made(lambda v: v + 1e-6)), ("NaN", _set(float("nan"))), ("infinite", _set(float("inf"))),
        ("without a point", _made(int)), ("negative", _set(-0.5)), ("minus nought", _set(-0.0)), ("a text", _made(str)),
        ("true", _set(True)), ("null", _set(None)),
    ),
    str: (
        ("one blank more", _made(lambda v: v + " ")), ("another spelling", _made(lambda v: v + "\u0301")),
        ("other letters", _made(lambda v: v.swapcase() if v.swapcase() != v else v + "x")), ("nothing", _set("")),
        ("a surrogate", _made(lambda v: v + "\ud800")), ("control characters", _made(lambda v: v + "\x00\x1b[31m")),
        ("huge", _set("x" * 30_000)), ("a number", _set(7)), ("a list", _made(lambda v: [v])), ("null", _set(None)),
    ),
    type(None): (("a text", _set("x")), ("nought", _set(0)), ("a table", _set({"smuggled": "x"})), ("false", _set(False))),
    list: (
        ("one more", _made(lambda v: [*v, copy.deepcopy(v[-1]) if v else "x"])), ("empty", _made(lambda v: [] if v else [0])),
        ("turned round", _made(lambda v: v[::-1])), ("a table", _made(lambda v: {"0": v})),
    ),
    dict: (
        ("one key more", _made(_with_more)), ("other order", _made(_turned)), ("a list", _made(lambda v: [v])),
        ("empty", _made(lambda v: {} if v else {"smuggled": "x"})),
    ),
}  # fmt: skip


def oddities(entry: Entry) -> Iterator[Oddity]:
    """Every change of every value of an entry, in a fixed order."""
    parts = {"metadata": entry.metadata, "results": entry.results, "traces": entry.traces[:1]}
    for part, value in parts.items():
        yield from _below(part, (part,), value)


def _below(place: str, path: tuple[Any, ...], value: Any) -> Iterator[Oddity]:
    if isinstance(value, dict):
        inner: list[tuple[str, Any]] = [(f"{place}.{key}", key) for key in value]
    else:
        inner = [(f"{place}[{i}]", i) for i in range(len(value))]
    for name, key in inner:
        for what, change in _OTHERS[type(value[key])]:
            yield Oddity(name, what, (*path, key), change)
        if isinstance(value, dict):
            yield Oddity(name, "missing", (*path, key), _gone)
        if isinstance(value[key], (dict, list)):
            yield from _below(name, (*path, key), value[key])


def forge(entry: Entry, odd: Oddity) -> bool:
    """Change an entry so, sign what follows, and write it; False if it cannot be written, or is what it was."""
    parts = {"metadata": entry.metadata, "results": entry.results, "traces": entry.traces}
    before = _bytes(entry)
    at: Any = parts
    for key in odd.path[:-1]:
        at = at[key]
    odd.change(at, odd.path[-1])
    signature = odd.place.startswith(("metadata.files", "results.figures", "results.episodes"))
    try:
        if not signature:
            entry.sign()
        if odd.place.startswith("metadata.files"):
            (entry.folder / "metadata.yaml").write_text(metadata_text(entry.metadata))
        else:
            entry.write()
    except (ValueError, TypeError, AttributeError, KeyError, IndexError, OverflowError, YAMLError):
        if signature or odd.place.startswith("metadata"):  # no such file can be
            return False
        try:
            entry.write()  # too strange to sign; it is sent as it is
        except (ValueError, TypeError, AttributeError, KeyError, YAMLError):
            return False
    return _bytes(entry) != before


def _bytes(entry: Entry) -> list[bytes]:
    return [path.read_bytes() for path in sorted(entry.folder.iterdir())]


def only_words(odd: Oddity) -> bool:
    """Tell whether the change may leave an entry that somebody could have made honestly."""
    parent = odd.place.rpartition(".")[0]
    return bool(WORDS.fullmatch(odd.place) or (odd.name == "missing" and GROWING.fullmatch(parent)))
