"""Every registered environment through every check, and the front door's manners."""

import gc
import json
import subprocess
import sys

import pytest

import unitymas
from unitymas.cli.environments import validate
from unitymas.envs.core import trace as traces
from unitymas.envs.core.drivers import heap_at_rest
from unitymas.envs.core.workflow import WorkflowError
from unitymas.envs.registry import list_envs, unregister


@pytest.mark.parametrize("id", list_envs())
def test_conforms(id):
    unitymas.check_env(id)


@pytest.mark.parametrize("id", list_envs())
def test_the_expert_gets_full_marks_and_the_fool_none(id):
    assert validate(id, tasks=12) == []


@pytest.mark.parametrize("id", [id for id in list_envs() if not id.startswith(("code", "coder"))])
def test_the_expert_is_right_on_every_split(id):
    assert validate(id, tasks=100, split="test") == []


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: unitymas.make("mask-hotpotq"), KeyError, "did you mean mask-hotpotqa"),
        (lambda: unitymas.make("mask-hotpotqa-v7"), KeyError, "has no version 7"),
        (lambda: unitymas.make("mask-hotpotqa", data="mini", max_turn=3), TypeError, "did you mean 'max_turns'"),
        (lambda: unitymas.make("mask-hotpotqa", tasks=[], split="test"), ValueError, "either tasks"),
        (lambda: unitymas.make("mask-hotpotqa", tasks=[{"id": "1"}]).reset(), ValueError, "lacks question, answers"),
        (lambda: unitymas.make("mask-hotpotqa", tasks=[]), ValueError, "is empty"),
        (lambda: unitymas.make("mask-hotpotqa", data="mini", tools={"retreive": print}), ValueError, "did you mean 'retrieve'"),
        (lambda: unitymas.make("mask-hotpotqa", data="mini", render_mode="gif"), ValueError, "use 'ansi'"),
        (lambda: unitymas.make("mask-hotpotqa", data="mini").reset(options={"task_id": "x"}), KeyError, "unknown task 'x'"),
        (lambda: unitymas.make("mask-hotpotqa", data="mini", split="tset"), ValueError, "no split 'tset'"),
        (lambda: unitymas.rollout("mask-hotpotqa", {"planer": "random"}, data="mini"), ValueError, "did you mean 'planner'"),
        (lambda: unitymas.rollout("mask-hotpotqa", {"planner": "random"}, data="mini"), ValueError, "nobody plays 'searcher'"),
        (lambda: unitymas.Team({"*": "scriptd"}), ValueError, "did you mean 'scripted'"),
        (lambda: unitymas.Team({}), ValueError, "an empty team"),
        (lambda: unitymas.make("mask-hotpotqa", data="mini").step("x"), WorkflowError, r"call reset\(\) first"),
        (lambda: unitymas.make("mask-hotpotqa", data="mini").state(), WorkflowError, "trace"),
    ],
)  # fmt: skip
def test_bad_input_is_named(call, error, says):
    with pytest.raises(error, match=says):
        call()


def test_the_readme_loop():
    env = unitymas.make("mask-hotpotqa", data="mini", render_mode="ansi")
    env.reset(seed=0)
    steps = 0
    for _agent in env.agent_iter():
        observation, reward, termination, truncation, info = env.last()
        assert set(observation) == {"messages"} and isinstance(reward, float)
        env.step(None if termination or truncation else "<end>")
        steps += 1
    assert steps > 5 and "planner: <end>" in env.render()


def test_a_trace_is_plain_json_and_survives_a_file(tmp_path):
    done = unitymas.rollout("rag-evidence-hotpotqa", "scripted", tasks=3, data="mini")
    for name in ("t.jsonl", "t.jsonl.zst"):
        assert traces.write(done, tmp_path / name) == 3
        again = list(traces.read(tmp_path / name))
        assert [t.to_dict() for t in again] == [json.loads(json.dumps(t.to_dict())) for t in done]
    torn = (tmp_path / "t.jsonl.zst").read_bytes()[:-20]
    (tmp_path / "torn.jsonl.zst").write_bytes(torn)
    assert len(list(traces.read(tmp_path / "torn.jsonl.zst"))) == 2


def test_the_trace_tells_where_it_comes_from():
    plain = unitymas.rollout("mask-hotpotqa", "scripted", tasks=1, data="mini")[0].to_dict()
    assert (
        plain["env_id"] == "mask-hotpotqa-v0"
        and plain["data"]["name"] == "mini"
        and len(plain["code_hash"]) == 16
    )
    assert plain["config"]["modified"] == []
    own = unitymas.rollout("mask-hotpotqa", "scripted", tasks=1, data="mini", max_turns=1, reward=None)[0]
    assert own.config["modified"] == ["max_turns", "reward"]


def test_rollouts_do_not_depend_on_what_runs_beside_them():
    team = {"*": lambda agent, messages: f"<end> {len(str(messages))}"}
    alone = unitymas.rollout("search-router-hotpotqa", team, tasks=3, k=2, concurrency=1, data="mini")
    crowd = unitymas.rollout("search-router-hotpotqa", team, tasks=9, k=2, concurrency=99, data="mini")
    assert [t.to_dict(volatile=False) for t in alone] == [t.to_dict(volatile=False) for t in crowd[:6]]


def test_a_policy_that_fails_is_recorded_and_named():
    def broken(agent, messages):
        raise RuntimeError("out of order")

    trace = unitymas.rollout("rag-nq", broken, tasks=1, data="mini")[0]
    assert (trace.ended, trace.reason) == ("error", "model") and "out of order" in trace.error


def test_async_policies_and_tools():
    async def policy(agent, messages):
        return "<end>"

    async def retrieve(query, k):
        return [{"id": "1", "title": "T", "text": "text"}]

    traces_ = unitymas.rollout(
        "search-router-hotpotqa", policy, tasks=2, data="mini", tools={"retrieve": retrieve}
    )
    assert all(t.ended == "terminal" for t in traces_)
    env = unitymas.make("search-router-hotpotqa", data="mini", tools={"retrieve": retrieve})
    env.reset(seed=1)
    env.step("no")
    env.step("<search>x</search>")
    assert env.trace.uses("retrieve")[0].result[0]["title"] == "T"


class Echo(unitymas.Workflow):
    roles = (unitymas.Role("echo"),)

    async def run(self, ep):
        return unitymas.Outcome(answer=(await ep.act("echo", ep.task.question)).text)


def one(trace, task):
    return 1.0


def test_registering_ones_own():
    unitymas.register("my-echo-v2", workflow=Echo, reward=one, kind="qa")
    try:
        assert unitymas.spec("my-echo").id == "my-echo-v2"
        assert unitymas.rollout("my-echo", "random", tasks=1, data="mini")[0].credits[0].amount == 1.0
        import pettingzoo

        env = pettingzoo.make("aec", "unitymas/my-echo", data="mini")
        env.reset(seed=0)
        unitymas.check_env("my-echo")
    finally:
        unregister("my-echo")


def test_the_front_door_loads_neither_torch_nor_ray():
    code = (
        "import sys, unitymas; unitymas.rollout('mask-hotpotqa', 'scripted', tasks=2, data='mini');"
        "unitymas.list_envs(); bad = {'torch', 'ray', 'transformers', 'datasets'} & set(sys.modules); assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_rollouts_leave_the_garbage_collector_as_they_found_it():
    during = []

    def fool(agent, messages):
        during.append(gc.get_freeze_count() > 0)
        return "?"

    assert gc.get_freeze_count() == 0
    unitymas.rollout("mask-hotpotqa", fool, tasks=2, data="mini")
    assert all(during) and gc.get_freeze_count() == 0
    with pytest.raises(KeyError), heap_at_rest(), heap_at_rest():
        raise KeyError("inside")
    assert gc.get_freeze_count() == 0
    gc.freeze()
    try:  # somebody's own
        with heap_at_rest():
            pass
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
