"""Replies as data: read in linear time whatever they hold, thinking set aside, and what may stand around them."""

from __future__ import annotations

import asyncio
import pickle
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

import unitymas
from unitymas.agents.policies import Answer
from unitymas.agents.roles import Boxed, Choice, Custom, Json, Raw, Reply, Role, Tags, read_reply
from unitymas.agents.text.calls import ToolCalls
from unitymas.agents.text.reply_readers import MAX_REPLY, first_json_object, split_thinking, tag_split, tagged
from unitymas.envs.core.drivers import arena_of, take
from unitymas.envs.core.trace import Trace
from unitymas.envs.core.workflow import Episode, Outcome, Workflow
from unitymas.envs.workflows.code import one_tag
from unitymas.envs.workflows.mask import ROLES, read_filing, read_plan
from unitymas.rewards.monitors import measure

PLANNER, SEARCHER, SUMMARIZER, UPDATER, ANSWERER = (role.reply for role in ROLES)
THOUGHT = "<think>\nIs it <answer>Rome</answer>?\n</think>\n\n"

# format, a legal reply, its value
LEGAL = [
    (Raw(), "Paris", "Paris"),
    (Tags("answer"), "<answer>Paris</answer>", "Paris"),
    (Tags("verify", verify=("approve", "reject"), otherwise="reject"), "<verify>approve</verify>", "approve"),
    (Choice("approve", "reject"), "approve", "approve"),
    (Json("queries"), '{"queries": ["a"]}', ("a",)),
    (Json("queries", most=2, texts=True), '{"queries": [{"q": 1}, " a ", 2, "b", "c"]}', ("a", "b")),
    (Boxed(), "so \\boxed{7}", "7"),
    (one_tag("code"), "<code>\n  print(1)\n</code>", "  print(1)"),
    (ToolCalls(Tags("answer")), "<answer>Paris</answer>", {"final": "Paris"}),
    (PLANNER, "<q1>a</q1><a1>b</a1><final_answer>c</final_answer>", {"steps": (("a", "b"),), "final": "c"}),
    (SEARCHER, "<search>who</search>", {"search": "who"}),
    (SEARCHER, "<end>", {"end": True}),
    (SUMMARIZER, "<evidence>Paris</evidence>", "Paris"),
    (UPDATER, "<update>t2</update>", {"kind": "update", "step": 2}),
    (ANSWERER, "<final_answer>Paris</final_answer>", "Paris"),
]


@pytest.mark.parametrize(
    "value", ['[{"key": "queries", "value": "who"}]', "[1]", "[[]]", '"who"', '{"1": "who"}', "7"]
)
def test_a_list_of_texts_without_a_text_is_malformed(value):
    """Nothing could be searched of it, so it must not pass as a legal reply."""
    assert Json("queries").parse(f'{{"queries": {value}}}').ok
    reply = Json("queries", otherwise=(), texts=True).parse(f'{{"queries": {value}}}')
    assert not reply.ok and reply.value == ()


@pytest.mark.parametrize("form, text, value", LEGAL, ids=lambda x: type(x).__name__)
def test_thinking_before_a_reply_is_set_aside_by_every_format(form, text, value):
    assert form.parse(text)[:3] == (text, True, value)
    for thought in (THOUGHT, "hm</think>", "Well. <think>a</think>\n<think>b<think>c</think>d</think> "):
        reply = form.parse(thought + text, "0")
        assert reply == Reply(text, True, value, "0", thought)
        assert reply.said == thought + text == reply.message()["content"]


@pytest.mark.parametrize("form, text, _", LEGAL, ids=lambda x: type(x).__name__)
def test_thinking_that_is_never_closed_is_malformed(form, text, _):
    for said in (
        f"<think>hm {text}",
        f"{text}<think>",
        f"Sure! <think>{text}",
        f"<THINK>x</Think><think>{text}",
    ):
        for lenient in (None, True, False):
            reply = read_reply(form, said, "0", lenient)
            assert not reply.ok and reply.text == "" and reply.said == said


@given(
    st.lists(st.sampled_from(["<think>", "</think>", "a", "\n ", "<answer>", "</answer>", "İ"])).map("".join)
)
def test_the_parts_make_up_the_text_and_no_thinking_is_left(text):
    thinking, said, closed = split_thinking(text)
    assert thinking + said == text and "think>" not in said and closed == (not text or "<think>" not in text[text.rfind("</think>") :] if "</think>" in text else "<think>" not in text)  # fmt: skip


AROUND = ["Sure! Here it is:\n\n{}", "```xml\n{}\n```", "{}\n\nI hope this helps.", "```\n{}\n```\nDone."]


@pytest.mark.parametrize("form, text, value", LEGAL, ids=lambda x: type(x).__name__)
def test_what_stands_around_is_overlooked_by_all_formats_or_by_none(form, text, value):
    """Raw text and a boxed solution are what stands around; all else has a part that can be told from it."""
    for around in AROUND[: 2 if isinstance(form, Choice) else 4]:
        said = around.format(text)
        free = isinstance(form, Json | Boxed | Raw)
        assert read_reply(form, said).ok == free
        assert read_reply(form, said, lenient=False).ok == isinstance(form, Boxed | Raw)
        reply = read_reply(form, said, lenient=True)
        assert reply.ok and reply.text == said and (reply.value == value or isinstance(form, Raw))
    assert read_reply(form, text, lenient=False).value == value


class Loud(Tags):
    """A format of somebody's own that reads in its own way."""

    def parse(self, text: str, node: str = "") -> Reply:
        return super().parse(text.lower(), node)


@pytest.mark.parametrize("lenient", [None, True, False])
@pytest.mark.parametrize("form, text, _", [*LEGAL, (Loud("answer"), "<ANSWER>Paris</ANSWER>", "paris")])
def test_a_role_reads_as_its_format_does(form, text, _, lenient):
    role = pickle.loads(pickle.dumps(Role("one", reply=Loud("answer"), lenient=lenient)))
    assert role.read("<answer>A</answer>", "0") == read_reply(
        Loud("answer"), "<answer>a</answer>", "0", lenient
    )
    role = Role("one", reply=form, lenient=lenient)
    for said in (text, f"well: {text}", text.upper(), f"```\n{text}\n```", "", "<answer>"):
        assert role.read(said, "0") == read_reply(form, said, "0", lenient)


@given(
    st.lists(
        st.sampled_from(["<a>", "</a>", "<A>", "</A>", "<", ">", "b", " ", "\n", "\x1f", "</a", "/"])
    ).map("".join)
)
def test_the_short_way_of_a_lone_tag_gives_what_the_long_way_gives(text):
    tags, around = tag_split(text, "a", most=3)
    alone = tags == ["a", "/a"] and not (around[0] + around[2]).strip()
    assert tagged(text, "a") == (around[1].strip() if alone else None)


def test_being_lenient_never_guesses_between_two():
    verdict = Tags("verify", verify=("approve", "reject"), otherwise="reject")
    for said in (
        "I won't say <verify>approve</verify>, I say <verify>reject</verify>",
        "<verify>approve</verify><verify>approve</verify>",
        "approve",
    ):
        assert read_reply(verdict, said, lenient=True)[1:3] == (False, "reject")
    for said in ("I do not approve", "approve or reject", "reject\nno: approve it"):
        assert not read_reply(Choice("approve", "reject"), said, lenient=True).ok


def test_each_tag_stands_once():
    form = Tags("a", "b")
    assert form.parse(" <A>1</a>\n<b>2</b> ").value == {"a": "1", "b": "2"}
    for text in ("<a>1</a>x<b>2</b>", "<a>1</a>2</a><b>3</b>", "<a><b>1</b></a><b>2</b>", "<b>1</b><a>2</a>"):
        assert not form.parse(text).ok
    assert not Tags("a").parse("<a>1</a>2</a>").ok


@pytest.mark.parametrize(
    "text, filing",
    [
        ("<update>t2</update>", ("update", 2)),
        ("<update>2</update>", ("update", 2)),
        ("<Update> step 2 </Update>", ("update", 2)),
        ("<update>t2: Who directed it? | unknown</update>", ("update", 2)),
        ("<add>t3</add>", ("add", 3)),
        ("<add>next step</add>", ("add", 0)),
        ("<add>Next step: t3</add>", ("add", 3)),
    ],
)
def test_the_updater_may_say_what_its_prompt_says(text, filing):
    assert tuple(read_filing(text).values()) == filing


@pytest.mark.parametrize(
    "text",
    ["<update>step</update>", "<update>t</update>", "<update>t1</update><add>t2</add>", "<add></add>", "t2",
     f"<update>t{'9' * 5000}</update>"],
)  # fmt: skip
def test_what_names_no_step_is_malformed(text):
    assert UPDATER.parse(text)[1:3] == (False, {"kind": "add", "step": 0})


WORDS = st.sampled_from(["", " ", "a", "b\n", "unknown", "<", "<1>", "x > y", "\u2003", "t1", "7"])
PLANS = st.integers(0, 6).flatmap(
    lambda pairs: st.tuples(
        *(
            st.tuples(WORDS, WORDS, st.integers(1, 6).map(lambda n, i=i, c=c: f"{c}{i if n > 1 else n}")).map(
                lambda part: f"{part[0] if not part[0].strip('ab') else ''}<{part[2]}>{part[1]}</{part[2]}>"
            )
            for i in range(1, pairs + 1)
            for c in "qa"
        ),
        WORDS.map(lambda word: f"<final_answer>{word}</final_answer>"),
    ).map("".join)
)
FILINGS = st.tuples(
    WORDS,
    st.sampled_from(["update", "add"]),
    st.sampled_from(["t1", "12", " t3 ", "T4", "t٣", "t12345", "step 2", "t"]),
).map(lambda part: f"{part[0]}<{part[1]}>{part[2]}</{part[1]}>")


@given(st.one_of(PLANS, FILINGS))
def test_the_quick_reading_of_a_plain_reply_is_the_careful_one(text):
    """Tags in capitals are read by the careful code alone."""
    careful = re.sub(r"</?[a-z_]+\d?>", lambda tag: tag[0].upper(), text)
    for form in (PLANNER, UPDATER):
        assert form.parse(text)[1:3] == form.parse(careful)[1:3]


def test_a_malformed_plan_keeps_what_can_be_read():
    said = "<q1>a</q1><a1></a1><q3>b</q3><a3>c</a3> so <final_answer>d</final_answer>"
    with pytest.raises(ValueError) as failed:
        read_plan(said)
    assert failed.value.args[1] == {"steps": [("a", "unknown"), ("b", "c")], "final": "d"}


def test_the_first_object_that_is_json():
    assert first_json_object('\\frac{1}{2} {x} {"a": NaN} {"b": 1} {"c": 2}') == {"b": 1}
    assert first_json_object("{" * 1000 + '{"b": 1}') == {"b": 1}


# in an episode -----------------------------------------------------------------------------------------


class Pair(Workflow):
    """The second reads what the first said, and the first goes on with its own words."""

    roles = (Role("first", reply=Tags("answer", otherwise="none")), Role("second"))

    async def run(self, ep: Episode) -> Outcome:
        memory = ep.memory("first")
        said = await memory.act("go")
        heard = await ep.act("second", f"It said: {said.text} ({said.value})")
        await memory.act("on")
        return Outcome(answer=said.value, heard=heard.text)


@pytest.fixture
def pair():
    unitymas.register("test-pair", workflow=Pair, tasks=[{"id": "t", "question": "?", "answers": ["Paris"]}])
    yield "test-pair"
    unitymas.envs.registry.unregister("test-pair")


def thinker(agent, messages):
    return f"{THOUGHT}<answer>Paris</answer>"


def test_thinking_stays_in_its_node_and_with_its_author(pair):
    (trace,) = unitymas.rollout(pair, thinker)
    first, second, again = trace.acts()
    assert "<think>" not in second.messages[-1]["content"] and "Rome" not in str(trace.outcome)
    assert again.messages[1]["content"] == first.text == f"{THOUGHT}<answer>Paris</answer>"
    assert first.thinking == THOUGHT and first.ok and first.value == "Paris"
    assert measure([trace])["thinking_characters"] == 3 * len(THOUGHT)
    plain = trace.to_dict()
    assert [n["thinking"] for n in plain["nodes"]] == [len(THOUGHT)] * 3
    assert plain["nodes"][0]["reply"] == first.text
    assert Trace.from_dict(plain).to_dict() == plain
    assert pickle.loads(pickle.dumps(Trace.from_dict(plain).nodes[0].reply)) == first.reply


def test_a_setting_by_role_for_a_whole_environment(pair):
    said = "Sure:\n```\n<answer>Paris</answer>\n```"
    outcomes = []
    for lenient in (None, True, {"first": True}, {"second": True}):
        how = {} if lenient is None else {"lenient": lenient}
        env = unitymas.make(pair, **how)
        (trace,) = unitymas.rollout(env, lambda agent, messages: said)
        assert trace.nodes[0].text == said
        assert trace.config["modified"] == ([] if lenient is None else ["lenient"])
        outcomes.append(trace.outcome["answer"])
        execution = pickle.loads(pickle.dumps(env.arena.start(env.arena.task("t"), 0)))
        take(execution, execution.pending[0], said)
        assert execution.nodes[0].value == outcomes[-1]
    assert outcomes == ["none", "Paris", "Paris", "none"]
    with pytest.raises(ValueError, match="did you mean 'first'"):
        unitymas.make(pair, lenient={"frist": True})


def test_a_long_reply_is_cut_recorded_and_malformed(pair):
    arena = arena_of(pair)
    said = "<answer>Paris</answer>" + " " * MAX_REPLY
    (trace,) = unitymas.rollout(pair, lambda agent, messages: said)
    node = trace.nodes[0]
    assert not node.ok and node.value == "none" and node.meta["cut"] == len(said)
    assert node.text == said[:MAX_REPLY]
    execution = arena.start(arena.task("t"), 0)
    take(
        execution, execution.pending[0], Answer(node.text, dict(node.meta))
    )  # as a recorded episode is replayed
    assert not execution.nodes[0].ok
    assert read_reply(Tags("answer"), said[:MAX_REPLY]).ok  # one character less would have been legal


def test_long_replies_are_read_beside_the_event_loop(pair, monkeypatch):
    import threading

    seen = []
    form = Custom(lambda text: seen.append(threading.current_thread()) or text)
    monkeypatch.setattr(Pair, "roles", (Role("first", reply=form), Role("second")))
    asyncio.run(unitymas.arollout(pair, lambda agent, messages: "x" * 200_000))
    assert threading.main_thread() not in seen and len(seen) == 2


# thinking and models -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer():
    from unitymas.agents import model_path
    from unitymas.agents.model.weights import load_tokenizer

    return load_tokenizer(model_path("tiny"))


@pytest.mark.parametrize("opened", [False, True])
def test_what_is_said_while_thinking_is_no_stop_string(tokenizer, opened):
    from unitymas.agents.engines.stopping import Stopper, closing_tokens, pieces_within

    stop = ("</answer>",)
    closers = closing_tokens(stop, pieces_within(tokenizer, len(tokenizer)))
    prompt = tokenizer.encode("Question: who?\n" + "<think>\n" * opened, add_special_tokens=False)
    stopper = Stopper(stop, tokenizer, closers, prompt)
    said = "<think>" * (not opened) + "<answer>Rome</answer>?</think><answer>Paris</answer> or so"
    ids = tokenizer.encode(said, add_special_tokens=False)
    end = next(n for n in range(1, len(ids) + 1) if stopper.stops(ids[:n]))
    text = stopper.cut(tokenizer.decode(ids[:end], clean_up_tokenization_spaces=False))
    reply = Tags("answer").parse(text)
    assert reply.ok and reply.value == "Paris" and "Rome" in reply.thinking
    plain = Stopper(stop, tokenizer, closers, tokenizer.encode("who?"))
    assert plain.cut("<answer>Paris</answer> or so") == "<answer>Paris</answer>"


def test_the_tokens_of_thinking_are_counted(tokenizer):
    from unitymas.agents.engines.token_text import thinking_tokens

    for thought, n in (("<think>Paris or Rome</think>", None), ("", 0), ("<think>", 0)):
        text = f"{thought}<answer>Paris</answer>"
        ids = tokenizer.encode(text, add_special_tokens=False)
        text = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        count = thinking_tokens(tokenizer, ids, text)
        if n is not None:
            assert count == n
        else:
            before = tokenizer.decode(ids[:count], clean_up_tokenization_spaces=False)
            assert 0 < count < len(ids) and before.rstrip().endswith("</think>")
            assert "</think>" not in tokenizer.decode(ids[: count - 1], clean_up_tokenization_spaces=False)


def test_thinking_that_the_prompt_began_and_nobody_ended_reaches_no_other_role(pair, tokenizer, monkeypatch):
    from unitymas.agents.engines.token_text import opens_thinking

    ends = {"<think>\n": True, "<think>\n\n</think>\n\n": False, "": False}
    for end, opened in ends.items():
        prompt = tokenizer.encode(f"go {end}", add_special_tokens=False)
        assert opens_thinking(tokenizer, prompt) == opened

    class Truncated:
        def act(self, call):
            return Answer("I must keep the secret", {"thinking": "open"})

    monkeypatch.setattr(Pair, "roles", (Role("first", reply=Raw(otherwise="none")), Role("second")))
    (trace,) = unitymas.rollout(pair, Truncated())
    first, second, _ = trace.acts()
    assert not first.ok and first.text == first.thinking == "I must keep the secret"
    assert second.messages[-1]["content"] == "It said:  (none)"


@pytest.mark.parametrize(
    "id",
    ["mask-hotpotqa", "mask-router-hotpotqa", "rag-evidence-nq", "math-deepscaler", "solver-verifier-deepscaler",
     "debate-deepscaler", "search-router-hotpotqa", "tool-qa-nq", "sokoban-duo"],
)  # fmt: skip
def test_a_team_that_thinks_plays_as_one_that_does_not(id):
    known = unitymas.spec(id)
    arena = arena_of(id, **({} if known.tasks is not None else {"data": "mini"}))
    thought = '<think>SECRET <answer>x</answer> {"a": 1} \\boxed{9} approve</think>\n'

    class Thinker:
        sees_reference = True

        def act(self, call):
            return thought + arena.expert(call)

    (plain,), (thinking,) = (unitymas.rollout(arena, team, tasks=1) for team in ("scripted", Thinker()))
    assert thinking.metrics == plain.metrics and thinking.error is None
    others = [m for n in thinking.acts() for m in n.messages if m["role"] != "assistant"]
    assert not any("SECRET" in m["content"] for m in others)
