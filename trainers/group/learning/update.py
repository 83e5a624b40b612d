"""The update: it takes mini-batches of sealed samples, changes the parameters, and returns metrics.

    for each mini-batch (one optimizer step)
        denominators over the whole of it
        for each micro-batch (what fits the token budget)
            packed forward -> Batch -> algorithm.loss -> backward
        check, clip, step

Gradients add up over micro-batches, because losses are shares of one global denominator. Computation may run in
bfloat16; parameters, gradients and optimizer stay float32 unless the settings say otherwise (optimizers/). Several ranks deal the micro-batches out, and the model is
sharded over them (ranks/); everything else each of them computes alike.

An optimizer step is a transaction: losses and gradients are checked before it. When one is not finite, the micro-batch is
saved for inspection, and `UpdateError` says where to look. The steps that the same update took before it stand, unless
`learning.snapshot` keeps a copy to go back to.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ....agents.answers import DecisionId
from ....agents.basics.json_types import JsonObject
from ....agents.model.decoder import Decoder
from ...algorithms.algorithm import Algorithm
from ...config.group_settings import Learning
from ...controller.checkpoint import Saved
from ...controller.statistics.table import Signal
from ..optimizers.adam import check_moments, make_optimizer
from ..sample_store import Sample
from .batch import Batch, Thin, thin_of, tokens_per_unit, weights_of
from .dealing import ALONE, Peers, deal
from .packing import lay
from .parameters import Parameters
from .targets import Discount, Target, moved, moving, targets

T = TypeVar("T")
Loss = Callable[[Batch, Mapping[str, float]], tuple[Tensor, dict[str, float]]]


class UpdateError(RuntimeError):
    """Raised when an update fails. The message says which parameters are left."""


def no_reference(policy: str) -> UpdateError:
    """Return the error of an algorithm that needs a reference, for a policy without one."""
    return UpdateError(f"the algorithm needs a reference and policy {policy!r} has none: set reference: true")


class Learner:
    """The optimizer of one policy, and its updates."""

    def __init__(
        self,
        policy: str,
        parameters: Parameters,
        settings: Learning,
        *,
        reference: Parameters | None = None,
        inspection: Path | None = None,
        peers: Peers = ALONE,
        seed: int = 0,
    ) -> None:
        self.peers = peers
        self.policy, self.parameters, self.settings = policy, parameters, settings
        self.reference, self.inspection = reference, inspection
        settings.rate(settings.warmup)  # a schedule without an end fails here, not in the first update
        self.trained = list(parameters.named().values())
        for parameter in self.trained:
            parameter.requires_grad_(True)
        self.optimiser = make_optimizer(self.trained, settings, f"{seed}/{policy}")
        self.steps = 0
        self._began = 0

    def update(
        self,
        algorithm: Algorithm,
        signals: Mapping[DecisionId, Signal],
        minibatches: Sequence[Sequence[Sample]],
    ) -> dict[str, float]:
        """Make one optimizer step per mini-batch. Metrics are means over the mini-batches."""
        if not minibatches or not all(minibatches):
            raise UpdateError(
                f"policy {self.policy!r}: an update needs samples, got {list(map(len, minibatches))}"
            )
        started = time.perf_counter()
        # a single step changes nothing before its checks have passed, so it needs no copy
        before = self._snapshot() if self.settings.snapshot and len(minibatches) > 1 else None
        self._began = self.steps
        try:
            self._prepare(algorithm, signals, minibatches)
            steps = [self._step(algorithm, signals, samples) for samples in minibatches]
        except Exception:
            self.optimiser.zero_grad(set_to_none=True)
            if before is not None:
                self._restore(before)
            raise
        seconds = time.perf_counter() - started
        tokens = float(sum(sample.n_tokens for samples in minibatches for sample in samples))
        context = float(sum(len(sample.prompt) for samples in minibatches for sample in samples))
        return {
            **_combine(steps),
            "tokens": tokens,
            "steps": float(self.steps),
            "time/update": seconds,
            "time/tokens_per_second": (tokens + context) / seconds,
        }

    # -- before the first step ------------------------------------------------------------------------------------

    def _prepare(
        self,
        algorithm: Algorithm,
        signals: Mapping[DecisionId, Signal],
        minibatches: Sequence[Sequence[Sample]],
    ) -> None:
        """Compute log-probs at the start of the update, for samples that are not in the first optimizer step."""
        if self.parameters.is_critic:
            return
        everyone = {sample.id: sample for samples in minibatches for sample in samples}
        computed = [
            {samples[i].id for i in moved(signals, samples)}
            if algorithm.skips_still
            else {s.id for s in samples}
            for samples in minibatches
        ]
        later = set[DecisionId]().union(*computed[1:]) - computed[0]
        self.measure_proximal([sample for id, sample in everyone.items() if id in later])
        if algorithm.needs.reference:
            self.measure_reference(list(everyone.values()))

    def measure_proximal(self, samples: Sequence[Sample]) -> None:
        """Compute `proximal` of samples without it: log-probs under the present parameters."""
        missing = [sample for sample in samples if sample.proximal_at != self.steps]
        for sample, logp in zip(missing, self._logprobs(self.parameters, missing), strict=True):
            sample.proximal, sample.proximal_at = logp, self.steps

    def measure_reference(self, samples: Sequence[Sample]) -> None:
        """Compute `reference` of samples without it."""
        if self.reference is None:
            raise no_reference(self.policy)
        missing = [sample for sample in samples if sample.reference is None]
        for sample, logp in zip(missing, self._logprobs(self.reference, missing), strict=True):
            sample.reference = logp

    def measure_values(self, samples: Sequence[Sample]) -> None:
        """Compute `values` of a critic: before every token, and after the last one."""
        own: dict[int, NDArray[np.float32]] = {}
        for micro, counts in self._dealt(samples, critic=True):
            chosen = [samples[i] for i in micro]
            with torch.no_grad():
                rows = lay(chosen, whole=True, critic=True)
                before, after = self.parameters.values(rows, self.settings.dtype)
            parts = before.split([s.n_tokens for s in chosen])
            for index, values, end in zip(micro, parts, after, strict=True):
                if counts:
                    own[index] = torch.cat((values, end[None])).numpy()
        for index, values in self._of_all(own).items():
            samples[index].values = values

    @torch.no_grad()
    def _logprobs(self, parameters: Parameters, samples: Sequence[Sample]) -> list[NDArray[np.float32]]:
        own: dict[int, NDArray[np.float32]] = {}
        for micro, counts in self._dealt(samples):
            chosen = [samples[i] for i in micro]
            logp, _ = parameters.logprobs(lay(chosen), self.settings.dtype)
            parts = logp.split([s.n_tokens for s in chosen])
            own |= {i: part.numpy() for i, part in zip(micro, parts, strict=True) if counts}
        logprobs = self._of_all(own)
        return [logprobs[i] for i in range(len(samples))]

    # -- ranks ----------------------------------------------------------------------------------------------------

    def _dealt(self, samples: Sequence[Sample], critic: bool = False) -> Iterator[tuple[list[int], bool]]:
        """Yield this rank's micro-batches. All ranks must take part in a pass. So a rank without one repeats the
        shortest sample of the others with weight 0.
        """
        apart = self.parameters.roles
        for parts in deal(samples, self.settings.micro_tokens, self.peers.size, critic, apart):
            own = parts[self.peers.index]
            dealt = (index for part in parts for index in part)
            shortest = min(dealt, key=lambda i: (len(samples[i].prompt) + samples[i].n_tokens, i))
            yield own or [shortest], bool(own)

    def _of_all(self, own: dict[int, T]) -> dict[int, T]:
        """Merge what every rank computed."""
        return {key: value for part in self.peers.gather(own) for key, value in part.items()}

    # -- one optimiser step ---------------------------------------------------------------------------------------

    def _step(
        self, algorithm: Algorithm, signals: Mapping[DecisionId, Signal], samples: Sequence[Sample]
    ) -> dict[str, float]:
        loss_of = _critic_loss(algorithm) if self.parameters.is_critic else algorithm.loss
        needs = algorithm.needs
        goals = targets(samples, signals, Discount(needs.gamma, needs.lam, needs.kl_reward))
        unseen = 0 if self.settings.thinking or self.parameters.is_critic else 1
        # in a decision whose thinking is not trained, the thinking tokens leave the denominators too
        thin = [thin_of(sample, signals[sample.id], unseen * sample.thinking) for sample in samples]
        denominators, units = algorithm.denominators(thin), tokens_per_unit(thin)
        if algorithm.skips_still and not self.parameters.is_critic:
            # denominators stay those of all, and so does the gradient
            samples, goals, thin = moving(signals, samples, goals, thin)
            denominators = {**denominators, "computed": float(sum(row.n_tokens for row in thin))}
        self.optimiser.zero_grad(set_to_none=True)
        shares: list[dict[str, float]] = []
        failure, batch, counted = "", None, set[str]()
        for micro, counts in self._dealt(samples, self.parameters.is_critic):
            batch = self._forward(
                [samples[i] for i in micro], [goals[i] for i in micro], [thin[i] for i in micro], units
            )
            loss, metrics = loss_of(batch, denominators)
            if not counts:
                (loss * 0.0).backward()
                continue
            failure = failure or self._fault(loss, batch, "loss")
            if failure and self.peers.size == 1:
                break
            loss.backward()
            counted.update(batch.ids)
            shares.append({"loss": loss.item(), **{name: float(value) for name, value in metrics.items()}})
        shares = self._agree(shares, failure, [sample for sample in samples if sample.id in counted], samples)
        norm = torch.nn.utils.clip_grad_norm_(self.trained, self.settings.clip_norm or math.inf)
        if hasattr(norm, "full_tensor"):  # a DTensor: of all shards
            norm = norm.full_tensor()
        if failure := self._fault(norm, batch, "gradient norm"):
            raise UpdateError(failure)
        rate = self.settings.rate(self.steps)
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        self.optimiser.step()
        self.steps += 1
        extra = {"explained_variance": _explained(samples, goals)} if self.parameters.is_critic else {}
        return {
            **_add(shares),
            **extra,
            "grad_norm": norm.item(),
            "lr": rate,
            "micro_batches": float(len(shares)),
        }

    def _forward(
        self,
        samples: Sequence[Sample],
        goals: Sequence[Target],
        thin: Sequence[Thin],
        units: Mapping[str, int],
    ) -> Batch:
        """Run the packed forward pass of one micro-batch. Return everything that its loss may use."""
        critic, settings = self.parameters.is_critic, self.settings
        ends = critic and any(target.after is not None for target in goals)
        rows = lay(samples, whole=ends, critic=critic)
        behaviour = _flat([sample.behaviour for sample in samples])
        values = old_values = entropy = after = None
        if critic:
            values, after = self.parameters.values(rows, settings.dtype, settings.checkpointing)
            old_values = _flat([_known(sample, "values")[:-1] for sample in samples])
            logp = proximal = behaviour
        else:
            logp, entropy = self.parameters.logprobs(rows, settings.dtype, settings.checkpointing)
            proximal = self._proximal(samples, logp)
        return Batch(
            logp=logp,
            behaviour=behaviour,
            proximal=proximal,
            advantage=_flat([target.advantage for target in goals]),
            weight=weights_of(samples, thin, rows.sequence),
            sequence=rows.sequence,
            n_sequences=len(samples),
            unit_tokens=torch.tensor([float(units[row.unit or row.id]) for row in thin])[rows.sequence],
            entropy=entropy,
            reference=_reference(samples),
            values=values,
            old_values=old_values,
            returns=_flat([_returns(s, t) for s, t in zip(samples, goals, strict=True)]) if critic else None,
            after=after if ends else None,
            after_returns=torch.tensor([math.nan if t.after is None else t.after for t in goals])
            if ends
            else None,
            ids=tuple(sample.id for sample in samples),
        )

    def _proximal(self, samples: Sequence[Sample], logp: Tensor) -> Tensor:
        """Return the log-probs at the start of the update. In its first optimizer step they equal `logp`."""
        for sample, part in zip(samples, logp.detach().split([s.n_tokens for s in samples]), strict=True):
            if sample.proximal_at != self._began:
                sample.proximal, sample.proximal_at = part.numpy(), self._began
        return _flat([_known(sample, "proximal") for sample in samples])

    def _agree(
        self, shares: list[dict[str, float]], failure: str, own: Sequence[Sample], samples: Sequence[Sample]
    ) -> list[dict[str, float]]:
        """Exchange the results of one mini-batch between ranks. A failure of one rank is raised on all."""
        if self.peers.size == 1:
            if failure:
                raise UpdateError(failure)
            return shares
        news = {s.id: s.proximal for s in own if s.proximal_at == self._began}
        everyone = self.peers.gather((shares, failure, news))
        if failures := [failure for _, failure, _ in everyone if failure]:
            raise UpdateError(failures[0])
        proximal = {id: logp for _, _, own in everyone for id, logp in own.items()}
        for sample in samples:
            if sample.id in proximal:
                sample.proximal, sample.proximal_at = proximal[sample.id], self._began
        return [share for own, _, _ in everyone for share in own]

    # -- all or nothing -------------------------------------------------------------------------------------------

    def _snapshot(self) -> tuple[list[Tensor], JsonObject, int]:
        own = [parameter.detach().clone() for parameter in self.trained]
        return own, copy.deepcopy(self.optimiser.state_dict()), self.steps

    @torch.no_grad()
    def _restore(self, before: tuple[list[Tensor], JsonObject, int]) -> None:
        for parameter, own in zip(self.trained, before[0], strict=True):
            parameter.copy_(own)
        self.optimiser.load_state_dict(before[1])
        self.steps = before[2]

    def _fault(self, number: Tensor, batch: Batch | None, what: str) -> str:
        """Return what is wrong with a number that is not finite, after saving its micro-batch. Return "" for a finite
        number.
        """
        if math.isfinite(number.item()):
            return ""
        where = "nowhere (the group has no folder)"
        if self.inspection is not None:
            self.inspection.mkdir(parents=True, exist_ok=True)
            rank = f"-rank{self.peers.index}" if self.peers.size > 1 else ""
            file = self.inspection / f"{self.policy}-step{self.steps}{rank}.pt"
            tensors = {n: _detached(getattr(batch, n, None)) for n in Batch.__dataclass_fields__}
            tensors["ids"] = [
                str(id) for id in getattr(batch, "ids", ())
            ]  # plain data, so that reading it runs no code
            torch.save(
                {"policy": self.policy, "step": self.steps, what: number.item(), "batch": tensors}, file
            )
            where = str(file)
        taken = 0 if self.settings.snapshot else self.steps - self._began
        left = (
            f"as after the {taken} optimiser steps that this update took before"
            if taken
            else "as before this update"
        )
        return (
            f"policy {self.policy!r}, optimiser step {self.steps}: the {what} is {number.item()}. The parameters are "
            f"{left}; its micro-batch is saved in {where} (torch.load). Look for extreme advantages "
            "or log-ratios there, or lower the learning rate."
        )

    # -- state ----------------------------------------------------------------------------------------------------

    def rest(self) -> None:
        """Free what no later call needs: gradients."""
        self.optimiser.zero_grad(set_to_none=True)

    def published(self) -> Decoder:
        """Return the present model, for an engine."""
        return self.parameters.model

    def state_dict(self) -> dict[str, object]:
        return {"optimiser": self.optimiser.state_dict(), "steps": self.steps}

    def load_state_dict(self, state: Saved) -> None:
        settings = [
            {k: v for k, v in group.items() if k != "params"} for group in self.optimiser.param_groups
        ]
        check_moments(self.optimiser, state["optimiser"]["state"])
        self.optimiser.load_state_dict(state["optimiser"])
        for group, own in zip(self.optimiser.param_groups, settings, strict=True):
            group.update(own)  # the present settings, which a resume may have changed
        self.steps = state["steps"]


def _critic_loss(algorithm: Algorithm) -> Loss:
    loss: Loss | None = getattr(algorithm, "critic_loss", None)
    if loss is None:
        raise UpdateError(f"algorithm {algorithm.name!r} has no critic_loss: it cannot train a critic")
    return loss


def _reference(samples: Sequence[Sample]) -> Tensor | None:
    parts = [sample.reference for sample in samples if sample.reference is not None]
    return _flat(parts) if len(parts) == len(samples) else None


def _flat(parts: Sequence[NDArray[np.float32]]) -> Tensor:
    return torch.from_numpy(np.concatenate(parts).astype(np.float32, copy=False))


def _known(sample: Sample, what: str) -> NDArray[np.float32]:
    value: NDArray[np.float32] | None = getattr(sample, what)
    if value is None:
        raise UpdateError(f"sample {sample.id!r} has no {what}: ask `values` for it before the update")
    return value


def _returns(sample: Sample, target: Target) -> NDArray[np.float32]:
    if target.returns is None:
        raise UpdateError(
            f"decision {sample.id!r}: its signal gives the critic no target (neither tail nor target)"
        )
    return target.returns


def _explained(samples: Sequence[Sample], goals: Sequence[Target]) -> float:
    """Return the share of the variance of the returns over tokens that the critic's values explain.

    1: all of it. 0: no better than the mean of the returns. Below 0: worse than the mean.
    """
    returns = np.concatenate([_returns(s, t) for s, t in zip(samples, goals, strict=True)])
    missed = returns - np.concatenate([_known(sample, "values")[:-1] for sample in samples])
    spread = float(returns.var())
    return 1.0 - float(missed.var()) / spread if spread > 0 else 0.0


def _detached(value: object) -> object:
    return value.detach() if isinstance(value, Tensor) else value


def _add(shares: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the sums of the micro-batches' shares of one mini-batch, and maxima of metrics named `max_…`."""
    names = dict.fromkeys(name for share in shares for name in share)
    columns = {name: [share[name] for share in shares if name in share] for name in names}
    return {
        name: max(parts) if name.startswith("max_") else math.fsum(parts) for name, parts in columns.items()
    }


def _combine(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the means over the mini-batches of one update, and maxima of metrics named `max_…`."""
    columns = {name: [step[name] for step in steps] for name in steps[0]}
    return {
        name: max(parts) if name.startswith("max_") else math.fsum(parts) / len(parts)
        for name, parts in columns.items()
    }
