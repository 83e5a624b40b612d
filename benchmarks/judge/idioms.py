"""Honest programs in many styles, for `honest.py`: ways to read, print, exit, recurse, share work and clean up.

`programs.yaml` holds them. Each is a script for `python program.py`. None needs network, other programs or files of the host,
which the sandbox refuses on purpose. `INPUT` is the standard input of every program.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import yaml

INPUT = "5 3\n1 2 3 4 5\nhello world\nzażółć gęślą\n\n10 20\n"

_TEXT = Path(__file__).with_name("programs.yaml").read_text(encoding="utf-8")
_SECTIONS: dict[str, dict[str, str]] = yaml.load(_TEXT, Loader=yaml.BaseLoader)
READING, PRINTING, ENDING = (_SECTIONS[name] for name in ("reading", "printing", "ending"))
WHOLE = {
    **_SECTIONS["whole"],
    "long line": "x = [" + "1, " * 5000 + "]\nprint(len(x))",
    "many functions": "\n".join(f"def f{n}(): return {n}" for n in range(400)) + "\nprint(f399())",
}


def idioms() -> Iterator[tuple[str, str]]:
    """Yield every way of reading with every way of printing, every way of ending after a few of these, and the rest."""
    for reading, read in READING.items():
        for printing, write in PRINTING.items():
            yield f"{reading} / {printing}", f"{read}\n{write}\n"
    for ending, end in ENDING.items():
        for printing in (
            "print",
            "open 1 kept",
            "buffer",
            "wrapper",
            "del",
            "atexit",
            "thread",
            "emptied early",
        ):
            yield f"{printing} / {ending}", f"a = 'text'\n{PRINTING[printing]}\n{end}\n"
    yield from WHOLE.items()


def library_examples() -> Iterator[tuple[str, str]]:
    """Yield the doctests of the standard library's modules."""
    folder = Path(sys.modules["os"].__file__ or "").parent
    for path in sorted(folder.glob("*.py")):
        if ">>>" in path.read_text(errors="replace") and path.stem not in ("antigravity", "doctest", "this"):
            yield (
                f"doctest {path.stem}",
                f"import doctest, {path.stem}\nprint(doctest.testmod({path.stem}))\n",
            )
