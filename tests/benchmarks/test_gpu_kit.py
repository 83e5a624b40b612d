"""The GPU kit on a CPU: every section in small, and what becomes of one that fails, hangs or dies."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from unitymas.benchmarks.speed.gpu import __main__ as kit
from unitymas.benchmarks.speed.gpu.learning import TOLERANCE
from unitymas.benchmarks.speed.gpu.model_sizes import TINY, Sizes, Stand


def bench(seconds=600.0):
    return Stand(torch.device("cpu"), TINY, time.monotonic() + seconds)


@pytest.mark.parametrize("name", kit.sections(TINY))
def test_every_section_measures_all_that_it_names(name):
    rows = list(kit.sections(TINY)[name][1](bench()))
    assert rows and not [row for row in rows if "error" in row or "skipped" in row]
    assert all(row.get("tokens/s", 1) > 0 and row["peak GiB"] > 0 for row in rows)
    json.dumps(rows)
    if name == "same-step":
        assert rows[0]["equal"] and rows[0]["differences"].keys() == TOLERANCE.keys()


def test_what_fails_is_named_and_the_rest_goes_on():
    def fails():
        raise RuntimeError("CUDA out of memory. Tried to allocate 99 GiB\nmore")

    here = bench()
    rows = [*here.measure({"what": "a"}, fails), *here.measure({"what": "b"}, lambda: {"tokens/s": 1})]
    assert rows[0]["error"] == "RuntimeError: CUDA out of memory. Tried to allocate 99 GiB"
    assert rows[1]["tokens/s"] == 1
    assert list(bench(-1).measure({"what": "a"}, fails)) == [{"what": "a", "skipped": "out of time"}]


def test_a_section_that_dies_or_hangs_keeps_what_it_measured(tmp_path, monkeypatch):
    """The processes are real; what they run is not the kit, so that one can die and one can hang."""
    script = tmp_path / "section.py"
    script.write_text(
        "import os, sys, time\n"
        "out = sys.argv[sys.argv.index('--out') + 1]\n"
        'open(out, \'w\').write(\'{"what": "first", "tokens/s": 5}\\n\')\n'
        "sys.stderr.write('illegal memory access\\n')\n"
        "time.sleep(600) if sys.argv[sys.argv.index('--section') + 1] == 'hangs' else os._exit(7)\n"
    )
    real = kit.subprocess.Popen

    def start(command, **how):
        return real([command[0], str(script), *command[3:]], **how)

    monkeypatch.setattr(kit.subprocess, "Popen", start)
    died = list(kit._apart("dies", "cpu", 60.0, True))
    assert [row["what"] for row in died] == ["first", "dies"]
    assert "7" in died[1]["error"] and "illegal memory access" in died[1]["error"]
    hung = kit._apart("hangs", "cpu", 60.0, True)
    assert next(hung) == {"what": "first", "tokens/s": 5}  # a row is there while its section still runs
    monkeypatch.setattr(kit.time, "monotonic", lambda: float("inf"))
    assert "stopped" in next(hung)["error"]
    monkeypatch.undo()
    assert list(kit._apart("late", "cpu", 1.0, True)) == [{"what": "late", "skipped": "out of time"}]


def test_a_kit_that_is_killed_leaves_its_rows_and_no_process(tmp_path):
    command = [
        sys.executable,
        "-m",
        kit.__package__,
        "--tiny",
        "--device",
        "cpu",
        "--out",
        str(tmp_path / "gpu.json"),
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    while "product" not in process.stdout.readline():  # its first row
        assert process.poll() is None
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.kill()
    process.wait()
    result = json.loads((tmp_path / "gpu.json").read_text())
    assert [row["section"] for row in result["rows"]] == ["product"] and not result["finished"]
    while any(alive(pid) for pid in children):  # the suite's time limit ends this
        time.sleep(0.05)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_one_command_gives_a_table_and_a_json(tmp_path, capsys):
    kit.main(["--tiny", "--device", "cpu", "--only", "product", "--out", str(tmp_path / "gpu.json")])
    result = json.loads((tmp_path / "gpu.json").read_text())
    assert result["rows"][0]["section"] == "product" and result["machine"]["torch"] == torch.__version__
    assert "TFLOP/s" in capsys.readouterr().out
    with pytest.raises(ValueError, match="no section is called 'nothing'"):
        kit.run("cpu", 1.0, "nothing", tiny=True)


def test_the_published_shapes_have_the_published_sizes():
    from transformers import AutoModelForCausalLM, Qwen3Config

    for name, billions in (("Qwen3-0.6B", 0.596), ("Qwen3-1.7B", 1.72), ("Qwen3-8B", 8.19)):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(Qwen3Config(**Sizes().shapes[name]))
        assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, rel=0.01)
