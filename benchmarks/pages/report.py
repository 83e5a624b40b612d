"""Report of a training run: one page with curves, episodes and alarms.

    unitymas report runs/mask-1                     writes runs/mask-1/report.html
    unitymas report runs/seed-0 runs/seed-1 …       one report over seeds: means, with 95% intervals over runs

It reads the files of a run (``metrics.jsonl``, ``config.yaml``, ``traces/``), even if the run was killed, and needs neither
torch nor the run's machine.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from ...agents.basics.hints import counted
from ...cli.arguments import Parser
from ...rewards.monitors import Alarm, Watch
from ...trainers.controller.reporting.loggers import BookRow
from ..evaluation.result_types import LabelledTrace
from ..evaluation.stats import student_quantile
from . import viewer
from .charts import Series, chart, short
from .html import escape, page, write_page
from .trace_sources import labelled_episodes, trace_files

SHOWN = 5  # best and worst episodes
MOST_EPISODES = 2_000

UNFINISHED = "still running, or killed"
"""Text for a run without a recorded end."""


@dataclass
class History:
    """Contents of one run's directory."""

    folder: Path
    begin: BookRow = field(default_factory=dict)
    steps: list[BookRow] = field(default_factory=list)
    validations: list[BookRow] = field(default_factory=list)
    losses: list[BookRow] = field(default_factory=list)
    """Lost groups after which the run continued."""
    ending: str = UNFINISHED

    @property
    def headline(self) -> str:
        """Name of the main metric."""
        return str(self.begin.get("headline", "score"))


def read_run(folder: str | Path) -> History:
    """Read a run's history. An incomplete last line is skipped."""
    path = Path(folder) / "metrics.jsonl"
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; give the directory of a training run")
    history = History(Path(folder))
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        if not line.endswith("\n"):
            break  # incomplete because of a kill
        row = _row(f"{path}, line {number}", line)
        kind = row["kind"]
        if kind == "begin":
            history.begin = history.begin or row
        elif kind == "step":
            history.steps.append(row)
        elif kind == "validation":
            history.validations.append(row)
        elif kind == "loss":
            history.losses.append(row)
        elif kind == "end":
            history.ending = str(row.get("ending"))
    return history


def _row(where: str, line: str) -> BookRow:
    """Read a line of a run's log. The error for an invalid line names its number."""
    try:
        row = json.loads(line)
        if not isinstance(row, dict) or not isinstance(row["kind"], str):
            raise ValueError("it holds no 'kind'")
        if row["kind"] in ("step", "validation"):
            row["step"] = int(row["step"])
            wrong = [
                key for key, value in row.items() if key != "kind" and not isinstance(value, int | float)
            ]
            if wrong:
                raise ValueError(f"{wrong[0]} is no number")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{where}: this is not a line of a run's figures ({error})") from error
    return row


def alarms(history: History) -> list[Alarm]:
    """Return the alarms of the monitors on a run's figures."""
    score = f"train/{history.headline}"
    held_out = {int(row["step"]): row.get(history.headline) for row in history.validations}
    watch = Watch()
    for row in [{"step": 0}, *history.steps]:
        step = int(row["step"])
        watch.see({**row, "train": row.get(score), "held_out": held_out.get(step)})
    return watch.alarms


def build(runs: Sequence[str | Path], out: str | Path) -> Path:
    """Write the report of one run, or of several seeds of the same, to ``out``."""
    histories = [read_run(run) for run in runs]
    out = Path(out)
    episodes = out.with_name(f"{out.stem}-episodes.html")
    pairs = list(kept(histories[-1].folder))
    if pairs:
        viewer.build_labelled(
            pairs, episodes, title=histories[-1].folder.name, headline=histories[-1].headline
        )
    title = f"{histories[0].begin.get('env_id', 'training')}: {', '.join(h.folder.name for h in histories)}"
    text = body(histories, episodes.name, pairs)
    return write_page(out, [page(title, text, style="report.css"), "</body>\n</html>\n"])


def body(histories: Sequence[History], episodes: str, pairs: Sequence[LabelledTrace] | None = None) -> str:
    """Return the sections of a report. ``episodes`` is the address of the page of the stored episodes."""
    alarms_of = {history.folder.name: alarms(history) for history in histories}
    pairs = list(kept(histories[-1].folder)) if pairs is None else pairs
    sections = [
        _head(histories), _score(histories, alarms_of), _alarms(alarms_of), _episodes(histories[-1].headline, pairs, episodes),
        _roles(histories), _drift(histories), _groups(histories), _timeline(histories),
    ]  # fmt: skip
    return "\n".join(sections)


# curves over seeds ------------------------------------------------------------------------------------


def over_seeds(name: str, tables: Sequence[list[BookRow]], key: str, **how: Any) -> Series:
    """Return the mean of a figure over runs, at each step that all have. Several runs give a 95% t interval."""
    columns = [
        {int(r["step"]): float(r[key]) for r in rows if isinstance(r.get(key), (int, float))}
        for rows in tables
    ]
    columns = [c for c in columns if c]
    steps = sorted(set.intersection(*(set(c) for c in columns))) if columns else []
    values = [[column[step] for column in columns] for step in steps]
    if len(columns) < 2:
        return Series(name, steps, [v[0] for v in values], **how)
    reach = [-student_quantile(0.025, len(v) - 1) * stdev(v) / math.sqrt(len(v)) for v in values]
    means = [fmean(v) for v in values]
    low, high = (
        [m - r for m, r in zip(means, reach, strict=True)],
        [m + r for m, r in zip(means, reach, strict=True)],
    )
    return Series(name, steps, means, low, high, **how)


@dataclass(frozen=True)
class Panel:
    """Planned chart: its title, its figures by name, and the unit of its axis."""

    title: str
    keys: Mapping[str, str]
    unit: str = ""


def _panels(
    panels: Sequence[Panel],
    histories: Sequence[History],
    grid: str = "grid2",
    width: int = 560,
    height: int = 210,
) -> str:
    """Return the charts of figures that change. Constant figures are listed as text."""
    tables = [h.steps for h in histories]
    charts, still = [], []
    for panel in panels:
        lines = [over_seeds(name, tables, key) for key, name in panel.keys.items()]
        lines = [line for line in lines if line.y]
        for line in lines:
            if line.constant is not None and len(line.y) > 1:
                name = ", ".join(
                    dict.fromkeys(n for n in (panel.title, line.name if len(lines) > 1 else "") if n)
                )
                still.append(f"<span>{escape(name)} <b>{short(line.constant)}</b></span>")
        moving = [line for line in lines if line.constant is None or len(line.y) == 1]
        charts.append(chart(panel.title, moving, unit=panel.unit, width=width, height=height))
    words = f"<details class='still'><summary>{counted(len(still), 'figure')} never changed</summary><p>{''.join(still)}</p></details>"
    drawn = f"<div class='{grid}'>{''.join(charts)}</div>" if any(charts) else ""
    return drawn + (words if still else "")


def _keys(histories: Sequence[History], pattern: str) -> dict[str, tuple[str, ...]]:
    """Return the figures whose names match, with the groups of the match, in the order of their first appearance."""
    rule = re.compile(pattern)
    names = dict.fromkeys(name for h in histories for row in h.steps for name in row)
    return {name: match.groups() for name in names if (match := rule.fullmatch(name))}


# the sections -----------------------------------------------------------------------------------------


def _head(histories: Sequence[History]) -> str:
    first = histories[0]
    steps = [len(h.steps) for h in histories]
    seconds = [h.steps[-1]["time"] - h.begin["time"] for h in histories if h.steps and "time" in h.begin]
    config = first.begin.get("config", {})
    facts = [
        counted(len(histories), "run"),
        counted(steps[0], "step") if min(steps) == max(steps) else f"{min(steps)} to {max(steps)} steps",
        f"data {first.begin.get('data')} ({first.begin.get('fingerprint')})",
        f"{_duration(fmean(seconds))}{' each' if len(seconds) > 1 else ''}" if seconds else "",
        *dict.fromkeys(h.ending for h in histories),
        *(_lost(h) for h in histories if h.losses),
    ]
    tree = json.dumps(config, indent=1, sort_keys=True)
    return (f"<header id='head'><h1>{escape(first.begin.get('env_id', 'Training run'))}</h1><p class='soft'>{escape(' · '.join(f for f in facts if f))}</p>"
            f"<details><summary>configuration</summary><pre tabindex='0'>{escape(tree, 40_000)}</pre></details></header>")  # fmt: skip


def _lost(history: History) -> str:
    """Return a sentence on how often the run continued after a lost group, and on the cost."""
    steps = sum(int(row["steps_lost"]) for row in history.losses if isinstance(row.get("steps_lost"), int))
    deaths = counted(len(history.losses), "death")
    return f"went on after {deaths} of a group ({counted(steps, 'step')} played again; last: {history.losses[-1].get('cause')})"


def _duration(seconds: float) -> str:
    return (
        f"{seconds / 3600:.1f} h"
        if seconds >= 5400
        else f"{seconds / 60:.1f} min"
        if seconds >= 90
        else f"{seconds:.0f} s"
    )


def _alarms(alarms_of: Mapping[str, list[Alarm]]) -> str:
    lines = [
        f"<li><b>{escape(alarm.monitor)}</b> at step {alarm.step}{f' of {escape(run)}' if len(alarms_of) > 1 else ''}: {escape(alarm.message)}</li>"
        for run, all_ in alarms_of.items() for alarm in all_
    ]  # fmt: skip
    body = f"<ul class='alarms'>{''.join(lines)}</ul>" if lines else "<p class='soft'>No monitor fired.</p>"
    return f"<section id='alarms'><h2>Alarms</h2>{body}</section>"


def _score(histories: Sequence[History], alarms_of: Mapping[str, list[Alarm]]) -> str:
    headline = histories[0].headline
    train = over_seeds("training", [h.steps for h in histories], f"train/{headline}")
    held = over_seeds("held out", [h.validations for h in histories], headline, dots=True)
    marks = [(float(a.step), str(a)) for all_ in alarms_of.values() for a in all_]
    drawn = chart(f"{headline} by step", [train, held], width=1120, height=300, unit=headline, marks=marks)
    if not held.y:
        return f"<section id='score'><h2>Score</h2><p class='soft'>No validation yet.</p>{drawn}</section>"
    interval = f"<span class='soft'>95% {held.low[-1]:.3f} to {held.high[-1]:.3f}</span>" if held.low else ""
    last = max(int(row["step"]) for h in histories for row in h.validations)
    cards = (
        f"<div class='card'><b>{held.y[0]:.3f}</b><span>before training</span></div>"
        f"<div class='card main'><b>{held.y[-1]:.3f}</b><span>after {counted(last, 'step')}</span>{interval}</div>"
        f"<div class='card'><b>{held.y[-1] - held.y[0]:+.3f}</b><span>difference</span></div>"
    )
    note = "The last point is the result; the best one would be chosen on the data it is measured on."
    return (f"<section id='score'><h2>Score</h2><p class='soft'>Held-out {escape(headline)}</p><div class='cards'>{cards}</div>"
            f"{drawn}<p class='faint'>{note}</p></section>")  # fmt: skip


def _roles(histories: Sequence[History]) -> str:
    by_role: dict[str, dict[str, str]] = defaultdict(dict)
    for key, (role, component) in _keys(histories, r"role/([^/]+)/(.+)").items():
        if component not in ("acts", "tokens"):
            by_role[role][key] = component
    panels = [Panel(f"{role}: credit a decision", keys, "credit") for role, keys in by_role.items()]
    body = _panels(panels, histories, height=200)
    return f"<section id='roles'><h2>Reward by role and component</h2>{body}</section>" if body else ""


def _drift(histories: Sequence[History]) -> str:
    tokens = {key: role for key, (role,) in _keys(histories, r"role/([^/]+)/tokens").items()}
    form = {key: role for key, (role,) in _keys(histories, r"role/([^/]+)/format").items()}
    entropy = {key: policy for key, (policy,) in _keys(histories, r"policy/(.+)/entropy").items()}
    panels = [
        Panel("acts an episode", {"acts": "acts"}, "acts"),
        Panel("tokens a reply", tokens, "tokens"),
        Panel("format credit (0: every reply is legal)", form, "credit"),
        Panel("token entropy", entropy, "nats"),
        Panel("share of episodes truncated", {"truncated": "truncated"}, "share"),
        Panel("failed episodes a step", {"failures": "failures"}, "episodes"),
    ]
    return f"<section id='drift'><h2>Drift</h2>{_panels(panels, histories)}</section>"


_BOOKKEEPING = re.compile(r"(critic/)?(lr|steps|tokens|micro_batches|time/.*)")
_MEANINGS = {
    "approx_kl": "KL between the policies before and after the update",
    "clipped": "share of tokens whose ratio was clipped",
    "kl": "KL to the reference",
    "grad_norm": "norm of the gradient",
    "max_log_ratio": "largest |log ratio| of the update",
    "mismatch_kl": "KL between engine and trainer",
    "max_mismatch": "largest |log-prob difference|, engine and trainer",
    "critic/explained_variance": "share of the return's variance that the critic explains",
}


def _groups(histories: Sequence[History]) -> str:
    by_figure: dict[str, dict[str, str]] = defaultdict(dict)
    for key, (policy, figure) in _keys(histories, r"policy/([^/]+)/(.+)").items():
        whole, _, role = figure.partition("/")
        if whole == "zero_advantages":
            by_figure[whole][key] = role
        elif figure != "entropy":
            by_figure[figure][key] = policy
    if not by_figure:
        return ""
    panels = [
        Panel(f"{figure}: {_MEANINGS[figure]}" if figure in _MEANINGS else figure, keys, figure)
        for figure, keys in sorted(by_figure.items())
    ]
    told = [p for p in panels if not _BOOKKEEPING.fullmatch(p.unit)]
    rest = [p for p in panels if _BOOKKEEPING.fullmatch(p.unit)]
    draw = partial(_panels, histories=histories, grid="grid3", width=360, height=170)
    more = (
        f"<details id='books'><summary>rates, sizes and times of the learners</summary>{draw(rest)}</details>"
    )
    return f"<section id='learners'><h2>Groups and updates</h2>{draw(told)}{more if rest else ''}</section>"


def _timeline(histories: Sequence[History]) -> str:
    times = {
        key: name for key, (name,) in _keys(histories, r"time/([^/]+)").items() if "per_second" not in key
    }
    shares = {key: f"{what} {who}" for key, (what, who) in _keys(histories, r"time/(busy|idle)/(.+)").items()}
    calls = {
        key: f"{who}, most" if most else who
        for key, (most, who) in _keys(histories, r"time/open_calls(_max)?/(.+)").items()
    }
    speed = {key: "tokens a second" for key in _keys(histories, r"time/.*tokens_per_second")}
    panels = [
        Panel("seconds a step", times, "seconds"),
        Panel("generated tokens a second", speed, "tokens/s"),
        Panel("share of the step: groups busy, trainer and rollout idle", shares, "share"),
        Panel("calls open at a group, mean and most", calls, "calls"),
    ]
    return f"<section id='timeline'><h2>Timeline</h2>{_panels(panels, histories)}</section>"


def _episodes(headline: str, pairs: Sequence[LabelledTrace], address: str) -> str:
    """Return the best and worst episodes of the newest validation, with links to the page of all stored episodes."""
    if not pairs:
        return (
            "<section id='episodes'><h2>Episodes</h2><p class='soft'>No traces were kept yet.</p></section>"
        )
    newest = [i for i, (label, _) in enumerate(pairs) if label == pairs[-1][0]]
    ranked = sorted(newest, key=lambda i: (viewer.score_of(pairs[i][1], headline) or 0.0, i))
    worst, best = ranked[:SHOWN], ranked[::-1][:SHOWN]

    def rows(chosen: list[int]) -> str:
        return "".join(
            f"<tr><td class='n'>{viewer.score_of(pairs[i][1], headline) or 0.0:.3f}</td><td><a href='{escape(address)}#a={i}'>"
            f"{escape(viewer.title_of(pairs[i][1]), 140)}</a></td><td class='faint'>{escape(pairs[i][1]['ended'])}</td></tr>"
            for i in chosen
        )

    return (f"<section id='episodes'><h2>Episodes</h2><p class='soft'>From {escape(viewer.label_words(pairs[-1][0]))}; <a href='{escape(address)}'>all {counted(len(pairs), 'kept episode')}</a>.</p>"
            f"<div class='grid2'><table><caption>best</caption>{rows(best)}</table><table><caption>worst</caption>{rows(worst)}</table></div></section>")  # fmt: skip


def kept(folder: Path) -> Iterator[LabelledTrace]:
    """Yield the stored episodes with their file, validations last. Of more than `MOST_EPISODES`, the newest files are used."""
    if not any((folder / "traces").glob("*.jsonl*")):
        return
    files = sorted(trace_files(folder), key=lambda f: (f.name.startswith("validation"), f.name))
    pairs = ((file.name.split(".")[0], episode) for file in files for _, episode in labelled_episodes([file]))
    yield from deque(pairs, maxlen=MOST_EPISODES)


def report_main(argv: list[str] | None = None) -> int:
    """Run ``unitymas report RUN …``."""
    parser = Parser(
        prog="unitymas report", description="Write a training run as one page of curves, alarms and episodes."
    )
    parser.add_argument(
        "runs", nargs="+", type=Path, help="directories of runs; several seeds of one config give intervals"
    )
    parser.add_argument("-o", "--out", type=Path, help="default: report.html in the (first) run's directory")
    options = parser.parse_args(argv)
    print(build(options.runs, options.out or options.runs[0] / "report.html"))
    return 0
