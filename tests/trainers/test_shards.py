"""Several controllers: the results of one, to the bit, here and on Ray; and what they cannot play, said by name."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import unitymas
from unitymas import Outcome, Role, Workflow
from unitymas.agents.basics.failures import Infrastructure
from unitymas.agents.roles import Choice
from unitymas.envs.core.trace import read
from unitymas.envs.registry import unregister
from unitymas.trainers.config.resolve import resolve
from unitymas.trainers.config.schema import ConfigError
from unitymas.trainers.controller.collect import Cursor
from unitymas.trainers.controller.run import Run, train
from unitymas.trainers.controller.shards.sharded import DistantShard, Shards

from .pairs import ROWS, WORDS, right

ID, OTHER = "two-of-shards", "two-beside-shards"


def look(text: str) -> str:
    """A server that is down whenever it hears w3 first."""
    if text.startswith("w3 w2"):
        raise Infrastructure("the server is down")
    return "w10" if "w1" in text else "w11"


class Lookers(Workflow):
    """Two speak, and one looks something up in between."""

    roles = (Role("first", reply=Choice(*WORDS)), Role("second", reply=Choice(*WORDS)))
    tools = ("look",)

    async def run(self, ep: Any) -> Outcome:
        one = await ep.act("first", f"w9 {ep.task.question}")
        place = await ep.use("look", text=f"{one.text} {ep.task.question}")
        two = await ep.act("second", f"w8 {place} {ep.task.question}")
        return Outcome(answer=two.value)


@pytest.fixture(scope="module", autouse=True)
def environment() -> Iterator[None]:
    for id in (ID, OTHER):
        unitymas.register(
            id, workflow=Lookers, reward=right, tasks=ROWS, tools={"look": look}, expert=lambda call: WORDS[0]
        )
    yield
    unregister(ID)
    unregister(OTHER)


def settings(model: str, **more: Any) -> dict[str, Any]:
    """Two groups; the second step's traces are not kept, so its prompts stay where they were played."""
    policy = {
        "algorithm": {"name": "grpo"},
        "learning": {"lr": 1e-2},
        "sampling": {"temperature": 5.0, "max_tokens": 2},
    }
    return {
        "steps": 2, "tasks_per_step": 5, "k": 3, "starved": False, "deterministic": True, "checkpoint_every": 0,
        "eval": {"every": 0, "tasks": 3}, "log": {"console": "off", "traces_every": 2},
        "groups": {name: {"model": model, "slots": 8, "threads": 1} for name in ("left", "right")},
        "policies": {"one": {**policy, "group": "left"}, "two": {**policy, "group": "right"}},
        "map": {"first": "one", "second": "two"}, **more,
    }  # fmt: skip


def weights(folder: Path) -> list[bytes]:
    return [file.read_bytes() for file in sorted(folder.glob("policies/*/*.safetensors"))]


def figures(run: Run) -> list[dict[str, Any]]:
    """All that a run tells but how long things took."""
    rows = [{k: v for k, v in row.items() if "time" not in k} for row in run.history]
    return [row for row in rows if row["kind"] in ("step", "validation")]


def episodes(folder: Path) -> list[dict[str, Any]]:
    return [trace.to_dict(volatile=False) for file in sorted(folder.glob("traces/*")) for trace in read(file)]


def test_several_controllers_are_one(tiny_llama: str, tmp_path: Path) -> None:
    one = train(ID, directory=tmp_path / "one", **settings(tiny_llama))
    three = train(ID, directory=tmp_path / "three", **settings(tiny_llama, controllers=3))
    assert weights(one.dir) == weights(three.dir) and len(weights(one.dir)) == 2
    assert figures(one) == figures(three)
    assert any(row.get("failures", 0) > 0 for row in figures(one))  # of the server that is down
    assert episodes(one.dir) == episodes(three.dir)
    assert all(node["messages"] for trace in episodes(three.dir) for node in trace["nodes"] if node["role"])


QUESTIONS = {"first": {"samples": 2, "limit": 1}, "second": {"reply": "w1"}}


@pytest.mark.parametrize(
    "more",
    [
        {"recipe": "several", "recipe_args": {"beside": [{"id": OTHER}], "tasks": 3}},
        {"counterfactual": QUESTIONS},
        {"algorithm": {"name": "dapo", "resample": 2}},
    ],
    ids=["several environments", "counterfactual", "resample"],
)
def test_recipes_and_questions_are_those_of_one(
    more: dict[str, Any], tiny_llama: str, tmp_path: Path
) -> None:
    tree = settings(tiny_llama, **more)
    for policy in tree["policies"].values():
        policy["algorithm"] = tree.get("algorithm", policy["algorithm"])
    tree.pop("algorithm", None)
    one = train(ID, directory=tmp_path / "one", **tree)
    two = train(ID, directory=tmp_path / "two", **tree, controllers=2)
    assert weights(one.dir) == weights(two.dir)
    assert figures(one) == figures(two) and episodes(one.dir) == episodes(two.dir)
    steps = [row for row in figures(two) if row["kind"] == "step"]
    if "recipe" in more:
        assert {trace["env_id"].removesuffix("-v0") for trace in episodes(two.dir)} == {ID, OTHER}
    elif "counterfactual" in more:
        assert all(row["role/first/counterfactual"] for row in steps)
    else:  # tasks that teach nothing were replaced
        plain = Cursor(list(two.arena.task_ids), two.config.seed)
        plain.take(2 * 5)
        assert two.cursor.state_dict() == one.cursor.state_dict() != plain.state_dict()


def test_a_run_goes_on_with_another_number(tiny_llama: str, tmp_path: Path) -> None:
    whole = train(ID, directory=tmp_path / "whole", **settings(tiny_llama))
    train(ID, directory=tmp_path / "half", **settings(tiny_llama, steps=1, controllers=2))
    half = train(directory=tmp_path / "half", resume=True, steps=2, controllers=4)
    assert weights(whole.dir) == weights(half.dir)


def test_draws_of_an_overlapped_run_go_to_whoever_has_the_fewest(tiny_llama: str, tmp_path: Path) -> None:
    more = {"overlap": "wait", "staleness": 0}
    one = train(ID, directory=tmp_path / "one", **settings(tiny_llama, **more))
    two = train(ID, directory=tmp_path / "two", **settings(tiny_llama, controllers=2, **more))
    assert weights(one.dir) == weights(two.dir)


def test_a_controller_that_dies_on_ray_changes_nothing(
    tiny_llama: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cluster: Any
) -> None:
    """Three lives in one test, because a Ray takes long to start: one controller here, two there of which one is killed."""
    ray = pytest.importorskip("ray")
    team = settings(tiny_llama)["policies"]["one"]
    alone = {
        "groups": {"main": {"model": tiny_llama, "slots": 8, "threads": 1}}, "policies": {"team": {**team, "group": "main"}},
        "map": {"*": "team"},
    }  # fmt: skip
    here = train(ID, directory=tmp_path / "here", **settings(tiny_llama, **alone))
    play, asked = DistantShard.play, list[str]()

    async def mortal(shard: DistantShard, *arguments: Any) -> Any:
        asked.append(shard.name)
        if (
            len(asked) == 9
        ):  # the first draw of the second step, after three of the validation and five of the first step
            ray.kill(shard.actor)
        return await play(shard, *arguments)

    monkeypatch.setattr(DistantShard, "play", mortal)
    more = {**alone, "runtime": "ray", "controllers": 2, "restart_pause": 0.0, "checkpoint_every": 1}
    there = train(ID, directory=tmp_path / "there", **settings(tiny_llama, **more))
    assert weights(here.dir) == weights(there.dir) != []
    assert set(asked) == {"controller 0", "controller 1"}
    (loss,) = [row for row in there.history if row["kind"] == "loss"]
    assert "controller 0 is gone" in loss["cause"]
    assert [f for f in figures(there) if f["kind"] == "step"] == [
        f for f in figures(here) if f["kind"] == "step"
    ]


ALONE = {"two": {"group": "right", "algorithm": {"name": "grpo"}}}
TREES = {
    name: {"group": group, "algorithm": {"name": "at_grpo"}}
    for name, group in (("one", "left"), ("two", "right"))
}


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"policies": TREES}, "controllers=2: trees choose by what the one table says"),
        ({"recipe": "cross"}, "controllers=2: recipe 'cross' seats players of its own"),
        (
            {"policies": ALONE, "map": {"first": "openai:m@http://localhost:1/v1", "second": "two"}},
            "controllers=2: map.first: 'openai:m@http://localhost:1/v1' is one for the whole run",
        ),
        (
            {"policies": ALONE, "map": {"first": "human", "second": "two"}},
            "controllers=2: map.first: 'human' is one for",
        ),
    ],
)
def test_what_shards_cannot_play_is_refused(
    tiny_llama: str, tmp_path: Path, more: dict[str, Any], words: str
) -> None:
    tree = settings(tiny_llama, controllers=2, **more)
    homes = {policy["group"] for policy in tree["policies"].values()}
    tree["groups"] = {name: group for name, group in tree["groups"].items() if name in homes}
    with pytest.raises(ConfigError) as error:
        Run(resolve(ID, **tree), tmp_path / "run")
    assert words in str(error.value)


class Counting:
    """A tool that counts its uses."""

    uses = 0

    def __call__(self, text: str) -> str:
        self.uses += 1
        return f"w{self.uses}"


def test_parts_that_cannot_cross_are_named(tiny_llama: str, tmp_path: Path) -> None:
    def run(runtime: str, **env: Any) -> Run:
        tree = settings(tiny_llama, controllers=2, runtime=runtime, env={"id": ID, **env})
        return Run(resolve(**tree), tmp_path / "run")

    with pytest.raises(ConfigError, match=r"env.tools.look: .*Counting.* may hold state"):
        run("local", tools={"look": Counting()})
    with pytest.raises(ConfigError, match=r"env.tools.look: .* may hold state"):
        run("local", tools={"look": Counting().__call__})
    run("local", tools={"look": look})
    pytest.importorskip("ray")

    lock = threading.Lock()
    with pytest.raises(ConfigError, match="cannot be sent to another process, because of reward rule"):
        run("ray", reward=lambda trace, task: float(lock.locked()))


def test_ranges_are_equal() -> None:
    shards = Shards([None] * 3, None, None)  # type: ignore[list-item, arg-type]
    assert [shards.place(i, 7) for i in range(7)] == [0, 0, 0, 1, 1, 2, 2]
    shards.open_draws.update({0: 2, 1: 1, 2: 1})
    assert shards.place(0, 1) == 1
