"""`trace.reward_of`: what an act would have earned with other words, the episode played on from there."""

import copy
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import unitymas
from unitymas.envs.core.trace import read, write
from unitymas.envs.core.workflow import WorkflowError


def scripted(id="mask-hotpotqa", **how):
    return unitymas.rollout(id, "scripted", data="mini", tasks=2, **how)


MASK, RAG, CODE = scripted(), scripted("rag-evidence-hotpotqa"), scripted("coder-tester-deepcoder")


@settings(max_examples=25, deadline=None)
@given(st.sampled_from([*MASK, *RAG, *CODE]), st.data())
def test_its_own_words_earn_an_act_what_it_has_earned(trace, data):
    node = data.draw(st.sampled_from(trace.acts()))
    assert trace.reward_of(node.id, node.text) == pytest.approx(sum(trace.rewards(node.id).values()))
    everybody = sum(c.amount for c in trace.credits)
    assert trace.reward_of(node.id, node.text, of="team") == pytest.approx(everybody)


def test_other_words_change_what_follows():
    trace = MASK[0]
    last = trace.acts("answerer")[-1]
    right, wrong, malformed = trace.reward_of(
        last.id, [last.text, "<final_answer>nobody</final_answer>", "nobody"]
    )
    assert right == 1.0 and wrong == 0.0 and malformed < wrong
    gain = trace.acts("summarizer")[-1]
    lost = trace.reward_of(gain.id, "<evidence>nothing</evidence>", component="gain")
    assert isinstance(lost, float)
    plan = trace.acts("planner")[0]
    team = {
        "*": "scripted",
        "searcher": lambda agent, messages: "<end>",
    }  # nobody searches: the others earn less
    assert trace.reward_of(plan.id, plan.text, team=team, of="team") < trace.reward_of(
        plan.id, plan.text, of="team"
    )


def test_siblings_of_the_round_keep_their_words():
    trace = next(t for t in RAG if len(t.acts("evidence")) > 1)
    first, *others = trace.acts("evidence")[:3]
    heard = []

    def note(agent, messages):
        heard.append(agent)
        return "x"

    trace.reward_of(first.id, "nothing", team=note)
    assert {n.agent for n in others}.isdisjoint(heard) and "answerer" in heard


def test_a_trace_from_a_file_is_told_where_it_was_played(tmp_path):
    write(MASK, tmp_path / "t.jsonl.zst")
    trace = next(read(tmp_path / "t.jsonl.zst"))
    last = trace.acts("answerer")[-1]
    env = unitymas.make("mask-hotpotqa", data="mini")
    assert trace.reward_of(last.id, last.text, env=env, team="scripted") == 1.0
    with pytest.raises(ValueError, match="does not tell where it was played"):
        trace.reward_of(last.id, last.text, team="scripted")
    with pytest.raises(ValueError, match="who plays on"):
        trace.reward_of(last.id, last.text, env=env)
    other = unitymas.make("rag-hotpotqa", data="mini")
    with pytest.raises(WorkflowError, match="does not ask node 0 as the trace"):
        trace.reward_of(last.id, last.text, env=other, team="scripted")


def test_an_episode_that_was_stepped_by_hand_knows_where_it_was_played():
    env = unitymas.make("math-gsm8k", data="mini")
    env.reset(seed=0)
    first = env.agent_selection
    for agent in env.agent_iter():
        env.step(None if env.terminations[agent] or env.truncations[agent] else "no")
    node = env.unwrapped.trace.acts()[0]
    assert node.agent == first
    paid = sum(env.unwrapped.trace.rewards(node.id).values())
    assert env.unwrapped.trace.reward_of(node.id, "no", team={"*": lambda agent, messages: "no"}) == paid
    with pytest.raises(ValueError, match="who plays on"):
        env.unwrapped.trace.reward_of(node.id, "no")


def test_a_reward_that_is_never_paid_is_told_once(capsys):
    trace = MASK[0]
    for _ in range(2):
        assert trace.reward_of("0", trace.acts("planner")[0].text, component="plam") == 0.0
    assert capsys.readouterr().err == (
        "unitymas: reward_of(component='plam'): no such reward was paid; did you mean 'plan'?\n"
    )


def test_what_cannot_be_substituted_is_refused():
    trace = MASK[0]
    with pytest.raises(WorkflowError, match="use of the tool 'retrieve'"):
        trace.reward_of(trace.uses("retrieve")[0].id, "x")
    with pytest.raises(ValueError, match="of='nodes'"):
        trace.reward_of("0", "x", of="nodes")
    with pytest.raises(KeyError, match="no node '99'"):
        trace.reward_of("99", "x")

    def broken(agent, messages):
        raise RuntimeError("out of order")

    with pytest.raises(WorkflowError, match=r"the episode failed: RuntimeError: out of order"):
        trace.reward_of("0", trace.acts("planner")[0].text, team=broken)


def test_where_a_trace_was_played_stays_in_its_process():
    trace = MASK[0]
    for twin in (pickle.loads(pickle.dumps(trace)), copy.deepcopy(trace)):
        assert twin.origin is None and twin.to_dict() == trace.to_dict()
    assert "origin" not in trace.to_dict()


def test_what_is_no_text_is_refused_by_name():
    for text in (5, {"a": "b"}, ["a", 3]):
        with pytest.raises(TypeError, match="reward_of takes a text or a list of texts, got"):
            MASK[0].reward_of("0", text)
