"""Settings that the documentation names are settings of the config."""

import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import NoneType
from typing import get_args, get_origin

import pytest

from unitymas.trainers.algorithms import ALGORITHMS, find_algorithm
from unitymas.trainers.config.choices import hints_of
from unitymas.trainers.config.schema import RunConfig

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "docs/papers").glob("*.md")])
SECTIONS = ["policies", "groups", "eval", "log"]  # `env.` and `ray.` are names of Python, too
KEY = re.compile(rf"(?<![\w./])((?:{'|'.join(SECTIONS)})(?:\.[\w*]+)+)(?![\w(/])")
FILES = re.compile(r"\.(py|md|json|jsonl|yaml|html)$")


def stale(key, kind=RunConfig):
    """Return what of a key is no setting, or ""."""
    name, _, rest = key.partition(".")
    hints = hints_of(kind)
    if name not in hints:
        return name
    hint = hints[name]
    if get_origin(hint) not in (dict, None):  # a union with null
        hint = next(part for part in get_args(hint) if part is not NoneType)
    if get_origin(hint) is dict and name == "algorithm":
        known = {f.name for algorithm in ALGORITHMS for f in fields(find_algorithm(algorithm))} | {"name"}
        return rest if rest and rest.partition(".")[0] not in known else ""
    if get_origin(hint) is dict:
        _, _, rest = rest.partition(".")  # the name of a policy, a group, an argument
        hint = get_args(hint)[1]
    return stale(rest, hint) if rest and is_dataclass(hint) else ""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_keys_are_settings(page):
    keys = {key for key in KEY.findall(page.read_text()) if not FILES.search(key)}
    assert not {key for key in keys if stale(key)}


def test_a_stale_key_is_found():
    assert stale("policies.*.learning.rate") == "rate"
    assert stale("groups.main.gpu_count") == "gpu_count"
    assert stale("policies.*.algorithm.clip_lower") == "clip_lower"
    assert not stale("policies.team.learning.lr") and not stale("groups.*.engine_options.anything")
