"""A device that several policies, or several groups, use: whose turn it is, and what a group frees while another one works.

On a GPU the updates of a process run one after the other (`turn`). Groups may share a device in turn (`groups.*.pool`).

Engines sleep while any group of the pool learns. A policy's optimizer state is on the device only during the policy's
own update. Otherwise it is in the CPU's memory. Its gradients are freed after the update. Its weights stay.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from ...agents.engines.engine import Engine
from .contract import PolicyLearner
from .hosting import Hosted
from .learning.update import Learner

SIDE_BY_SIDE = {"cpu"}
"""Types of devices whose cores compute several updates at once."""
_TURNS: dict[torch.device, threading.Lock] = {}


@contextmanager
def turn(device: torch.device) -> Iterator[None]:
    """Wait until no other update of this process runs on a GPU. Side by side, updates would be no faster, and would hold the
    activations of all policies at once.
    """
    if device.type in SIDE_BY_SIDE:
        yield
        return
    with _TURNS.setdefault(device, threading.Lock()):
        yield


@contextmanager
def present(learner: PolicyLearner, pooled: bool) -> Iterator[None]:
    """Keep a learner's optimizer state on its device during the block, and in the CPU's memory after it."""
    if not pooled or not isinstance(learner, Learner):
        yield
        return
    move(learner.optimiser, learner.parameters.device)
    try:
        yield
    finally:
        learner.rest()
        move(learner.optimiser, torch.device("cpu"))


def move(optimiser: torch.optim.Optimizer, device: torch.device) -> None:
    """Move all state of an optimizer to a device."""
    for state in optimiser.state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                state[name] = value.to(device)


def memory(hosted: Iterable[Hosted], device: torch.device) -> dict[str, int]:
    """Return the bytes that a group holds on its device, by kind."""
    bytes_of = dict.fromkeys(("keys_values", "engine_weights", "optimizer", "gradients"), 0)
    engines: dict[int, Engine] = {}
    for policy in hosted:
        if policy.engine is not None:
            engines[id(policy.engine)] = policy.engine
        if isinstance(policy.learner, Learner):
            learner = policy.learner
            states = (x for state in learner.optimiser.state.values() for x in state.values())
            there = (x for x in states if isinstance(x, torch.Tensor) and x.device.type == device.type)
            bytes_of["optimizer"] += sum(x.nbytes for x in there)
            bytes_of["gradients"] += sum(p.grad.nbytes for p in learner.trained if p.grad is not None)
    for engine in engines.values():
        for name, size in engine.memory().items() if hasattr(engine, "memory") else ():
            bytes_of[name] += size
    if device.type == "cuda":
        bytes_of["allocated"] = torch.cuda.memory_allocated(device)
    return bytes_of
