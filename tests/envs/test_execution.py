"""The rules of the core: rounds, purity, journals, forks, replays, endings. Each test is one rule."""

import asyncio
import copy
import inspect
import pickle
import random
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

import unitymas
from unitymas import Choice, Outcome, Raw, Role, Tags, ToolError, Workflow
from unitymas.envs.core.execution import Budget, Ended, Execution, ReplayDivergence
from unitymas.envs.core.fast import NUMBERS
from unitymas.envs.core.tasks import QA, Task
from unitymas.envs.core.workflow import WorkflowError

TASK = Task.of({"id": "t", "question": "why?", "answers": ["because"], "tags": ["a", "b"]}, QA)


class Debate(Workflow):
    roles = (
        Role("solver", instances=2, reply=Tags("answer")),
        Role("judge", reply=Choice("1", "2", otherwise="1")),
    )

    async def run(self, ep):
        first, second = await ep.all(*(ep.act(s, ep.task.question) for s in ep.cast("solver")))
        pick = await ep.act("judge", f"{first.value} or {second.value}")
        return Outcome(answer=(first, second)[int(pick.value) - 1].value)


def play(execution, say, order=None):
    """Answer everything pending with `say(node)`, in an order of one's own."""
    while execution.ended is Ended.NO:
        pending = execution.pending
        for node in order(pending) if order else pending:
            if node.kind == "act":
                execution.answer(node, say(node))
            else:
                execution.give(node, say(node))
    return execution


CAST = (Role("a"), Role("b"), Role("c", instances=3))


def of(run, *, roles=CAST, tools=("tool",), grade=None, **kw):
    """An execution of a workflow made of one coroutine function."""
    body = {"run": run, "roles": roles, "tools": tools}
    if grade:
        body["grade"] = grade
    return Execution(type("W", (Workflow,), body)(), TASK, 7, **kw)


DEBATE = {"solver_1": "<answer>x</answer>", "solver_2": "<answer>y</answer>", "judge": "2"}


def test_a_workflow_reads_like_its_prose():
    done = play(Execution(Debate(), TASK), lambda n: DEBATE[n.agent])
    assert done.outcome == {"answer": "y"}
    assert [n.id for n in done.canonical()] == ["0.0.0", "0.1.0", "1"]
    assert done.canonical()[2].parents == ("0.0.0", "0.1.0")


@given(st.randoms())
def test_the_order_of_arrival_changes_nothing(rng):
    async def run(self, ep):
        async def branch(agent, depth):
            said = []
            for i in range(depth):
                said.append((await ep.act(agent, f"{agent} {i}")).text)
            return said

        got = await ep.all(*(branch(a, d) for a, d in zip(ep.cast("c"), (1, 3, 2), strict=True)))
        return Outcome(answer=str(got), last=(await ep.act("a", "end")).text)

    def say(node):
        return f"{node.agent}@{node.id}"

    straight = play(of(run), say)
    shuffled = play(of(run), say, lambda nodes: rng.sample(nodes, len(nodes)))
    assert straight.trace.to_dict() == shuffled.trace.to_dict()


def test_rounds_wait_for_every_branch():
    async def run(self, ep):
        async def twice(agent):
            await ep.act(agent, "1")
            await ep.act(agent, "2")

        await ep.all(twice("a"), twice("b"))

    execution = of(run)
    first, second = execution.pending
    execution.answer(first, "x")
    assert execution.pending == [second]
    execution.answer(second, "x")
    assert [n.round for n in execution.pending] == [2, 2]


def test_an_agent_stands_in_one_branch_only():
    async def run(self, ep):
        await ep.all(ep.act("a", "1"), ep.act("a", "2"))

    execution = of(run)
    assert execution.ended is Ended.ERROR and "stands in two branches" in str(execution.exception)


def test_a_failing_branch_cancels_its_siblings_and_can_be_caught():
    closed = []

    async def run(self, ep):
        async def fails():
            await ep.act("a", "x")
            raise ValueError("broken")

        async def goes_on():
            try:
                await ep.act("b", "1")
                await ep.act("b", "2")
            finally:
                closed.append(True)

        try:
            await ep.all(fails(), goes_on())
        except ValueError as error:
            return Outcome(answer=str(error), then=(await ep.act("b", "after")).text)

    done = play(of(run), lambda n: n.messages[0]["content"])
    assert done.outcome == {"answer": "broken", "then": "after"} and closed == [True]


def test_nested_alls_and_empty_ones():
    async def run(self, ep):
        async def inner(x, y):
            return [r.text for r in await ep.all(ep.act(x, x), ep.act(y, y))]

        nothing = await ep.all()
        one, two = ep.cast("c")[:2]
        return Outcome(answer=[nothing, await ep.all(inner("a", "b"), inner(one, two))])

    done = play(of(run), lambda n: n.agent)
    assert done.outcome["answer"] == ((), (("a", "b"), ("c_1", "c_2")))


def test_malformed_replies_never_approve():
    done = play(Execution(Debate(), TASK), lambda n: "garbage")
    assert done.node("1").value == "1" and done.node("1").ok is False  # declared: otherwise="1"
    assert done.node("0.0.0").value is None


@pytest.mark.parametrize(
    ("run", "says"),
    [
        (lambda self, ep: _forget(ep), "never awaited"),
        (lambda self, ep: _twice(ep), "awaited twice"),
        (lambda self, ep: _foreign(), "only ep.act, ep.use and ep.all"),
        (lambda self, ep: _name(ep), "did you mean 'a'"),
        (lambda self, ep: _tool(ep), "unknown tool 'tol'; did you mean 'tool'"),
        (lambda self, ep: _field(ep), "there is no field 'answers' here"),
        (lambda self, ep: _mutate(ep), "cannot be changed"),
        (lambda self, ep: _self(self, ep), "shared by all of them"),
    ],
)
def test_purity_is_guarded(run, says):
    execution = of(run)
    execution.workflow.seal()
    execution = Execution(execution.workflow, TASK)
    while execution.ended is Ended.NO:
        for node in execution.pending:
            execution.answer(node, "x")
    assert execution.ended is Ended.ERROR and says in str(execution.exception)


async def _forget(ep):
    ep.act("a", "x")
    await ep.act("b", "x")


async def _twice(ep):
    request = ep.act("a", "x")
    await request
    await request


async def _foreign():
    class Foreign:
        def __await__(self):
            yield "something"

    await Foreign()


async def _name(ep):
    await ep.act("A", "x")


async def _tool(ep):
    await ep.use("tol")


async def _field(ep):
    return ep.task.answers


async def _mutate(ep):
    ep.task["question"] = "other"


async def _self(workflow, ep):
    workflow.seen = 1


def test_no_running_loop_is_visible_inside_run():
    async def run(self, ep):
        await ep.act("a", "x")
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return Outcome(answer="hidden")

    async def outside():
        execution = of(run)
        execution.answer(execution.pending[0], "x")
        assert asyncio.get_running_loop()
        return execution.outcome

    assert asyncio.run(outside()) == {"answer": "hidden"}


def test_both_rollouts_take_the_same_arguments():
    rollout, arollout = (inspect.signature(f).parameters for f in (unitymas.rollout, unitymas.arollout))
    assert rollout == arollout and {"tasks", "k", "keep_tokens"} <= set(rollout)


def test_chance_comes_from_the_episode():
    async def run(self, ep):
        first = ep.rng.random()
        await ep.act("a", f"{first}")
        return Outcome(answer=ep.rng.random())

    one, two = (play(of(run), lambda n: "x") for _ in range(2))
    assert one.outcome == two.outcome
    assert one.call_seed(one.nodes[0]) == two.call_seed(two.nodes[0])


def test_the_seeds_of_calls_stay_those_of_saved_runs():
    async def run(self, ep):
        for _ in range(3):
            await ep.act("a", "?")

    def seeds(execution):
        return [execution.call_seed(n) for n in execution.nodes]

    whole = play(of(run), lambda n: "x")
    assert seeds(whole) == [67586997550666060, 12148886848777773, 32981453321948550]
    second = play(whole.fork(at="1", seed=8), lambda n: "x")
    assert seeds(second) == [67586997550666060, 20269965445001864, 15555095613613891]
    assert seeds(play(second.fork(at="2", seed=9), lambda n: "x")) == [
        67586997550666060,
        20269965445001864,
        37601935721343135,
    ]


# forks, replays, pickles -----------------------------------------------------------------------------


class Chatty(Workflow):
    """Branches, chance, tools and loops, all decided by the replies."""

    roles = (Role("a"), Role("b"), Role("c", instances=3))
    tools = ("tool",)

    async def run(self, ep):
        log = []
        for _ in range(4):
            said = await ep.act("a", f"{log} {ep.rng.random():.3f}")
            log.append(said.text)
            if said.text.endswith("0"):
                log.append(await ep.use("tool", x=len(log)))
            if said.text.endswith("1"):
                log += [r.text for r in await ep.all(*(ep.act(c, f"{log}") for c in ep.cast("c")))]
            if said.text.endswith("2"):
                break
        return Outcome(answer=log)


def say_from(seed):
    def say(node):
        rng = random.Random(f"{seed}/{node.id}/{node.messages}")
        return rng.randrange(9) if node.kind == "use" else f"r{rng.randrange(5)}"

    return say


@given(st.integers(0, 10_000), st.data())
def test_a_fork_at_any_node_comes_to_the_same_end(seed, data):
    done = play(Execution(Chatty(), TASK, seed), say_from(seed))
    at = data.draw(st.sampled_from([n.id for n in done.canonical()]))
    fork = done.fork(at=at)
    assert fork.node(at).state == 1  # asked, not yet answered
    assert play(fork, say_from(seed)).trace.to_dict() == done.trace.to_dict()


@given(st.integers(0, 10_000), st.integers(0, 12))
def test_pickling_at_any_moment_changes_nothing(seed, moments):
    execution, say = Execution(Chatty(), TASK, seed), say_from(seed)
    for _ in range(moments):
        if execution.ended is Ended.NO:
            node = execution.pending[-1]
            (execution.answer if node.kind == "act" else execution.give)(node, say(node))
    for twin in (pickle.loads(pickle.dumps(execution)), copy.deepcopy(execution)):
        assert twin.trace.to_dict() == execution.trace.to_dict()
        assert play(twin, say).trace.to_dict() == play(execution.fork(), say).trace.to_dict()


def test_a_fork_with_another_seed_has_another_chance_after_it_only():
    done = play(Execution(Chatty(), TASK, 3), lambda n: "r3")
    third = done.canonical()[2].id
    other = play(done.fork(at=third, seed=99), lambda n: "r3")
    assert other.canonical()[2].messages == done.canonical()[2].messages  # already asked
    assert other.canonical()[3].messages != done.canonical()[3].messages
    again = play(pickle.loads(pickle.dumps(done.fork(at=third, seed=99))), lambda n: "r3")
    assert again.trace.to_dict() == other.trace.to_dict()


def test_replay_with_substitution_forces_the_rest_and_marks_what_changed():
    done = play(Execution(Debate(), TASK), lambda n: DEBATE[n.agent])
    other = done.replay({"0.1.0": "<answer>z</answer>"})
    assert other.ended is Ended.TERMINAL and other.outcome == {"answer": "z"}
    assert other.node("1").meta["changed"] and other.node("1").meta["forced"]
    assert not other.node("0.1.0").meta["changed"]
    assert done.outcome == {"answer": "y"}


def test_a_replay_that_asks_something_else_says_which_node():
    async def run(self, ep):
        await ep.act("a", f"{next(counter)}")
        await ep.act("b", "x")

    counter = iter(range(9))
    execution = of(run)
    execution.answer(execution.pending[0], "x")
    with pytest.raises(ReplayDivergence, match="node 0 asked a: '1', but the journal holds a: '0'"):
        execution.fork()


# tools, grading, endings -----------------------------------------------------------------------------


class Told(Workflow):
    roles = (Role("a", sees=("word",)),)
    prompts = {"full": {"a": {"prompt": "say {word}"}}}

    async def run(self, ep):
        fields = {"word": next(self.words)}
        first = await ep.act("a", fields)
        fields["word"] = first.value  # one table of fields for all acts
        return Outcome(answer=(await ep.act("a", fields)).value)


def test_a_replay_takes_prompts_by_fields_from_the_journal_and_still_sees_what_differs():
    workflow = Told()
    workflow.words = iter(["x", "x", "y"])
    done = play(Execution(workflow, TASK), lambda n: n.messages[-1]["content"] + "!")
    twin = done.fork()
    assert [n.messages[-1]["content"] for n in twin.nodes] == ["say x", "say say x!"]
    assert twin.outcome == done.outcome == {"answer": "say say x!!"}
    with pytest.raises(ReplayDivergence, match="node 0 asked a: 'say y', but the journal holds a: 'say x'"):
        done.fork()


def test_tool_failures_are_journalled_and_can_be_caught():
    async def run(self, ep):
        try:
            await ep.use("tool", x=1)
        except ToolError as error:
            return Outcome(answer=str(error))

    execution = of(run)
    execution.fail(execution.pending[0], "no luck")
    assert execution.outcome == {"answer": "no luck"}
    assert execution.fork().outcome == execution.outcome


def test_tool_results_are_frozen():
    async def run(self, ep):
        got = await ep.use("tool")
        with pytest.raises(TypeError):
            got["x"].append(1) if isinstance(got["x"], list) else got.update(x=2)
        return Outcome(answer=got["x"])

    execution = of(run)
    execution.give(execution.pending[0], {"x": [1, {"y": 2}]})
    assert execution.outcome == {"answer": (1, {"y": 2})}


def test_grade_sees_the_reference_and_is_journalled():
    async def run(self, ep):
        return Outcome(answer=(await ep.act("a", "x")).text)

    async def grade(self, ep, trace, task):
        checked = await ep.use("tool", answer=trace.outcome["answer"], gold=task.reference["answers"])
        return {"score": checked}

    execution = of(run, grade=grade)
    execution.answer(execution.pending[0], "because")
    node = execution.pending[0]
    assert node.id == "g0" and node.args["gold"] == ("because",)
    execution.give(node, 1)
    assert execution.ended is Ended.TERMINAL and execution.trace.grade == {"score": 1}
    assert execution.fork().trace.to_dict() == execution.trace.to_dict()


def test_budgets_truncate_and_close_run_without_telling_it():
    caught = []

    async def run(self, ep):
        while True:
            try:
                await ep.act("a", "again")
            except Exception as error:
                caught.append(error)

    done = play(of(run, budget=Budget(requests=5)), lambda n: "x")
    assert done.ended is Ended.TRUNCATED and len(done.canonical()) == 5 and not caught
    assert "5 requests" in done.reason


class Endless(Workflow):
    roles = (Role("a"),)

    async def run(self, ep):
        while True:
            await ep.act("a", "again")


def test_tokens_are_a_budget_too():
    execution = Execution(Endless(), TASK, 7, budget=Budget(tokens=25))
    while execution.ended is Ended.NO:
        execution.answer(execution.pending[0], "x", {"tokens_out": 10})
        if len(execution.canonical()) == 2:
            others = execution.fork(), execution.replay({"0": "y"}), pickle.loads(pickle.dumps(execution))
    assert len(execution.canonical()) == 3 and execution.ended is Ended.TRUNCATED
    assert execution.fork(at="1").tokens == 10 and execution.fork().ended is Ended.TRUNCATED
    for other in others:  # what was said before counts for them, too
        other.answer(other.pending[0], "x", {"tokens_out": 10})
        assert other.ended is Ended.TRUNCATED


def test_an_error_in_run_is_an_error_ending():
    async def run(self, ep):
        await ep.act("a", "x")
        raise KeyError("oops")

    execution = of(run)
    execution.answer(execution.pending[0], "x")
    assert execution.ended is Ended.ERROR and execution.reason == "workflow"
    assert "oops" in execution.trace.error


def test_answers_to_strangers_are_refused():
    execution = Execution(Debate(), TASK)
    node = execution.pending[0]
    execution.answer(node, "x")
    with pytest.raises(WorkflowError, match="waits for no reply"):
        execution.answer(node, "again")


def test_memory_continues_its_conversation_and_remembers_its_nodes():
    async def run(self, ep):
        chat = ep.memory("a")
        await chat.act("one")
        chat.hear("by the way")
        await chat.act("two")

    done = play(of(run), lambda n: f"reply to {n.messages[-1]['content']}")
    said = done.canonical()[1].messages
    assert [m["content"] for m in said] == ["one", "reply to one", "by the way", "two"]
    assert said[1]["role"] == "assistant" and said[1]["content"].node == "0"


@dataclass(frozen=True)
class Note:
    text: str


def test_prompts_are_checked():
    async def run(self, ep):
        await ep.act("a", Note("x"))

    assert "must be a string, or a list of" in str(of(run).exception)
    assert Raw().parse("  ").ok is False


def test_a_late_answer_changes_nothing():
    async def run(self, ep):
        await ep.act("a", "one")
        return Outcome(answer=(await ep.act("a", "two")).text)

    execution = of(run)
    node = execution.pending[0]
    execution.truncate("enough")
    execution.answer(node, "late")
    assert (execution.ended, execution.reason, execution.pending) == (Ended.TRUNCATED, "enough", [])
    assert len(execution.nodes) == 1


def test_an_episode_may_be_longer_than_the_numbers_that_are_kept():
    async def run(self, ep):
        for _ in range(len(NUMBERS) + 3):
            await ep.act("a", "again")

    done = play(of(run, budget=Budget(requests=2000)), lambda n: "x")
    assert [n.id for n in done.canonical()] == [str(i) for i in range(len(NUMBERS) + 3)]
