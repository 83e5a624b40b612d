"""A replay: an overlapped run played again from its log, step by step, with the same losses and weights to the bit.

What depended on time in the original stands in its log: which draws a step trained on, which attempt of an episode ended, and which
version drew which token. Everything else follows from config and seed in deterministic mode. So a replay is a synchronous run: each
step plays the draws of its batch, each token by the version that drew it then, and nothing depends on time any more.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING

from ....agents.basics.json_types import JsonView
from ....agents.basics.manifest import Damaged
from ....agents.engines.drawn_versions import Drawn, ReplayFailed
from ....agents.team import BoundTeam
from ....envs.core.drivers import side_by_side
from ...config.group_settings import GroupSpec
from ...config.reader import ConfigError, leaves, to_dict, written
from ...config.schema import RunConfig
from ..collect import Harvest
from .draw_record import EpisodeRecord, record_of
from .log import NAME, records
from .stream import Stream, exact

if TYPE_CHECKING:
    from ..stage import Stage

FREE = (
    "steps", "checkpoint_every", "checkpoints", "checkpoints_best", "restart_pause", "log.*", "eval.*", "watchdog", "restarts", "patience", "starved",
    "concurrency", "controllers", "runtime", "ray.*", "imports*", "retries",
)  # fmt: skip
"""Keys that do not affect training."""


@dataclass
class Recording:
    """Log of a run, as a replay reads it."""

    path: Path
    size: int
    """Number of draws in a batch."""
    tasks: dict[int, str] = field(default_factory=dict)  # by draw
    arrivals: dict[int, dict[str, EpisodeRecord]] = field(default_factory=dict)  # by draw
    batches: list[list[int]] = field(default_factory=list)  # by step
    figures: list[dict[str, float]] = field(default_factory=list)  # by step
    ended: bool = False

    @classmethod
    def of(cls, directory: Path, config: RunConfig) -> Recording:
        """Read the log of a run directory. A changed log is refused, and so is a log of another config."""
        recording = cls(directory / NAME, config.tasks_per_step)
        for number, line in enumerate(records(recording.path), 1):
            try:
                recording._take(line, config)
            except (KeyError, TypeError, IndexError, AttributeError) as error:
                raise Damaged(
                    f"{recording.path}, line {number}: it is not of this kind of log ({error!r})"
                ) from error
        del recording.batches[len(recording.figures) :]  # lines of a step that a kill interrupted
        if not recording.figures:
            raise ConfigError(f"{recording.path} holds no whole step: there is nothing to replay")
        return recording

    def _take(self, line: JsonView, config: RunConfig) -> None:
        match line["kind"]:
            case "begin" | "resume":
                self._compare(line["settings"], config)
            case "admit":
                self.tasks[line["draw"]] = line["task"]
            case "arrive":
                self.arrivals[line["draw"]] = {**line["episodes"]}
            case "batch":
                for draw in line["draws"]:
                    self.tasks[draw], self.arrivals[draw]
                self.batches.append(line["draws"])
            case "publish":
                self.figures.append(line["figures"])
                if len(self.figures) != line["step"] or len(self.batches) != line["step"]:
                    raise Damaged(
                        f"{self.path} is cut: step {line['step']} follows on {len(self.figures) - 1}"
                    )
            case "end":
                self.ended = True

    def _compare(self, then: Mapping[str, object], config: RunConfig) -> None:
        """Refuse a run whose settings changed during the run, because no single config repeats it."""
        now = settings_of(config)
        for key in {**then, **now}:
            if then.get(key) != now.get(key) and not any(fnmatch(key, free) for free in FREE):
                raise ConfigError(
                    f"{self.path}: the run went on with another {key} ({then.get(key)!r}, later {now.get(key)!r}), so it "
                    "cannot be replayed as one run"
                )

    def specs(self, specs: Mapping[str, GroupSpec], staleness: int) -> dict[str, GroupSpec]:
        """Return the groups, with engines that sample each token with the version of the original run."""
        versions: dict[str, list[list[int]]] = {}
        for draws in self.batches:
            for draw in draws:
                for sample, episode in self.arrivals[draw].items():
                    name = self.name(draw, sample, episode["attempt"])
                    versions |= {f"{name}/{node}": parts for node, parts in episode["versions"].items()}
        drawn = Drawn(versions, staleness + 1)
        return {name: replace(spec, engine_options={"replay": drawn}) for name, spec in specs.items()}

    def name(self, draw: int, sample: str, attempt: int) -> str:
        """Return the name of an episode."""
        return f"{draw // self.size}:{draw % self.size}.{sample}" + (f"~{attempt}" if attempt else "")


class Replay(Stream):
    """Source of the draws in the log, in place of newly admitted ones."""

    def __init__(self, run: Stage, recording: Recording) -> None:
        super().__init__(run)
        self.recording = recording

    def begin(self, team: BoundTeam, trained: Collection[str]) -> None:
        """Set the players, and open the replay's own log."""
        super().begin(team, trained)
        self.log.write("replay", of=str(self.recording.path))

    def admit(self) -> None:
        """Admit no draw: each step plays its own draws."""

    async def batch(self) -> Harvest:
        """Play the draws of the step, and compare each episode with the original one."""
        draws = self.recording.batches[self.run.step]
        self._follow(max(draws))
        with self.run.hosts.idle.waiting():
            played = await side_by_side(self._again(draw) for draw in draws)
        self.log.write("batch", step=self.run.step, draws=draws)
        harvest = Harvest()
        for more in played:
            harvest.add(more)
        return harvest

    def _follow(self, last: int) -> None:
        """Move the cursor as the original run did."""
        while self.admitted <= last:
            (task,) = self.run.cursor.take(1)
            then = self.recording.tasks[self.admitted]
            if task != then:
                raise ReplayFailed(f"draw {self.admitted} was of task {then!r}, and here it is of {task!r}")
            self.admitted += 1

    async def _again(self, draw: int) -> Harvest:
        then = self.recording.arrivals[draw]
        attempts = {int(sample): episode["attempt"] for sample, episode in then.items()}
        harvest = await self.play(draw, self.recording.tasks[draw], attempts)
        record = record_of(harvest, draw, self.size)
        for sample, episode in then.items():
            name = self.recording.name(draw, sample, episode["attempt"])
            if record["episodes"].get(sample) != episode:
                cause = (
                    harvest.cause if sample not in record["episodes"] else "its words or rewards are others"
                )
                raise ReplayFailed(f"episode {name} is not the one in {self.recording.path}: {cause}")
        return harvest

    def stepped(self, metrics: Mapping[str, float]) -> None:
        """Compare the metrics of the step with the original ones."""
        step = self.run.step
        then, now = self.recording.figures[step - 1], json.loads(json.dumps(exact(metrics)))
        for key in {**then, **now}:
            if repr(then.get(key)) != repr(now.get(key)):
                raise ReplayFailed(
                    f"step {step}: {key} is {now.get(key)!r}, and in {self.recording.path} it is {then.get(key)!r}"
                )
        super().stepped(metrics)

    @asynccontextmanager
    async def at_rest(self) -> AsyncIterator[None]:
        """Do nothing: no episode runs between the steps."""
        yield


def settings_of(config: RunConfig) -> dict[str, object]:
    """Return a config's settings by key, as a log holds them."""
    plain: dict[str, object] = json.loads(json.dumps(dict(leaves(written(to_dict(config))))))
    return plain
