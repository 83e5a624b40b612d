"""A model group: one base model, the policies on it, their engines, samples and learners.

The controller holds workflows, tables and statistics. A group holds everything that is made of tensors. Only thin
records cross: calls and answers, ids, signals, summaries, metrics. The same object runs in the controller's process
or as a Ray actor (runtime.py). Every method is a coroutine.

One step, as the controller sees it:

    answer = await group.generate("team", call)         # many at a time; the sample is kept under (episode, node)
    ids = await group.seal(episode, ["0", "1.0"])       # its credits are known: these may train
    values = await group.values("team", ids, algorithm.needs, "team-critic")
    metrics = await group.update("team", algorithm, signals, minibatches)
    versions = await group.publish()                    # after all groups have updated; then a checkpoint
    await group.retire(episodes)

Heavy work runs in threads, one task at a time for each policy, so that other policies continue.
"""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ...agents.answers import Answer, DecisionId
from ...agents.basics.machine import give_back
from ...agents.engines.engine import Sleeper
from ...agents.engines.sampling import SamplingParams
from ...agents.engines.token_text import thinking_tokens
from ...agents.policies import Call
from ...agents.text.control_tokens import plain_of
from ..algorithms.algorithm import Algorithm, Needs
from ..config.group_settings import GroupSpec
from ..controller.statistics.table import Signal, ValueSummary
from . import shared_device
from .contract import GroupReport, Peer
from .hosting import Hosted, sample_of, vocabulary
from .learning.targets import Discount, records, summaries
from .persistence import PersistentGroup
from .sample_store import Sample, SampleRow


class CallCancelled(RuntimeError):
    """Raised when the controller cancels a request before it is answered."""


class ModelGroup(PersistentGroup):
    """One base model and everything made of tensors around it; the module's docstring shows a step."""

    def __init__(self, spec: GroupSpec) -> None:
        super().__init__(spec)
        self._running: dict[DecisionId, asyncio.Task[Answer]] = {}
        self._open = asyncio.Event()
        self._open.set()

    # -- collecting -----------------------------------------------------------------------------------------------

    async def generate(
        self, policy: str, call: Call, temperature: float | None = None, keep: bool = True
    ) -> Answer:
        """Generate a reply of a policy. The sample is kept until it is sealed or dropped, unless `keep` is off (validation).

        `temperature` replaces the policy's own.
        """
        hosted = self._policy(policy)
        sampling = hosted.speaking().sampling
        if temperature is not None:
            sampling = replace(sampling, temperature=temperature)
        await self._open.wait()
        name = DecisionId(call.episode, call.node)
        task = asyncio.ensure_future(self._answer(hosted, call, sampling, keep))
        self._running[name] = task
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise CallCancelled(f"call {name!r} to policy {policy!r} was cancelled") from None
            task.cancel()  # the caller is cancelled, and the request goes with it
            raise
        finally:
            if self._running.get(name) is task:
                del self._running[name]

    async def _answer(self, hosted: Hosted, call: Call, sampling: SamplingParams, keep: bool) -> Answer:
        answer, generation = await hosted.speaking().say(call, sampling)
        if keep and generation.ids:
            sample = sample_of(hosted.name, call, generation, sampling.temperature)
            sample.thinking = thinking_tokens(
                hosted.speaking().chat.tokenizer, generation.ids, generation.text
            )
            if self.store.put(sample):
                answer.meta = replace(answer.meta, sample=sample.id)
        return answer

    async def cancel(self, episode: str, node: str | None = None) -> int:
        """Cancel an episode's requests, or one of them. Their callers get `CallCancelled`."""
        requests = [
            task
            for name, task in self._running.items()
            if name.episode == episode and node in (None, name.node)
        ]
        for task in requests:
            task.cancel()
        return len(requests)

    async def seal(self, episode: str, keep: Sequence[str]) -> list[DecisionId]:
        """Close an episode. The nodes in `keep` may be trained on. Idempotent. Return their decision ids."""
        self._forget(episode)
        return self.store.seal(episode, keep)

    async def drop(self, episode: str, cause: str) -> int:
        """Discard an episode's samples in any state, and count them under `cause`. Return their number."""
        await self.cancel(episode)
        self._forget(episode)
        return self.store.drop(episode, cause)

    async def retire(self, episodes: Collection[str]) -> dict[str, int]:
        """Remove the samples of these episodes, because their step is over. Return counts by state and cause so far."""
        self.store.retire(episodes, {name.episode for name in self._running})
        return self.store.summary()

    async def send(self, ids: Sequence[DecisionId], peer: Peer, news: bool = False) -> None:
        """Send copies of sealed samples to another group: what a critic needs, or (`news`) the values computed for
        them.
        """
        samples = [self.store.get(id) for id in ids]
        await peer.admit([sample.news() if news else sample.for_critic() for sample in samples])

    @property
    def peer(self) -> Peer:
        """Return the group itself: other groups of this process call it as the controller does."""
        return self

    async def records(
        self, ids: Sequence[DecisionId], policy: str, algorithm: Algorithm, signals: Sequence[Signal]
    ) -> list[SampleRow]:
        """Return a policy's samples as plain data for the run's sidecar: text, log-prob and advantage of each
        token.
        """
        tokenizer = self._policy(policy).speaking().chat.tokenizer
        samples = [self.store.get(id) for id in ids]
        return await self._thread(lambda: records(samples, signals, algorithm.needs, tokenizer))

    async def admit(self, samples: Sequence[Sample]) -> None:
        """Take in sealed samples of another group, or values that its critic computed for samples here."""
        for sample in samples:
            self.store.admit(copy.copy(sample))

    async def phase(self, name: str) -> dict[str, int]:
        """Set the phase. In "collect", in which a group begins, calls are answered. In "learn" new calls wait, and engines that can
        sleep give their memory to the learner, once open requests have ended. Return the bytes on its device, by kind.
        """
        if name not in ("collect", "learn"):
            raise ValueError(f"unknown phase {name!r}: choose collect or learn")
        if name == "learn":
            self._open.clear()
        for engine in {id(hosted.engine): hosted.engine for hosted in self.hosted.values()}.values():
            if isinstance(engine, Sleeper) and engine.sleeps:
                while name == "learn" and self._running:  # with overlap some are on their way
                    await asyncio.wait(list(self._running.values()))
                    await asyncio.sleep(0)  # who asked takes them off the list
                await self._thread(engine.wake if name == "collect" else engine.sleep)
        if name == "collect":
            await self._thread(give_back)
            self._open.set()
        return shared_device.memory(self.hosted.values(), self.device)

    # -- learning -------------------------------------------------------------------------------------------------

    async def values(
        self,
        policy: str,
        ids: Sequence[DecisionId],
        needs: Needs,
        critic: str | None = None,
        contexts: Mapping[DecisionId, str] | None = None,
    ) -> dict[DecisionId, ValueSummary]:
        """Compute what token-level GAE needs of each decision: the critic's values, and the KL penalty if there is one.

        Without a critic here, the values are those of another group's critic (see `admit`), or 0. `contexts` maps
        decision ids to the text that the critic reads instead of the policy's prompt (`needs.values == "trace"`).
        """
        busy = None if needs.kl_reward else critic  # the penalty is computed for the policy itself
        return await self._thread(lambda: self._values(policy, ids, needs, critic, contexts or {}), busy)

    def _values(
        self,
        policy: str,
        ids: Sequence[DecisionId],
        needs: Needs,
        critic: str | None,
        contexts: Mapping[DecisionId, str],
    ) -> dict[DecisionId, ValueSummary]:
        samples = [self.store.get(id) for id in sorted(ids)]
        if needs.kl_reward:
            learner = self._policy(policy).learning()
            learner.measure_proximal(samples)
            learner.measure_reference(samples)
        if critic is not None:
            judge = self._policy(critic)
            if not judge.parameters.is_critic:
                raise ValueError(f"policy {critic!r} cannot be a critic: set critic: true on it")
            for sample in samples:
                if sample.id in contexts:
                    sample.critic_prompt = self._encode(contexts[sample.id], judge, sample)
            judge.learning().measure_values(samples)
        return summaries(samples, Discount(needs.gamma, needs.lam, needs.kl_reward))

    async def prepare(self, policy: str, ids: Sequence[DecisionId]) -> None:
        """Measure the reference's log-probs now, beside the critic's `values`. Without this call the update
        measures them.
        """
        learner = self._policy(policy).learning()
        samples = [self.store.get(id) for id in sorted(ids)]
        await self._thread(lambda: learner.measure_reference(samples), policy)

    async def update(
        self,
        policy: str,
        algorithm: Algorithm,
        signals: Sequence[Signal],
        minibatches: Sequence[Sequence[DecisionId]],
    ) -> dict[str, float]:
        """Make one optimizer step per mini-batch (decision ids). Return metrics (docs/update-path.md).

        A policy and its critic can be updated at the same time.
        """
        self._policy(policy)
        return await self._thread(lambda: self._update(policy, algorithm, signals, minibatches), policy)

    def _update(
        self,
        policy: str,
        algorithm: Algorithm,
        signals: Sequence[Signal],
        minibatches: Sequence[Sequence[DecisionId]],
    ) -> dict[str, float]:
        hosted = self._policy(policy)
        learner = hosted.learning()
        hosted.free_cache()
        taken = [self.store.take(sorted(ids)) for ids in minibatches]
        with shared_device.turn(self.device), shared_device.present(learner, pooled=bool(self.spec.pool)):
            metrics = learner.update(algorithm, {signal.id: signal for signal in signals}, taken)
        if hosted.spec.critic:
            hosted.version += 1  # a critic has no engine, so its version needs no publishing
        else:
            hosted.dirty = True
        return metrics

    async def publish(self, policy: str | None = None) -> dict[str, int]:
        """Publish new weights to the engine of a policy (None: of every updated policy). Return the version of every
        policy.
        """
        return await self._thread(lambda: self._publish(policy))

    def _publish(self, policy: str | None) -> dict[str, int]:
        chosen = self.hosted.values() if policy is None else [self._policy(policy)]
        for hosted in chosen:
            if hosted.dirty:
                hosted.version += 1
                hosted.publish()
        give_back()
        return {name: hosted.version for name, hosted in self.hosted.items()}

    async def close(self) -> None:
        """Cancel the requests that are open, and stop engines that run in processes of their own."""
        for task in list(self._running.values()):
            task.cancel()
        for hosted in self.hosted.values():
            await self._thread(hosted.close)

    def abandon(self) -> None:
        """Stop engines that run in processes of their own, without waiting for open requests."""
        for hosted in self.hosted.values():
            hosted.close()

    async def report(self) -> GroupReport:
        """Return samples by state and cause, engine counters, and versions."""
        engines = {name: dict(h.engine.counts) for name, h in self.hosted.items() if h.engine}
        return {
            "samples": self.store.summary(), "engines": engines, "at": time.time(),
            "versions": {name: hosted.version for name, hosted in self.hosted.items()},
            "vocabulary": vocabulary(self.tokenizer),
            "parameters": {n: sum(p.numel() for p in h.parameters.named().values()) for n, h in self.hosted.items()},
        }  # fmt: skip

    def _forget(self, episode: str) -> None:
        """Remove the conversations of this episode from the engine's memory."""
        for speaker in filter(None, (hosted.speaker for hosted in self.hosted.values())):
            speaker.chat.forget(episode)

    def _encode(self, text: str, judge: Hosted, sample: Sample) -> NDArray[np.int64]:
        """Return the tokens of a critic's context. If prompt and reply are too long together, its beginning is cut
        off.
        """
        room = judge.parameters.model.shape.context - sample.n_tokens
        return np.array(plain_of(self.tokenizer).encode(text, add_special_tokens=True)[-room:], np.int64)
