"""Checksums that show whether files are as they were written: of a folder in its manifest, of a text in its last line.

They detect damage (a torn write, a flipped bit, a swapped file), not malice: who can write a file can also write its
checksum. So reading such a file never runs code either.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

MANIFEST = "MANIFEST.json"
_HEAD = (
    b"# The last line is a checksum: give changes as a.b=c, or remove both comments to vouch for the file.\n"
)
_TAIL = b"# sha256 of all above: "


class Damaged(RuntimeError):
    """Raised when a file is not as it was written. The message names it."""


def manifest(folder: Path) -> bytes:
    """Size and checksum of every file below. A folder with a manifest of its own counts by the checksum of
    that manifest.
    """
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST)
    within = [path.parent for path in files if path.name == MANIFEST]
    own = [p for p in files if p.name == MANIFEST or not any(w in p.parents for w in within)]
    return _dumps({p.relative_to(folder).as_posix(): [p.stat().st_size, checksum(p)] for p in own})


def check(folder: str | Path, *, others: bool = False) -> None:
    """Raise `Damaged`, naming the file, unless everything that the folder's manifest lists is as it was written.

    Files that it does not list are damage too, unless `others` may lie beside them.
    """
    folder = Path(folder)
    path = folder / MANIFEST
    data = path.read_bytes()
    try:
        listed = json.loads(data)
        sound = (
            data == _dumps(listed)
            and bool(listed)
            and all(isinstance(size, int) and isinstance(digest, str) for size, digest in listed.values())
        )
    except (ValueError, TypeError, AttributeError, RecursionError):
        sound = False
    if not sound:
        raise Damaged(f"{path} is damaged: it is no manifest")
    for name, (size, digest) in listed.items():
        file = folder / name
        if ".." in Path(name).parts or file.is_symlink() or not file.is_file():
            raise Damaged(f"{file} is missing")
        if file.stat().st_size != size:
            raise Damaged(f"{file} is damaged: it has {file.stat().st_size} bytes of {size}")
        if checksum(file) != digest:
            raise Damaged(f"{file} is damaged: its checksum is not the one in {path}")
        if file.name == MANIFEST:
            check(file.parent, others=others)
    if others:
        return
    within = [
        (folder / name).parent for name in listed if Path(name).name == MANIFEST
    ]  # folders with a manifest of their own were checked by it
    for file in folder.rglob("*"):
        known = file == path or file.relative_to(folder).as_posix() in listed
        if file.is_file() and not known and not any(inner in file.parents for inner in within):
            raise Damaged(f"{file} does not belong there: {path} does not list it")


def checksum(path: Path, size: int | None = None) -> str:
    """Compute the SHA-256 of a file, or of its first `size` bytes."""
    digest, left = hashlib.sha256(), path.stat().st_size if size is None else size
    with path.open("rb") as file:
        while left > 0 and (block := file.read(min(left, 1 << 20))):
            digest.update(block)
            left -= len(block)
    return digest.hexdigest()


def signed(text: str) -> bytes:
    """Put a text between two comments; the last one is its checksum."""
    body = _HEAD + text.encode()
    return body + _TAIL + hashlib.sha256(body).hexdigest().encode() + b"\n"


def read_signed(path: str | Path) -> str:
    """Read what `signed` wrote, and check it. A text with neither comment is returned as it is."""
    path = Path(path)
    data = path.read_bytes()
    body, tail, _ = data.rpartition(_TAIL)
    if tail and data != body + _TAIL + hashlib.sha256(body).hexdigest().encode() + b"\n":
        raise Damaged(
            f"{path} is not as the run wrote it: it was damaged, or changed by hand. Give changes as a.b=c; "
            "or remove its first and its last line to vouch for it as it is"
        )
    if not tail and data.startswith(_HEAD[:16]):
        raise Damaged(f"{path} is cut short: its last line, the checksum, is missing")
    try:
        return (body or data).decode()
    except UnicodeDecodeError as error:
        raise Damaged(f"{path} is damaged: {error}") from error


def _dumps(listed: object) -> bytes:
    return json.dumps(listed, indent=1, sort_keys=True).encode()


def prompts_of_run(run: Path) -> object:
    """Read the prompt set that a run (or one of its policies) was trained with; "short" of runs older than sets."""
    import yaml

    config = next((f / "config.yaml" for f in (run, *run.parents[:2]) if (f / "config.yaml").is_file()), None)
    if config is None:
        return "full"  # loading the run reports that it is none
    tree = yaml.safe_load(read_signed(config))
    env = tree.get("env") if isinstance(tree, dict) else None
    return env.get("prompts", "short") if isinstance(env, dict) else None
