"""The loop of an agent that calls tools itself: what it is shown, what its mistakes become, and that it only grows."""

import json
import pickle
import sys
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

import unitymas
from unitymas.agents.policies import FoolPolicy
from unitymas.agents.roles import Json, Role, Tags
from unitymas.agents.text.calls import MOST, ToolCalls, read_calls
from unitymas.envs.core.arena import Arena
from unitymas.envs.core.drivers import play
from unitymas.envs.core.tasks import DataSet
from unitymas.envs.core.workflow import Episode, Outcome, Workflow, WorkflowError
from unitymas.envs.tool_loop import LONGEST, tool_loop
from unitymas.envs.tools.signatures import about, misfit
from unitymas.envs.tools.tool import Tool, tool

ROW = {"id": "t", "question": "why?", "answers": ["because"]}


def retrieve(query: str, k: int = 3) -> list[dict[str, str]]:
    """Look it up.

    More than a model needs to know.
    """
    return [{"id": "1", "title": query, "text": f"{k} of them"}]


async def add(a: int, b: int | None = None, how: Literal["fast", "slow"] = "fast") -> int:
    """Add two numbers."""
    if b is None:
        raise ValueError("nothing to add")
    return a + b


class Calculator(Workflow):
    roles = (Role("agent", reply=ToolCalls(Tags("answer")), system="Be brief."),)
    tools = ("retrieve", "add")

    async def run(self, ep: Episode) -> Outcome:
        done = await tool_loop(ep, "agent", ep.task.question, {"retrieve": {"k": 2}, "add": {}}, max_calls=3)
        return Outcome(answer=done.value, ok=done.ok, calls=done.calls)


def arena(workflow: Workflow | None = None, **tools: Any) -> Arena:
    data = DataSet("own", "own", [ROW], "0")
    return Arena(workflow or Calculator(), data, tools=tools or {"retrieve": retrieve, "add": add})


def played(*replies: str, of: Arena | None = None) -> Any:
    """An episode in which the agent says these, and then the last one again and again."""
    said = iter(replies)

    def agent(name: str, messages: Any) -> str:
        return next(said, replies[-1])

    table = of or arena()
    team = unitymas.Team({"*": agent}).bind(table.roles)
    return play(table.start(table.task("t"), 0), team, table)


def call(name: str, **arguments: Any) -> str:
    return f"<tool>{json.dumps({'name': name, 'arguments': arguments})}</tool>"


ANSWER = "<answer>42</answer>"


def heard(trace: Any, act: int = 1) -> str:
    """What the agent was last told before its act."""
    text: str = trace.acts()[act].messages[-1]["content"]
    return text


def test_calls_run_side_by_side_and_their_results_come_in_order():
    trace = played(f"let me see {call('add', a=1, b=2)}\n{call('retrieve', query='x')}", ANSWER)
    assert trace.outcome == {"answer": "42", "ok": True, "calls": 2}
    told, first, adding, finding, second = trace.nodes
    assert told.tool == "tools" and first.parents == (told.id,)
    assert adding.parents == finding.parents == (first.id,) and adding.round == finding.round
    assert second.parents == (adding.id, finding.id)
    assert dict(finding.args) == {"query": "x", "k": 2}
    found = '[{"id": "1", "title": "x", "text": "2 of them"}]'
    assert heard(trace) == f"<result>\n3\n</result>\n<result>\n{found}\n</result>\n1 calls left."
    assert second.messages[-1]["role"] == "tool"


def test_the_schemas_stand_in_the_one_system_message():
    messages = played(ANSWER).acts()[0].messages
    assert [m["role"] for m in messages] == ["system", "user"]
    system = messages[0]["content"]
    assert system.startswith("Be brief.\n\nTo call a tool, write <tool>")
    schemas = [json.loads(line) for line in system.splitlines() if line.startswith("{")]
    assert [s["name"] for s in schemas] == ["retrieve", "add"]
    assert schemas[0]["description"] == "Look it up."
    assert list(schemas[0]["parameters"]["properties"]) == ["query"]  # k is not the agent's to choose
    assert schemas[1]["parameters"]["properties"] == {
        "a": {"type": "integer"},
        "b": {"type": ["integer", "null"]},
        "how": {"enum": ["fast", "slow"]},
    }
    assert schemas[1]["parameters"]["required"] == ["a"]


@pytest.mark.parametrize(
    ("said", "told", "legal"),
    [
        (call("ad", a=1), "there is no tool 'ad'; did you mean 'add'?", True),
        (call("xyz", a=1), "there is no tool 'xyz'; there are retrieve, add", True),
        (call("add"), "add: the argument 'a' is missing", True),
        (call("add", a="1"), "add: the argument 'a' must be of type integer", True),
        (call("add", a=True), "add: the argument 'a' must be of type integer", True),
        (call("add", a=1, how="so"), "add: the argument 'how' must be one of 'fast', 'slow'", True),
        (call("add", a=1, bb=2), "add: there is no argument 'bb'; did you mean 'b'?", True),
        (call("add", a=1, tool=2), "add: there is no argument 'tool'", True),
        (call("retrieve", query="x", k=99), "retrieve: there is no argument 'k'", True),
        (call("add", a=1), "add: ValueError: nothing to add", True),
        ("<tool>add(1, 2)</tool>", "the call is not JSON", False),
        ("<tool>[1]</tool>", "the call names no tool", False),
        ('<tool>{"name": "add", "arguments": [1]}</tool>', "must be a (shallow) JSON object", False),
        ('<tool>{"name": "add", "arguments": {"a": NaN}}</tool>', "NaN is no JSON number", False),
        ('<tool>{"name": "add"', "the call is not closed", False),
        (call("add", a=1, b=1) + "<result>\n2\n</result>", "2", False),
        ("I do not know", "neither a tool call nor a final answer", False),
        ("<answer></answer>", "neither a tool call nor a final answer", False),
    ],
)
def test_a_mistake_is_told_and_the_agent_goes_on(said, told, legal):
    trace = played(said, ANSWER)
    assert told in heard(trace) and heard(trace).endswith("2 calls left.")
    assert trace.acts()[0].ok is legal and trace.outcome["answer"] == "42"


def test_calls_too_many_are_refused_and_the_last_reply_is_final():
    trace = played(call("add", a=1, b=1) * 5)
    assert [n.tool for n in trace.uses()] == ["tools", "add", "add", "add"] and len(trace.acts()) == 2
    assert heard(trace).count("only 3 calls are allowed") == 2
    assert heard(trace).endswith("No calls are left: give your final answer.")
    assert trace.outcome == {"answer": None, "ok": False, "calls": 3}


def test_a_long_result_is_cut():
    long = arena(retrieve=lambda query, k: "y" * 10_000, add=add)
    text = heard(played(call("retrieve", query="x"), ANSWER, of=long))
    assert text.count("y") == LONGEST and "6,000 characters more" in text


def test_arguments_may_be_json_in_json_and_thoughts_are_nobodys():
    said = '<think>or <tool> not</think><tool>{"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": 5}"}</tool>'
    trace = played(said, f"<think>six</think>{ANSWER}")
    assert trace.uses("add")[0].result == 6 and trace.outcome["ok"]


def test_the_conversation_only_grows():
    trace = played(call("add", a=1, b=1), "what?", call("add", a=2, b=2), ANSWER)
    acts = trace.acts()
    for before, after in zip(acts, acts[1:], strict=False):
        n = len(before.messages)
        assert after.messages[:n] == before.messages and after.messages[n]["content"] == before.text
        assert after.messages[n]["content"].node == before.id  # so an engine reuses the very tokens
    assert [a.turn for a in acts] == [0, 1, 2, 3]


@given(st.lists(st.sampled_from(
    ["<tool>", "</tool>", call("add", a=1, b=1), '{"name": "add"', "}", "<answer>", "</answer>", "x", "[" * 2000, "\n"]
)).map("".join))  # fmt: skip
def test_no_reply_whatever_breaks_the_loop(said):
    trace = played(said)
    assert trace.ended == "terminal" and len(trace.acts()) <= 4
    json.dumps(trace.to_dict())


def test_hostile_replies_take_no_time_and_never_crash():
    for text in ("<tool>" * 150_000, "<tool>" + "[" * 900_000, '{"a":' * 100_000, "<think>" * 100_000):
        calls, _ = read_calls(text)
        assert len(calls) <= MOST and not ToolCalls(Tags("answer")).parse(text).ok
    assert Json().parse('{"a": ' + "[" * 600 + "]" * 600 + "}").ok is False
    for seed in range(18):
        said = FoolPolicy().act(type("Call", (), {"seed": seed})())
        assert played(said).outcome["ok"] is False


def test_forks_and_pickles_tell_the_tools_from_the_journal():
    table = arena()
    execution = table.start(table.task("t"), 0)
    table.toolbox.call(execution, execution.pending[0])
    execution.answer(execution.pending[0], call("add", a=1, b=1))
    for twin in (execution.fork(), pickle.loads(pickle.dumps(execution))):
        assert twin.trace.to_dict() == execution.trace.to_dict()
        assert twin.pending[0].tool == "add"


def test_a_role_that_calls_tools_needs_the_format():
    class Plain(Calculator):
        roles = (Role("agent"),)

    assert "give its role reply=ToolCalls" in played("x", of=arena(Plain())).error


# what a model is told of a tool --------------------------------------------------------------------------


def test_schemas_come_from_signatures():
    @tool(task=True)
    def verify(program: str, task: Any, tests: list[str] | None = None, *, limit: float = 1.0) -> str:
        """Run it."""

    (told,) = about(verify, "verify")
    assert told["parameters"]["properties"] == {
        "program": {"type": "string"},
        "tests": {"type": ["array", "null"]},
        "limit": {"type": "number"},
    }
    assert told["parameters"]["required"] == ["program"]

    class Shelf:
        """A shelf."""

        def __call__(self, words: list[str], **more: Any) -> None: ...

    (told,) = about(Tool(Shelf(), "shelf"), "shelf")
    assert told["description"] == "A shelf." and told["parameters"]["additionalProperties"] is True
    assert told["parameters"]["properties"] == {"words": {"type": "array", "items": {"type": "string"}}}
    assert misfit(told["parameters"], {"words": ["a"], "other": 1}) == ""


def test_a_session_says_that_it_must_be_described():
    session = Tool(lambda task, seed: None, "world", kind="session")
    with pytest.raises(TypeError, match="opens sessions"):
        about(session, "world")
    told = {"description": "Move.", "parameters": {"type": "object", "properties": {}}}
    assert about(Tool(session.fn, "w", kind="session", about=told), "world")[0]["name"] == "world"


def test_the_name_of_the_teller_is_taken():
    with pytest.raises(WorkflowError, match="choose another"):
        arena(retrieve=retrieve, add=add, tools=add)


# with an engine's chat, and with MCP ---------------------------------------------------------------------


@pytest.mark.parametrize("knows_tools", [True, False])
def test_the_second_prompt_continues_the_very_tokens_of_the_first(knows_tools):
    from transformers import AutoTokenizer

    from unitymas.agents import TINY
    from unitymas.agents.policies import Call
    from unitymas.agents.text.chat import Chat

    tokenizer = AutoTokenizer.from_pretrained(TINY)
    if not knows_tools:
        refuse = (
            "{% for m in messages if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endfor %}"
        )
        tokenizer.chat_template = refuse + tokenizer.chat_template
    chat = Chat(tokenizer, stop_ids=[tokenizer.eos_token_id])
    acts = played(call("add", a=1, b=1), ANSWER).acts()
    calls = [Call("agent", "agent", n.messages, node=n.id, episode="e") for n in acts]
    shown = chat.prompt(calls[0])
    sampled = [*tokenizer.encode(acts[0].text, add_special_tokens=False), tokenizer.eos_token_id]
    chat.remember(calls[0], shown, sampled, acts[0].text)
    again = chat.prompt(calls[1])
    assert again.continued == acts[0].id and again.ids[: len(shown.ids) + len(sampled)] == shown.ids + sampled
    rest = tokenizer.decode(again.ids[len(shown.ids) + len(sampled) :], skip_special_tokens=False)
    assert ("<|tool|>" if knows_tools else "<|user|>") in rest and "calls left" in rest


SERVER = '''
try:
    from mcp.server.mcpserver import MCPServer as Server  # mcp 2
except ImportError:
    from mcp.server.fastmcp import FastMCP as Server  # mcp 1

server = Server("test")

@server.tool()
def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b

server.run()
'''


def test_mcp_tools_work_in_the_loop(tmp_path):
    pytest.importorskip("mcp")
    from unitymas.envs.tools.mcp import McpServer, mcp_tools

    class Remote(Calculator):
        tools = ("mcp",)

        async def run(self, ep: Episode) -> Outcome:
            done = await tool_loop(ep, "agent", ep.task.question, ("mcp",))
            return Outcome(answer=done.value, calls=done.calls)

    (tmp_path / "server.py").write_text(SERVER)
    server = McpServer(command=[sys.executable, str(tmp_path / "server.py")])
    try:
        of = arena(Remote(), mcp=mcp_tools(math=server))
        trace = played(call("mcp:math/multiply", a=6, b=7), call("mcp:math/multiply", a="six"), ANSWER, of=of)
    finally:
        server.close()
    assert "Multiply two numbers." in trace.acts()[0].messages[0]["content"]
    assert "42" in heard(trace) and "the argument 'b' is missing" in heard(trace, 2)
    assert trace.uses()[1].tool == "mcp:math/multiply" and trace.outcome == {"answer": "42", "calls": 2}
