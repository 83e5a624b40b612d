"""Names of decisions, and the record of how a reply came about."""

import copy
import json
import pickle
from dataclasses import FrozenInstanceError, fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unitymas.agents import answers
from unitymas.agents.answers import NOTHING_KNOWN, Answer, DecisionId, ReplyMeta
from unitymas.envs.core.trace import jsonable

nodes = st.text().filter(lambda name: "/" not in name)
plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
entries = st.dictionaries(
    st.sampled_from([f.name for f in fields(ReplyMeta) if f.name != "more"]) | st.text(),
    plain | st.dictionaries(st.text(), plain, max_size=2),
    max_size=6,
)


@given(st.text(), nodes, st.text(), nodes)
def test_an_id_has_its_parts_and_no_two_decisions_share_one(episode, node, other, another):
    name = DecisionId(episode, node)
    assert (name.episode, name.node) == (episode, node)
    assert (name == DecisionId(other, another)) == ((episode, node) == (other, another))
    assert (
        name == f"{episode}/{node}" and hash(name) == hash(str(name)) and json.loads(json.dumps(name)) == name
    )
    for twin in (DecisionId.of(str.__str__(name)), pickle.loads(pickle.dumps(name)), copy.deepcopy(name)):
        assert (twin, twin.episode, twin.node) == (name, episode, node)
    assert DecisionId.of(name) is name


def test_what_is_no_id_is_refused():
    with pytest.raises(ValueError, match="holds no '/'"):
        DecisionId("a", "b/c")
    with pytest.raises(ValueError, match="written episode/node"):
        DecisionId.of("e1")


@given(entries)
def test_a_record_reads_as_the_mapping_it_was_made_of(given_entries):
    """Whatever a policy or a file gives: nothing is lost but what says nothing, and nothing raises."""
    meta = ReplyMeta.of(given_entries)
    back = jsonable(meta)
    for name, value in given_entries.items():
        if value is None and name in answers._READ:
            assert name not in meta
        elif name in ("version", "tokens_in", "tokens_out", "cut") and repr(back[name]) != repr(
            jsonable(value)
        ):
            assert back[name] == int(value)  # a whole number is what the field holds
        elif name == "cost" and isinstance(back[name], float):
            assert back[name] == value
        else:
            assert repr(back[name]) == repr(jsonable(value))
    assert set(meta) <= set(given_entries) and len(meta) == len(set(meta)) == len(dict(meta))
    assert ReplyMeta.of(dict(meta)) == meta or "nan" in repr(meta)
    assert ReplyMeta.of(pickle.loads(pickle.dumps(meta))) == meta or "nan" in repr(meta)


def test_a_record_is_typed_frozen_and_complete():
    meta = ReplyMeta.of({"tokens_out": 3, "sample": "0:1.0/2~0", "cost": 0.5, "tokens_in": None})
    assert (meta.sample.episode, meta.sample.node) == ("0:1.0", "2~0")
    assert (
        meta.tokens_used == 3 and meta["cost"] == 0.5 and meta.get("version", 7) == 7 and meta.version is None
    )
    assert meta == {"tokens_out": 3, "sample": "0:1.0/2~0", "cost": 0.5}
    with pytest.raises(FrozenInstanceError):
        meta.tokens_out = 4
    with pytest.raises(TypeError):
        meta["tokens_out"] = 4
    with pytest.raises(KeyError):
        meta["version"]
    assert set(answers._READ) == {f.name for f in fields(ReplyMeta)} - {"more"}


def test_an_answer_takes_a_mapping_or_a_record():
    assert Answer("x").meta is NOTHING_KNOWN and not Answer("x").meta
    assert Answer("x", {"policy": "me"}).meta.policy == "me"
    assert Answer("x", ReplyMeta(policy="me")) == Answer("x", {"policy": "me"})


def test_an_old_trace_reads_its_records():
    """`meta` is written as ever, and read into the record."""
    import unitymas
    from unitymas.envs.core.trace import Trace

    (trace,) = unitymas.rollout("rag-hotpotqa", {"*": lambda agent, messages: "x"}, data="mini", tasks=1)
    row = trace.to_dict()
    row["nodes"][0]["meta"] = {"policy": "team", "tokens_out": 4, "sample": "0:0.0/0", "seconds": 1.5}
    again = Trace.from_dict(json.loads(json.dumps(row)))
    assert again.nodes[0].meta.sample.node == "0" and again.to_dict() == row
