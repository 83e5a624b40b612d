"""`unitymas train --replay RUN`: an overlapped run played again from its log.

    run = replay("runs/mine", "runs/again")       # raises where anything differs

overlap/replay.py says how. The comparison covers each episode, the figures of each update, and the exported weights.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ...agents.basics.manifest import Damaged, checksum
from ...agents.engines.drawn_versions import ReplayFailed
from ...envs.core.drivers import run_sync
from ..config.resolve import load_imports
from ..config.schema import ConfigError
from .overlap.fitting import check_replay
from .overlap.replay import Recording
from .reporting.loggers import rows_of
from .resume import read_config
from .run import Run


def replay(directory: str | Path, out: str | Path | None = None) -> Run:
    """Replay the run in `directory` into `out` (default: beside it). Raise `ReplayFailed` at the first difference."""
    original = Path(directory)
    config = read_config(original)
    load_imports({"imports": config.imports})
    check_replay(config)
    recording = Recording.of(original, config)
    check_whole(original, recording)
    where = Path(out) if out is not None else original.with_name(f"{original.name}-replay")
    if (where / "metrics.jsonl").exists():
        raise ConfigError(f"{where} already holds a run; name another directory (--dir)")
    settings = replace(config, steps=len(recording.figures), runtime="local", checkpoint_every=0)
    run = Run(settings, where, recording=recording)
    run_sync(run.train(), interrupted=run.interrupts)
    compare_weights(original, where, recording)
    return run


def check_whole(original: Path, recording: Recording) -> None:
    """Refuse a log that has fewer steps than the run's metrics."""
    rows = rows_of(original / "metrics.jsonl")
    steps = max((row["step"] for row in rows if row["kind"] == "step"), default=0)
    if len(recording.figures) < steps:
        raise Damaged(
            f"{recording.path} is cut: it holds {len(recording.figures)} steps, and metrics.jsonl has {steps}"
        )
    if rows and rows[-1].get("ending") == "done" and not recording.ended:
        raise Damaged(f"{recording.path} is cut: the run is done, and the log does not say so")


def compare_weights(original: Path, where: Path, recording: Recording) -> None:
    """Compare the exported policies, if the original run was finished."""
    if not recording.ended:
        return
    for file in sorted((original / "policies").rglob("*.safetensors")):
        twin = where / file.relative_to(original)
        if not twin.exists() or checksum(twin) != checksum(file):
            raise ReplayFailed(f"{twin} is not equal to {file}")
