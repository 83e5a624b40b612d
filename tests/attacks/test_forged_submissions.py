"""Forged entries, each caught by name: what is forged, and the sentence that must name it.

The forger knows the code, and signs keys, digests, figures and hashes again after every change, so that only what is
recomputed can catch them.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from unitymas.benchmarks.leaderboard import board as leaderboard
from unitymas.benchmarks.leaderboard import submission
from unitymas.benchmarks.leaderboard.as_written import metadata_text
from unitymas.benchmarks.leaderboard.guard import Guard
from unitymas.envs.core.drivers import derive

from .forging import Entry, K, honest
from .hostile import HOSTILE_ENTRIES, configured

Forge = Callable[[Entry], Any]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return honest(tmp_path_factory.mktemp("honest"))


# what is forged ---------------------------------------------------------------------------------------


def drop_failed_samples(e: Entry) -> None:
    e.traces = [t for t in e.traces if t["metrics"]["f1"] > 0 or t["sample"] == 0]


def best_of_all_copied(e: Entry) -> None:
    for number in range(len(e.of_task()) and len({t["task_id"] for t in e.traces})):
        group = e.of_task(number)
        best = max(group, key=lambda t: t["metrics"]["f1"])
        for t in group:
            for name in ("nodes", "metrics", "outcome"):
                t[name] = copy.deepcopy(best[name])


def relabel_from_more(e: Entry) -> None:
    """The best 3 of 4 samples as samples 0 to 2; their seeds are those of other samples."""
    kept = []
    for number in range(len({t["task_id"] for t in e.traces})):
        best = sorted(e.of_task(number), key=lambda t: -t["metrics"]["f1"])[: K - 1]
        for sample, t in enumerate(reversed(best)):
            t["sample"] = sample
            kept.append(t)
    e.traces = kept
    e.results["figures"]["k"] = K - 1


def other_k(e: Entry) -> None:
    e.results["figures"]["k"] = 8


def fewer_k(e: Entry) -> None:
    e.results["figures"]["k"] = 2


def drop_hard_task(e: Entry) -> None:
    hard = min({t["task_id"] for t in e.traces[: 3 * K]})
    e.traces = [t for t in e.traces if t["task_id"] != hard]
    e.data["tasks"] -= 1


def other_tasks_count(e: Entry) -> None:
    e.data["tasks"] = 512


def task_twice(e: Entry) -> None:
    e.traces.append(copy.deepcopy(e.traces[0]))


def unknown_task(e: Entry) -> None:
    for t in e.of_task():
        t["task_id"] = "mini-qa-single-test-511"
    for t in e.traces:
        t["seed"] = derive(0, t["task_id"], t["sample"])


def other_seed(e: Entry) -> None:
    e.results["provenance"]["seed"] = 7


def told_seed(e: Entry) -> None:
    e.traces[3]["seed"] += 1


def negative_sample(e: Entry) -> None:
    e.traces[0]["sample"] = -1


def other_config(e: Entry) -> None:
    for config in (e.env["config"], *(t["config"] for t in e.traces)):
        config["top_k"] = 1
        config["modified"] = ["top_k"]


def hidden_setting(e: Entry) -> None:
    """Another setting, of which `modified` says nothing."""
    for config in (e.env["config"], *(t["config"] for t in e.traces)):
        config["top_k"] = 2


def budget(e: Entry) -> None:
    e.env["budget"]["requests"] = 5


def tools(e: Entry) -> None:
    e.env["tools"]["retrieve"] = "f" * 16


def more_tools(e: Entry) -> None:
    e.env["tools"]["oracle"] = "f" * 16


def index(e: Entry) -> None:
    e.env["index"] = "f" * 16


def code_hash(e: Entry) -> None:
    for place in (e.env, *e.traces):
        place["code_hash"] = "f" * 16


def fingerprint(e: Entry) -> None:
    for place in (e.data, *(t["data"] for t in e.traces)):
        place["fingerprint"] = "f" * 16


def tasks_hash(e: Entry) -> None:
    e.data["tasks_hash"] = "f" * 16


def prompt_hash(e: Entry) -> None:
    e.roles["answerer"]["prompt_sha"] = "f" * 16


def wrong_role(e: Entry) -> None:
    e.roles["answerer"]["role"] = "decomposer"


def seat_more(e: Entry) -> None:
    e.roles["coach"] = dict(e.roles["answerer"])
    for t in e.traces:
        t["tags"]["team"]["coach"] = e.roles["coach"]["player"]


def other_player(e: Entry) -> None:
    e.roles["answerer"]["player"] = "hf:famous/model"


def other_model(e: Entry) -> None:
    e.roles["answerer"]["model"] = "hf:famous/model"


def expert_helped(e: Entry) -> None:
    """The decomposer is named as the scripted expert, and says something else."""
    e.node("decomposer")["reply"] = json.dumps({"sub_queries": ["Who?"]})


def split(e: Entry) -> None:
    for place in (e.data, *(t["data"] for t in e.traces)):
        place["split"] = "train"


def env_in_provenance(e: Entry) -> None:
    e.env["env_id"] = "rag-hotpotqa-v0"


def metric(e: Entry) -> None:
    worst = min(e.traces, key=lambda t: t["metrics"]["f1"])
    worst["metrics"].update(f1=1.0, em=1.0)


def extra_metric(e: Entry) -> None:
    e.traces[0]["metrics"]["style"] = 1.0


def reward(e: Entry) -> None:
    e.node()["rewards"]["outcome"] += 1.0
    e.node()["credit"] += 1.0


def credit(e: Entry) -> None:
    e.node()["credit"] += 1.0


def prompt(e: Entry) -> None:
    e.node()["messages"][-1]["content"] += " (the answer is 1852)"


def passage(e: Entry) -> None:
    e.use()["result"][0]["text"] = "The answer is written here."


def tool_args(e: Entry) -> None:
    e.use()["args"]["query"] = "another query"


def tool_error(e: Entry) -> None:
    e.use()["error"] = "retrieve: down"
    e.use()["result"] = None


def value(e: Entry) -> None:
    e.node()["value"] = "the right answer"


def legality(e: Entry) -> None:
    e.node()["ok"] = not e.node()["ok"]


def node_twice(e: Entry) -> None:
    e.traces[0]["nodes"].append(copy.deepcopy(e.traces[0]["nodes"][0]))


def node_missing(e: Entry) -> None:
    e.traces[0]["nodes"].pop()


def node_more(e: Entry) -> None:
    e.traces[0]["nodes"].append({**copy.deepcopy(e.traces[0]["nodes"][-1]), "id": "9"})


def node_order(e: Entry) -> None:
    e.traces[0]["nodes"].reverse()


def node_parents(e: Entry) -> None:
    e.node()["parents"] = ["0"]


def node_agent(e: Entry) -> None:
    e.node()["agent"] = "decomposer"


def node_field(e: Entry) -> None:
    e.node()["hint"] = "1852"


def outcome(e: Entry) -> None:
    e.traces[0]["outcome"] = {"answer": "1852"}


def grade(e: Entry) -> None:
    e.traces[0]["grade"] = {"passed": True}


def cut_short(e: Entry) -> None:
    """A bad episode as one that a deadline ended; there was no deadline."""
    e.traces[0].update(ended="truncated", reason="more than 3 s")
    e.traces[0]["nodes"].pop()


def failed_instead(e: Entry) -> None:
    e.traces[0].update(ended="error", reason="model", error="ConnectionError: reset")


def negative_cost(e: Entry) -> None:
    e.node()["meta"]["cost"] = -1.0


def negative_tokens(e: Entry) -> None:
    e.node()["meta"]["tokens_out"] = -5


def too_many_tokens(e: Entry) -> None:
    e.node()["meta"]["tokens_out"] = 257


def tokens_without_text(e: Entry) -> None:
    e.node()["meta"]["tokens_out"] = 200


def no_tokens(e: Entry) -> None:
    del e.node()["meta"]["tokens_out"]


def too_long(e: Entry) -> None:
    """More text than a model says in so many tokens."""
    e.node()["reply"] = "x" * 10_000 + e.node()["reply"]


def negative_price(e: Entry) -> None:
    e.results["price"] = [-1.0, 0.0]


def easier_success(e: Entry) -> None:
    e.results["measure"].update(relation=">", threshold=0.0)


def copied_without_a_temperature(e: Entry) -> None:
    """Copies, of a model that does not say how it was sampled."""
    best_of_all_copied(e)
    del e.roles["answerer"]["sampling"]


def copied_at_a_temperature_in_words(e: Entry) -> None:
    best_of_all_copied(e)
    e.roles["answerer"]["sampling"]["temperature"] = "1.0"


def copied_with_other_blanks(e: Entry) -> None:
    best_of_all_copied(e)
    for t in e.traces:
        for n in t["nodes"]:
            if n["role"] == "answerer":
                n["reply"] = n["reply"].title() + " " * t["sample"]


def expert_in_disguise(e: Entry) -> None:
    """The scripted expert under a model's name: the board would show the name."""
    e.roles["decomposer"]["player"] = "hf:famous/model"
    for t in e.traces:
        t["tags"]["team"]["decomposer"] = "hf:famous/model"


def address_for_a_name(e: Entry) -> None:
    for t in e.traces:
        t["tags"]["team"]["answerer"] = "gpt-7 at 0x1"


def cut_for_nothing(e: Entry) -> None:
    """Replies that were cut have no number of tokens to check."""
    e.node()["meta"].update(cut=2_000_000, tokens_out=0)


def endpoint_without_tokens(e: Entry) -> None:
    del e.roles["answerer"]["template_sha"]
    e.node()["meta"]["tokens_out"] = 0


def few_tokens_in(e: Entry) -> None:
    """A prompt of some thousand characters that is said to have been one token."""
    e.node()["meta"]["tokens_in"] = 1


def no_tokens_in(e: Entry) -> None:
    del e.node()["meta"]["tokens_in"]


def words_in_one_token(e: Entry) -> None:
    """Some two hundred different letters: no vocabulary holds such a token."""
    e.node()["reply"] = "".join(chr(97 + n * n % 26) + chr(97 + n % 23) for n in range(200))
    e.node()["meta"]["tokens_out"] = 2


def cut_prompt(e: Entry) -> None:
    """Prompts that were cut are shorter than they read; not by less than nothing."""
    e.node()["meta"].update(tokens_in=1, prompt_cut={"passages": -50_000})


def endpoint(e: Entry) -> None:
    seat = e.roles["answerer"]
    del seat["template_sha"], seat["sampling"], seat["weights"], seat["adapter"]
    options = {"temperature": 1.0, "max_tokens": 256}
    seat.update(model="model", endpoint="http://host/v1", options=options, system={}, choices="parse")
    for t in e.traces:
        for n in t["nodes"]:
            if n["role"] == "answerer":
                meta = n["meta"]
                meta["policy"] = "openai:model"
                del meta["version"]


def endpoint_of_another_name(e: Entry) -> None:
    endpoint(e)
    e.node()["meta"]["policy"] = "openai:famous"


def endpoint_over_its_limit(e: Entry) -> None:
    endpoint(e)
    e.node()["meta"]["tokens_out"] = 257


def endpoint_that_counts_nothing(e: Entry) -> None:
    endpoint(e)
    del e.node()["meta"]["tokens_out"]


def own_player(e: Entry) -> None:
    """A function of its makers, under whatever name."""
    for name in ("model", "template_sha", "sampling", "weights", "adapter"):
        e.roles["answerer"].pop(name, None)
    e.roles["answerer"].update(name="theirs.player", code="f" * 16)


def model_without_template(e: Entry) -> None:
    del e.roles["answerer"]["template_sha"]


def other_python(e: Entry) -> None:
    """Another Python is no reason to compare less."""
    e.results["run"]["python"] = "3.12.1"
    e.env["tools"]["retrieve"] = "f" * 16


def old_python(e: Entry) -> None:
    e.results["run"]["python"] = "2.7"


def no_python(e: Entry) -> None:
    del e.results["run"]["python"]


def expert_of_other_code(e: Entry) -> None:
    e.results["run"]["python"] = "3.13.0"
    e.roles["decomposer"]["code"] = "f" * 16


def much_beside(e: Entry) -> None:
    """Sixty entries of this size would fill the memory of whoever builds the board."""
    e.roles["decomposer"]["state"] = "x" * 2_000_000


def endless_time(e: Entry) -> None:
    e.traces[0]["tags"]["seconds"] = -3.0


SIGNED: list[tuple[Forge, str]] = [
    (drop_failed_samples, "k=4 means each of 0 to 3, once"),
    (best_of_all_copied, "they are copies"),
    (relabel_from_more, "seed: the provenance gives"),
    (other_k, "k=8 means each of 0 to 7, once"),
    (fewer_k, "k=2 means each of 0 to 1, once"),
    (drop_hard_task, "is not among the first 5 of the test split"),
    (other_tasks_count, "512 are claimed, 6 have episodes"),
    (task_twice, "results.json names an episode twice"),
    (unknown_task, "is not among the first 6 of the test split"),
    (other_seed, "seed: the provenance gives"),
    (told_seed, "seed: the provenance gives"),
    (negative_sample, "sample must be at least 0"),
    (other_config, "messages: recorded"),
    (hidden_setting, "provenance.env.config"),
    (budget, "provenance.env.budget"),
    (tools, "provenance.env.tools"),
    (more_tools, "provenance.env.tools"),
    (index, "provenance.env.index"),
    (code_hash, "made by other code than is here"),
    (fingerprint, "provenance.data.fingerprint"),
    (tasks_hash, "provenance.data.tasks_hash"),
    (prompt_hash, "provenance.roles.answerer.prompt_sha"),
    (wrong_role, "provenance.roles.answerer.role"),
    (seat_more, "provenance.roles: "),
    (other_player, "tags.team.answerer: the provenance says 'hf:famous/model'"),
    (other_model, "meta.policy: 'hf:someone/model'"),
    (expert_helped, "decomposer as it is named says"),
    (split, "provenance.data"),
    (env_in_provenance, "provenance.env.env_id"),
    (metric, "metrics: recorded"),
    (extra_metric, "metrics: recorded"),
    (reward, "rewards: recorded"),
    (credit, "credit: recorded"),
    (prompt, "messages: recorded"),
    (passage, "result: recorded"),
    (tool_args, "args: recorded"),
    (tool_error, "error: recorded"),
    (value, "value: recorded"),
    (legality, "ok: recorded"),
    (node_twice, "stands there twice"),
    (node_missing, "lacks"),
    (node_more, "node 9 is not asked by the environment"),
    (node_order, "do not stand in their order"),
    (node_parents, "parents: recorded"),
    (node_agent, "agent: recorded"),
    (node_field, "has 'hint', which no node has"),
    (outcome, "outcome: recorded"),
    (grade, "grade: recorded"),
    (cut_short, "a recording that ended as 'truncated'"),
    (failed_instead, "ended: recorded 'error'"),
    (negative_cost, "cost must be at least 0"),
    (negative_tokens, "tokens_out must be at least 0"),
    (too_many_tokens, "more than the 256 that answerer may say"),
    (tokens_without_text, "200 tokens are more than a reply of"),
    (no_tokens, "without the number of its tokens"),
    (too_long, "too long for 5 tokens"),
    (negative_price, "results.price[0] must be at least 0"),
    (easier_success, "measure: the environment is ranked by"),
    (endless_time, "tags.seconds must be at least 0"),
    (copied_without_a_temperature, "a model of ours always tells its temperature"),
    (copied_at_a_temperature_in_words, "a model of ours always tells its temperature"),
    (copied_with_other_blanks, "they are copies"),
    (expert_in_disguise, "is called 'scripted'"),
    (address_for_a_name, "its trace 'gpt-7 at 0x1'"),
    (cut_for_nothing, "is said to be cut"),
    (endpoint_without_tokens, "is too long for 0 tokens"),
    (few_tokens_in, "bytes are too long for 1 tokens"),
    (no_tokens_in, "without the number of its tokens"),
    (words_in_one_token, "is too long for 2 tokens"),
    (cut_prompt, "bytes are too long for 1 tokens"),
    (endpoint_of_another_name, "meta.policy: 'openai:famous'"),
    (endpoint_over_its_limit, "more than the 256 that answerer may say"),
    (endpoint_that_counts_nothing, "not verified: answerer does not say the number of tokens"),
    (own_player, "own code: not verified: answerer is played by theirs.player"),
    (model_without_template, "tells neither template_sha and sampling"),
    (other_python, "provenance.env.tools"),
    (old_python, "results.run.python must match"),
    (no_python, "lacks 'python'"),
    (expert_of_other_code, "not verified: decomposer is played by"),
    (much_beside, "characters beside its episodes"),
]


def key(e: Entry) -> None:
    for t, claim in zip(e.traces, e.results["episodes"], strict=True):
        t["tags"]["key"] = claim["key"] = "0" * 24


def players(e: Entry) -> None:
    for t in e.traces:
        t["tags"]["players"] = "0" * 16


def not_a_number(e: Entry) -> None:
    e.results["figures"]["score"]["value"] = float("nan")


def infinite_score(e: Entry) -> None:
    e.results["episodes"][0]["score"] = float("inf")


def better_score(e: Entry) -> None:
    e.results["figures"]["score"]["value"] = 0.99


def narrower(e: Entry) -> None:
    e.results["figures"]["score"]["low"] = e.results["figures"]["score"]["value"]


def one_solved(e: Entry) -> None:
    unsolved = next(claim for claim in e.results["episodes"] if not claim["solved"])
    unsolved["solved"] = True


def cheaper(e: Entry) -> None:
    e.results["figures"]["per_episode"]["tokens_out"] = 1.0


def figure_more(e: Entry) -> None:
    e.results["figures"]["metrics"]["style"] = e.results["figures"]["score"]


def huge_without_errors(e: Entry) -> None:
    """A figure that no float can be compared with."""
    e.results["figures"]["score_without_errors"]["value"] = 10**400


def signature(e: Entry) -> None:
    e.traces[0]["tags"]["seconds"] = 0.0


UNSIGNED: list[tuple[Forge, str]] = [
    (key, "what it hashes gives"),
    (players, "tags.players: the provenance gives"),
    (not_a_number, "results.figures.score.value must be number"),
    (infinite_score, "score must be number"),
    (better_score, "figures.score.value: results.json says 0.99"),
    (narrower, "figures.score.low"),
    (one_solved, "solved: results.json says True"),
    (cheaper, "figures.per_episode.tokens_out"),
    (figure_more, "figures.metrics.style is not a figure"),
    (huge_without_errors, "score_without_errors.value must be at most"),
    (signature, "figures.timing.seconds_per_episode"),
]
FORGERIES = [(f, s, True) for f, s in SIGNED] + [(f, s, False) for f, s in UNSIGNED]


def forged(source: Path, folder: Path, forge: Forge, sign: bool) -> Path:
    entry = Entry(source, folder)
    forge(entry)
    if sign:
        entry.sign()
    return entry.write()


def test_what_nobody_forged_is_verified(source: Path, tmp_path: Path) -> None:
    assert submission.check(forged(source, tmp_path / "signed", lambda e: None, True), verify=True) == []


@pytest.mark.parametrize("how", [endpoint, lambda e: e.results["run"].update(python="3.14.0rc2")])
def test_honest_entries_of_other_kinds_are_verified(source: Path, tmp_path: Path, how: Forge) -> None:
    """A model behind an endpoint that counts its tokens, and another Python than ours."""
    assert submission.check(forged(source, tmp_path / "other", how, True), verify=True) == []


@pytest.mark.parametrize(("forge", "sentence", "sign"), FORGERIES, ids=[f.__name__ for f, *_ in FORGERIES])
def test_a_forgery_is_named(source: Path, tmp_path: Path, forge: Forge, sentence: str, sign: bool) -> None:
    problems = submission.check(forged(source, tmp_path / "forged", forge, sign), verify=True)
    assert any(sentence in problem for problem in problems), problems[:5]


def test_there_are_enough_of_them() -> None:
    assert len({forge for forge, *_ in FORGERIES}) >= 50


# a board ----------------------------------------------------------------------------------------------

HOSTILE = "</script><script>alert(1)</script>\x1b[31m\u202e"


def test_a_board_of_two_hundred_stands_beside_twenty_hostile_entries(tmp_path: Path) -> None:
    """The honest ones are listed and verified, each hostile one is named, and none of them ends the board."""
    board, small = tmp_path / "board", honest(tmp_path / "small", tasks=2, k=2)
    board.mkdir()
    for number in range(180):
        folder = board / f"honest-{number:03}"
        folder.mkdir()
        for file in small.iterdir():
            (folder / file.name).hardlink_to(file)
    for name, attack in HOSTILE_ENTRIES[:20]:
        attack(Entry(small, board / f"hostile-{name}"))
    entries, rejected = leaderboard.build(board, tmp_path / "site", seconds=20, memory_mb=1024)
    verified = {entry.slug[:10] for entry in entries if entry.verified}
    assert verified == {f"honest-{number:03}" for number in range(180)}
    unranked = {entry.slug for entry in entries if not entry.verified}
    assert len(rejected) + len(unranked) == 20 and all(rejected.values())
    assert all(name.startswith("hostile-") for name in (*rejected, *unranked))
    html = (tmp_path / "site" / "index.html").read_text()
    assert html.count("<script") == 1 and "javascript:" not in html


def test_a_board_stands_whatever_its_folders_are_called(source: Path, tmp_path: Path) -> None:
    """No name ends the board, and none takes the page of another; an entry is no folder of entries."""
    board = tmp_path / "board"
    names = [b"plain", b"plain.", b"plain--", b"not \xff text", b"a" * 255, b"<script>", b"new\nline"]
    for name in names:
        shutil.copytree(source, board / os.fsdecode(name))
    shutil.copytree(source, board / "full")
    shutil.copytree(source, board / "full" / "nested" / "deep")
    entries, rejected = leaderboard.build(board, tmp_path / "site")
    assert rejected.keys() == {"full"} and "'nested' does not belong there" in rejected["full"][0]
    assert len({entry.slug for entry in entries}) == len(entries) == len(names)
    assert all(len(entry.slug) < 100 and len(entry.slug.rpartition("-")[2]) >= 16 for entry in entries)
    assert len(list((tmp_path / "site" / "traces").iterdir())) == len(names)


def test_a_board_shows_names_as_text(source: Path, tmp_path: Path) -> None:
    entry = Entry(source, tmp_path / "board" / f"x{'<img src=x>'.replace('/', '')}")
    entry.metadata |= {"name": HOSTILE, "authors": HOSTILE, "description": HOSTILE, "url": "https://a.b/?<>"}
    (entry.folder / "metadata.yaml").write_text(metadata_text(entry.metadata))
    _, rejected = leaderboard.build(tmp_path / "board", tmp_path / "site")
    assert "metadata.url must match" in next(iter(rejected.values()))[0]
    entry.metadata["url"] = "https://example.org/"
    (entry.folder / "metadata.yaml").write_text(metadata_text(entry.metadata))
    (listed,), rejected = leaderboard.build(tmp_path / "board", tmp_path / "site")
    html = (tmp_path / "site" / "index.html").read_text()
    assert listed.verified and not rejected and html.count("<script") == 1 and "<img" not in html


def test_each_hostile_entry_is_a_problem_with_a_name(source: Path, tmp_path: Path) -> None:
    """Whatever stands in the files: a sentence about them, and never about our own failure."""
    for name, attack in HOSTILE_ENTRIES:
        entry = Entry(source, tmp_path / name)
        attack(entry)
        problems = submission.check(entry.folder, verify=True)
        assert problems, name
        assert not any("checking it" in problem for problem in problems), (name, problems)


def test_checking_imports_and_calls_nothing_that_an_entry_names(source: Path, tmp_path: Path) -> None:
    """A module shipped inside the entry, named as reward, rule, tool, tasks and setting, leaves no trace of itself."""
    ran = tmp_path / "ran"
    for name in ("reward", "tools", "tasks", "budget", "data", "split", "size", "top_k", "max_queries"):
        entry = Entry(source, tmp_path / name)
        (entry.folder / "evil.py").write_text(f"open({str(ran)!r}, 'w').close()\ndef main(*a, **k): pass\n")
        (entry.folder / "yaml.py").write_text(f"open({str(ran)!r}, 'w').close()\n")
        configured(name, "evil:main")(entry)
        problems = submission.check(entry.folder, verify=True)
        assert any("own code: not verified" in problem and repr(name) in problem for problem in problems), (
            problems
        )
    assert not ran.exists()


def test_a_file_named_as_a_module_of_python_is_not_imported(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder of strangers' files may be where a script lies, or where one stands."""
    for name in ("re", "json", "yaml", "resource"):
        (tmp_path / f"{name}.py").write_text(
            f"open({str(tmp_path / 'ran')!r}, 'w').close()\nraise SystemExit(3)\n"
        )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with Guard() as guard:
        assert guard.check(source, verify=True).problems == []
    assert not (tmp_path / "ran").exists()
