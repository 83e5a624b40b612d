"""Persistence of a group: checkpoints of its policies and samples, and its policies as models.

A checkpoint folder is written completely or not at all. It holds parameters, optimizers, versions, samples and random
generators. A group of many ranks writes shards in place of whole parameters (ranks/group.py).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from ...agents.basics.hints import nearest
from ...agents.basics.threads import in_thread
from ...agents.text.tokenizing import Tokenizer
from ..config.group_settings import GroupSpec
from ..controller import checkpoint
from ..controller.checkpoint import Saved
from .hosting import Hosted, export_dtype, host, same_shape, write_policy
from .learning.update import Learner
from .sample_store import SampleStore

T = TypeVar("T")

HEAVY = ThreadPoolExecutor(os.cpu_count(), "group")
"""Threads for the heavy work of all groups of a process. More tasks at once than cores would only cost
memory.
"""


class PersistentGroup:
    """Policies of a group with their samples. It runs heavy work in threads, and saves, loads, exports and adopts."""

    def __init__(self, spec: GroupSpec) -> None:
        self.spec = spec
        if spec.threads:
            torch.set_num_threads(spec.threads)
        self._threads = torch.get_num_threads()
        self.hosted, self.tokenizer = self._host(spec)
        self.store = SampleStore()
        self._at_work = {name: asyncio.Lock() for name in self.hosted}

    def _host(self, spec: GroupSpec) -> tuple[dict[str, Hosted], Tokenizer]:
        return host(spec)

    async def save(self, path: str | Path) -> None:
        """Save a checkpoint folder, completely or not at all: parameters, optimizers, versions, samples, random
        generators.
        """
        await self._thread(lambda: self._save(Path(path)))

    def _save(self, path: Path) -> None:
        unpublished = [name for name, hosted in self.hosted.items() if hosted.dirty]
        if unpublished:
            raise ValueError(
                f"policies {unpublished} are updated but not published: publish before a checkpoint"
            )
        state = {name: self._kept(hosted) for name, hosted in self.hosted.items()}
        with checkpoint.writing(path) as folder:
            checkpoint.write_tensors(folder / "policies.pt", state)
            self._keep_more(folder)
            checkpoint.write_tensors(folder / "samples.pt", self.store.state_dict())
            checkpoint.write_tensors(folder / "chance.pt", torch.get_rng_state())
            checkpoint.write_json(
                folder / "group.json", {"name": self.spec.name, "policies": sorted(self.hosted)}
            )

    def _kept(self, hosted: Hosted) -> dict[str, object]:
        """Return the state of one policy for `policies.pt`."""
        return {
            "parameters": hosted.parameters.state_dict(),
            "learner": hosted.learner.state_dict() if isinstance(hosted.learner, Learner) else None,
            "version": hosted.version,
        }

    def _keep_more(self, folder: Path) -> None:
        """Write the files beside `policies.pt`: shards, in a group with several ranks."""

    async def load(self, path: str | Path) -> dict[str, int]:
        """Load the checkpoint of a group with the same policies. Return the version of every policy."""
        return await self._thread(lambda: self._load(checkpoint.verify(path)))

    def _load(self, path: Path) -> dict[str, int]:
        with checkpoint.reading(path / "group.json") as about:
            held = list(about["policies"])
        if held != sorted(self.hosted):
            raise ValueError(
                f"{path} holds policies {held}, this group has {sorted(self.hosted)}: frozen, map and critics stay as they were"
            )
        with checkpoint.reading(path / "policies.pt") as state:
            self._restore(path, state)
        for hosted in self.hosted.values():
            hosted.publish()
        with checkpoint.reading(path / "samples.pt") as state:
            self.store.load_state_dict(state)
        with checkpoint.reading(path / "chance.pt") as state:
            torch.set_rng_state(state)
        return {name: hosted.version for name, hosted in self.hosted.items()}

    def _restore(self, path: Path, state: Saved) -> None:
        learners = {n: h.learner for n, h in self.hosted.items() if isinstance(h.learner, Learner)}
        for name, hosted in self.hosted.items():
            hosted.version = state[name]["version"]
            if state[name]["parameters"] is not None:
                hosted.parameters.load_state_dict(state[name]["parameters"])
                if name in learners and state[name]["learner"] is not None:
                    learners[name].load_state_dict(state[name]["learner"])
        if (path / "shards").is_dir():  # of a group of many ranks
            from .ranks import sharded_checkpoint

            sharded_checkpoint.resume(path, learners, state)

    async def export(self, policy: str, path: str | Path) -> str:
        """Write the present policy to a Hugging Face directory, with its tokenizer. Return the path.

        An adapter is merged into the model. It is also saved alone in `adapter`, in peft's format. For a role with an
        adapter of its own, the model is in `roles/ROLE`, in the same form.
        """
        hosted = self._policy(policy)
        tokenizer = hosted.speaking().chat.tokenizer
        return str(await self._thread(lambda: self._export(hosted, Path(path), tokenizer)))

    def _export(self, hosted: Hosted, path: Path, tokenizer: Tokenizer) -> Path:
        model = hosted.parameters.model
        return write_policy(hosted.parameters, model, path, tokenizer, export_dtype(self.spec, model))

    async def adopt(self, policy: str, path: str | Path) -> None:
        """Load the parameters of an exported policy, or of any model with the same shape. `publish` sends them to the
        engine.
        """
        await self._thread(lambda: self._adopt(policy, Path(path)))

    def _adopt(self, policy: str, path: Path) -> None:
        hosted = self._policy(policy)
        if hosted.parameters.adapter is not None:
            raise ValueError(f"policy {policy!r} is an adapter; only full parameters can adopt a model")
        self._take(hosted, path)
        hosted.dirty = True

    def _take(self, hosted: Hosted, path: Path) -> None:
        mine = hosted.parameters.model
        with torch.no_grad():
            for ours, theirs in zip(mine.parameters(), same_shape(hosted, path).parameters(), strict=True):
                ours.copy_(theirs)

    @property
    def device(self) -> torch.device:
        return next(iter(self.hosted.values())).parameters.device

    def _policy(self, name: str) -> Hosted:
        if name not in self.hosted:
            hint = nearest(name, self.hosted, "it has")
            raise KeyError(f"group {self.spec.name!r} has no policy {name!r}; {hint}")
        return self.hosted[name]

    async def _thread(self, work: Callable[[], T], policy: str | None = None) -> T:
        """Run work on one policy in a thread, in parallel with other policies. With `policy` None, no other work runs
        in the group.
        """
        async with AsyncExitStack() as stack:
            for name in [policy] if policy is not None else self._at_work:
                await stack.enter_async_context(self._at_work[name])
            return await in_thread(HEAVY, partial(self._counted, work))

    def _counted(self, work: Callable[[], T]) -> T:
        """Run work with this group's number of threads. Torch stores a number for each Python thread at its first
        use.
        """
        torch.set_num_threads(self._threads)
        return work()
