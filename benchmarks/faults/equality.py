"""Comparison of a run that was killed and continued with the undisturbed run: bits, logs, samples, files."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ...agents.basics.manifest import MANIFEST, Damaged
from ...envs.core.trace import read_dicts
from ...trainers.controller import checkpoint
from ...trainers.controller.reporting.loggers import BookRow, rows_of

LEFT_OVERS = (".writing-", ".replaced", ".damaged", ".tmp")


def differences(run: Path, whole: Path, bits: bool = True) -> list[str]:
    """Describe all differences from the undisturbed run. Empty: there are none.

    Without `bits` (vLLM does not guarantee them), only files, steps and names of samples are compared.
    """
    if not bits:
        return [*torn(run), *places(run, whole), *samples(run, whole, _name)]
    return [*torn(run), *weights(run, whole), *state(run, whole), *books(run, whole), *samples(run, whole)]


def torn(run: Path) -> Iterator[str]:
    """Yield the files that are unfinished, damaged, or should have been removed."""
    for path in sorted(run.rglob("*")):
        if any(mark in path.name for mark in LEFT_OVERS):
            yield f"{path.relative_to(run)} is left behind"
        elif path.name == MANIFEST:
            try:
                checkpoint.verify(path.parent)
            except checkpoint.CheckpointError as error:
                yield str(error)


def weights(run: Path, whole: Path) -> Iterator[str]:
    """Compare the exported policies, byte for byte."""
    yield from _folders(run / "policies", whole / "policies", run)


def state(run: Path, whole: Path) -> Iterator[str]:
    """Compare the last checkpoint byte for byte: optimizers, samples, random state, recipe.

    The controller's position in its log is not compared, because the log contains times.
    """
    mine, theirs = (checkpoint.finished(place / "checkpoints") for place in (run, whole))
    if [path.name for path in mine] != [path.name for path in theirs]:
        yield f"checkpoints are {[p.name for p in mine]}, not {[p.name for p in theirs]}"
        return
    yield from _folders(mine[-1], theirs[-1], run, skip={"controller.json", MANIFEST})
    a, b = (checkpoint.read_json(path[-1] / "controller.json") for path in (mine, theirs))
    for key in sorted({*a, *b} - {"book"}):
        if _timeless(a.get(key)) != _timeless(b.get(key)):
            yield f"controller.json: {key} differs"


def _folders(mine: Path, theirs: Path, run: Path, skip: set[str] = frozenset()) -> Iterator[str]:  # type: ignore[assignment]
    ours, others = (
        {p.relative_to(place).as_posix(): p for p in place.rglob("*") if p.is_file() and p.name not in skip}
        for place in (mine, theirs)
    )
    for name in sorted({*ours, *others}):
        if name not in ours or name not in others:
            yield f"{mine.relative_to(run)}/{name} is in one of them alone"
        elif not same_file(ours[name], others[name]):
            yield f"{mine.relative_to(run)}/{name} differs"


def same_file(mine: Path, theirs: Path) -> bool:
    """Tell whether two files have equal bytes, or equal tensors and data in another order."""
    if mine.read_bytes() == theirs.read_bytes():
        return True
    if mine.suffix == ".safetensors":
        from safetensors.torch import load_file

        a, b = load_file(mine), load_file(theirs)
        return same(dict(sorted(a.items())), dict(sorted(b.items())))
    return mine.suffix == ".pt" and same(checkpoint.read_tensors(mine), checkpoint.read_tensors(theirs))


def same(a: Any, b: Any) -> bool:
    """Tell whether two values are equal to the bit, including tensors and the order of keys."""
    import torch

    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def books(run: Path, whole: Path) -> Iterator[str]:
    """Compare the logs: every step and every validation once, in order, with the same figures."""
    if odd := list(places(run, whole)):
        yield from odd
        return
    for a, b in zip(_rows(run), _rows(whole), strict=True):
        names = sorted(
            name for name in {*a, *b} if not _agree(_timeless(a).get(name), _timeless(b).get(name))
        )
        if names:
            yield f"metrics.jsonl, {a['kind']} {a['step']}: {', '.join(names)} differ"


def places(run: Path, whole: Path) -> Iterator[str]:
    """Compare the steps and validations in the logs."""
    mine, theirs = ([(row["kind"], row["step"]) for row in _rows(place)] for place in (run, whole))
    if mine != theirs:
        yield f"metrics.jsonl has {_odd(mine, theirs)} lost or doubled"


def _rows(run: Path) -> list[BookRow]:
    return [row for row in rows_of(run / "metrics.jsonl") if row["kind"] in ("step", "validation")]


def _odd(mine: list[tuple[str, int]], theirs: list[tuple[str, int]]) -> str:
    counts, others = Counter(mine), Counter(theirs)
    return str(sorted((counts - others) + (others - counts))) if counts != others else "the order"


def _timeless(value: Any) -> Any:
    """Return a record without times."""
    if isinstance(value, dict):
        return {k: _timeless(v) for k, v in value.items() if not _of_clock(k)}
    return [_timeless(v) for v in value] if isinstance(value, list) else value


def _agree(a: object, b: object) -> bool:
    return a == b or (a != a and b != b)  # a figure may be nan


def _of_clock(name: str) -> bool:
    return "time" in name.split("/") or "seconds" in name


def samples(
    run: Path, whole: Path, part: Callable[[dict[str, object]], object] = lambda row: row
) -> Iterator[str]:
    """Compare all samples: every record of every step once, token by token, and every stored episode.

    `part` returns the part of a record that is compared; the default is all of it.
    """
    for kind in ("samples", "traces"):
        ours, others = ({p.name: p for p in (place / kind).glob("*.zst")} for place in (run, whole))
        if ours.keys() != others.keys():
            yield f"{kind}: {sorted(ours.keys() ^ others.keys())} in one of them alone"
        for name in sorted(ours.keys() & others.keys()):
            try:
                a, b = (Counter(_records(place[name], part)) for place in (ours, others))
            except (ValueError, Damaged) as error:
                yield f"{kind}/{name} cannot be read: {error}"
                continue
            if a != b:
                yield f"{kind}/{name}: {len(list((a - b).elements()))} too many, {len(list((b - a).elements()))} missing"


def _records(path: Path, part: Callable[[dict[str, object]], object]) -> Iterator[str]:
    """Yield a file's records without the times and speeds in them."""
    for row in read_dicts(path):
        yield json.dumps(_timeless(part(row)), sort_keys=True)


def _name(row: dict[str, object]) -> object:
    """Return the name of a sample or an episode, without its content."""
    return row.get("id") or (row["task_id"], row["seed"])
