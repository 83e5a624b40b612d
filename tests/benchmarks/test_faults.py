"""Runs under SIGKILL: a short harness run, and the comparison that must see what a kill could do."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from unitymas.benchmarks.faults.equality import differences


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A controller that is killed in the middle of collection, update, sync, save and anywhere: 5 SIGKILLs."""
    place = tmp_path_factory.mktemp("faults")
    command = [
        sys.executable,
        "-m",
        "unitymas.benchmarks.faults",
        "--kinds",
        "controller",
        "--kills",
        "5",
        "--steps",
        "4",
    ]
    ended = subprocess.run(
        [*command, "--keep", str(place / "runs"), "--out", str(place / "result.json")],
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return place


@pytest.mark.timeout(600)
def test_a_controller_that_is_killed_goes_on_to_equal_bits(killed: Path) -> None:
    (kind,) = json.loads((killed / "result.json").read_text())["kinds"]
    assert sum(kind["kills"].values()) == 5 and not kind["faults"]
    assert sum(count > 0 for count in kind["kills"].values()) >= 4  # moments


def test_the_comparison_sees_damage(killed: Path, tmp_path: Path) -> None:
    """A comparison that cannot fail would prove nothing."""
    whole = killed / "runs" / "controller" / "whole"

    def copy(name: str) -> Path:
        return Path(shutil.copytree(whole, tmp_path / name))

    assert differences(copy("same"), whole) == []
    weights = (run := copy("weights")) / "policies" / "a" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-2] ^= 1
    weights.write_bytes(data)
    assert any("policies/a/model.safetensors differs" in words for words in differences(run, whole))
    assert any("is damaged" in words for words in differences(run, whole))
    book = (run := copy("book")) / "metrics.jsonl"
    lines = book.read_text().splitlines(keepends=True)
    step = next(line for line in lines if '"kind": "step"' in line)
    book.write_text("".join([*lines, step]))
    assert differences(run, whole) == ["metrics.jsonl has [('step', 1)] lost or doubled"]
    book.write_text("".join(line.replace('"acts": 2.0', '"acts": 3.0') for line in lines))
    assert any("acts differ" in words for words in differences(run, whole))
    packed = sorted((run := copy("samples")).glob("samples/*.zst"))[0]
    packed.write_bytes(packed.read_bytes() + packed.read_bytes())
    assert differences(run, whole) == [f"samples/{packed.name}: 16 too many, 0 missing"]
    (run := copy("draft")).joinpath("policies", "a.writing-12").mkdir()
    assert differences(run, whole) == ["policies/a.writing-12 is left behind"]
