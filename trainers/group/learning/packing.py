"""Micro-batches from samples: a token budget, and exact prefixes computed once.

Samples of one prompt, turns of one conversation and prompts under one system text share their first tokens. Sorting by
token ids puts such samples next to each other, so they fall into one micro-batch. There
`agents.model.attention.pack` lays their common prefix once. The budget counts the tokens that are really laid,
because only those are computed.

The last token of a reply is not fed to the model: it is predicted, and nothing is predicted from it. A critic that
must give the value *after* the reply asks for that token with `whole=True`.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ....agents.model.attention import Packed, pack, packed_length
from ....agents.model.logprobs import Support
from ..sample_store import Sample

SHARE = 16
"""Fewest tokens of a shared prefix. A shorter prefix is computed twice, because a segment of its own costs more."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Packed samples, and the rows from which tokens are predicted. `T` trained tokens, flat, in the order of
    samples.
    """

    packed: Packed
    places: Tensor
    """Rows of the packed hidden states from which the trained tokens are predicted: (T,)."""
    after: Tensor
    """Rows that have attended to the whole reply: (S,). Empty unless packed with `whole`."""
    targets: Tensor
    temperature: Tensor
    support: Support | None
    sequence: Tensor
    """Index of the sample that each token belongs to: (T,)."""
    role: str
    """Role of the samples, if roles have adapters of their own."""


def micro_batches(
    samples: Sequence[Sample], budget: int, critic: bool = False, apart: Collection[str] = ()
) -> list[list[int]]:
    """Cut samples into lists of indices, each with at most `budget` computed tokens. A longer sample is alone in its
    list.

    Samples of a role in `apart` are never with samples of other roles.
    """
    # sorted by token ids, a sample shares its longest prefix with one of its neighbours
    whole = [tokens(sample, critic) for sample in samples]
    cut: list[list[int]] = []
    laid = 0
    before: list[int] = []
    kind = [sample.role if sample.role in apart else "" for sample in samples]
    for index in sorted(range(len(samples)), key=lambda i: (kind[i], whole[i], i)):
        sequence = whole[index]
        common = len(os.path.commonprefix([before, sequence]))
        cost = len(sequence) - (common if common >= SHARE else 0)
        if not cut or laid + cost > budget or kind[index] != kind[cut[-1][0]]:
            cut.append([])
            laid, cost = 0, len(sequence)
        cut[-1].append(index)
        laid, before = laid + cost, sequence
    return [part for micro in cut for part in _fitting(micro, whole, budget)]


def _fitting(micro: list[int], whole: list[list[int]], budget: int) -> list[list[int]]:
    """Halve a micro-batch until it fits. The costs of neighbours are nearly exact: a prefix of all samples may be too
    short to share.
    """
    if len(micro) == 1 or max(_costs([whole[i] for i in micro])) <= budget:
        return [micro]
    half = len(micro) // 2
    return _fitting(micro[:half], whole, budget) + _fitting(micro[half:], whole, budget)


def _costs(sequences: list[list[int]]) -> tuple[int, int]:
    """Count the computed tokens, with and without the last token of each reply."""
    return packed_length(sequences, SHARE), packed_length([s[:-1] for s in sequences], SHARE)


def lay(samples: Sequence[Sample], whole: bool = False, critic: bool = False, share: bool = True) -> Rows:
    """Pack samples into one row of tokens, and mark which row predicts which token."""
    sequences = [tokens(sample, critic) for sample in samples]
    packed = pack([s if whole else s[:-1] for s in sequences], SHARE if share else None)
    lengths = [sample.n_tokens for sample in samples]
    # the row at position p predicts the token at p + 1, so n reply tokens come from rows len - n - 1 … len - 2
    places = [
        rows[len(s) - n - 1 : len(s) - 1] for rows, s, n in zip(packed.rows, sequences, lengths, strict=True)
    ]
    per_sample = torch.tensor(lengths)  # (S,)
    heat = torch.tensor([sample.temperature for sample in samples], dtype=torch.float32)
    return Rows(
        packed=packed,
        places=torch.cat(places),
        after=torch.stack([rows[-1] for rows in packed.rows]) if whole else torch.empty(0, dtype=torch.long),
        targets=torch.cat([torch.from_numpy(sample.reply) for sample in samples]),
        temperature=heat.repeat_interleave(per_sample),
        support=Support.of([ids for sample in samples for ids in _support(sample)]),
        sequence=torch.arange(len(samples)).repeat_interleave(per_sample),
        role=samples[0].role,
    )


def tokens(sample: Sample, critic: bool = False) -> list[int]:
    """Return the tokens of a sample that the model reads. A critic may have a prompt of its own."""
    own = sample.critic_prompt if critic and sample.critic_prompt is not None else sample.prompt
    return [*own.tolist(), *sample.reply.tolist()]


def _support(sample: Sample) -> Sequence[Sequence[int] | None]:
    return sample.support if sample.support is not None else [None] * sample.n_tokens
