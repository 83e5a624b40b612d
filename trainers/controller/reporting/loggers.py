"""Loggers of a run's figures: `metrics.jsonl` always; console, TensorBoard, W&B and trackio as configured.

`metrics.jsonl` has one line per event: `begin`, `step`, `validation`, `end`. A logger that fails to start
is an error at once (the user asked for it); none of them can change what is trained.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias, TypedDict

from ....agents.basics.json_types import JsonObject
from ....agents.basics.manifest import Damaged, checksum
from ....agents.basics.named_parts import Registry
from ....rewards.monitors import Alarm
from ...config.reader import to_dict, written
from ...config.schema import RunConfig
from .exporters import OpenTelemetry, Prometheus

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from ....envs.core.arena import Arena
    from .console import Console
    from .progress import Progress


BookRow: TypeAlias = JsonObject
"""Row of `metrics.jsonl`: `kind`, `step`, `time`, and metrics by name."""


class BookMark(TypedDict):
    """Position of the end of `metrics.jsonl`, for a checkpoint."""

    bytes: int
    sha256: str


class Sink(Protocol):
    """Interface of a logger."""

    def log(self, kind: str, step: int, figures: Mapping[str, float]) -> None:
        """Take the metrics of one event."""

    def close(self, ending: str) -> None:
        """Close the logger at the end of the run."""


class Logbook:
    """Writer of `metrics.jsonl`, which also passes metrics to the other loggers."""

    def __init__(self, directory: Path, config: RunConfig, arena: Arena) -> None:
        self.path, self.config, self.arena = directory / "metrics.jsonl", config, arena
        directory.mkdir(parents=True, exist_ok=True)
        self.sinks: list[Sink] = [LOGGERS.find(name)(directory, config) for name in loggers_of(config)]
        self.console = _console(directory, config, arena.headline)
        if self.console is not None:
            self.sinks.insert(0, self.console)

    def begin(self, step: int = 0, mark: BookMark | None = None) -> None:
        """Open `metrics.jsonl`. A resumed run removes the rows after its checkpoint's `mark`, because those steps are
        repeated.
        """
        losses: list[BookRow] = []  # rows of deaths stay, also when their steps are repeated
        if mark is None:
            with suppress(Damaged, OSError):
                losses = _losses(self.path)
            self.path.unlink(missing_ok=True)  # a run that ended before its first checkpoint begins again
        elif not self.path.exists():
            print(f"unitymas: {self.path} is gone; the curves begin at step {step}", file=sys.stderr)
        elif self.path.stat().st_size < mark["bytes"] or checksum(self.path, mark["bytes"]) != mark["sha256"]:
            raise Damaged(
                f"{self.path} is damaged: it is not what the checkpoint of step {step} was written beside. Move it away "
                "to go on without the curves so far"
            )
        else:
            losses = _losses(self.path)
            os.truncate(self.path, mark["bytes"])
            if self.console is not None:
                self.console.recall(rows_of(self.path))
        data = self.arena.data
        self._line(
            "begin", step,
            {
                "env_id": self.arena.env_id, "data": data.name, "fingerprint": data.fingerprint,
                "headline": self.arena.headline, "resumed": mark is not None, "config": written(to_dict(self.config)),
            },
        )  # fmt: skip
        self.lost(step, losses)

    def mark(self) -> BookMark:
        """Return the position of the end of `metrics.jsonl`, for a checkpoint."""
        with open(self.path, "rb+") as file:
            os.fsync(file.fileno())
        return {"bytes": self.path.stat().st_size, "sha256": checksum(self.path)}

    def stepped(self, step: int, figures: Mapping[str, float]) -> None:
        """Log the metrics of a step."""
        self._line("step", step, figures)
        for sink in self.sinks:
            sink.log("step", step, figures)

    def validated(self, step: int, figures: Mapping[str, float]) -> None:
        """Log the metrics of a validation."""
        self._line("validation", step, figures)
        for sink in self.sinks:
            sink.log("validation", step, figures)

    def alarmed(self, alarm: Alarm) -> None:
        """Log an alarm of a monitor."""
        self._line(
            "alarm", alarm.step, {"monitor": alarm.monitor, "value": alarm.value, "message": alarm.message}
        )
        print(f"alarm, {alarm}", file=sys.stderr, flush=True)

    def lost(self, step: int, losses: Sequence[BookRow]) -> None:
        """Log the deaths of groups after which the run continued, each once, also those after the checkpoint's mark."""
        logged = {row.get("lost_at") for row in _losses(self.path)} if losses else set()
        for loss in losses:
            if loss.get("lost_at") not in logged:
                self._line("loss", step, loss)

    def say(self, text: str) -> None:
        """Print a message on the console."""
        if self.console is not None:
            self.console.say(text)

    def progressed(self, progress: Progress) -> None:
        """Show the progress within a step."""
        if self.console is not None:
            self.console.progressed(progress)

    def finish(self, ending: str) -> None:
        """Log how the run ended."""
        with suppress(OSError):  # on a full disk, the original error is reported in any case
            if self.path.exists():  # otherwise the run never began, and the directory can be used again
                self._line("end", -1, {"ending": ending})
        for sink in self.sinks:
            sink.close(ending)

    def _line(self, kind: str, step: int, figures: Mapping[str, object]) -> None:
        row = {"kind": kind, "step": step, "time": round(time.time(), 3), **figures}
        with open(self.path, "a") as file:
            file.write(json.dumps(row) + "\n")


def rows_of(path: Path) -> list[BookRow]:
    """Return the rows of a `metrics.jsonl`. A torn last line is left out. Other damage is an error with the number of
    the line.
    """
    rows: list[BookRow] = []
    for number, line in enumerate(path.read_text(errors="replace").splitlines(keepends=True), 1):
        if not line.endswith("\n"):
            break
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            raise Damaged(f"{path}, line {number}: this is not a line of JSON ({error})") from error
    return rows


def _losses(path: Path) -> list[BookRow]:
    """Return the rows of deaths in a `metrics.jsonl`."""
    told = ("kind", "step", "time")
    return [{k: v for k, v in row.items() if k not in told} for row in rows_of(path) if row["kind"] == "loss"]


def _console(directory: Path, config: RunConfig, headline: str) -> Console | None:
    log = config.log
    if log.console == "off":
        return None
    from .console import Console

    live = log.console == "live" or (log.console == "auto" and sys.stdout.isatty())
    return Console(config, headline, live=live, directory=directory)


def loggers_of(config: RunConfig) -> list[str]:
    """Return the names of the loggers that a config selects."""
    log = config.log
    switched = {
        "tensorboard": log.tensorboard,
        "wandb": log.wandb not in ("", "off"),
        "trackio": log.trackio not in ("", "off"),
        "prometheus": log.prometheus != 0,
        "otlp": log.otlp not in ("", "off"),
    }
    return [*(name for name, on in switched.items() if on), *log.also]


class _TensorBoard:
    """Logger that writes TensorBoard's event files into the run's directory."""

    def __init__(self, directory: Path, config: RunConfig) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError("log.tensorboard: pip install 'unitymas[loggers]' first") from error
        self.writer: SummaryWriter = SummaryWriter(str(directory / "tensorboard"))

    def log(self, kind: str, step: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self.writer.add_scalar(name if kind == "step" else f"{kind}/{name}", value, step)

    def close(self, ending: str) -> None:
        self.writer.close()


class _Tracker:
    """Logger to a project of Weights & Biases, or of trackio, which has the same interface."""

    def __init__(self, module: str, directory: Path, config: RunConfig) -> None:
        import importlib

        project = getattr(config.log, module)
        try:
            self.api = importlib.import_module(module)
        except ImportError as error:
            raise ImportError(f"log.{module}: pip install {module} first") from error
        self.api.init(project=project, name=directory.name, config=written(to_dict(config)))

    def log(self, kind: str, step: int, figures: Mapping[str, float]) -> None:
        self.api.log({(k if kind == "step" else f"{kind}/{k}"): v for k, v in figures.items()}, step=step)

    def close(self, ending: str) -> None:
        self.api.finish()


LOGGERS: Registry[Callable[[Path, RunConfig], Sink]] = Registry(
    "logger",
    "unitymas.loggers",
    own={
        "tensorboard": _TensorBoard,
        "wandb": partial(_Tracker, "wandb"),
        "trackio": partial(_Tracker, "trackio"),
        "prometheus": Prometheus,
        "otlp": OpenTelemetry,
    },
)
"""Loggers by name. Each is constructed with the run's directory and config."""
