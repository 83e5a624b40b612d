"""The machine: which device computes, and with how many threads."""

from __future__ import annotations

import ctypes
import sys

import torch

SMALL = 30_000_000  # parameters: in smaller models, products are too short for a second thread
_ALL = torch.get_num_threads()
_chosen = 0  # number of threads that was set for the models loaded so far


def default_device() -> torch.device:
    """Return a GPU if there is one, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def device_of(name: str) -> torch.device:
    """Return a device by its name ("": the default). An error says which devices there are."""
    if not name:
        return default_device()
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"{name!r} is no device; give cpu, cuda, cuda:1 or mps") from error
    if device.type == "cuda" and not (device.index or 0) < torch.cuda.device_count():
        raise ValueError(f"{name!r} is not there: torch sees {torch.cuda.device_count()} GPUs")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ValueError("'mps' is not there: torch sees no Apple GPU")
    return device


def give_back() -> None:
    """Return freed memory to the system. glibc keeps it otherwise: gigabytes after an update by several threads."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def keep_little() -> None:
    """Let large tensors of this process go back to the system when they are freed. glibc else keeps them for a next one, and layers
    of unlike sizes, gathered one after the other, then hold several times what they need at once.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if set_option is not None:
        set_option(_MMAP_THRESHOLD, 1 << 20)


_MMAP_THRESHOLD = -3
"""Number of glibc's option for the size from which memory is mapped by itself; a fixed value does not grow."""


def use_threads(wanted: int | None, parameters: int) -> None:
    """Set the threads for a loaded model: the given number, else one for small models, and torch's number after a large
    one.

    More threads make the short products of a small model slower, tenfold while other programs run.
    """
    global _chosen
    _chosen = wanted or max(_chosen, 1 if parameters < SMALL else _ALL)
    torch.set_num_threads(_chosen)
