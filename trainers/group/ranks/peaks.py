"""Peaks of a process's memory, phase by phase: forward, backward and optimizer step of a learner."""

from __future__ import annotations

import resource
from pathlib import Path

import torch

from ..learning.update import Learner


def peak(device: torch.device) -> int:
    """Return the largest memory since the last call, in bytes, where the system tells; else since the process began."""
    if device.type == "cuda":
        most = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return most
    try:
        most = _account("VmHWM")
        Path("/proc/self/clear_refs").write_text("5")  # the mark falls to what is held now
        return most
    except (OSError, IndexError):
        return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def held(device: torch.device) -> int:
    """Return the memory of now, in bytes; 0 where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    try:
        return _account("VmRSS")
    except (OSError, IndexError):
        return 0


def _account(line: str) -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition(f"{line}:")[2].split()[0])


class Phases:
    """Peaks of each phase of a learner's updates, over all micro-batches."""

    def __init__(self, learner: Learner, device: torch.device) -> None:
        self.device = device
        self.peaks: dict[str, int] = {}
        model, optimiser = learner.parameters.model, learner.optimiser
        model.register_forward_pre_hook(lambda *_: self._end("between"))
        model.register_forward_hook(lambda *_: self._end("forward"))
        optimiser.register_step_pre_hook(lambda *_: self._end("backward"))
        optimiser.register_step_post_hook(lambda *_: self._end("step"))

    def _end(self, phase: str) -> None:
        """Note the peak of a phase that ends here. A backward pass ends where the next forward pass or the step begins."""
        name = "backward" if phase == "between" and self.peaks else phase
        self.peaks[name] = max(self.peaks.get(name, 0), peak(self.device))
