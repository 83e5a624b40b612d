"""Sampling settings as vLLM reads them, and the tokens that it reports as allowed."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from ..sampling import SamplingParams, truncates

if TYPE_CHECKING:
    import vllm


COLDEST = 0.01
"""Lowest temperature of vLLM above 0."""


def to_vllm(
    params: SamplingParams, room: int, stop_ids: Collection[int], *, masks: bool, untracked: bool
) -> vllm.SamplingParams:
    """Return vLLM's settings of one request. `room` is the number of tokens that the context has left. `masks`: vLLM was
    started with `return_sampling_mask`. `untracked`: truncated samples are allowed without masks.
    """
    if 0 < params.temperature < COLDEST:
        raise ValueError(
            f"sampling.temperature={params.temperature}: vLLM would sample at {COLDEST} in its place; set that or more, or 0"
        )
    heat, top_k = params.temperature, params.top_k
    if masks and not heat:  # vLLM refuses greedy requests then, because they have no mask
        heat, top_k = 1.0, 1
    if masks and not top_k:
        raise ValueError(
            "with return_sampling_mask vLLM needs a top_k, which bounds the tokens that it reports: set sampling.top_k, "
            "such as 1000"
        )
    if truncates(params) and heat and not (masks or untracked):
        raise ValueError(
            "vLLM does not tell which tokens top_k and top_p left, so such samples cannot be trained on; "
            "sample with top_p=1 and top_k=0, set return_sampling_mask=True (on a GPU), or pass "
            "untracked_truncation=True for evaluation"
        )
    from vllm import SamplingParams as Theirs
    from vllm.sampling_params import RequestOutputKind

    return Theirs(
        temperature=heat,
        top_p=params.top_p,
        top_k=top_k or -1,
        max_tokens=min(params.max_tokens, room),
        stop=list(params.stop) or None,
        include_stop_str_in_output=True,
        stop_token_ids=sorted(stop_ids),
        ignore_eos=True,  # else vLLM adds the end tokens of the model's files to these
        seed=params.seed,
        logprobs=0,  # of the sampled token alone
        skip_special_tokens=False,
        spaces_between_special_tokens=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def reported_tokens(completion: vllm.CompletionOutput) -> list[tuple[int, ...] | None]:
    """Return the tokens that were allowed at each token of a reply, as vLLM reports them."""
    told = completion.sampling_mask
    if told is None or len(told.token_ids) != len(completion.token_ids):
        raise RuntimeError("vLLM told no sampling mask for a reply, though return_sampling_mask is set")
    return [tuple(ids) for ids in told.token_ids]
