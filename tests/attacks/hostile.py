"""Entries that would end, stall, fill or take over whoever checks them, by name."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import zstandard

from .forging import Entry

DEEP = 100_000


def results_text(text: str) -> Callable[[Entry], Any]:
    """Another text as results.json."""

    def attack(e: Entry) -> None:
        (e.folder / "results.json").write_text(text)
        e.seal()

    return attack


def metadata_text(text: str | bytes) -> Callable[[Entry], Any]:
    """Another text as metadata.yaml."""

    def attack(e: Entry) -> None:
        (e.folder / "metadata.yaml").write_bytes(text.encode() if isinstance(text, str) else text)

    return attack


def traces_bytes(content: bytes) -> Callable[[Entry], Any]:
    """Another archive as the traces."""

    def attack(e: Entry) -> None:
        (e.folder / "traces.jsonl.zst").write_bytes(content)
        e.seal()

    return attack


def changed(change: Callable[[Entry], Any]) -> Callable[[Entry], Any]:
    """Another value in results or traces, which only claims."""

    def attack(e: Entry) -> None:
        change(e)
        e.write()

    return attack


def configured(name: str, value: Any) -> Callable[[Entry], Any]:
    """A configuration that names something to import, call or open."""

    def attack(e: Entry) -> None:
        for config in (e.env["config"], *(t["config"] for t in e.traces)):
            config[name] = value
        e.sign()
        e.write()

    return attack


def linked(name: str, target: str) -> Callable[[Entry], Any]:
    def attack(e: Entry) -> None:
        (e.folder / name).unlink()
        (e.folder / name).symlink_to(target)

    return attack


def piped(name: str) -> Callable[[Entry], Any]:
    def attack(e: Entry) -> None:
        (e.folder / name).unlink()
        os.mkfifo(e.folder / name)

    return attack


def bomb(e: Entry) -> None:
    """A small archive that unfolds to one line of a gigabyte."""
    packer = zstandard.ZstdCompressor().compressobj()
    parts = (
        [packer.compress(b"[")] + [packer.compress(b" " * (1 << 20)) for _ in range(1024)] + [packer.flush()]
    )
    (e.folder / "traces.jsonl.zst").write_bytes(b"".join(parts))
    e.seal()


def huge_file(e: Entry) -> None:
    """Four gigabytes that take no place on the disk."""
    with open(e.folder / "results.json", "r+b") as file:
        file.truncate(4 << 30)


def wide_window(e: Entry) -> None:
    """A frame that wants half a gigabyte to be unpacked."""
    how = zstandard.ZstdCompressionParameters(window_log=29, enable_ldm=True)
    content = zstandard.ZstdCompressor(compression_params=how).compress(b" " * (1 << 10) + b"\n")
    header = bytearray(content)
    header[4] &= 0b11011111  # no single segment: the window stands in the next byte
    header[5] = (29 - 10) << 3
    (e.folder / "traces.jsonl.zst").write_bytes(bytes(header))
    e.seal()


def many_agents(e: Entry) -> None:
    """A setting that is plain data, and asks for more than there is."""
    configured("max_queries", 1_000_000)(e)


def set_(*path: Any, to: Any) -> Callable[[Entry], Any]:
    """One value of results.json exchanged."""

    def change(e: Entry) -> None:
        at = e.results
        for name in path[:-1]:
            at = at[name]
        at[path[-1]] = to

    return changed(change)


ALIASES = "a: &a [x, x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [*{chr(97 + i)}, *{chr(97 + i)}]\n" for i in range(20)
)
HOSTILE_ENTRIES: list[tuple[str, Callable[[Entry], Any]]] = [
    ("deep-json", results_text("[" * DEEP)),
    ("deep-yaml", metadata_text("[" * 60_000)),
    ("yaml-of-100-kb", metadata_text("[" * DEEP)),
    ("aliases", metadata_text(ALIASES)),
    ("bomb", bomb),
    ("four-gigabytes", huge_file),
    ("fifo", piped("traces.jsonl.zst")),
    ("link-to-zero", linked("traces.jsonl.zst", "/dev/zero")),
    ("own-reward", configured("reward", "unittest:main")),
    ("own-factory", configured("factory", "os:abort")),
    ("k-with-a-point", set_("figures", "k", to=4.0)),
    ("sample-infinity", set_("episodes", 0, "sample", to=float("inf"))),
    ("empty-price", set_("price", to=[])),
    ("meta-text", changed(lambda e: e.node().update(meta="x"))),
    ("data-path", set_("provenance", "data", "name", to="../../../../dev/zero")),
    ("wide-window", wide_window),
    ("many-queries", many_agents),
    ("not-text", metadata_text(b"name: \xff\xfe")),
    ("keys-twice", results_text('{"schema": 1, "schema": 2}')),
    ("huge-number", results_text(json.dumps({"schema": 10**4000}) if sys.version_info >= (3, 11) else "9" * 4000)),
    ("fifo-metadata", piped("metadata.yaml")),
    ("link-metadata", linked("metadata.yaml", "/etc/passwd")),
    ("python-tag", metadata_text("!!python/object/apply:os.abort []")),
    ("cut-archive", traces_bytes(b"\x28\xb5\x2f\xfd\x00")),
    ("no-archive", traces_bytes(b"hello")),
    ("nested-text", changed(lambda e: e.traces[0]["tags"].update(team=[]))),
    ("seconds-text", changed(lambda e: e.traces[0]["tags"].update(seconds="x"))),
    ("tasks-as-list", set_("provenance", "data", "tasks", to=[])),
    ("modified-as-number", set_("provenance", "env", "config", to={"modified": 3})),
    ("command-object", set_("run", "command", to={})),
    ("tool-as-list", changed(lambda e: e.use().update(tool=["x"]))),
    ("metrics-as-list", changed(lambda e: e.traces[0].update(metrics=[]))),
    ("ended-otherwise", changed(lambda e: e.traces[0].update(ended="won"))),
    ("huge-k", set_("figures", "k", to=10**18)),
    ("huge-seed", set_("provenance", "seed", to=10**400)),
]  # fmt: skip
