"""Checkpoints that are whole or absent.

A checkpoint is a folder. It is written under another name beside its place, every file is synced, a manifest of
checksums goes in last, and one rename puts it there. So at any moment, a kill or a full disk included, what stands
under a checkpoint's name is complete, and the one before it is untouched. Damage that comes later is found by the
checksums, and reading runs no code, whoever wrote the files:

    with writing(run / "checkpoints" / "step-000012") as folder:       # composed: controller and groups
        write_json(folder / "controller.json", {...})
        await group.save(folder / "groups" / "shared")                 # nests: a folder of the same kind
    newest = latest(run / "checkpoints")
"""

from __future__ import annotations

import errno
import glob
import io
import json
import os
import shutil
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeAlias

from ...agents.basics.failures import GroupLost
from ...agents.basics.json_types import JsonView
from ...agents.basics.manifest import MANIFEST, Damaged, check, manifest

_UNFINISHED = ".writing-"
_REPLACED = ".replaced"
_DAMAGED = ".damaged"

Saved: TypeAlias = JsonView
"""State of one part as a checkpoint holds it: plain data and tensors by name, as its `state_dict` gave them."""


class CheckpointError(Damaged):
    """A checkpoint could not be written or is not whole; the message says which, and what is left."""


@contextmanager
def writing(target: str | Path) -> Iterator[Path]:
    """A folder to write into; it appears under `target` when the block ends well, and not at all otherwise."""
    target = Path(target)
    draft = target.with_name(f"{target.name}{_UNFINISHED}{os.getpid()}")
    try:
        _sweep(target)
        draft.mkdir(parents=True)
        yield draft
        _write_synced(draft / MANIFEST, manifest(draft))
        _sync(draft)
        _put_in_place(draft, target)
    except OSError as error:
        shutil.rmtree(draft, ignore_errors=True)
        cause = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else str(error)
        named = target.parent.with_name(target.parent.name.partition(_UNFINISHED)[0]) / target.name
        raise CheckpointError(
            f"checkpoint {named} was not written: {cause}. Earlier checkpoints are untouched; "
            "free some space (or keep fewer: checkpoints=1), and resume."
        ) from error
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def verify(folder: str | Path) -> Path:
    """The folder, if everything its manifest lists is there in full; else a CheckpointError naming the file."""
    folder = Path(folder)
    if not (folder / MANIFEST).is_file():
        raise CheckpointError(f"{folder} is no finished checkpoint: it has no {MANIFEST}")
    try:
        check(folder)
    except (Damaged, OSError) as error:
        raise CheckpointError(f"checkpoint {folder} is damaged: {error}") from error
    return folder


def named(step: int) -> str:
    """Name of the folder of a run's checkpoint after a step."""
    return f"step-{step:06d}"


def step_of(folder: Path) -> int:
    """Step after which the checkpoint in a folder was taken."""
    return int(folder.name.removeprefix("step-"))


def finished(root: str | Path) -> list[Path]:
    """The finished checkpoints under `root`, oldest first by name."""
    root = Path(root)
    if not root.is_dir():
        return []
    folders = {folder.name: folder for folder in root.iterdir() if (folder / MANIFEST).is_file()}
    for name in [name for name in folders if name.endswith(_REPLACED)]:
        plain = name.removesuffix(_REPLACED)
        replaced = folders.pop(name)
        if plain not in folders:  # killed between the two renames of a replacement: put the old one back
            folders[plain] = replaced.rename(root / plain)
    return [folders[name] for name in sorted(folders) if _plain(folders[name])]


def _plain(folder: Path) -> bool:
    """Tell whether a folder has a checkpoint's name, and not that of a draft or of a folder that was set aside."""
    return _UNFINISHED not in folder.name and not folder.name.endswith((_DAMAGED, _REPLACED))


def latest(root: str | Path) -> Path | None:
    """The newest checkpoint under `root` that is as it was written, or None where none was finished.

    Newer ones that are damaged are named, and set aside under another name; where all are, that is an error.
    """
    root, errors = Path(root), list[CheckpointError]()
    folders = finished(root)  # and those that lost their manifest:
    if root.is_dir():
        folders = sorted({*folders, *(f for f in root.iterdir() if f.is_dir() and _plain(f))})
    for folder in reversed(folders):
        try:
            verify(folder)
        except CheckpointError as error:
            errors.append(error)
            continue
        for cause, damaged in zip(errors, reversed(folders), strict=False):
            print(f"unitymas: {cause}. Going back to {folder}", file=sys.stderr, flush=True)
            shutil.rmtree(aside := damaged.with_name(damaged.name + _DAMAGED), ignore_errors=True)
            damaged.rename(aside)
        return folder
    if errors:
        others = f" So are {len(errors) - 1} before it." if len(errors) > 1 else ""
        raise CheckpointError(f"{errors[0]}. No whole checkpoint is left to go back to.{others}")
    return None


def prune(root: str | Path, keep: int, best: Collection[str] = ()) -> None:
    """Remove all but the newest `keep` checkpoints and those named in `best`, and what was left unfinished."""
    folders = finished(root)
    for folder in folders[: max(0, len(folders) - keep)]:
        if folder.name in best:
            continue
        folder.rename(folder.with_name(folder.name + _UNFINISHED))  # first of all it stops being a checkpoint
    for folder in Path(root).glob(f"*{_UNFINISHED}*"):
        shutil.rmtree(folder, ignore_errors=True)


def write_json(path: Path, value: object) -> None:
    """Plain data, synced."""
    _write_synced(path, json.dumps(value, indent=1, sort_keys=True).encode())


def read_json(path: Path) -> Any:
    """Read what `write_json` wrote. An error names the file."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def write_tensors(path: Path, value: object) -> None:
    """Tensors and plain data, however nested, synced."""
    import torch

    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:  # our file object, because torch's own writer hides why a write failed
        try:
            torch.save(value, file)
        except RuntimeError as error:  # … and even so may complain of its cut-short archive instead
            raise error.__context__ if isinstance(error.__context__, OSError) else error from None
        file.flush()
        os.fsync(file.fileno())


def read_tensors(path: Path) -> Any:
    """Read what `write_tensors` wrote: tensors and plain data. A file with anything else in it is refused, and runs nothing."""
    import torch

    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # of many kinds: unpickling, archive, index, value …
        raise CheckpointError(f"{path} cannot be read: {str(error).splitlines()[0]:.200}") from error


def check_storable(value: object) -> None:
    """Raise for what `write_tensors` cannot write, or `read_tensors` would refuse."""
    import torch

    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    torch.load(file, weights_only=True)


@contextmanager
def reading(path: Path) -> Iterator[Any]:
    """Read what `write_json` or `write_tensors` wrote; if the block cannot use it, the error names the file."""
    state = read_json(path) if path.suffix == ".json" else read_tensors(path)
    try:
        yield state
    except (Damaged, GroupLost):  # a rank that died while it read says nothing of the file
        raise
    except (LookupError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise CheckpointError(f"{path} holds something else than is needed here: {error}") from error


def write_whole(path: Path, data: bytes) -> None:
    """A file that is the old one or the new one at any moment."""
    _sweep(path)
    draft = path.with_name(f"{path.name}{_UNFINISHED}{os.getpid()}")
    try:
        _write_synced(draft, data)
        os.replace(draft, path)
    except OSError as error:
        with suppress(OSError):  # what went wrong is told all the same
            draft.unlink()
        error.filename, error.filename2 = str(path), None
        raise


def _sweep(target: Path) -> None:
    """Remove drafts that a kill left beside a target. A target has one writer at a time."""
    for draft in target.parent.glob(f"{glob.escape(target.name)}{_UNFINISHED}*"):
        shutil.rmtree(draft) if draft.is_dir() else draft.unlink()


def _write_synced(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """Make the names durable too, deepest first."""
    for path in sorted([folder, *folder.rglob("*")], reverse=True):
        if path.is_dir():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def _put_in_place(draft: Path, target: Path) -> None:
    replaced = target.with_name(target.name + _REPLACED)
    if target.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        target.rename(replaced)
    draft.rename(target)
    shutil.rmtree(replaced, ignore_errors=True)
    descriptor = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
