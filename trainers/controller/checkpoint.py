"""Checkpoints that are either complete or absent.

A checkpoint is a folder. It is written under another name beside its place. Every file is synced, a manifest of
checksums is written last, and one rename gives the folder its name. So after a kill at any moment, or on a full disk,
a folder with a checkpoint's name is complete, and older ones are unchanged. The checksums find later damage. Reading
a checkpoint runs no code:

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

from ...agents.basics.failures import GroupEnded, out_of_memory
from ...agents.basics.json_types import JsonView
from ...agents.basics.manifest import MANIFEST, Damaged, check, manifest

_UNFINISHED = ".writing-"
_REPLACED = ".replaced"
_DAMAGED = ".damaged"

Saved: TypeAlias = JsonView
"""State of one part in a checkpoint: plain data and tensors by name, as its `state_dict` returned them."""


class CheckpointError(Damaged):
    """Raised when a checkpoint cannot be written, or is not complete. The message names it, and what is left."""


@contextmanager
def writing(target: str | Path) -> Iterator[Path]:
    """Make a folder to write into. If the block succeeds, the folder appears as `target`. Otherwise nothing appears."""
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
    """Return the folder if it has everything that its manifest lists. Otherwise raise a CheckpointError with the
    file.
    """
    folder = Path(folder)
    if not (folder / MANIFEST).is_file():
        raise CheckpointError(f"{folder} is no finished checkpoint: it has no {MANIFEST}")
    try:
        check(folder)
    except (Damaged, OSError) as error:
        raise CheckpointError(f"checkpoint {folder} is damaged: {error}") from error
    return folder


def named(step: int) -> str:
    """Return the name of the checkpoint folder of a step."""
    return f"step-{step:06d}"


def step_of(folder: Path) -> int:
    """Return the step of a checkpoint folder."""
    return int(folder.name.removeprefix("step-"))


def finished(root: str | Path) -> list[Path]:
    """Return the finished checkpoints under `root`, the oldest first."""
    root = Path(root)
    if not root.is_dir():
        return []
    folders = {folder.name: folder for folder in root.iterdir() if (folder / MANIFEST).is_file()}
    for name in [name for name in folders if name.endswith(_REPLACED)]:
        plain = name.removesuffix(_REPLACED)
        replaced = folders.pop(name)
        if plain not in folders:  # killed between the two renames of a replacement: restore the old one
            folders[plain] = replaced.rename(root / plain)
    return [folders[name] for name in sorted(folders) if _plain(folders[name])]


def _plain(folder: Path) -> bool:
    """Tell whether a folder has the name of a checkpoint, and not of a draft or of a damaged folder."""
    return _UNFINISHED not in folder.name and not folder.name.endswith((_DAMAGED, _REPLACED))


def latest(root: str | Path) -> Path | None:
    """Return the newest undamaged checkpoint under `root`, or None if none was finished.

    Newer checkpoints that are damaged are named, and renamed. If all checkpoints are damaged, that is an error.
    """
    root, errors = Path(root), list[CheckpointError]()
    folders = finished(root)  # and folders that lost their manifest:
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
    """Remove unfinished folders, and all checkpoints except the newest `keep` and those in `best`."""
    folders = finished(root)
    for folder in folders[: max(0, len(folders) - keep)]:
        if folder.name in best:
            continue
        # the rename comes first, so that a half-removed folder is no checkpoint
        folder.rename(folder.with_name(folder.name + _UNFINISHED))
    for folder in Path(root).glob(f"*{_UNFINISHED}*"):
        shutil.rmtree(folder, ignore_errors=True)


def write_json(path: Path, value: object) -> None:
    """Write plain data as JSON, and sync the file."""
    _write_synced(path, json.dumps(value, indent=1, sort_keys=True).encode())


def read_json(path: Path) -> Any:
    """Read the result of `write_json`. An error names the file."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def write_tensors(path: Path, value: object) -> None:
    """Write tensors and plain data, nested at will, and sync the file."""
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
    """Read the result of `write_tensors`: tensors and plain data. A file with anything else is refused, and no code in
    it runs.
    """
    import torch

    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds of errors: unpickling, archive, index, value …
        if out_of_memory(error):
            raise _no_room(path, error) from error
        raise CheckpointError(f"{path} cannot be read: {str(error).splitlines()[0]:.200}") from error


def check_storable(value: object) -> None:
    """Raise for data that `write_tensors` cannot write, or that `read_tensors` refuses."""
    import torch

    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    torch.load(file, weights_only=True)


@contextmanager
def reading(path: Path) -> Iterator[Any]:
    """Read the result of `write_json` or `write_tensors`. If the block cannot use it, the error names the file."""
    state = read_json(path) if path.suffix == ".json" else read_tensors(path)
    try:
        yield state
    except (Damaged, GroupEnded):  # the end of ranks while they read says nothing about the file
        raise
    except (LookupError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        if out_of_memory(error):
            raise _no_room(path, error) from error
        raise CheckpointError(f"{path} holds something else than is needed here: {error}") from error


def _no_room(path: Path, error: Exception) -> MemoryError:
    """Say that memory ended while a file was read, which says nothing of the file."""
    return MemoryError(
        f"memory ended while {path} was read ({str(error).splitlines()[0]:.200}). The file is not at fault: free some memory, "
        "or take more ranks (groups.*.ranks)"
    )


def write_whole(path: Path, data: bytes) -> None:
    """Write a file by one rename, so that at any moment it is the old file or the new one."""
    _sweep(path)
    draft = path.with_name(f"{path.name}{_UNFINISHED}{os.getpid()}")
    try:
        _write_synced(draft, data)
        os.replace(draft, path)
    except OSError as error:
        with suppress(OSError):  # the original error is reported in any case
            draft.unlink()
        error.filename, error.filename2 = str(path), None
        raise


def _sweep(target: Path) -> None:
    """Remove the drafts of a target that a kill left. A target has one writer at a time."""
    for draft in target.parent.glob(f"{glob.escape(target.name)}{_UNFINISHED}*"):
        shutil.rmtree(draft) if draft.is_dir() else draft.unlink()


def _write_synced(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """Sync the folders too, the deepest first, so that the names are durable."""
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
