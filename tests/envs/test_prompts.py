"""Prompts in sets: every set of every environment, one's own over them, mistakes in them, and prompts that are cut."""

import copy
import hashlib
import json
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import unitymas
from unitymas.agents.policies import ExpertPolicy
from unitymas.agents.roles import read_reply
from unitymas.agents.team import Team
from unitymas.agents.text.role_prompt import LEFT_OUT, FieldText, Told, Wording
from unitymas.envs.core.drivers import call_for, derive, play
from unitymas.envs.core.prompts import PromptError, sets_of
from unitymas.envs.registry import list_envs, make_arena, spec
from unitymas.trainers.config.resolve import resolve

RECORDED: dict[str, Any] = json.loads(
    (Path(__file__).parent / "recorded" / "short_prompts.json").read_text(encoding="utf-8")
)
"""What every environment asked before prompts came in sets: all of it as a digest, and each role's last prompt."""


class Sloppy:
    """Mostly right, now and then malformed: what the recording was made by."""

    sees_reference = True

    def __init__(self, expert: Any) -> None:
        self.expert = expert

    def act(self, call: Any) -> str:
        dice = derive(call.agent, *(str(m["content"]) for m in call.messages)) % 10
        if dice < 6:
            return str(self.expert(call))
        if call.role == "coder":
            return "<code>\nprint(1)\n</code>"
        return "no idea" if dice < 9 or not call.choices else str(call.choices[-1])


def arena_of(id: str, prompts: Any, size: int = 6) -> Any:
    own = spec(id).tasks is not None
    return make_arena(id, split="validation", size=size, prompts=prompts, **({} if own else {"data": "mini"}))


def episodes(id: str, prompts: Any, size: int = 6) -> Any:
    arena = arena_of(id, prompts, size)
    for policy in (ExpertPolicy(arena.expert), Sloppy(arena.expert)):
        for i, task in enumerate(list(arena.task_ids)[:size]):
            team = Team({"*": policy}).bind(arena.roles)
            yield play(arena.start(arena.task(task), i), team, arena)


@pytest.mark.parametrize("id", sorted(RECORDED))
def test_the_short_set_is_what_the_tiny_model_was_made_with_to_the_byte(id: str) -> None:
    digest, roles = hashlib.sha256(), {}
    for trace in episodes(id, "short"):
        for node in trace.acts():
            said = [[m["role"], str(m["content"])] for m in node.messages]
            line = json.dumps([node.agent, said, node.text], ensure_ascii=False)
            digest.update(line.encode("utf-8", "surrogatepass"))
            roles[node.role] = said
    assert roles == RECORDED[id]["roles"]
    assert digest.hexdigest()[:16] == RECORDED[id]["digest"]


@pytest.mark.parametrize("id", list_envs())
def test_every_set_shows_a_reply_that_its_role_may_give_and_fills_every_field(id: str) -> None:
    for name in ("full", "few-shot", "short"):
        arena = arena_of(id, name, size=2)
        for role in arena.roles.values():
            example = role.wording.terms["example"]
            assert read_reply(role.reply, example).ok, (name, role.name, example)
            assert name == "short" or example in role.system or "\napprove" in role.system
            assert "\n\n\n" not in role.system
    for trace in episodes(id, "full", size=2):
        assert trace.error is None
        for node in trace.acts():
            assert set(node.fields) == set(arena.roles[node.agent].sees) or id.startswith("tool-qa"), node
            text = " ".join(str(m["content"]) for m in node.messages if m["role"] != "assistant")
            assert not FieldText.of(text).fields & {*node.fields, "example", "format"}, text


PUBLISHED = (
    "rag-nq",
    "rag-squad",
    "rag-evidence-nq",
    "rag-summary-nq",
    "rag-rewrite-nq",
    "mask-hotpotqa",
    "code-mbpp",
    "math-gsm8k",
)


@pytest.mark.parametrize("id", PUBLISHED)
def test_the_full_set_tells_job_situation_form_and_cost(id: str) -> None:
    """What docs/prompts.md says of each role, point by point."""
    arena = arena_of(id, "full", size=2)
    for role in arena.roles.values():
        words, example = role.system, role.wording.terms["example"].strip()
        job, _, rest = words.partition("\n\nHow to ")
        assert re.match(r"You are (the|an) [a-z ]+ (of|in) a team", job), role.name
        assert len(job.split()) > 30 and rest, f"{role.name}: its place in the team is not told"
        method, _, end = rest.partition(example)
        assert method.count("\n- ") >= 3 and "Reply with" in method, f"{role.name}: how to work, and the form"
        cost = end.strip().splitlines()[-1]
        assert re.search(r"\bcosts( the team)? points\b", cost), f"{role.name}: {cost}"
        assert "between 1 and 1" not in words
        assert role.wording.prompt.fields & set(role.sees[:1]) or role.wording.when, role.name


@pytest.mark.parametrize("id", list_envs())
def test_the_full_set_shows_all_that_the_short_one_shows(id: str) -> None:
    def shown(role: Any) -> set[str]:
        words = role.wording
        tables = [t.fields for table in (words.when, words.unless) for t in table.values()]
        return set(role.sees) & words.prompt.fields.union(*tables)

    same = {"history": "turns"}  # told with the plans besides
    for short, full in zip(
        arena_of(id, "short").roles.values(), arena_of(id, "full").roles.values(), strict=True
    ):
        assert {same.get(name, name) for name in shown(short)} <= shown(full), full.name


def test_experts_and_chance_do_not_depend_on_the_set() -> None:
    for id in (
        "mask-hotpotqa",
        "rag-rewrite-nq",
        "code-deepcoder",
        "planpath-tool",
        "search-router-hotpotqa",
    ):
        for team in ("scripted", "random"):
            said = [
                [
                    [node.text for node in trace.acts()]
                    for trace in unitymas.rollout(arena_of(id, name), team, tasks=3)
                ]
                for name in ("full", "short")
            ]
            assert said[0] == said[1], (id, team)


# choosing ----------------------------------------------------------------------------------------------


def config_of(id: str, team: Any, **how: Any) -> Any:
    return unitymas.rollout(id, team, tasks=1, data="mini", **how)[0].config


def test_the_default_is_full_and_the_tiny_model_chooses_short(capsys: Any) -> None:
    from unitymas.agents.basics.hints import say_once

    say_once.cache_clear()
    assert config_of("rag-nq", "scripted")["prompts"] == "full"
    assert config_of("rag-nq", "tiny")["prompts"] == "short"
    assert capsys.readouterr().err.count("prompts='short'") == 1
    assert config_of("rag-nq", {"answerer": "tiny", "*": "scripted"})["prompts"] == "short"
    assert config_of("rag-nq", "tiny", prompts="full")["prompts"] == "full"
    made = unitymas.make("rag-nq", data="mini")
    assert unitymas.rollout(made, "tiny", tasks=1)[0].config["prompts"] == "short"
    assert made.arena.config["prompts"] == "full"
    # other models read any set, and the tiny one has no room for a longer one
    assert Team({"decomposer": "tiny", "*": "hf:somewhere"}).prompts == "short"
    assert Team({"decomposer": "tiny", "*": "openai:m@http://here/v1"}).prompts == "short"
    result = unitymas.evaluate("rag-nq", "tiny", tasks=1, k=1, data="mini")
    assert result.plain["provenance"]["env"]["config"]["prompts"] == "short"


def test_the_trainers_config_says_which_set() -> None:
    assert resolve("mask-hotpotqa", preset_name="shared").env.prompts == "short"
    assert (
        resolve("mask-hotpotqa", preset_name="shared", overrides=["env.prompts=full"]).env.prompts == "full"
    )
    assert resolve("mask-hotpotqa", groups={"main": {"model": "hf:elsewhere"}}).env.prompts == "full"
    beside = ["map.answerer=openai:m@http://here/v1"]
    assert resolve("mask-hotpotqa", preset_name="shared", overrides=beside).env.prompts == "short"


def test_the_hash_tells_sets_apart_and_an_own_one_is_a_modification() -> None:
    own = {"answerer": {"system": "Answer.\n{example}"}}
    configs = [
        arena_of("rag-nq", p).config for p in ("full", "few-shot", "short", own, {**own, "base": "short"})
    ]
    assert len({c["prompts_hash"] for c in configs}) == 5
    assert [c["modified"] for c in configs] == [["size"]] * 0 + [[], [], [], ["prompts"], ["prompts"]]
    assert configs[3]["prompts"] == own
    again = make_arena("rag-nq", data="mini", prompts=configs[4]["prompts"])
    assert again.config["prompts_hash"] == configs[4]["prompts_hash"]


# one's own ---------------------------------------------------------------------------------------------


def test_an_own_set_by_role_as_mapping_yaml_and_python(tmp_path: Path) -> None:
    own = {
        "answerer": {
            "prompt": "Q: {question}\nGiven: {found}",
            "example": "<final_answer>Oslo</final_answer>",
        }
    }
    (tmp_path / "mine.yaml").write_text(json.dumps(own))
    (tmp_path / "my_prompts.py").write_text(f"PROMPTS = {own!r}\nOTHERS = PROMPTS\n")
    full = arena_of("rag-nq", "full")
    hashes = set()
    for given_ in (own, tmp_path / "mine.yaml", str(tmp_path / "mine.yaml"), str(tmp_path / "my_prompts.py"), f"{tmp_path / 'my_prompts.py'}:OTHERS"):  # fmt: skip
        arena = arena_of("rag-nq", given_)
        assert arena.roles["decomposer"].system == full.roles["decomposer"].system
        assert arena.roles["answerer"].wording.ask({"question": "a", "found": "b"}) == "Q: a\nGiven: b"
        assert "<final_answer>Oslo</final_answer>" in arena.roles["answerer"].system
        hashes.add(arena.config["prompts_hash"])
    assert len(hashes) == 1


SELF: dict[str, Any] = {}
SELF["more"] = SELF
NESTED: Any = "x"  # sixty-four million texts, if all aliases are followed
for _ in range(6):
    NESTED = [NESTED] * 20


@pytest.mark.parametrize(
    ("own", "named"),
    [
        ("ful", "did you mean 'full'"),
        ({"answerr": {"system": "x"}}, "no role 'answerr'; did you mean 'answerer'"),
        ({"answerer": {"systme": "x"}}, "answerer has no 'systme'; did you mean 'system'"),
        ({"answerer": "x"}, "answerer must be a table"),
        ({"answerer": {"system": 3}}, "answerer.system: 3 is no text"),
        ({"answerer": {"prompt": "{qestion} {found}"}}, r"answerer.prompt: there is no field {qestion}; did you mean 'question'"),
        ({"answerer": {"system": "Look at {found}"}}, r"answerer.system: there is no field {found}"),
        ({"answerer": {"prompt": "Just answer. {found}"}}, r"never shows {question}"),
        ({"answerer": {"example": "Oslo"}}, "answerer.example is not a reply that the role's format reads: 'Oslo'"),
        ({"answerer": {"when": {"fond": "x"}}}, r"answerer.when: there is no field {fond}; did you mean 'found'"),
        ({"answerer": {"cut": {"found": "lst"}}}, "did you mean 'last'"),
        ({"base": "shrt"}, "did you mean 'short'"),
        ({"base": "few-shot", "answerer": {"shots": [{"question": "q", "reply": "Oslo"}]}}, r"shots\[1\].reply is not a reply"),
        ({"base": "few-shot", "answerer": {"shots": [{"quest": "q", "reply": "x"}]}}, r"shots\[1\]: there is no field {quest}"),
        ({"answerer": {"shots": [{"question": "q", "reply": "x"}]}}, "answerer.shots are only shown in a set with `base: few-shot`"),
        ({"answerer": {"system": "x" * 300_000}}, "characters in all"),
        ({"answerer": {"when": {"found": ["x", "y"]}}}, r"answerer.when.found must be a text, got \['x', 'y'\]"),
        ({"base": "few-shot", "answerer": {"shots": [{"question": ["q"], "reply": "x"}]}}, r"shots\[1\].question must be a text"),
        ({"answerer": SELF}, "answerer.more.more.* contains itself"),
        ({"answerer": {"shots": [{"question": NESTED}]}}, "characters in all"),
        ("nowhere.yaml", "nowhere.yaml: No such file"),
    ],
)  # fmt: skip
def test_a_mistake_in_an_own_set_is_named_at_the_start(own: Any, named: str) -> None:
    with pytest.raises(PromptError, match=named.replace("{", r"\{").replace("}", r"\}")):
        unitymas.make("rag-nq", data="mini", prompts=own)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"answerer: &a\n  when: *a\n", "contains itself"),
        (b"answerer:\n  system: x\nanswerer:\n  system: y\n", "the key 'answerer' stands twice"),
        ("answerer:\n  system: Réponds.\n".encode("latin-1"), "mine.yaml is not UTF-8.*save it as UTF-8"),
        (b"answerer: [", "mine.yaml is not YAML"),
        (b"answerer:\n\tprompt: x\n", r"mine.yaml is not YAML \(line 2\): found character .*token$"),
        (b"[" * 5_000, "mine.yaml is not YAML"),
        (b"", "mine.yaml is empty, not a table"),
    ],
)
def test_a_file_that_holds_no_set_is_named(content: bytes, named: str, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_bytes(content)
    with pytest.raises(PromptError, match=named):
        unitymas.make("rag-nq", data="mini", prompts=tmp_path / "mine.yaml")


def test_a_set_without_a_role_is_an_error_that_names_it() -> None:
    from unitymas.envs.workflows.rag import Rag

    class Mine(Rag):
        prompts = {"full": {"decomposer": sets_of(Rag.prompts)["full"]["decomposer"]}}

    with pytest.raises(PromptError, match="'answerer' has no prompts"):
        Mine().agents()


def test_a_workflow_without_sets_takes_none() -> None:
    class Plain(unitymas.Workflow):
        roles = (unitymas.Role("speaker", system="Speak."),)

        async def run(self, ep: Any) -> Any:
            await ep.act("speaker", "hi")

    unitymas.register("plain-words", workflow=Plain, tasks=[{"id": "t", "question": "q", "answers": ["a"]}])
    try:
        assert "prompts" not in unitymas.make("plain-words", reward=None).arena.config
        with pytest.raises(PromptError, match="no prompts in sets"):
            unitymas.make("plain-words", reward=None, prompts="short")
    finally:
        from unitymas.envs.registry import unregister

        unregister("plain-words")


# braces and cutting ------------------------------------------------------------------------------------


def test_braces_that_are_no_field_stand_for_themselves() -> None:
    template = FieldText.of('{"a": [{"b": 1}]} \\boxed{} {x + 1} {{name}} {name}')
    assert template.fields == {"name"}
    assert [literal for literal, _ in template.parts] == ['{"a": [{"b": 1}]} \\boxed{} {x + 1} {name} ', ""]


@given(st.text(min_size=1, max_size=300), st.integers(0, 400), st.sampled_from(["first", "middle", "last"]))
def test_what_is_cut_is_counted_and_the_rest_stays(text: str, by: int, end: str) -> None:
    told = Told([("", "Head: "), ("body", text), ("", " :tail")], [("body", end)])
    kept, gone = told.shortened(by)
    assert kept.startswith("Head: ") and kept.endswith(" :tail")
    assert len(told) - len(kept) == gone.get("body", 0)
    if by and len(text) > by + 8:
        assert gone["body"] >= by and LEFT_OUT in kept
    if not by:
        assert kept == told
    again = pickle.loads(pickle.dumps(told))
    assert again == told and again.shortened(by) == (kept, gone)


@given(st.data())
def test_a_prompt_is_its_pieces_whichever_way_it_is_filled(data: Any) -> None:
    """The quick way to fill a prompt, and the pieces that a cut goes by."""
    text = st.lists(st.sampled_from(["{a}", "{b}", "%", "%(a)s", "{{a}}", "{", " "])).map("".join)
    prompt, when, unless = (data.draw(text) for _ in range(3))
    terms, tables = data.draw(
        st.sampled_from([({}, False), ({"b": "100%"}, False), ({}, True), ({"b": ""}, True)])
    )
    around = ({"a": FieldText.of(when)}, {"a": FieldText.of(unless)}) if tables else ({}, {})
    words = Wording("", FieldText.of(prompt), *around, terms=terms)
    fields = {name: data.draw(st.sampled_from(["", "x", "100% {a}", 7])) for name in "ab"}
    whole = "".join(part for _, part in words.pieces(fields))
    assert words.ask(fields) == whole == words.told(fields)
    again = pickle.loads(pickle.dumps(words))
    assert again == words and again.ask(fields) == copy.deepcopy(words).ask(fields) == whole
    if "a" in words.prompt.fields:
        with pytest.raises(KeyError, match="a"):
            words.ask({"b": ""})


def test_a_call_knows_how_its_prompt_may_be_cut_and_a_node_holds_plain_text() -> None:
    arena = arena_of("mask-hotpotqa", "full")
    execution = arena.start(arena.task(arena.task_ids[0]), 0)
    execution.answer(execution.pending[0], "<final_answer>x</final_answer>")
    node = execution.pending[0]
    content = call_for(execution, node, "").messages[-1]["content"]
    assert isinstance(content, Told) and content.cut == (("steps", "first"),)
    assert type(node.messages[-1]["content"]) is str and content == node.messages[-1]["content"]


def test_the_oldest_steps_and_the_last_passages_go_first() -> None:
    lines = "\n".join(f"t{i}: question {i} | answer {i}" for i in range(1, 9))
    role = arena_of("mask-hotpotqa", "full").roles["answerer"]
    told = role.wording.told({"question": "Who?", "steps": lines})
    assert isinstance(told, Told)
    kept, gone = told.shortened(60)
    assert (
        "t1:" not in kept
        and "\nt8: question 8 | answer 8\n" in kept
        and "Question: Who?" in kept
        and gone["steps"] >= 60
    )
    reader = arena_of("mask-hotpotqa", "full").roles["summarizer"]
    told = reader.wording.told({"query": "q", "passages": "A: one\nB: two\nC: three three three"})
    kept, _ = told.shortened(12)
    assert "A: one\n" in kept and "C: three" not in kept


def test_a_prompt_that_does_not_fit_is_cut_and_recorded_and_never_silently_empty(capsys: Any) -> None:
    from unitymas.agents import TINY
    from unitymas.agents.basics.hints import say_once
    from unitymas.agents.engines.sampling import SamplingParams
    from unitymas.agents.engines.torch.torch_engine import TorchEngine
    from unitymas.agents.llm import LLMPolicy
    from unitymas.agents.model.weights import load_model, load_tokenizer

    tokenizer = load_tokenizer(TINY)
    engine = TorchEngine(load_model(TINY), tokenizer, slots=4, context=192)
    policy = LLMPolicy(engine, tokenizer, name="small", sampling=SamplingParams(temperature=0, max_tokens=24))
    passages = [{"id": str(i), "title": f"Town {i}", "text": "A town on a river. " * 4} for i in range(20)]
    how: dict[str, Any] = {
        "data": "mini",
        "prompts": "short",
        "tools": {"retrieve": lambda query, k: passages},
    }
    team = {"summarizer": policy, "*": "scripted"}
    say_once.cache_clear()
    (trace,) = unitymas.rollout("mask-nq", team, tasks=1, max_turns=1, keep_tokens="ids", **how)
    (node,) = trace.acts("summarizer")
    assert (
        "small: prompts of the role 'summarizer' are longer than the model's context of 192"
        in capsys.readouterr().err
    )
    assert node.meta["prompt_cut"]["passages"] > 500 and node.meta["finish_reason"] != "overflow"
    assert len(node.meta["tokens"]["prompt_ids"]) <= 192 - 24 and node.text
    assert "Town 19" in node.messages[-1]["content"]  # the trace keeps what the role was to see

    say_once.cache_clear()
    (trace,) = unitymas.rollout("mask-nq", team, tasks=1, max_turns=1, **{**how, "prompts": "full"})
    (node,) = trace.acts("summarizer")
    assert node.meta["finish_reason"] == "overflow" and node.meta["prompt_cut"]
    assert "'summarizer' does not fit" in capsys.readouterr().err


def test_a_role_that_is_left_out_is_told(capsys):
    own = {"answerer": {"system": "Answer."}}
    unitymas.make("rag-nq", data="mini", prompts=own)
    assert "prompts: decomposer not in this set, so told as in 'full'" in capsys.readouterr().err
    unitymas.make("rag-nq", data="mini", prompts={**own, "base": "full"})
    unitymas.make("rag-nq", data="mini", prompts="short")
    assert "not in this set" not in capsys.readouterr().err


WORDS = st.lists(st.sampled_from(["x ", "{a}", "{b}", "{c}", "{{a}}", "\n", "'\"\\"]), max_size=5)
TEXT = WORDS.map("".join).map(FieldText.of)
SENTENCES = st.dictionaries(st.sampled_from("abc"), TEXT, max_size=2)


def told_or_missing(fill, fields):
    try:
        return fill(fields)
    except KeyError as error:
        return error.args
    except RecursionError:  # sentences that stand in each other
        return RecursionError


@given(
    TEXT,
    SENTENCES,
    SENTENCES,
    st.dictionaries(st.sampled_from("abc"), st.sampled_from(["", "T"])),
    st.dictionaries(st.sampled_from("abc"), st.sampled_from(["", "v", 0, 3, None])),
)
def test_a_compiled_prompt_says_what_its_pieces_say(prompt, when, unless, terms, fields):
    wording = Wording("", prompt, when, unless, (), terms)
    pieces = told_or_missing(lambda f: "".join(text for _, text in wording.pieces(f)), fields)
    for _ in range(2):  # the first call compiles
        assert told_or_missing(wording.ask, fields) == pieces
