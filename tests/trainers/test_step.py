"""One step of training: how many tasks are drawn, what counts in its means, what its state may be, how it validates."""

import asyncio
import math
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import unitymas
from unitymas import Choice, Outcome, Role, Workflow
from unitymas.envs.core.ledger import Credit
from unitymas.envs.core.trace import Trace
from unitymas.envs.core.workflow import WorkflowError
from unitymas.envs.registry import unregister
from unitymas.trainers.config.resolve import resolve
from unitymas.trainers.controller import checkpoint
from unitymas.trainers.controller.collect import Harvest
from unitymas.trainers.controller.reporting.loggers import Logbook
from unitymas.trainers.controller.run import Run
from unitymas.trainers.controller.step import collected

WORDS = ("w1", "w2")
ID = "step-test"
BROKEN = "t1"


class Say(Workflow):
    """Says a word; the world adds chance, and one task's tool is down now and then."""

    roles = (Role("speaker", reply=Choice(*WORDS)),)

    async def run(self, ep):
        first = await ep.act("speaker", f"w9 {ep.task.question}")
        if ep.task.id == BROKEN and ep.rng.random() < 0.5:
            raise RuntimeError("down")
        return Outcome(answer=first.value, luck=ep.rng.random())


class Pay:
    """`fixed` is the same whatever is said, `own` is not; `rare` is a figure that only some episodes have."""

    name = "pay"

    def on_node(self, trace, node, task):
        yield Credit(node.id, "own", float(node.value == "w1"))
        yield Credit(node.id, "fixed", 1.0)

    def metrics(self, trace, task):
        said, luck = (trace.outcome or {}).get("answer"), (trace.outcome or {}).get("luck", 0.0)
        return {
            "score": -1.0 if said == "w2" else 1.0,
            "luck": luck,
            **({"rare": 1.0} if said == "w1" else {}),
        }


@pytest.fixture(scope="module", autouse=True)
def environment():
    rows = [{"id": f"t{i}", "question": f"w{20 + i}", "answers": ["w1"]} for i in range(5)]
    unitymas.register(ID, workflow=Say, reward=Pay, tasks=rows)
    yield
    unregister(ID)


def made(model: str, folder: Any, policy: dict[str, Any], **fields: Any) -> Run:
    given = {
        "steps": 2, "tasks_per_step": 6, "k": 4, "minibatches": 1, "starved": False, "checkpoint_every": 0,
        "eval": {"every": 1, "tasks": 4, "k": 2}, "log": {"console": "off", "traces_every": 0}, "retries": 0,
    }  # fmt: skip
    config = resolve(
        ID, preset_name="shared", groups={"*": {"model": model, "slots": 32, "threads": 1}},
        policies={"*": {"sampling": {"temperature": 5.0, "max_tokens": 8}, **policy}}, **(given | fields),
    )  # fmt: skip
    return Run(config, folder / "run")


def played(run: Run, steps: int = 1) -> list[Harvest]:
    async def go() -> list[Harvest]:
        await run._start()
        found = []
        for run.step in range(steps):
            found.append(await run.recipe.collect(run))
            await run.hosts.retire(found[-1].episodes)
        for group in run.groups.values():
            await group.close()
        return found

    return asyncio.run(go())


def test_dynamic_sampling_draws_the_tasks_of_a_step_and_no_more(tiny_llama: str, tmp_path: Any) -> None:
    """Five tasks, six draws a step: one of them comes twice, and is two draws."""
    for harvest in played(made(tiny_llama, tmp_path, {"algorithm": {"name": "dapo", "resample": 8}}), 6):
        draws = Counter(name.rpartition(".")[0] for name in harvest.episodes)
        assert len(draws) == harvest.tasks <= 6 and max(draws.values()) <= 4


@pytest.mark.parametrize(("alpha", "beta", "kept"), [(1.0, 0.0, False), (1.0, 1.0, True)])
def test_what_teaches_nothing_is_what_the_algorithm_sees(
    tiny_llama: str, tmp_path: Any, alpha: float, beta: float, kept: bool
) -> None:
    """Where only what is the same for all is left of the rewards, no task has anything to compare."""
    credit = {"*": [{"name": "mix", "team": ["fixed"], "alpha": alpha, "beta": beta}]}
    policy = {"algorithm": {"name": "dapo", "resample": 1}, "credit": credit}
    (harvest,) = played(made(tiny_llama, tmp_path, policy))
    assert bool(harvest.traces) == kept


def test_training_counts_every_draw_as_validation_does(tiny_llama: str, tmp_path: Any) -> None:
    """Failed, set aside, or without such a figure: it counts, on both sides."""
    run = made(tiny_llama, tmp_path, {"algorithm": {"name": "dapo", "resample": 2}})
    seen: list[Trace] = []
    run.on_trace = seen.append
    (harvest,) = played(run)
    drawn = sum(harvest.drawn.values())
    failed = sum(harvest.failures.values())
    assert drawn == len(seen) + failed and failed and len(harvest.traces) < len(seen)
    figures = collected(harvest)
    for name in ("score", "luck", "rare"):
        assert figures[f"train/{name}"] == pytest.approx(
            math.fsum(t.metrics.get(name, 0.0) for t in seen) / drawn
        )


def test_validation_meets_the_same_chance_at_every_step(tiny_llama: str, tmp_path: Any) -> None:
    run = made(
        tiny_llama,
        tmp_path,
        {"learning": {"lr": 0.0}},
        eval={"every": 1, "tasks": 4, "k": 2, "temperature": 3.0},
    )

    async def go() -> list[dict[str, float]]:
        await run._start()
        found = []
        for run.step in (0, 1, 7):
            found.append(await run.validate())
        for group in run.groups.values():
            await group.close()
        return found

    first, *others = asyncio.run(go())
    assert first["luck"] and first["failed"] in (0.0, 0.125, 0.25) and all(other == first for other in others)


def test_validation_and_training_count_alike() -> None:
    """One rule for both, over several environments too: a figure's mean is over the draws of those that have it."""
    harvest = Harvest()
    for env, values, drawn in (("a", [1.0, -3.0], 4), ("b", [2.0], 2)):
        more = Harvest()
        more.drawn[env] = drawn
        for i, value in enumerate(values):
            more.take(f"{env}:{i}.0", Trace(env, str(i), 0, metrics={env: value, "both": value}))
        assert harvest.add(more, set()) == more.episodes  # nothing is kept, and all of it counts
    assert harvest.means() == {"a": -0.5, "b": 1.0, "both": 0.0} and not harvest.traces


KEYS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.tuples(inner, inner),
    max_leaves=4,
)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=2) | st.tuples(inner, inner) | st.dictionaries(KEYS, inner, max_size=2)
    ),
    max_leaves=5,
)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(state=st.dictionaries(KEYS, PLAIN, max_size=4))
def test_an_algorithms_state_comes_back_from_a_checkpoint(untrained: Run, state: dict[Any, Any]) -> None:
    """Whatever plain keys it has: tuples, numbers, None; and an empty one, made when first asked for."""
    untrained.state.clear()
    untrained.state["team"] = state

    async def go() -> None:
        folder = await untrained.save()
        untrained.state.clear()
        assert await untrained._load(checkpoint.verify(folder))

    asyncio.run(go())
    assert untrained.state == {"team": state} and untrained.state["another"] == {}
    assert repr(untrained.state["team"]) == repr(state)  # 1 and True, 0.0 and -0.0 too


def test_what_no_checkpoint_can_hold_is_said_in_the_first_step(tiny_llama: str, tmp_path: Any) -> None:
    run = made(tiny_llama, tmp_path, {"algorithm": {"name": "grpo"}})
    run.state["team"]["rule"] = lambda x: x

    async def go() -> None:
        await run._start()
        try:
            await run.recipe.step(run)
        finally:
            for group in run.groups.values():
                await group.close()

    with pytest.raises(TypeError, match="policy 'team': what grpo keeps in `state` cannot be kept"):
        asyncio.run(go())


@pytest.fixture(scope="module")
def untrained(tiny_llama: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run without groups: what it keeps of its own."""
    run = made(tiny_llama, tmp_path_factory.mktemp("state"), {})
    run.book = Logbook(run.dir, run.config, run.arena)
    run.book.path.touch()
    return run


def test_states_of_the_world_are_asked_for_at_the_start(tiny_llama: str, tmp_path: Any) -> None:
    with pytest.raises(WorkflowError, match=r"policies.team.algorithm \(gigpo\) compares .* names no state"):
        made(tiny_llama, tmp_path, {"algorithm": {"name": "gigpo"}})
    made(
        tiny_llama, tmp_path, {"algorithm": {"name": "gigpo", "step_weight": 0.0}}
    )  # plain GRPO, and said so
    with pytest.raises(WorkflowError, match=r"\(grpo\) compares .* names no state"):
        made(tiny_llama, tmp_path, {"algorithm": {"name": "grpo", "group": "anchor"}})
    games = resolve("planpath-duo", preset_name="shared", policies={"*": {"algorithm": {"name": "gigpo"}}})
    assert Run(games, tmp_path / "games").algorithms["team"].name == "gigpo"
