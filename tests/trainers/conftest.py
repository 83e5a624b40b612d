"""Random ragged play for the tests of statistics: tasks, trajectories, agents, calls, chains, siblings, tokens."""

import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from unitymas.benchmarks.faults.work import make_model
from unitymas.trainers.controller.statistics.table import Decision


@dataclass
class Play:
    """Decisions, and what their model groups would know of their tokens."""

    rows: list[Decision] = field(default_factory=list)
    values: dict[str, list[float]] = field(default_factory=dict)
    """Decision -> V_1 … V_n."""
    after: dict[str, float] = field(default_factory=dict)
    """Decision -> the value once its last token is said."""
    kl: dict[str, list[float]] = field(default_factory=dict)
    """Decision -> per-token reward."""


def play(seed: int, tasks: int = 3, trees: bool = True) -> Play:
    """Agents speak 0–3 times per trajectory in one or more chains; scores are coarse, so that there are ties."""
    chance, found = random.Random(seed), Play()
    for task in range(tasks):
        scale = chance.choice([0.0, 1.0, 5.0])
        for trajectory in range(chance.randint(1, 4)):
            episode = f"t{task}e{trajectory}"
            for agent, role in (("planner", "planner"), ("worker_1", "worker"), ("worker_2", "worker")):
                turn = 0
                for invocation in range(chance.randint(0, 2)):
                    length = chance.randint(1, 3)
                    for order in range(length):
                        siblings = chance.randint(1, 3) if trees and chance.random() < 0.4 else 0
                        for sibling in range(1 + siblings):
                            lost = sibling > 0
                            node = f"{agent}.{turn}" + (f"s{sibling}" if lost else "")
                            name = f"{episode}/{node}"
                            last = lost or order == length - 1
                            n = chance.randint(1, 5)
                            found.values[name] = [chance.gauss(0, 1) for _ in range(n)]
                            found.after[name] = chance.gauss(0, 1)
                            found.kl[name] = [chance.gauss(0, 0.2) for _ in range(n)]
                            found.rows.append(
                                Decision(
                                    id=name,
                                    env_id=f"env{task % 2}",
                                    task=f"task{task // 2}",
                                    episode=episode,
                                    node=node,
                                    role=role,
                                    agent=agent,
                                    chain=f"{episode}/{agent}/{invocation}" + (f"/{node}" if lost else ""),
                                    policy=chance.choice(["mine", "theirs"]) if role == "worker" else "mine",
                                    n_tokens=n,
                                    parents=(f"planner.{turn}", "tool.1") if role == "worker" else (),
                                    sibling_set=f"{episode}/{agent}/{turn}" if siblings else "",
                                    turn=turn,
                                    order=0 if lost else order,
                                    prompt_hash=f"h{chance.randint(0, 3)}" if chance.random() < 0.8 else "",
                                    anchor=f"s{chance.randint(0, 3)}" if chance.random() < 0.8 else None,
                                    trainable=chance.random() < 0.9,
                                    credit={
                                        "outcome": scale * chance.choice([0.0, 0.5, 1.0]),
                                        "format": chance.choice([0.0, -1.0]),
                                    },
                                    ended=chance.choice(["terminal", "truncated"]) if last else "no",
                                )
                            )
                        turn += 1
    chance.shuffle(found.rows)
    return found


@pytest.fixture(scope="session")
def ragged() -> Callable[..., Play]:
    """`ragged(seed)`: a different team at a different table each time."""
    return play


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """A Ray that all tests share, because its start takes longer than most of them: a `Cluster` of one node."""
    import ray
    from ray.cluster_utils import Cluster

    from unitymas.trainers.config.schema import RayConfig
    from unitymas.trainers.group.cluster import connect

    folder = tempfile.mkdtemp(prefix="ry", dir="/tmp")  # a short path: sockets lie under it
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", folder)  # nobody else on this machine finds it by itself
        patch.setenv("RAY_raylet_start_wait_time_s", "600")  # Ray's own 30 s are too few for a busy machine
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.delenv("RAY_ADDRESS", raising=False)
        own = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": 10**8}
        nodes = Cluster(
            initialize_head=True, head_node_args={**own, "_system_config": {"worker_niceness": 0}}
        )
        connect(RayConfig(address=nodes.address))
    yield nodes
    ray.shutdown()
    nodes.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Hugging Face directory: a random two-layer Llama, a tokenizer of 64 words, a chat template."""
    return make_model(tmp_path_factory.mktemp("tiny-llama"))
