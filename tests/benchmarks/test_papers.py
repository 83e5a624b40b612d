"""The grid of the paper reproductions: what is finished is kept, verdicts say what the figures say."""

import json
import random
from dataclasses import replace

import numpy as np
import pytest

from unitymas.benchmarks.papers import (
    dr_mas,
    faults,
    micro,
    reproduction,
    routing,
    stronger_mas,
    uneven,
    unitymas_o,
)
from unitymas.benchmarks.papers.reproduction import (
    Claim,
    Paper,
    judged,
    key_of,
    load,
    mean_of,
    outdated,
    page,
    run,
)
from unitymas.envs.core.drivers import rollout
from unitymas.envs.registry import make, unregister
from unitymas.trainers.controller.statistics.table import Decision, Table

played = []


def pretend(settings, seed, folder):
    """A cell whose figure is known."""
    played.append((settings["level"], seed))
    assert folder.is_dir()
    return {"final": {"score": settings["level"] + 0.01 * seed}, "curve": [[0, 0.0], [1, settings["level"]]]}


PAPER = Paper(
    name="pretended", title="A test", source="nobody", expected="high above low", metric="score", play=pretend,
    conditions={"high": ("more", {"level": 0.8}), "low": ("less", {"level": 0.2})},
    claims=(Claim(says="high is above low", better="high", worse="low"), Claim(says="and below", better="low", worse="high")),
)  # fmt: skip


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.setattr(reproduction, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(reproduction, "PAGES", tmp_path / "pages")
    played.clear()


def test_a_finished_cell_is_not_run_again_unless_its_settings_change(tmp_path):
    run(PAPER, [0, 1], [], tmp_path / "runs")
    assert played == [(0.8, 0), (0.2, 0), (0.8, 1), (0.2, 1)]  # seed by seed
    run(PAPER, [0, 1, 2], ["low"], tmp_path / "runs")
    assert played[4:] == [(0.2, 2)]
    other = replace(PAPER, conditions={**PAPER.conditions, "high": ("more", {"level": 0.9})})
    assert outdated(other, load(other)) == {"high/0", "high/1"}
    run(other, [0], [], tmp_path / "runs")
    assert played[5:] == [(0.9, 0)]
    assert outdated(other, load(other)) == {"high/1"}  # no finished cell is lost
    text = page(other, load(other))
    assert (
        "| high † | more | 2 |" in text and "| low | less | 3 |" in text and "† 1 cell of these rows" in text
    )
    assert "†" not in page(
        PAPER, {name: cell for name, cell in load(PAPER).items() if name.startswith("low")}
    )
    assert key_of({"a": 1, "b": 2}) == key_of({"b": 2, "a": 1}) != key_of({"a": 1, "b": 3})


def test_a_cell_that_was_cut_short_is_run_anew(tmp_path):
    left = tmp_path / "runs" / "pretended" / "high-0"
    left.mkdir(parents=True)
    (left / "metrics.jsonl").write_text("half a run")
    run(PAPER, [0], ["high"], tmp_path / "runs")
    assert played == [(0.8, 0)] and not left.exists()


def test_two_processes_can_fill_one_grid(tmp_path):
    def slowly(settings, seed, folder):
        if settings["level"] == 0.8:  # meanwhile, elsewhere
            run(PAPER, [0], ["low"], tmp_path / "elsewhere")
        return pretend(settings, seed, folder)

    run(replace(PAPER, play=slowly), [0], ["high"], tmp_path / "runs")
    assert set(load(PAPER)) == {"high/0", "low/0"}


def test_verdicts_and_page(tmp_path):
    assert reproduction.command(PAPER, ["--seeds", "0", "1", "2", "--folder", str(tmp_path / "runs")]) == 0
    cells = load(PAPER)
    verdict, gap = judged(PAPER, PAPER.claims[0], cells)
    assert verdict == "holds" and gap.value == pytest.approx(0.6)
    assert judged(PAPER, PAPER.claims[1], cells)[0] == "the opposite holds"
    assert judged(PAPER, replace(PAPER.claims[0], less=True), cells)[0] == "the opposite holds"
    assert judged(PAPER, PAPER.claims[0], {})[0] == "not run"
    assert (
        judged(PAPER, PAPER.claims[0], {k: v for k, v in cells.items() if k.endswith("/0")})[0] == "one seed"
    )
    noisy = json.loads(json.dumps(cells))
    noisy["high/1"]["final"]["score"] = 0.0
    assert judged(PAPER, PAPER.claims[0], noisy)[0] == "not shown"
    text = (tmp_path / "pages" / "pretended.md").read_text()
    assert "--seeds 0 1 2" in text and "**holds**" in text and "high above low" in text
    assert text == page(PAPER, cells)


def test_the_interval_is_students():
    found = mean_of([1.0, 2.0, 3.0])
    assert found.value == 2.0 and found.half == pytest.approx(4.3027 / np.sqrt(3), rel=1e-3)
    assert mean_of([1.0]).half is None


@pytest.mark.parametrize(
    "paper", [m.PAPER for m in (stronger_mas, dr_mas, faults, routing, unitymas_o)], ids=lambda p: p.name
)
def test_papers_say_what_they_expect_and_compare_what_they_run(paper):
    assert len(paper.expected) > 200
    for claim in paper.claims:
        assert {claim.better, claim.worse} - {""} <= set(paper.conditions)
    json.dumps(dict(paper.conditions))  # plain settings: a cell is known by them


# the micro teams --------------------------------------------------------------------------------------


@pytest.fixture
def env():
    yield uneven.registered()
    unregister("uneven-words")


def test_the_expert_of_the_uneven_team_is_right_and_chance_is_not(env):
    assert all(t.metrics["score"] == 1.0 for t in rollout(env, "scripted"))
    assert np.mean([t.metrics["score"] for t in rollout(env, "random", k=8)]) < 0.3


def test_a_phrase_is_one_token_and_a_system_prompt_too(tmp_path):
    from transformers import AutoTokenizer

    micro.micro_model(tmp_path, "planpath-duo", 0, by="phrases", difficulty={"side": 3, "walls": 0.1})
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer.encode("P . .\n. . G\n. . .\n\nP: row 1 column 1. G: row 2 column 3. Free: down, right.")
    assert len(ids) == 6 and tokenizer.unk_token_id not in ids[3:]
    system = make("planpath-duo", prompts="short").arena.roles["critic"].system
    assert len(tokenizer.encode(system)) == 1


def test_a_role_that_speaks_freely_is_refused(tmp_path):
    with pytest.raises(RuntimeError, match="'planner' replies freely"):
        micro.micro_model(tmp_path, "mask-hotpotqa", 0, data="mini")


def test_imitation_learns_what_was_said(tmp_path):
    env = uneven.registered()
    model = micro.micro_model(tmp_path, env, 0)
    pupil = micro.Pupil(uneven.expert, slips=0.0)
    rollout(env, pupil, k=2)
    micro.school(model, pupil.lessons, seed=0, updates=60, rate=1e-2)
    assert micro.held_out(env, {"*": tmp_path}, 24)["score"] > 0.9


def test_the_fixed_order_is_mask_itself():
    """The router that keeps the order makes the very calls that M-ASK makes, but for its own."""
    ours = rollout(
        make("mask-router-hotpotqa", data="mini", prompts="short"),
        {"router": routing.InOrder(), "*": "scripted"},
        tasks=20,
    )
    theirs = rollout(make("mask-hotpotqa", data="mini"), "scripted", tasks=20)
    for one, other in zip(ours, theirs, strict=True):
        assert [n.role or n.tool for n in one.nodes if n.role != "router"] == [
            n.role or n.tool for n in other.nodes
        ]
        assert one.metrics["calls"] == len(other.nodes) and one.metrics["f1"] == other.metrics["f1"]


# the doubles ------------------------------------------------------------------------------------------


def uneven_play(seed):
    """Decisions of eight tasks: a leader's call, then one to four of a worker's."""
    chance = random.Random(seed)
    rows = []
    for task in range(8):
        for episode in range(4):
            name = f"t{task}e{episode}"
            for agent, calls in (("leader", 1), ("worker", chance.randint(1, 4))):
                for turn in range(calls):
                    rows.append(
                        Decision(
                            id=f"{name}/{agent}{turn}", env_id="e", task=f"t{task}", episode=name, node=f"{agent}{turn}",
                            role=agent, agent=agent, chain=f"{name}/{agent}", policy="team", n_tokens=1, turn=turn,
                            order=turn, credit={"pay": chance.choice([0.0, 10.0])},
                            ended="terminal" if turn == calls - 1 else "no",
                        )
                    )  # fmt: skip
    return Table(rows)


def test_the_faults_do_what_their_names_say():
    table = uneven_play(0)
    tasks, mine = table.codes("task"), np.arange(len(table))
    mixed = faults.MixedPrompts(mixed=8, group="agent-turn", score="act").groups(table)
    assert any(len(set(tasks[mixed.code == g])) > 1 for g in range(len(mixed.samples)))
    reshaped = faults.Reshaped(n=4).groups(table)
    assert set(np.bincount(reshaped.code)[:-1]) == {4}
    raw = faults.RawSingletons(group="agent-turn", score="act")
    within, x = raw.groups(table), raw.scores(table)
    alone = within.samples[within.code] == 1
    assert alone.any() and np.array_equal(raw.compare(within, x)[alone], x[alone])
    assert len(raw.advantages(table, mine, {})) == len(table)
