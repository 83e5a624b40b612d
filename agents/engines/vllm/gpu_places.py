"""GPUs that vLLM takes, and from which of them weights can be sent. Importable without vLLM and without torch."""

from __future__ import annotations

import math
from collections.abc import Mapping

KINDS = ("tensor", "pipeline", "data", "prefill_context")
"""Kinds of vLLM's parallelism of which each multiplies the workers."""


def gpus_of(options: Mapping[str, object]) -> int:
    """Return the number of GPUs that vLLM takes with these options: one for each of its workers."""
    sizes = (options.get(f"{kind}_parallel_size") for kind in KINDS)
    return math.prod(size for size in sizes if isinstance(size, int))


def check_sender(transfer: str, sender: int, workers: int) -> None:
    """Refuse a transfer that the GPUs do not allow. vLLM takes the first ones, and weights are sent from number `sender`."""
    if transfer == "ipc" and (sender or workers > 1):
        raise ValueError(
            f"transfer=ipc hands over the memory of one GPU, and the policies learn on cuda:{sender} while vLLM takes "
            f"{workers} from cuda:0 on: set transfer=shared, or nccl from a GPU of its own"
        )
    if transfer == "nccl" and sender < workers:
        raise ValueError(
            f"transfer=nccl needs a GPU that vLLM does not use, and the policies learn on cuda:{sender} while vLLM takes "
            f"{workers} from cuda:0 on: set groups.*.device=cuda:{workers}, or transfer=shared"
        )
