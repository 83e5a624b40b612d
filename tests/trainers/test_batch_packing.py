"""Packing: every trained token is predicted from exactly its own past, whatever was shared and cut."""

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from unitymas.trainers.group.learning.batch import Thin, count, tokens_per_unit
from unitymas.trainers.group.learning.packing import lay, micro_batches, tokens
from unitymas.trainers.group.sample_store import Sample

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=30)


@st.composite
def samples(draw: st.DrawFn) -> list[Sample]:
    """Samples of a tiny vocabulary, so that prefixes are often shared, nested and equal."""
    prompts = draw(st.lists(TOKENS, min_size=1, max_size=3))
    found = []
    for i in range(draw(st.integers(1, 8))):
        prompt, reply = draw(st.sampled_from(prompts)), draw(TOKENS)
        restricted = draw(st.booleans())
        found.append(
            Sample(
                episode="e",
                node=str(i),
                policy="p",
                version=0,
                prompt=np.array(prompt),
                reply=np.array(reply),
                behaviour=np.zeros(len(reply), np.float32),
                temperature=1.0 + i,
                support=tuple((token,) for token in reply) if restricted else None,
            )
        )
    return found


@settings(deadline=None, max_examples=60)
@given(given_samples=samples(), whole=st.booleans(), share=st.booleans())
def test_each_token_is_predicted_from_its_own_past(
    given_samples: list[Sample], whole: bool, share: bool
) -> None:
    rows = lay(given_samples, whole=whole, share=share)
    ancestors = [path.tolist() for path in rows.packed.rows]
    token = 0
    for index, sample in enumerate(given_samples):
        sequence = tokens(sample)
        assert rows.packed.ids[ancestors[index]].tolist() == (sequence if whole else sequence[:-1])
        for n in range(sample.n_tokens):
            place = int(rows.places[token])
            past = ancestors[index][: ancestors[index].index(place) + 1]
            assert rows.packed.ids[past].tolist() == sequence[: len(sample.prompt) + n]
            assert rows.packed.position[place] == len(sample.prompt) + n - 1
            assert rows.targets[token] == sample.reply[n] and rows.sequence[token] == index
            assert rows.temperature[token] == sample.temperature
            if rows.support is not None:
                start, stop = rows.support.offsets[token : token + 2].tolist()
                allowed = rows.support.ids[start:stop].tolist()
                assert allowed == ([] if sample.support is None else list(sample.support[n] or ()))
            token += 1
        if whole:
            assert int(rows.after[index]) == ancestors[index][-1]
    assert token == len(rows.places)


def zeros(prompt: int, reply: int) -> Sample:
    """A sample that says nothing but 0."""
    return Sample("e", "0", "p", 0, np.zeros(prompt, int), np.zeros(reply, int), np.zeros(reply, np.float32))


@settings(deadline=None, max_examples=60)
@given(given_samples=samples(), budget=st.integers(1, 200))
@example([zeros(13, 3), zeros(13, 4)], 17)  # 16 tokens shared, of which 15 are laid: too few to be laid once
def test_micro_batches_are_a_partition_within_budget(given_samples: list[Sample], budget: int) -> None:
    cut = micro_batches(given_samples, budget)
    assert sorted(i for micro in cut for i in micro) == list(range(len(given_samples)))
    for micro in cut:
        chosen = [given_samples[i] for i in micro]
        assert len(micro) == 1 or len(lay(chosen).packed) <= budget


def test_a_critic_may_see_another_prompt() -> None:
    sample = Sample("e", "0", "p", 0, np.array([1, 1]), np.array([2]), np.zeros(1, np.float32))
    sample.critic_prompt = np.array([5, 6, 7])
    assert tokens(sample) == [1, 1, 2] and tokens(sample, critic=True) == [5, 6, 7, 2]


def test_denominators_count_the_whole_mini_batch() -> None:
    rows = [Thin("a", 3, "u"), Thin("b", 2, "u", weight=0.0), Thin("c", 4)]
    assert count(rows) == {"tokens": 9.0, "sequences": 3.0, "units": 2.0}
    assert tokens_per_unit(rows) == {"u": 5, "c": 4}
