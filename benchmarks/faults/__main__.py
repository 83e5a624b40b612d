"""Kill processes of runs, at random and at chosen moments, and compare the results with an undisturbed run.

    python -m unitymas.benchmarks.faults [--kinds controller:44,rank:20,group:16,ray-controller:10,engine:10] [--out FILE.json]

    controller       the process of a run with its groups; it is resumed as a user does it
    rank             one of two processes that share a group; the run continues by itself
    group            the Ray actor of one of two groups; the run continues by itself
    ray-controller   the driver of a run on Ray; all processes that Ray started must end with it
    engine           vLLM's engine process, if vLLM is installed; the run continues by itself

The default is this mix of 100 kills. Without vLLM, the controller gets the engine's kills. The moments are divided evenly
between collection, update, sync, save and any time (`--moments`). A run gets at most `--per-run` kills and continues to its
end. Then it must equal the undisturbed run: weights, optimizers, samples and random state of the last checkpoint byte for
byte, each step once in its log with the same figures, each sample once, no unfinished file, and no process left. Runs are
deterministic, with a tiny model and a few steps.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from ...agents.basics.json_types import JsonObject
from ...agents.engines.vllm.vllm_setup import installed
from ...cli.arguments import module_parser
from ...trainers.controller.resume import NothingToResume
from ...trainers.controller.run import train
from . import forked_runs, work
from .blows import MOMENTS, RECIPE, Blow, Hand, UnderFire, aimed
from .equality import differences

KINDS = {"controller": 44, "rank": 20, "group": 16, "ray-controller": 10, "engine": 10}
"""Default number of kills of each kind. Kinds that start quickly have more."""
FUTILE = 5
"""Largest number of successive runs that may end before any kill."""


@dataclass
class Toll:
    """Outcome of one kind's runs."""

    kind: str
    runs: int = 0
    seconds: float = 0.0
    kills: Counter[str] = field(default_factory=Counter)
    """Kills by their planned moment."""
    hits: Counter[str] = field(default_factory=Counter)
    """Kills by the calls of groups that were open; "between" for none."""
    resumed: int = 0
    """Number of resumed controllers."""
    restarts: int = 0
    """Lost groups and engines that the logs of the runs count."""
    faults: list[str] = field(default_factory=list)

    def line(self) -> str:
        """Return the report as a row of the table."""
        moments = "".join(f"{self.kills[moment]:>12}" for moment in (*MOMENTS, "any"))
        return f"{self.kind:>15}{self.runs:>6}{self.kills.total():>7}{moments}{len(self.faults):>8}{self.seconds:>9.0f}"


class Battle:
    """Runs of one kind, in their own folder."""

    def __init__(self, kind: str, kills: int, place: Path, model: str, args: argparse.Namespace) -> None:
        self.kind, self.kills, self.place, self.model, self.args = kind, kills, place, model, args
        self.chance = random.Random(f"{args.seed}/{kind}")
        self.moments: Sequence[str] = args.moments
        self.report = Toll(kind)
        self.calls: dict[str, list[float]] = {}  # of the undisturbed run
        self.futile = 0
        place.mkdir()
        self.temporary = place / "tmp"
        self.temporary.mkdir()

    @property
    def over(self) -> bool:
        """Tell whether all kills are done, or a run differs."""
        return self.report.kills.total() >= self.kills or bool(self.report.faults)

    def fight(self) -> None:
        """Make one run with kills. Before the first one, make the undisturbed run."""
        began, report = time.monotonic(), self.report
        self.calls = self.calls or self.undisturbed()
        before = report.kills.total()
        report.runs += 1
        more = min(self.args.per_run, self.kills - before)
        self.under_fire(self.place / f"run-{report.runs}", self.calls, more)
        report.seconds = round(report.seconds + time.monotonic() - began, 1)
        self.futile = self.futile + 1 if report.kills.total() == before else 0
        if self.futile:  # the undisturbed run took longer: it imported, or the machine was busier
            self.calls["run"][0] /= 2
        if self.futile == FUTILE:
            report.faults.append(
                f"{FUTILE} runs ended before a blow fell; give --steps more than {self.args.steps}"
            )

    def undisturbed(self) -> dict[str, list[float]]:
        """Make the undisturbed run. Return the seconds of each call by name, and of the whole run."""
        where, told = self.place / "whole", self.place / "calls.json"

        def life() -> None:
            hand, started = self.hand([]), time.perf_counter()
            self.play(where, hand)
            calls = {**hand.took, "run": [time.perf_counter() - started]}
            told.write_text(json.dumps([calls, sorted(sys.modules)]))

        code = forked_runs.lasts(forked_runs.begin(life, self.place / "whole.log"), self.args.limit)
        left = forked_runs.survivors(0.0 if code is None else 120.0)
        if code != 0 or left:
            words = (self.place / "whole.log").read_text()[-4000:]
            raise RuntimeError(
                f"the undisturbed run of kind {self.kind!r} ended with {code or left}: {words}"
            )
        calls: dict[str, list[float]]
        calls, modules = json.loads(told.read_text())
        forked_runs.import_early(modules)
        return calls

    def hand(self, blows: list[Blow]) -> Hand:
        """Return the object that kills in this process. Its clocks start now."""
        return Hand(self.kind, blows, self.place / "kills.jsonl", self.chance.randrange(1 << 30))

    def life(self, where: Path, blows: list[Blow]) -> None:
        """Do the work of one process of a run with kills."""
        self.play(where, self.hand(blows))

    def play(self, where: Path, hand: Hand) -> None:
        """Begin the run, or resume it if its directory allows that, and play to its end."""
        UnderFire.hand = hand
        tempfile.tempdir = str(self.temporary)
        work.register_pair()
        try:
            if not (where / "metrics.jsonl").exists():
                fields = work.settings(self.model, self.kind, self.args.steps, RECIPE)
                train(work.ID, directory=where, **fields)
                return
            try:
                train(directory=where, resume=True)
            except NothingToResume:
                train(directory=where, resume=True, anew=True)
        finally:
            if self.kind in ("group", "ray-controller"):
                import ray

                ray.shutdown()

    def under_fire(self, where: Path, calls: dict[str, list[float]], kills: int) -> None:
        """Make one run with at most this many kills."""
        log = self.place / f"{where.name}.log"
        blows = [aimed(calls, self.chance, moment) for moment in self.dealt(kills)]
        own = self.kind in ("controller", "ray-controller")
        while True:
            mine = [blows.pop(0)] if own and blows else ([] if own else blows)
            noted = self.noted()
            self.chance.random()  # each life's own
            limit = self.args.limit * (1 + len(mine))
            code = forked_runs.lasts(forked_runs.begin(partial(self.life, where, mine), log), limit)
            for kill in self.noted()[len(noted) :]:
                self.report.kills[kill["moment"]] += 1
                self.report.hits[kill["hit"]] += 1
            struck = own and len(self.noted()) > len(noted)
            if code is None:
                forked_runs.survivors(0.0)
                self.report.faults.append(f"{where.name} did not end within {limit:g} s (see {log})")
                return
            if left := forked_runs.survivors():
                self.report.faults.append(f"{where.name}: processes left behind: {left}")
            if struck and code == -9:
                self.report.resumed += 1
                continue
            if code != 0:
                self.report.faults.append(f"{where.name} ended with {code}: {log.read_text()[-2000:]}")
                return
            break
        self.compare(where)

    def dealt(self, kills: int) -> list[str]:
        """Return the moments of the next kills, beginning with those that had the fewest."""
        counts, moments = Counter(self.report.kills), []
        for _ in range(kills):
            moments.append(min(self.moments, key=lambda moment: counts[moment]))
            counts[moments[-1]] += 1
        return moments

    def compare(self, where: Path) -> None:
        """Compare a run with the undisturbed run."""
        odd = differences(where, self.place / "whole", bits=self.kind != "engine")
        self.report.faults += [f"{where.name}: {difference}" for difference in odd]
        left = sorted(path.name for path in self.temporary.iterdir())
        self.report.faults += [f"{where.name}: {name} is left among the temporary files" for name in left]
        rows = [json.loads(line) for line in (where / "metrics.jsonl").read_text().splitlines()]
        self.report.restarts += sum(row["kind"] == "loss" for row in rows)
        if not self.report.faults:
            shutil.rmtree(where)

    def noted(self) -> list[JsonObject]:
        """Return the recorded kills."""
        notes = self.place / "kills.jsonl"
        return [json.loads(line) for line in notes.read_text().splitlines()] if notes.exists() else []


def in_a_life(work: Callable[[], object], log: Path) -> None:
    """Do work that starts threads in another process, so that this process can still fork."""

    def life() -> None:
        work()

    if forked_runs.lasts(forked_runs.begin(life, log), 600) != 0:
        raise RuntimeError(log.read_text()[-4000:])


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the arguments."""
    parser = module_parser(__doc__, prog="python -m unitymas.benchmarks.faults")
    parser.add_argument("--kinds", help="who is killed, by commas; KIND:N, and how often")
    parser.add_argument("--moments", default="collection,update,sync,save,any", help="when, by commas")
    parser.add_argument("--kills", type=int, default=20, help="kills of a kind that names no number")
    parser.add_argument("--per-run", type=int, default=10, help="kills that one run takes")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--limit", type=float, default=600.0, help="seconds that a life may last, and for each kill within it"
    )
    parser.add_argument("--out", type=Path, help="a JSON file of the result, written anew after each run")
    parser.add_argument("--keep", type=Path, help="a folder in which the runs stay")
    args = parser.parse_args(argv)
    kinds = [kind.partition(":") for kind in (args.kinds or "").split(",")]
    args.kinds = (
        {kind: int(number or args.kills) for kind, _, number in kinds} if args.kinds else by_default()
    )
    args.moments = args.moments.split(",")
    for name, choices in (("kinds", KINDS), ("moments", (*MOMENTS, "any"))):
        if wrong := set(getattr(args, name)) - set(choices):
            parser.error(f"--{name}: {', '.join(sorted(wrong))} is none of {', '.join(choices)}")
    return args


def by_default() -> dict[str, int]:
    """Return a hundred kills, of all kinds that this machine can run."""
    kinds = dict(KINDS)
    if not installed():
        kinds["controller"] += kinds.pop("engine")
        print(
            "vLLM is not installed: its engine is not killed, and the controller takes its kills", flush=True
        )
    return kinds


def main(argv: Sequence[str] | None = None) -> int:
    """Kill, compare, and print the table. Return 1 if a run differs."""
    args = parse(argv)
    import torch

    from ...trainers.group import model_group  # noqa: F401  what every life needs is imported once

    torch.set_num_threads(1)
    forked_runs.adopt_orphans()
    place = args.keep or Path(tempfile.mkdtemp(prefix="unitymas-faults-"))
    place.mkdir(parents=True, exist_ok=True)
    # torch makes it when it is imported
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(place / "torch"))
    in_a_life(lambda: work.make_model(place / "model"), place / "model.log")
    print(
        f"{'killed':>15}{'runs':>6}{'kills':>7}"
        + "".join(f"{m:>12}" for m in (*MOMENTS, "any"))
        + f"{'faults':>8}{'seconds':>9}"
    )
    waiting = [Battle(kind, n, place / kind, str(place / "model"), args) for kind, n in args.kinds.items()]
    reports = [battle.report for battle in waiting]
    while waiting:  # all kinds by turns: a harness that is stopped has struck each of them
        for battle in list(waiting):
            battle.fight()
            write(args, reports)
            if battle.over:
                print(battle.report.line(), flush=True)
                waiting.remove(battle)
    faults = [f"{report.kind}: {fault}" for report in reports for fault in report.faults]
    for fault in faults:
        print(fault, file=sys.stderr)
    if not faults and not args.keep:
        shutil.rmtree(place)
    total = sum(report.kills.total() for report in reports)
    print(
        f"{total} kills, {sum(r.runs for r in reports)} runs, {len(faults)} faults"
        + (f" (runs: {place})" if faults else "")
    )
    return 1 if faults else 0


def write(args: argparse.Namespace, reports: Sequence[Toll]) -> None:
    """Write the result so far."""
    if args.out:
        rows = [{**vars(r), "kills": dict(r.kills), "hits": dict(r.hits)} for r in reports]
        result = {"seed": args.seed, "steps": args.steps, "per_run": args.per_run, "kinds": rows}
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
