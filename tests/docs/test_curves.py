"""Every training command that the documentation shows was run, or stands in the list of those that were not."""

import re
import shlex
from pathlib import Path

import pytest

from unitymas.benchmarks.pages.curve import records
from unitymas.envs.registry import list_envs

ROOT = Path(__file__).parents[2]
PAGES = [p for p in sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]) if p.name != "curves.md"]
COMMAND = re.compile(r"unitymas train ((?:\\\n|[^\n`#])+)")
FREE = {"--watch": 1, "--dir": 2}
"""Options that change nothing of a run, and their length in words."""
SYNTAX = re.compile(r"\b(ID|RUN|DIR|PATH|NAME|HEAD|MODEL|N)\b|…")
"""Words that stand for a name of the reader's."""


def commands(text):
    """The commands of a page, without comments, placeholders, and options that change nothing."""
    for match in COMMAND.finditer(text):
        words = shlex.split(match[1].replace("\\\n", " "))
        while (at := next((i for i, word in enumerate(words) if word in FREE), None)) is not None:
            del words[at : at + FREE[words[at]]]
        if "--dry-run" not in words and len(words) > 1 and not SYNTAX.search(" ".join(words)):
            yield " ".join(words)


def listed(kind):
    """The commands of the list, in the same form."""
    return {found for entry in records()[kind] for found in commands(entry["command"])}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_each_command_was_run_or_says_that_it_was_not(page):
    unknown = set(commands(page.read_text())) - listed("curves") - listed("not_run")
    assert not unknown, f"run it and `pages.curve RUN --record`, or tell why not in curves.json: {unknown}"


def test_each_listed_command_is_shown():
    shown = {found for page in PAGES for found in commands(page.read_text())}
    assert not (listed("curves") | listed("not_run")) - shown


def test_a_curve_has_a_beginning_and_an_end():
    for entry in records()["curves"]:
        steps = [step for step, _ in entry["curve"]]
        assert steps[0] == 0 and steps == sorted(steps), entry["command"]
        assert len(steps) > 1 or "stopped" in entry, entry["command"]
        if entry["env"] in list_envs() and "gain" in entry:
            low, high = entry["gain"][1:]
            assert low <= entry["curve"][-1][1] - entry["curve"][0][1] <= high, entry["command"]


def test_a_command_that_was_not_run_is_found():
    page = "```bash\nunitymas train no-such \\\n    steps=3 --watch --dir runs/a   # a comment\n```\n`unitymas train ID a=b`"
    assert list(commands(page)) == ["no-such steps=3"]
    assert list(commands("`unitymas train x --dry-run`, `unitymas train`")) == []
