"""Benchmark of a GPU machine, in one command, without a network, in at most eight minutes: one table and one JSON file.

    unitymas bench gpu [--seconds 480] [--out gpu.json] [--only update/Qwen3-0.6B] [--device cuda]
    unitymas bench gpu --tiny --device cpu          # the kit's own test, in seconds

It needs torch and transformers. Weights are random, in published shapes. Every section runs in a separate process, within its
share of the time. A section that runs out of memory, fails or hangs is reported by name, and the others continue. A row is
printed and written to the JSON file as soon as it is measured, so a kill loses no finished row.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TextIO

from ....agents.basics.json_types import JsonObject
from ....cli.arguments import module_parser, number
from ...pages.html import write_page

BEGAN = time.monotonic()  # before torch is imported, which takes a part of a section's time

import torch  # noqa: E402

from . import learning, speaking  # noqa: E402
from .model_sizes import TINY, Measurement, Sizes, Stand  # noqa: E402

Section = Callable[[Stand], Iterator[Measurement]]


def sections(sizes: Sizes) -> dict[str, tuple[float, Section]]:
    """Return the sections by name, in order, each with its share of the time."""
    smallest = next(iter(sizes.shapes))
    chosen: dict[str, tuple[float, Section]] = {
        "product": (0.5, learning.product),
        "same-step": (1.0, learning.same_step),
        "attention": (1.0, learning.packed_attention),
        f"decode/{smallest}": (3.0, partial(speaking.decode, shape=smallest)),
    }
    for shape in sizes.shapes:
        chosen[f"update/{shape}"] = (3.0, partial(learning.update, shape=shape))
    for shape in sizes.shapes:
        chosen[f"publish/{shape}"] = (0.7, partial(speaking.publish, shape=shape))
    chosen["mixture"] = (1.0, learning.mixture)
    return chosen


def machine(device: torch.device) -> Measurement:
    """Describe the machine, and name the optional packages that are missing."""
    import transformers

    about: Measurement = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "device": str(device),
        "missing": [name for name in ("vllm", "ray") if find_spec(name) is None],
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        about |= {
            "gpu": properties.name,
            "GiB": round(properties.total_memory / 2**30, 1),
            "cuda": torch.version.cuda,
        }
    return about


GRACE = 15.0
"""Seconds after its deadline in which a section may finish its current row."""
LEAST = 8.0
"""Smallest number of seconds for a process, because it imports torch first."""


def run(
    device: str,
    seconds: float,
    only: str = "",
    tiny: bool = False,
    say: Callable[[str], None] = print,
    out: Path | None = None,
) -> JsonObject:
    """Run the sections whose names begin with `only`. Return the machine and the rows of each, also written to `out`."""
    chosen = {n: s for n, s in sections(TINY if tiny else Sizes()).items() if n.startswith(only)}
    if not chosen:
        raise ValueError(
            f"no section is called {only!r}; there are {', '.join(sections(TINY if tiny else Sizes()))}"
        )
    began = time.monotonic()
    about = machine(torch.device(device))
    say("  ".join(f"{name} {value}" for name, value in about.items() if name != "missing"))
    if about["missing"]:
        say(f"not here, so not measured: {', '.join(about['missing'])}")
    result: JsonObject = {"machine": about, "finished": False, "seconds": 0.0, "rows": []}
    shares = {name: share for name, (share, _) in chosen.items()}
    for name in chosen:
        left = began + seconds - time.monotonic()
        budget = left * shares[name] / sum(shares.values())
        del shares[name]
        for row in _apart(name, device, budget, tiny):
            result["rows"].append({"section": name, **row})
            _save(result, began, out)
            say(line(result["rows"][-1]))
    result["finished"] = True
    _save(result, began, out)
    return result


def _save(result: JsonObject, began: float, out: Path | None) -> None:
    """Write the JSON in one step."""
    result["seconds"] = round(time.monotonic() - began, 1)
    if out is not None:
        write_page(out, [json.dumps(result, indent=1)])


def _apart(name: str, device: str, budget: float, tiny: bool) -> Iterator[Measurement]:
    """Run a section in a separate process. Yield its rows as it writes them, and a row about its failure if it fails."""
    if budget < LEAST:
        yield {"what": name, "skipped": "out of time"}
        return
    with tempfile.TemporaryDirectory() as folder:
        rows, errors = Path(folder) / "rows.jsonl", Path(folder) / "errors"
        rows.touch()
        command = [
            sys.executable,
            "-m",
            __package__,
            "--section",
            name,
            "--device",
            device,
            "--out",
            str(rows),
        ]
        command += ["--seconds", str(budget), *(["--tiny"] if tiny else [])]
        kill_at = time.monotonic() + budget + GRACE
        with errors.open("w") as messages, rows.open() as written:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=messages, stderr=messages)
            try:
                while (code := process.poll()) is None and time.monotonic() < kill_at:
                    yield from map(json.loads, whole_lines(written))
                    time.sleep(0.1)
            finally:
                if process.poll() is None:
                    process.kill()
                process.wait()
            yield from map(json.loads, whole_lines(written))
        if code is None:
            yield {"what": name, "error": f"stopped after {budget + GRACE:.0f} s, its share of the time"}
        elif code:
            last = errors.read_text(errors="replace").strip().splitlines()[-1:] or ["no word"]
            yield {"what": name, "error": f"ended with {code}: {last[0]:.200}"}


def whole_lines(file: TextIO) -> Iterator[str]:
    """Yield the lines that another process has written to the end."""
    while True:
        place = file.tell()
        text = file.readline()
        if not text.endswith("\n"):
            file.seek(place)
            return
        yield text


def line(row: Measurement) -> str:
    """Return one line of the table."""
    what = f"{row['section']:20} {row['what']:28} "
    keys = {"context": "{}", "batch": "× {}", "checkpointing": "{}"}
    place = " ".join(
        form.format(
            {True: "recompute", False: ""}.get(row[key], row[key]) if key == "checkpointing" else row[key]
        )
        for key, form in keys.items()
        if key in row
    )
    hidden = {"section", "what", "shape", *keys}
    figures = "  ".join(
        f"{name} {value}" for name, value in row.items() if name not in hidden and value is not None
    )
    return f"{what}{place:18} {figures}"


def section(name: str, device: str, seconds: float, tiny: bool, out: Path) -> None:
    """Run one section here, and write each row as soon as it is measured. This process ends when the kit ends."""
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    sizes = TINY if tiny else Sizes()
    bench = Stand(torch.device(device), sizes, BEGAN + seconds)
    with out.open("a") as file:
        for row in sections(sizes)[name][1](bench):
            file.write(json.dumps(row) + "\n")
            file.flush()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def main(argv: list[str] | None = None) -> None:
    """Run the kit, or one section of it."""
    parser = module_parser(__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--seconds", type=number(0, kind=float), default=460.0, help="time for all sections together"
    )
    parser.add_argument("--only", default="", help="sections whose names begin so")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes: a test of the kit itself")
    parser.add_argument("--out", type=Path, help="file for the JSON")
    parser.add_argument("--section", help=argparse.SUPPRESS)
    a = parser.parse_args(argv)
    if a.section:
        section(a.section, a.device, a.seconds, a.tiny, a.out)
        return
    if a.device == "cpu" and not a.tiny:
        raise SystemExit(
            "unitymas bench gpu: torch sees no GPU here; --tiny --device cpu tests the kit itself"
        )
    result = run(a.device, a.seconds, a.only, a.tiny, out=a.out)
    print(f"{len(result['rows'])} rows in {result['seconds']} s" + (f", as JSON in {a.out}" if a.out else ""))


if __name__ == "__main__":
    main()
