"""Mistakes of somebody who writes a first workflow, reward, tool or task: one line each, with the place."""

import json
import re
import sys
import types
import warnings

import pytest

import unitymas
from unitymas.envs.registry import unregister
from unitymas.own import told

FILE = """\
import unitymas
from unitymas import Choice, Credit, GraphWorkflow, Outcome, Role, Tags, Workflow

ROWS = [{"id": "fr", "question": "France?", "answers": ["Paris"], "tags": ["a"]}]
tools = {"look": lambda query: ["Paris"]}


class Team(Workflow):
    roles = (Role("guesser", reply=Tags("answer")), Role("checker"))
    tools = ("look",)

    async def run(self, ep):
        guess = await ep.act("guesser", f"Question: {ep.task.question}")
        return Outcome(answer=guess.value)


def right(trace, task):
    return float(trace.outcome["answer"] == task.reference["answers"][0])


def player(agent, messages):
    return "<answer>Paris</answer>"
"""
RUN = '        guess = await ep.act("guesser", f"Question: {ep.task.question}")\n'  # line 13
RETURN = "        return Outcome(answer=guess.value)\n"
SCORE = '    return float(trace.outcome["answer"] == task.reference["answers"][0])\n'  # line 18
SAY = '    return "<answer>Paris</answer>"\n'  # line 22
ROLES = '    roles = (Role("guesser", reply=Tags("answer")), Role("checker"))\n'
NAMED = "did you mean 'guesser'?"


def line(changes):
    """Play the file with changes made to it; what is said of it in one line."""
    source = FILE
    for old, new in changes.items():
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    module = types.ModuleType("my_team")
    sys.modules["my_team"] = module
    try:
        exec(compile(source, "/home/me/my_team.py", "exec"), module.__dict__)
        unitymas.register("mistaken", workflow=module.Team, reward=module.right, tasks=module.ROWS)
        try:
            trace = unitymas.rollout("mistaken", module.player, tools=module.tools)[0]
            return trace.error
        finally:
            unregister("mistaken")
    except Exception as error:
        return re.sub(r" \(test_mistakes.py:\d+\)$", "", told(error))  # where no line of the file is to blame
    finally:
        del sys.modules["my_team"]


MISTAKES = {
    "a typo in run": ({RETURN: "        return Outcome(answer=gues.value)\n"},
        "NameError: name 'gues' is not defined (my_team.py:14)"),
    "run is no coroutine": ({"async def run": "def run", RUN + RETURN: "        return Outcome(answer=1)\n"},
        "WorkflowError: Team.run must be an `async def` (my_team.py:12)"),
    "a missing await": ({RUN: RUN.replace("await ", "")},
        "WorkflowError: guesser was not asked yet; write `await ep.act('guesser', …)` (my_team.py:14)"),
    "a forgotten request": ({RUN: RUN + '        ep.act("checker", "Right?")\n'},
        "WorkflowError: a request to 'checker' was made but never awaited; write `await ep.…` (my_team.py:12)"),
    "the reply instead of its value": ({RETURN: "        return guess\n"},
        "WorkflowError: run returned a reply; return what is in it, such as Outcome(answer=reply.value) (my_team.py:12)"),
    "a positional outcome": ({RETURN: "        return Outcome(guess.value)\n"},
        "TypeError: Outcome.__init__() takes 1 positional argument but 2 were given (my_team.py:14)"),
    "an unknown role": ({RUN: RUN.replace('"guesser"', '"gueser"')},
        f"WorkflowError: unknown agent 'gueser'; {NAMED} (my_team.py:13)"),
    "an unknown field in a prompt": ({"{ep.task.question}": "{ep.task.questoin}"},
        "AttributeError: there is no field 'questoin' here; did you mean 'question'? (my_team.py:13)"),
    "a reference in a prompt": ({"{ep.task.question}": "{ep.task.answers}"},
        "AttributeError: there is no field 'answers' here; fields: id, question, tags (my_team.py:13)"),
    "a prompt that is no text": ({RUN: RUN.replace('f"Question: {ep.task.question}"', "7")},
        "WorkflowError: the prompt to 'guesser' must be a string, or a list of {'role': …, 'content': …}; got 7 (my_team.py:13)"),
    "a changed task": ({RUN: RUN + '        ep.task["question"] = "Italy?"\n'},
        "TypeError: this data belongs to the task or to a journal and cannot be changed; copy it first: dict(x) (my_team.py:14)"),
    "an attribute set in run": ({RUN: RUN + "        self.guess = guess\n"},
        "WorkflowError: Team.guess was set inside an episode; a workflow is shared by all of them: keep what belongs to "
        "one episode in local variables of `run` (my_team.py:14)"),
    "a foreign coroutine": ({RUN: "        import asyncio\n        guess = await asyncio.sleep(0)\n"},
        "WorkflowError: Team.run awaited None; only ep.act, ep.use and ep.all can be awaited there: put other "
        "asynchronous work into a tool and ep.use it (my_team.py:14)"),
    "a helper that is no coroutine": ({RUN: "        guess = await str(ep.task.question)\n"},
        "TypeError: object str can't be used in 'await' expression (my_team.py:13)"),
    "one agent twice side by side": ({RUN: '        await ep.all(ep.act("guesser", "1"), ep.act("guesser", "2"))\n'},
        "WorkflowError: agent 'guesser' stands in two branches of one ep.all; give its role more instances (my_team.py:13)"),
    "roles without a comma": ({ROLES: '    roles = (Role("guesser"))\n'},
        "WorkflowError: Team.roles must be a tuple of Role, got Role(name='guesser', instances=1, reply=Raw(otherwise=None),: "
        "write (Role('name'),)"),
    "a format that is not made": ({'reply=Tags("answer")': "reply=Tags"},
        "ValueError: role 'guesser': reply must be a format, such as Tags('answer') or Raw(), got <class "
        "'unitymas.agents.roles.Tags'> (my_team.py:9)"),
    "tools without a comma": ({'    tools = ("look",)\n': '    tools = ("look")\n'},
        "WorkflowError: Team.tools must be a tuple of names, got 'look': write ('name',)"),
    "a tool that nobody gave": ({'    tools = ("look",)\n': '    tools = ("look", "book")\n'},
        "WorkflowError: Team uses the tool 'book', which nobody gave; pass tools={'book': …} to make"),
    "an unknown tool": ({RUN: RUN + '        await ep.use("loook", query="x")\n'},
        "WorkflowError: unknown tool 'loook'; did you mean 'look'? (my_team.py:14)"),
    "a tool with other arguments": ({RUN: RUN + '        await ep.use("look", question="x")\n'},
        "ToolError: look: TypeError: <lambda>() got an unexpected keyword argument 'question' (my_team.py:14)"),
    "a tool that raises": ({'lambda query: ["Paris"]': "lambda query: [][0]", RUN: RUN + '        await ep.use("look", query="x")\n'},
        "ToolError: look: IndexError: list index out of range (my_team.py:14)"),
    "a reward that is None": ({SCORE: "    trace.outcome\n"},
        "RewardError: reward 'right' gave None; give a number, a dict by node, agent or role, or Credits (my_team.py:17)"),
    "a reward that is text": ({SCORE: "    return 'good'\n"},
        "RewardError: reward 'right' gave 'good'; give a number, a dict by node, agent or role, or Credits (my_team.py:17)"),
    "a reward that is no number": ({SCORE: "    return float('nan')\n"},
        "RewardError: reward 'right' gave nan to node '0' as 'right'; an amount must be a finite number (my_team.py:17)"),
    "a reward for nobody": ({SCORE: "    return {'guessr': 1.0}\n"},
        "RewardError: reward 'right' names 'guessr', which is no act, agent or role of the trace (my_team.py:17)"),
    "a reward with one argument": ({"def right(trace, task)": "def right(trace)", SCORE: "    return 1.0\n"},
        "RewardError: reward 'right' is called as right(trace, task): too many positional arguments (my_team.py:17)"),
    "a reward that is a coroutine": ({"def right": "async def right"},
        "RewardError: reward 'right' is an `async def`; rewards only compute: ask judges and tools in `async def grade` "
        "of the workflow (my_team.py:17)"),
    "a typo in a reward": ({SCORE: "    return float(trace.outcom['answer'])\n"},
        "AttributeError: 'Trace' object has no attribute 'outcom' (my_team.py:18)"),
    "a player that says nothing": ({SAY: "    pass\n"},
        "TypeError: guesser: a reply must be a string, got NoneType None (my_team.py:21)"),
    "a player that raises": ({SAY: "    return messages[9]['content']\n"},
        "IndexError: tuple index out of range (my_team.py:22)"),
    "a task without id": ({'"id": "fr", ': ""},
        "TaskError: data set 'mistaken': task number 1 has no 'id': "
        "{'question': 'France?', 'answers': ['Paris'], 'tags': ['a']}"),
    "a task without a field": ({'"question": "France?", ': "", "{ep.task.question}": "?"},
        "TaskError: task 'fr' lacks question; a qa task needs id, question, answers"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_precise_line(mistake):
    changes, says = MISTAKES[mistake]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a coroutine that was never awaited, where that is the mistake
        assert line(changes) == says


def test_without_a_mistake_there_is_nothing_to_say():
    assert line({}) is None


def test_arguments_of_the_wrong_kind_are_named():
    with pytest.raises(TypeError, match="mask-hotpotqa-v0: top_k must be int, got 'three'"):
        unitymas.make("mask-hotpotqa", data="mini", top_k="three")
    with pytest.raises(TypeError, match="max_turns must be int, got 2.5"):
        unitymas.make("mask-hotpotqa", data="mini", max_turns=2.5)


def test_what_fails_a_thousand_times_is_printed_once_with_its_count(capsys):
    def broken(agent, messages):
        raise RuntimeError("out of order")

    def look(query, k):
        raise KeyError(query[:0] or "nothing here")

    unitymas.rollout("mask-hotpotqa", broken, data="mini", tasks=5, k=4)
    said = capsys.readouterr().err.splitlines()
    place = f"test_mistakes.py:{broken.__code__.co_firstlineno + 1}"
    assert said == [f"unitymas: model: RuntimeError: out of order ({place}): 20 × in 20 episodes"]

    unitymas.rollout("rag-nq", "scripted", data="mini", tasks=5, tools={"retrieve": look})
    said = capsys.readouterr().err
    assert said.count("tool 'retrieve' raised KeyError: 'nothing here' (test_mistakes.py:") == 1
    unitymas.rollout("rag-nq", "scripted", data="mini", tasks=2)
    assert capsys.readouterr().err == ""


def test_rules_are_not_called_on_failed_episodes():
    called = []

    class Watching:
        name = "watching"

        def on_node(self, trace, node, task):
            called.append("node")
            return ()

        def on_end(self, trace, task):
            called.append("end")
            return ()

        def metrics(self, trace, task):
            called.append("metrics")
            return {}

    def broken(agent, messages):
        raise RuntimeError("out of order")

    trace = unitymas.rollout("rag-nq", broken, data="mini", tasks=1, reward=Watching())[0]
    assert trace.ended == "error" and called == [] and trace.metrics == {} and trace.credits == []
    env = unitymas.make("rag-nq", data="mini", reward=Watching())
    assert env.arena.rescore(trace) is trace and called == []
    json.dumps(trace.to_dict())


@pytest.mark.parametrize(
    ("mistake", "says"),
    [
        (
            lambda: unitymas.make("rag-nq", tasks=[{"id": "a", "quesion": "q"}]),
            "task 'a' lacks question, answers; a qa task needs id, question, answers",
        ),
        (
            lambda: unitymas.make("rag-nq", data="mini", reward="defualt"),
            "unknown reward 'defualt': did you mean 'default'?",
        ),
        (
            lambda: unitymas.rollout("rag-nq", "scripted", k="4"),
            "k must be a whole number, at least 1, got '4'",
        ),
        (
            lambda: unitymas.rollout("rag-nq", "scripted", concurrency=0.5),
            "concurrency must be a whole number",
        ),
        (
            lambda: unitymas.evaluate("rag-nq", "scripted", k=True),
            "k must be a whole number, at least 1, got True",
        ),
        (
            lambda: unitymas.evaluate("rag-nq", "scripted", price=3),
            "price must be two numbers, dollars for a million tokens in and out, got 3",
        ),
        (
            lambda: unitymas.rollout(unitymas.Workflow, "scripted"),
            "<class 'unitymas.envs.core.workflow.Workflow'> is no environment: give an id, or what unitymas.make returned",
        ),
        (lambda: unitymas.train(unitymas.Workflow), "is no environment: give an id"),
        (
            lambda: unitymas.Team("tiny", temprature=0),
            "Team takes no setting 'temprature'; did you mean 'temperature'?",
        ),
    ],
)
def test_a_mistake_in_a_call_is_one_precise_line(mistake, says):
    with pytest.raises((TypeError, ValueError)) as error:
        mistake()
    assert says in str(error.value) and "\n" not in str(error.value)
