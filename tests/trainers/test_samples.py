"""The life of a sample: open, sealed, taken, retired, and everything that can get lost on the way counted."""

import pickle

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from unitymas.trainers.group.sample_store import Sample, SampleStore


def sample(episode: str, node: str, version: int = 0) -> Sample:
    return Sample(
        episode=episode,
        node=node,
        policy="shared",
        version=version,
        prompt=np.array([1, 2, 3]),
        reply=np.array([4, 5]),
        behaviour=np.array([-0.5, -0.25], dtype=np.float32),
    )


def test_a_sample_from_open_to_retired() -> None:
    store = SampleStore()
    for node in ("0", "1", "2"):
        assert store.put(sample("e1", node))
    assert store.seal("e1", ["2", "0"]) == ["e1/2", "e1/0"]
    assert [s.id for s in store.take(["e1/0", "e1/2"])] == ["e1/0", "e1/2"]
    store.retire(["e1"])
    assert len(store) == 0
    assert store.summary()["trained"] == 2
    assert store.summary()["discarded/not-kept"] == 1


def test_sealing_is_idempotent_but_not_changeable() -> None:
    store = SampleStore()
    store.put(sample("e1", "0"))
    store.put(sample("e1", "1"))
    assert store.seal("e1", ["0"]) == store.seal("e1", ["0"]) == ["e1/0"]
    assert store.summary()["discarded/not-kept"] == 1
    with pytest.raises(ValueError, match="sealed once"):
        store.seal("e1", ["1"])


def test_late_replies_meet_a_tombstone() -> None:
    store = SampleStore()
    store.put(sample("e1", "0"))
    store.seal("e1", ["0"])
    assert not store.put(sample("e1", "5"))
    assert store.drop("e2", "infrastructure") == 0
    assert not store.put(sample("e2", "0"))
    store.retire(["e1"], expected={"e1", "e2"})
    assert not store.put(sample("e1", "0"))
    assert store.summary()["discarded/late"] == 3


def test_episodes_that_are_over_leave_nothing_behind() -> None:
    """However many steps: what is remembered are episodes that are not over, and those to which a reply can still come."""
    store = SampleStore()
    store.put(sample("waits", "0"))
    store.seal("waits", ["0"])  # of a later step
    for step in range(50):
        trained, failed = f"{step}-a", f"{step}-b"
        store.put(sample(trained, "0"))
        store.seal(trained, ["0"])
        store.drop(failed, "failed")
        store.retire([trained, f"{step}-of-another-group"], expected={failed})
        assert not store.put(sample(failed, "0"))  # its reply comes late
    assert set(store._closed) == {"waits", "49-b"}
    assert store.state_dict()["closed"] == {"waits": ["0"]}  # nothing comes late after a restart
    assert store.seal("waits", ["0"]) == ["waits/0"]
    with pytest.raises(KeyError, match="retired with its step"):
        store.get("3-a/0")


def test_asked_again_the_last_answer_stands() -> None:
    store = SampleStore()
    store.put(sample("e1", "0", version=1))
    store.put(sample("e1", "0", version=2))
    store.seal("e1", ["0"])
    assert store.get("e1/0").version == 2
    assert store.summary()["discarded/superseded"] == 1


def test_errors_say_what_became_of_a_sample() -> None:
    store = SampleStore()
    store.put(sample("e1", "0"))
    with pytest.raises(ValueError, match="still open"):
        store.take(["e1/0"])
    with pytest.raises(KeyError, match="never stored"):
        store.seal("e1", ["0", "9"])
    with pytest.raises(KeyError, match="never stored"):
        store.get("e9/0")
    store.drop("e1", "stale")
    with pytest.raises(KeyError, match="dropped or retired"):
        store.get("e1/0")


def test_a_critic_elsewhere_is_told_and_tells() -> None:
    """Samples cross as records; the values that come back are merged into the known sample."""
    actor, critic = SampleStore(), SampleStore()
    actor.put(sample("e1", "0"))
    actor.seal("e1", ["0"])
    critic.admit(pickle.loads(pickle.dumps(actor.get("e1/0"))))
    critic.take(["e1/0"])[0].values = np.array([0.5, 0.75], dtype=np.float32)
    actor.admit(critic.get("e1/0"))
    values = actor.get("e1/0").values
    assert values is not None and values.tolist() == [0.5, 0.75]
    assert len(actor) == 1


class Life(RuleBasedStateMachine):
    """Whatever happens in whatever order: every sample put is held, trained, or discarded by a named cause."""

    def __init__(self) -> None:
        super().__init__()
        self.store = SampleStore()

    @rule(episode=st.sampled_from("ab"), node=st.sampled_from("0123"))
    def put(self, episode: str, node: str) -> None:
        self.store.put(sample(episode, node))

    @rule(episode=st.sampled_from("ab"), keep=st.sets(st.sampled_from("0123")))
    def seal(self, episode: str, keep: set[str]) -> None:
        try:
            ids = self.store.seal(episode, sorted(keep))
        except (KeyError, ValueError):
            return
        if all(s.state != "open" for s in self.store if s.episode == episode):
            held = {s.id for s in self.store}
            self.store.take([id for id in ids if id in held])

    @rule(episode=st.sampled_from("ab"))
    def drop(self, episode: str) -> None:
        self.store.drop(episode, "test")

    @rule(episode=st.sampled_from("ab"), expected=st.sets(st.sampled_from("ab")))
    def retire(self, episode: str, expected: set[str]) -> None:
        self.store.retire([episode], expected)

    @rule()
    def restart(self) -> None:
        state = pickle.loads(pickle.dumps(self.store.state_dict()))
        self.store = SampleStore()
        self.store.load_state_dict(state)

    @invariant()
    def nothing_is_lost_uncounted(self) -> None:
        summary = self.store.summary()
        kept = sum(count for name, count in summary.items() if name.startswith(("held/", "discarded/")))
        assert kept + summary.get("trained", 0) == summary.get("put", 0)


TestLife = Life.TestCase
TestLife.settings = settings(deadline=None, max_examples=40)
