"""Each monitor fires on its own disease, once, with its threshold, and on no healthy run."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from unitymas.envs.core.drivers import rollout
from unitymas.rewards import monitors
from unitymas.rewards.monitors import Alarm, Watch

Row = dict[str, float]


def healthy(step: int, rng: random.Random) -> Row:
    learnt = min(1.0, step / 30)
    return {
        "step": step, "acts": 8 + rng.gauss(0, 0.3), "tool_uses": 2 + rng.gauss(0, 0.2),
        "message_entropy": 0.9 - 0.2 * learnt + rng.gauss(0, 0.02), "format_credit": -2.0 + 1.9 * learnt,
        "task_credit": 1.0 + 3 * learnt + rng.gauss(0, 0.1), "train": 0.2 + 0.6 * learnt,
        **({"held_out": 0.2 + 0.5 * learnt + rng.gauss(0, 0.01)} if step % 5 == 0 else {}),
    }  # fmt: skip


def run(disease: Callable[[Row], None], steps: int = 40, begins: int = 20) -> list[Alarm]:
    rng, watch = random.Random(0), Watch()
    for step in range(steps):
        row = healthy(step, rng)
        if step >= begins:
            disease(row)
        watch.see(row)
    return watch.alarms


def test_a_healthy_run_is_silent() -> None:
    assert run(lambda row: None, steps=200) == []


DISEASES: dict[str, Callable[[Row], None]] = {
    "length drift": lambda row: row.update(acts=20),
    "tool spike": lambda row: row.update(tool_uses=9),
    "entropy collapse": lambda row: row.update(message_entropy=0.05),
    "format only": lambda row: row.update(task_credit=0.9),
    "held-out drop": lambda row: row.update({"held_out": 0.1} if "held_out" in row else {}),
}


@pytest.mark.parametrize("name", DISEASES)
def test_each_monitor_fires_once_on_its_own_disease(name: str) -> None:
    (alarm,) = run(DISEASES[name])
    assert alarm.monitor == name and 20 <= alarm.step <= 26
    assert alarm.value != alarm.threshold and "threshold" in alarm.message
    assert str(alarm).startswith(f"step {alarm.step}: {name}: ")


def test_shrinking_episodes_are_drift_too() -> None:
    (alarm,) = run(lambda row: row.update(acts=2))
    assert "shorter" in alarm.message and alarm.value < alarm.threshold == pytest.approx(1 / 1.5)


def test_an_alarm_that_goes_away_and_comes_back_is_told_twice() -> None:
    watch, rng = Watch(), random.Random(1)
    for step in range(40):
        watch.see({**healthy(step, rng), "acts": 20.0 if step in (10, 11, 12, 13, 25, 26, 27, 28) else 8.0})
    assert [a.monitor for a in watch.alarms] == ["length drift"] * 2


def test_a_held_out_score_that_falls_with_the_training_score_is_another_matter() -> None:
    assert run(lambda row: row.update(train=0.1, **({"held_out": 0.1} if "held_out" in row else {}))) == []


def test_missing_and_odd_figures_are_left_out() -> None:
    watch = Watch()
    for step in range(20):
        assert watch.see({"step": step, "acts": float("nan"), "note": "text"}) == []


def test_measure_reads_real_episodes() -> None:
    expert = rollout("mask-hotpotqa", "scripted", tasks=10, data="mini")
    figures = monitors.measure(expert)
    assert figures["acts"] == pytest.approx(sum(len(t.acts()) for t in expert) / 10)
    assert figures["format_credit"] == 0.0 < figures["task_credit"]

    def parrot(agent: str, messages: object) -> str:
        return "the same words"

    repeated = monitors.measure(rollout("mask-hotpotqa", parrot, tasks=10, data="mini"))
    assert repeated["message_entropy"] == 0.0 < figures["message_entropy"]
    assert repeated["format_credit"] < 0
    assert monitors.measure([]) == {}
