"""Kill runs at random and at chosen moments, and compare what comes out with a run that nobody disturbs.

    python -m unitymas.benchmarks.faults [--kinds controller,rank,group,ray-controller,engine] [--kills 20] [--out FILE.json]

    controller       the process of a run with groups inside; it is resumed as a user resumes it
    rank             one of two processes over which a group is sharded; the run goes on by itself
    group            the Ray actor of one of two groups; the run goes on by itself
    ray-controller   the driver of a run on Ray; what Ray started has to end with it
    engine           vLLM's engine process, where vLLM is installed; the run goes on by itself

Moments are chosen in turn: in the middle of collection, update, sync and save, and at any time at all (`--moments`). A run
takes at most `--per-run` kills, goes on to its end, and must then equal the undisturbed run: weights, optimisers, samples
and chance in its last checkpoint byte for byte; each step once in its book, with the same figures; each sample once; no
unfinished file; no process left. Runs are deterministic, on a tiny model and a few steps.
"""

from __future__ import annotations

import argparse
import json
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
from typing import Any

from ...trainers.controller.resume import NothingToResume
from ...trainers.controller.run import train
from . import lives, work
from .blows import MOMENTS, RECIPE, Blow, Hand, UnderFire, aimed
from .equality import differences

KINDS = ("controller", "rank", "group", "ray-controller", "engine")


@dataclass
class Toll:
    """Outcome of one kind's runs."""

    kind: str
    runs: int = 0
    seconds: float = 0.0
    kills: Counter[str] = field(default_factory=Counter)
    """Kills by moment."""
    resumed: int = 0
    """Lives after a kill of the controller."""
    restarts: int = 0
    """Losses that the books count."""
    faults: list[str] = field(default_factory=list)

    def line(self) -> str:
        """Return the report as a row of the table."""
        moments = "".join(f"{self.kills[moment]:>12}" for moment in (*MOMENTS, "any"))
        return f"{self.kind:>15}{self.runs:>6}{self.kills.total():>7}{moments}{len(self.faults):>8}{self.seconds:>9.0f}"


class Battle:
    """The runs of one kind, in a folder of their own."""

    def __init__(self, kind: str, place: Path, model: str, args: argparse.Namespace) -> None:
        self.kind, self.place, self.model, self.args = kind, place, model, args
        self.chance = random.Random(f"{args.seed}/{kind}")
        self.moments: Sequence[str] = args.moments
        self.report = Toll(kind)
        self.temporary = place / "tmp"
        self.temporary.mkdir()

    def fight(self, kills: int) -> Toll:
        """Make the undisturbed run, then runs under fire until so many kills are done."""
        began = time.monotonic()
        calls = self.undisturbed()
        while self.report.kills.total() < kills and not self.report.faults:
            self.report.runs += 1
            more = min(self.args.per_run, kills - self.report.kills.total())
            self.under_fire(self.place / f"run-{self.report.runs}", calls, more)
        self.report.seconds = time.monotonic() - began
        return self.report

    def undisturbed(self) -> dict[str, list[float]]:
        """Run to the end. Return how long each call took, by name, and the whole run."""
        where, told = self.place / "whole", self.place / "calls.json"

        def life() -> None:
            hand, started = self.hand([]), time.perf_counter()
            self.play(where, hand)
            told.write_text(json.dumps({**hand.took, "run": [time.perf_counter() - started]}))

        code = lives.lasts(lives.begin(life, self.place / "whole.log"), self.args.limit)
        if code != 0 or (left := lives.survivors()):
            words = (self.place / "whole.log").read_text()[-4000:]
            raise RuntimeError(
                f"the undisturbed run of kind {self.kind!r} ended with {code or left}: {words}"
            )
        calls: dict[str, list[float]] = json.loads(told.read_text())
        return calls

    def hand(self, blows: list[Blow]) -> Hand:
        """The hand of this process's life. Its clocks run from here."""
        return Hand(self.kind, blows, self.place / "kills.jsonl", self.chance.randrange(1 << 30))

    def life(self, where: Path, blows: list[Blow]) -> None:
        """All that a life under fire does."""
        self.play(where, self.hand(blows))

    def play(self, where: Path, hand: Hand) -> None:
        """Begin the run, or go on with it as its directory allows: the whole of a life."""
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
        """One run with at most so many kills."""
        log = self.place / f"{where.name}.log"
        moments = [self.moments[(self.report.kills.total() + i) % len(self.moments)] for i in range(kills)]
        blows = [aimed(calls, self.chance, moment) for moment in moments]
        own = self.kind in ("controller", "ray-controller")
        while True:
            mine = [blows.pop(0)] if own and blows else ([] if own else blows)
            noted = self.noted()
            self.chance.random()  # each life's own
            code = lives.lasts(lives.begin(partial(self.life, where, mine), log), self.args.limit)
            for kill in self.noted()[len(noted) :]:
                self.report.kills[kill["moment"]] += 1
            struck = own and len(self.noted()) > len(noted)
            if code is None:
                lives.survivors(0.0)
                self.report.faults.append(
                    f"{where.name} did not end within {self.args.limit:g} s (see {log})"
                )
                return
            if left := lives.survivors():
                self.report.faults.append(f"{where.name}: processes left behind: {left}")
            if struck and code == -9:
                self.report.resumed += 1
                continue
            if code != 0:
                self.report.faults.append(f"{where.name} ended with {code}: {log.read_text()[-2000:]}")
                return
            break
        self.compare(where)

    def compare(self, where: Path) -> None:
        """Look at what came out."""
        odd = differences(where, self.place / "whole", bits=self.kind != "engine")
        self.report.faults += [f"{where.name}: {difference}" for difference in odd]
        left = sorted(path.name for path in self.temporary.iterdir())
        self.report.faults += [f"{where.name}: {name} is left among the temporary files" for name in left]
        rows = [json.loads(line) for line in (where / "metrics.jsonl").read_text().splitlines()]
        self.report.restarts += sum(row["kind"] == "loss" for row in rows)
        if not self.report.faults:
            shutil.rmtree(where)

    def noted(self) -> list[dict[str, Any]]:
        """Kills so far, as the hands noted them."""
        notes = self.place / "kills.jsonl"
        return [json.loads(line) for line in notes.read_text().splitlines()] if notes.exists() else []


def in_a_life(work: Callable[[], Any], log: Path) -> None:
    """Do what starts threads in a process of its own, so that this one may still fork."""
    if lives.lasts(lives.begin(lambda: work() and None, log), 600) != 0:
        raise RuntimeError(log.read_text()[-4000:])


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m unitymas.benchmarks.faults", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--kinds", default="controller,rank,group", help="who is killed, by commas")
    parser.add_argument("--moments", default="collection,update,sync,save,any", help="when, by commas")
    parser.add_argument("--kills", type=int, default=20, help="kills of each kind")
    parser.add_argument("--per-run", type=int, default=5, help="kills that one run takes")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=600.0, help="seconds that a life may last")
    parser.add_argument("--out", type=Path, help="a JSON file of the result")
    parser.add_argument("--keep", type=Path, help="a folder in which the runs stay")
    args = parser.parse_args(argv)
    args.kinds, args.moments = args.kinds.split(","), args.moments.split(",")
    for name, choices in (("kinds", KINDS), ("moments", (*MOMENTS, "any"))):
        if wrong := set(getattr(args, name)) - set(choices):
            parser.error(f"--{name}: {', '.join(sorted(wrong))} is none of {', '.join(choices)}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Kill, compare, and print the table. Return 1 where something differs."""
    args = parse(argv)
    import torch

    from ...trainers.group import model_group  # noqa: F401  what every life needs is imported once

    torch.set_num_threads(1)
    lives.adopt_orphans()
    place = args.keep or Path(tempfile.mkdtemp(prefix="unitymas-faults-"))
    place.mkdir(parents=True, exist_ok=True)
    in_a_life(lambda: work.make_model(place / "model"), place / "model.log")
    print(
        f"{'killed':>15}{'runs':>6}{'kills':>7}"
        + "".join(f"{m:>12}" for m in (*MOMENTS, "any"))
        + f"{'faults':>8}{'seconds':>9}"
    )
    reports = []
    for kind in args.kinds:
        (folder := place / kind).mkdir()
        reports.append(Battle(kind, folder, str(place / "model"), args).fight(args.kills))
        print(reports[-1].line(), flush=True)
    faults = [f"{report.kind}: {fault}" for report in reports for fault in report.faults]
    for fault in faults:
        print(fault, file=sys.stderr)
    if args.out:
        rows = [{**vars(report), "kills": dict(report.kills)} for report in reports]
        args.out.write_text(
            json.dumps({"seed": args.seed, "steps": args.steps, "kinds": rows}, indent=1) + "\n"
        )
    if not faults and not args.keep:
        shutil.rmtree(place)
    total = sum(report.kills.total() for report in reports)
    print(
        f"{total} kills, {sum(r.runs for r in reports)} runs, {len(faults)} faults"
        + (f" (runs: {place})" if faults else "")
    )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
