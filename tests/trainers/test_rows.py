"""Traces as rows for other trainers: kinds, choice, weights, and the very tokens."""

import json

import pytest

import unitymas
from unitymas.trainers.rows import rows


class Wavering:
    """Answers right or wrong, by the seed of the call."""

    sees_reference = True

    def act(self, call):
        said = call.task.reference["answers"][0] if call.seed % 2 else "nobody"
        return f"<final_answer>{said}</final_answer>"


@pytest.fixture(scope="module")
def traces():
    team = {"*": "scripted", "answerer": Wavering()}
    return unitymas.rollout("mask-hotpotqa", team, data="mini", tasks=3, k=4, max_turns=2)


def test_rows_are_chosen_by_role_credit_and_function(traces):
    every = rows(traces)
    assert len(every) == sum(len(t.acts()) for t in traces)
    paid = rows(traces, roles=["answerer", "planner"], min_credit=0.5)
    assert (
        paid
        and {r["role"] for r in paid} <= {"answerer", "planner"}
        and min(r["credit"] for r in paid) >= 0.5
    )
    assert rows(traces, keep=lambda r: r["node"] == "0") == [r for r in every if r["node"] == "0"]
    plan = rows(traces, "steps", roles="planner", component="plan")
    assert [r["credit"] for r in plan] == [json.loads(r["rewards"])["plan"] for r in plan]
    with pytest.raises(ValueError, match="no act of role 'planer'"):
        rows(traces, roles="planer")
    with pytest.raises(ValueError, match="component='plam': no such reward was paid; did you mean 'plan'"):
        rows(traces, component="plam")
    with pytest.raises(
        ValueError, match="min_credit, keep and weight choose single replies, and dpo makes pairs"
    ):
        rows(traces, "dpo", min_credit=0.5)
    assert rows(traces[0]) == rows(traces[:1])
    with pytest.raises(TypeError, match="rows are made of traces, got dict; unitymas.Trace.from_dict reads"):
        rows([traces[0].to_dict()])
    with pytest.raises(ValueError, match="weight='best'"):
        rows(traces, weight="best")


def test_weights_are_credits_advantages_or_ones_own(traces):
    assert all(r["weight"] == r["credit"] for r in rows(traces))
    by_group = {}
    for row in rows(traces, weight="advantage"):
        by_group.setdefault((row["task_id"], row["agent"]), []).append(row["weight"])
    assert all(sum(group) == pytest.approx(0.0) for group in by_group.values())
    assert any(any(group) for group in by_group.values())
    assert {r["weight"] for r in rows(traces, weight=lambda r: 2 * r["credit"] + 1)} == {
        2 * r["credit"] + 1 for r in rows(traces)
    }


@pytest.mark.parametrize("kind", ["sft", "prompt-completion", "dpo", "steps"])
def test_every_kind_is_a_dataset(traces, kind):
    pytest.importorskip("datasets")
    made = unitymas.to_hf_dataset(traces, kind)
    wanted = {"sft": {"messages"}, "dpo": {"prompt", "chosen", "rejected"}}.get(
        kind, {"prompt", "completion"}
    )
    assert len(made) and wanted <= set(made.column_names)


def test_failed_episodes_give_no_rows(traces):
    def broken(agent, messages):
        raise RuntimeError("no model")

    failed = unitymas.rollout("mask-hotpotqa", {"*": "scripted", "answerer": broken}, data="mini", tasks=1)
    assert failed[0].ended == "error" and failed[0].acts() and rows(failed) == []
    assert rows([*failed, *traces]) == rows(traces)


def test_the_very_tokens_are_kept_when_asked_for():
    pytest.importorskip("torch")
    from unitymas.agents import model_path
    from unitymas.agents.model.weights import load_tokenizer

    team = unitymas.Team({"*": "scripted", "searcher": "tiny"})
    how = {"data": "mini", "tasks": 1, "max_turns": 1}
    kept = unitymas.rollout("mask-hotpotqa", team, keep_tokens="ids", **how)
    tokenizer = load_tokenizer(model_path("tiny"))
    found = rows(kept)
    assert [r["role"] for r in found if r["completion_ids"]] == ["searcher"]  # the expert has no tokens
    for row in (r for r in found if r["completion_ids"]):
        assert len(row["completion_ids"]) == len(row["logprobs"]) and max(row["logprobs"]) <= 0
        assert tokenizer.decode(row["completion_ids"]).startswith(row["completion"][0]["content"])
        assert row["prompt"][-1]["content"].splitlines()[-1] in tokenizer.decode(row["prompt_ids"])
    plain = unitymas.rollout("mask-hotpotqa", team, **how)  # the same team: nothing was switched on for good
    assert all("tokens" not in n.meta for n in plain[0].acts()) and "logprobs" not in rows(plain)[0]
    shown = unitymas.rollout("mask-hotpotqa", team, keep_tokens="text", **how)[0].acts("searcher")[0]
    assert "".join(shown.meta["tokens"]["text"]).startswith(shown.text)
    with pytest.raises(ValueError, match="keep_tokens='all'"):
        unitymas.rollout("mask-hotpotqa", team, keep_tokens="all", **how)
