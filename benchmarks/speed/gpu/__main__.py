"""One command that measures a GPU machine, without a network, in at most eight minutes: one table, one JSON.

    unitymas bench gpu [--seconds 480] [--out gpu.json] [--only update/Qwen3-0.6B] [--device cuda]
    unitymas bench gpu --tiny --device cpu          # the kit's own test, in seconds

It needs torch and transformers. Weights are random, of published shapes. Every section runs in a process of its own,
within its share of the time. What runs out of memory, fails or hangs is reported by name, and the rest goes on.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from . import learning, speaking
from .shapes import TINY, Row, Sizes, Stand

Section = Callable[[Stand], Iterator[Row]]


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


def machine(device: torch.device) -> Row:
    """Describe what was measured, and which packages that unitymas can use are not here."""
    import transformers

    about: Row = {
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


def run(
    device: str, seconds: float, only: str = "", tiny: bool = False, say: Callable[[str], None] = print
) -> dict[str, Any]:
    """Run the sections whose names begin with `only`. Return the machine and the rows of each."""
    chosen = {n: s for n, s in sections(TINY if tiny else Sizes()).items() if n.startswith(only)}
    if not chosen:
        raise ValueError(
            f"no section is called {only!r}; there are {', '.join(sections(TINY if tiny else Sizes()))}"
        )
    about = machine(torch.device(device))
    say("  ".join(f"{name} {value}" for name, value in about.items() if name != "missing"))
    if about["missing"]:
        say(f"not here, so not measured: {', '.join(about['missing'])}")
    until, rows = time.monotonic() + seconds, []
    shares = {name: share for name, (share, _) in chosen.items()}
    for name in chosen:
        left = until - time.monotonic()
        budget = left * shares[name] / sum(shares.values())
        del shares[name]
        for row in _apart(name, device, budget, tiny):
            rows.append({"section": name, **row})
            say(line(rows[-1]))
    return {"machine": about, "seconds": round(seconds - (until - time.monotonic()), 1), "rows": rows}


def _apart(name: str, device: str, budget: float, tiny: bool) -> list[Row]:
    """Run a section in a process of its own. What it measured before it was stopped counts."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.jsonl"
        command = [
            sys.executable,
            "-m",
            __package__,
            "--section",
            name,
            "--device",
            device,
            "--out",
            str(out),
        ]
        command += ["--seconds", str(budget), *(["--tiny"] if tiny else [])]
        ending: list[Row] = []
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=budget + 10)
            if done.returncode:
                last = done.stderr.strip().splitlines()[-1:] or ["no word"]
                ending = [{"what": name, "error": f"ended with {done.returncode}: {last[0]:.200}"}]
        except subprocess.TimeoutExpired:
            ending = [{"what": name, "error": f"stopped after {budget + 10:.0f} s, its share of the time"}]
        written = out.read_text().splitlines() if out.exists() else []
        return [json.loads(text) for text in written] + ending


def line(row: Row) -> str:
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
    """Run one section here, and write each row as soon as it is measured."""
    sizes = TINY if tiny else Sizes()
    bench = Stand(torch.device(device), sizes, time.monotonic() + seconds)
    with out.open("w") as file:
        for row in sections(sizes)[name][1](bench):
            file.write(json.dumps(row) + "\n")
            file.flush()


def main(argv: list[str] | None = None) -> None:
    """Run the kit, or one section of it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=470.0, help="time for all sections together")
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
    result = run(a.device, a.seconds, a.only, a.tiny)
    if a.out:
        a.out.write_text(json.dumps(result, indent=1))
    print(f"{len(result['rows'])} rows in {result['seconds']} s" + (f", as JSON in {a.out}" if a.out else ""))


if __name__ == "__main__":
    main()
