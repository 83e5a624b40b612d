"""One registry: names, places, plug-ins, and one error for a name that nobody registered."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

import unitymas
from unitymas.agents.basics.named_parts import Registry, UnknownName
from unitymas.agents.engines.engine import ENGINES
from unitymas.agents.team import PLAYERS, TeamError
from unitymas.envs.core.ledger import FunctionRule
from unitymas.envs.making import REWARDS, TOOLS
from unitymas.envs.registry import ENVIRONMENTS
from unitymas.own import BrokenPlugin, OwnCodeError
from unitymas.trainers.algorithms import ALGORITHMS
from unitymas.trainers.config.resolve import resolve
from unitymas.trainers.config.schema import ConfigError
from unitymas.trainers.controller.reporting.loggers import LOGGERS
from unitymas.trainers.recipes import RECIPES


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Registry[object]:
    points = [EntryPoint("fine", "json:loads", "g"), EntryPoint("broken", "no_such_module_anywhere:x", "g")]
    monkeypatch.setattr("unitymas.own.entry_points", lambda group: points if group == "g" else [])
    return Registry("part", "g", "unitymas.agents", {"near": ".hints:nearest", "thing": object})


def test_names_places_and_plug_ins_are_found(parts: Registry[object]) -> None:
    import json

    from unitymas.agents.basics.hints import nearest

    assert parts.names() == ["broken", "fine", "near", "thing"]
    assert (
        parts.find("near") is nearest and parts.find("thing") is object and parts.find("fine") is json.loads
    )
    assert parts.find("json:dumps") is json.dumps


def test_a_broken_plug_in_fails_by_name_and_alone(parts: Registry[object]) -> None:
    assert "broken" in parts and parts.find("thing") is object
    with pytest.raises(BrokenPlugin, match="plug-in 'broken'"):
        parts.find("broken")


@pytest.mark.parametrize("kind", [UnknownName, ValueError, KeyError])
def test_an_unknown_name_is_answered_with_the_nearest(parts: Registry[object], kind: type[Exception]) -> None:
    with pytest.raises(kind, match=r"^unknown part 'thingg': did you mean 'thing'\?$"):
        parts.find("thingg")


def test_a_name_is_given_once(parts: Registry[object]) -> None:
    parts.register("thing", object)  # the same again is no mistake
    with pytest.raises(ValueError, match="a part named 'thing' is already registered"):
        parts.register("thing", int)
    parts.unregister("thing")
    parts.register("thing", int)
    assert parts.find("thing") is int


KINDS = [ALGORITHMS, ENGINES, ENVIRONMENTS, LOGGERS, PLAYERS, RECIPES, REWARDS, TOOLS]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.kind)
def test_every_kind_has_the_same_registry(kind: Registry[object]) -> None:
    assert kind.find("json:dumps").__name__ == "dumps"  # type: ignore[attr-defined]
    kind.register("a-new-part", "json:loads")
    try:
        assert kind.find("a-new-part").__name__ == "loads" and "a-new-part" in kind.names()  # type: ignore[attr-defined]
        with pytest.raises(UnknownName, match=f"unknown {kind.kind} 'a-new-prt': did you mean 'a-new-part'"):
            kind.find("a-new-prt")
        with pytest.raises(OwnCodeError, match="json has no 'no_such_name'"):
            kind.find("json:no_such_name")
    finally:
        kind.unregister("a-new-part")
    assert "a-new-part" not in kind


@pytest.mark.parametrize("kind", [REWARDS, TOOLS, PLAYERS, LOGGERS, ENGINES], ids=lambda kind: kind.kind)
def test_what_comes_with_unitymas_is_there(kind: Registry[object]) -> None:
    for name in kind.names():
        assert callable(kind.find(name)), name


PART = """
from unitymas import tool

def half(trace, task):
    return 0.5

@tool
def nothing(query: str, k: int) -> list:
    return []

class Shy:
    def act(self, call):
        return "<final_answer>unknown</final_answer>"

class Memory:
    def __init__(self, directory, config):
        self.seen = []
    def log(self, kind, step, figures):
        self.seen.append((kind, step))
    def close(self, ending):
        self.seen.append(ending)
"""


def test_a_part_from_outside_is_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a_part_of_mine.py"
    file.write_text(PART)
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        for place in (str(file), "a_part_of_mine"):
            env = unitymas.make(
                "rag-nq",
                data="mini",
                size=2,
                reward=[f"{place}:half", "format"],
                tools={"retrieve": f"{place}:nothing"},
            )
            assert [rule.name for rule in env.arena.rules] == ["half", "format"]
            assert isinstance(env.arena.rules[0], FunctionRule)
            trace = unitymas.rollout(env, f"{file}:Shy", tasks=1)[0]
            assert str(trace.ended) == "terminal" and trace.outcome["answer"] == "unknown"
            config = resolve(
                "rag-nq",
                preset_name="shared",
                overrides=[f"log.also=[{place}:Memory]", f"env.reward={place}:half"],
            )
            assert LOGGERS.find(config.log.also[0])(tmp_path, config).seen == []  # type: ignore[attr-defined]
    finally:
        sys.modules.pop("a_part_of_mine", None)


def test_a_part_that_is_not_there_is_said_where_it_is_asked_for() -> None:
    with pytest.raises(UnknownName, match="unknown reward 'formt': did you mean 'format'"):
        unitymas.make("rag-nq", data="mini", reward="formt")
    with pytest.raises(UnknownName, match="unknown tool 'retreive': did you mean 'retrieve'"):
        unitymas.make("rag-nq", data="mini", tools={"retrieve": "retreive"})
    with pytest.raises(ConfigError, match="log.also: unknown logger 'wandbb': did you mean 'wandb'"):
        resolve("rag-nq", preset_name="shared", overrides=["log.also=[wandbb]"])
    with pytest.raises(TeamError, match="unknown policy 'randm'; did you mean 'random'"):
        unitymas.Team("randm")
    with pytest.raises(OwnCodeError, match="there is no module 'no_package.players'"):
        unitymas.Team("no_package.players:Shy")
    with pytest.raises(ValueError, match="unknown environment 'rag-nqq'; did you mean rag-nq"):
        unitymas.make("rag-nqq")
