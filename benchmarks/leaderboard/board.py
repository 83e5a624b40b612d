"""Static site of a folder of submissions. It needs no server, fetches nothing, and is readable without its script.

    unitymas leaderboard build submissions -o site

Every submission is first checked and replayed from its replies, in a separate process with limits of time and memory
(`guard`). A submission that fails is named, but not shown. A submission that cannot be replayed here (own code, missing data)
is listed separately, without a rank. Results on different data, tasks or settings have different tables. Every row links to
its episodes.

    unitymas leaderboard rerun submissions/theirs --team hf:their/model     plays a random tenth again (`rerun`)
"""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from ...agents.basics.hints import counted
from ...agents.fetch.packaged import PACKAGES
from ...cli.arguments import Parser
from ..evaluation.identity import digest
from ..evaluation.result_types import EstimateDict, FiguresDict, Metadata, Results
from ..pages.html import escape, page, printable, write_page
from . import rerun
from .copies import Sketch, marks
from .guard import MEMORY_MB, SECONDS, Guard

MOST_ENTRIES = 2000
"""Largest number of entries of one board. Each takes at most about 10 kB of the page."""
_MOST_NAMED = 200  # rejected entries that the page names
_MOST_ROLES = 30  # roles and failures of an entry that the page shows
_DEEPEST = 4  # levels of folders in which entries are searched
_WIDTH = 180  # width of the drawn interval, in its own units


@dataclass(frozen=True)
class Entry:
    """Accepted submission."""

    slug: str
    metadata: Metadata
    results: Results
    unverified: tuple[str, ...] = ()
    """Reasons why the entry could not be replayed here."""
    notes: tuple[str, ...] = ()
    same: str = ""
    """Other entries that have the same episodes."""

    @property
    def verified(self) -> bool:
        """Flag: the entry was replayed here."""
        return not self.unverified

    @property
    def figures(self) -> FiguresDict:
        """Figures of the entry."""
        return self.results["figures"]

    @property
    def group(self) -> str:
        """Return the values that must be equal for two scores in one table."""
        data, env = self.results["provenance"]["data"], self.results["provenance"]["env"]
        return digest([
            self.verified, env["env_id"], env["code_hash"], env["config"], env["budget"], data["name"], data["split"], data["tasks_hash"],
            self.results["measure"],
        ])  # fmt: skip


def build(
    folder: str | Path,
    out: str | Path,
    *,
    title: str = "unitymas leaderboard",
    seconds: float = SECONDS,
    memory_mb: int = MEMORY_MB,
) -> tuple[list[Entry], dict[str, list[str]]]:
    """Build the site. Return its entries, and the problems of the rejected submissions.

    The check of an entry may take at most `seconds` and `memory_mb`.
    """
    folder, out = Path(folder), Path(out)
    entries: list[Entry] = []
    rejected: dict[str, list[str]] = {}
    with Guard(seconds=seconds, memory_mb=memory_mb) as guard:
        told: dict[str, Sketch] = {}
        for path in found_in(folder):
            name = str(path.relative_to(folder))
            if len(entries) >= MOST_ENTRIES:
                rejected[name] = [f"the board is full: it lists {MOST_ENTRIES:,} entries"]
                continue
            page_of = out / "traces" / f"{_slug(name)}.html"
            verdict = guard.check(path, verify=True, page=page_of)
            if verdict.problems:
                rejected[name] = verdict.problems
            else:
                entries.append(
                    Entry(_slug(name), verdict.metadata, verdict.results, tuple(verdict.unverified), tuple(verdict.notes))
                )  # fmt: skip
                date = verdict.results["run"]["date"]
                told[_slug(name)] = Sketch(
                    printable(verdict.metadata["name"]), date, verdict.digests, verdict.scripted
                )
    same = marks(told)
    entries = [replace(entry, same=same.get(entry.slug, "")) for entry in entries]
    groups = _grouped(entries)
    write_page(
        out / "index.html",
        [
            page(title, _body(title, groups, rejected), style="site.css", scripts=("site.js",)),
            "</body>\n</html>\n",
        ],
    )
    summary = [{**_summary(e), "group": e.group} for group in groups for e in group]
    write_page(out / "leaderboard.json", [json.dumps(summary, indent=1, sort_keys=True) + "\n"])
    return entries, rejected


def found_in(folder: Path) -> list[Path]:
    """Return the submissions in a folder, a few levels deep. A submission is not searched, and links are not followed."""
    folders = []
    for path, inner, files in os.walk(folder):
        if "metadata.yaml" in files or "metadata.yaml" in inner:
            folders.append(Path(path))
            inner.clear()  # one entry is checked once
        elif len(Path(path).relative_to(folder).parts) >= _DEEPEST:
            inner.clear()
    return sorted(folders)


def _grouped(entries: Iterable[Entry]) -> list[list[Entry]]:
    groups: dict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        groups[entry.group].append(entry)
    for group in groups.values():
        group.sort(key=lambda e: (-e.figures["score"]["value"] if e.verified else 0.0, e.slug))
    return sorted(
        groups.values(), key=lambda g: (not g[0].verified, g[0].results["env_id"], -len(g), g[0].group)
    )


def _summary(entry: Entry) -> dict[str, object]:
    figures = entry.figures
    return {
        "name": entry.metadata["name"], "authors": entry.metadata["authors"], "env_id": entry.results["env_id"],
        "data": entry.results["provenance"]["data"], "score": figures["score"], "headline": figures["headline"],
        "success": figures["success"], "parameters": parameters(entry), "pass_at": figures["pass_at"], "pass_hat": figures["pass_hat"], "k": figures["k"],
        "roles": _seats(entry), "per_episode": figures["per_episode"], "verified": entry.verified,
        "unverified": list(entry.unverified), "notes": list(entry.notes), "same": entry.same,
        "date": entry.results["run"]["date"], "traces": f"traces/{entry.slug}.html",
    }  # fmt: skip


def _seats(entry: Entry) -> dict[str, object]:
    """Return the players of an entry. A player with a very long identity is reduced to its name."""
    seats = islice(entry.results["provenance"]["roles"].items(), _MOST_ROLES)
    short = ("role", "player", "prompt_sha")
    return {
        agent: seat if len(json.dumps(seat)) < 4000 else {k: seat[k][:200] for k in short}
        for agent, seat in seats
    }


_SIZE = re.compile(r"(?<![A-Za-z0-9.])(\d+(?:\.\d+)?)\s?([BbMm])(?![A-Za-z0-9])")
_KNOWN_SIZES = {"tiny": "2.06M", **{name: package.parameters for name, package in PACKAGES.items()}}


def parameters(entry: Entry) -> str:
    """Return the size of the entry's models, from its metadata or else from the models' names ("Qwen3-0.6B")."""
    if declared := entry.metadata.get("parameters"):
        return printable(declared)[:24]
    sizes = list(dict.fromkeys(map(_size_of, _models(entry))))
    if not sizes:
        return "no model"
    return "unknown" if sizes == ["?"] else " + ".join(sizes)


def _size_of(model: str) -> str:
    named = _SIZE.search(model)
    return _KNOWN_SIZES.get(model) or (f"{named[1]}{named[2].upper()}" if named else "?")


def _models(entry: Entry) -> list[str]:
    """Return the names of the models that play."""
    seats = entry.results["provenance"]["roles"].values()
    players = [
        p
        for s in seats
        for p in ([*s["policies"].values()] if isinstance(s.get("policies"), Mapping) else [s])
    ]
    return list(dict.fromkeys(str(p["model"]) for p in players if isinstance(p, Mapping) and p.get("model")))


# the page ---------------------------------------------------------------------------------------------


def _body(title: str, groups: Sequence[Sequence[Entry]], rejected: Mapping[str, list[str]]) -> str:
    count = sum(map(len, groups))
    contents = "".join(
        f'<li><a href="#{g[0].group}">{escape(_title(g[0]))}</a> <span>{len(g)}</span></li>' for g in groups
    )
    return f"""<header class="top"><h1>{escape(title)}</h1>
<p class="soft">{count} {"entry" if count == 1 else "entries"}. Every figure here was recomputed from the entry's own episodes when this page was built;
<b class="good">verified</b> entries were also played again from their replies. That proves what the environment makes of these replies,
not which model wrote them, nor that they were its first: for that the board's keeper plays a tenth again (<code>unitymas leaderboard rerun</code>).
Tokens are the entry's word, held against the lengths of its messages and replies; cost, date, libraries and Python are its word alone.
Lines show the score with its 95% interval over tasks.</p>
<p class="soft">These figures differ from the README's and the training pages': entries here are sampled (ours at temperature 1) on <em>test</em> tasks,
k times each; a training run is followed by greedy replies to <em>validation</em> tasks, which score higher.</p>
<label class="find"><span class="label">Filter</span><input id="query" type="search" placeholder="team, model, environment  ( / )" autocomplete="off" spellcheck="false"></label>
<ul class="contents">{contents}</ul></header>
<main>{"".join(map(_table, groups)) or '<p class="soft">No entry yet.</p>'}{_rejections(rejected)}{_SUBMIT}</main>
<footer class="soft">Tables hold only results on the same tasks, settings and code. avg@k counts failures as 0.
pass@k and pass^k are the unbiased estimators. The figures as data: <a href="leaderboard.json">leaderboard.json</a>.</footer>"""


_SUBMIT = """<section id="submit"><h2>Submit an entry</h2><p>Any team, any model. Evaluate it with its episodes, pack them, check the package, and send the folder:</p>
<pre tabindex="0">unitymas eval rag-nq --data mini --team tiny --tasks 64 -k 4 --out evaluations/mine
unitymas submit evaluations/mine --name "My team" -o submissions/mine
unitymas submit --check --verify submissions/mine
unitymas leaderboard build submissions -o site</pre>
<p class="soft">What a package holds, and what the check can and cannot show, stands in docs/evaluation.md. Where a model's name does
not say how large it is, <code>unitymas submit … --parameters 7B</code> does.</p></section>"""


def _name(entry: Entry) -> str:
    data = entry.results["provenance"]["data"]
    return f"{entry.results['env_id']} · {data['name']} {data['split']}, {counted(data['tasks'], 'task')}"


def _title(first: Entry) -> str:
    """Return the title of a table, from its first entry."""
    return ("" if first.verified else "Not verified, not ranked: ") + _name(first)


def _table(group: Sequence[Entry]) -> str:
    first = group[0]
    env, data = first.results["provenance"]["env"], first.results["provenance"]["data"]
    figures = first.figures
    modified = env["config"].get("modified") or []
    facts = [
        f"ranked by {figures['headline']}", f"success is {figures['success']}",
        f"tasks {data['tasks_hash']}", f"code {env['code_hash']}",
        *([f"modified: {', '.join(map(str, modified)):.300}"] if modified else []),
    ]  # fmt: skip
    columns = (("", ""), ("team", ""), ("size", "n"), (f"{figures['headline']} avg@k", "n"), ("k", "n"), ("pass@1", "n"), ("pass@k", "n"),
               ("pass^k", "n"), ("failed", "n"), ("acts", "n"), ("tokens", "n"), ("cost", "n"), ("date", "n"), ("episodes", ""))  # fmt: skip
    head = "".join(_heading(i, name, kind) for i, (name, kind) in enumerate(columns))
    names = [name for name, _ in columns]
    rows = "".join(_row(rank, entry, names) for rank, entry in enumerate(group, start=1))
    return f"""<section id="{first.group}"><h2>{escape(_title(first))}</h2><p class="facts">{" · ".join(map(escape, facts))}</p>
<div class="scroll"><table><thead><tr>{head}</tr></thead>{rows}</table></div></section>"""


_COLUMNS = {
    "size": "parameters of the models that play",
    "failed": "share of episodes that ended in an error",
    "acts": "replies an episode",
    "tokens": "generated tokens an episode, as the entry tells",
    "cost": "dollars an episode, as the entry tells",
    "pass@k": "at least one of k samples succeeds",
    "pass^k": "all of k samples succeed",
}


def _heading(index: int, name: str, kind: str) -> str:
    if not name or name == "episodes":
        return f"<th>{name}</th>"
    order = ' aria-sort="descending"' if "avg@k" in name else ""
    about = f' title="{_COLUMNS[name]}"' if name in _COLUMNS else ""
    return f'<th class="{kind}" scope="col"{order}><button data-column="{index}"{about}>{escape(name)}</button></th>'


def _row(rank: int, entry: Entry, columns: Sequence[str]) -> str:
    figures, per = entry.figures, entry.figures["per_episode"]
    k, score = str(figures["k"]), figures["score"]
    size, cost = parameters(entry), per.get("cost") or 0.0
    failed = figures["endings"].get("error", 0) / figures["episodes"]
    mark = (
        '<b class="good" title="played again from its replies on this machine">verified</b>'
        if entry.verified
        else f'<span class="bad">{escape("; ".join(entry.unverified), 300)}</span>'
    )
    if entry.same:
        mark += f' <span class="bad">{escape(entry.same, 300)}</span>'
    if entry.notes:
        mark += f' <span class="faint">{escape("; ".join(entry.notes), 300)}</span>'
    cells = [
        (rank, f'<td class="n faint">{rank if entry.verified else "–"}</td>'),
        (printable(entry.metadata["name"]).lower(), f'<td class="team"><button class="more" aria-expanded="false">{escape(entry.metadata["name"], 80)}</button> {mark}'
         f'<div class="faint">{escape(", ".join(_players(entry)), 120)}</div></td>'),
        (_magnitude(size), f'<td class="n">{escape(size)}</td>'),
        (score["value"], f'<td class="n score"><b>{score["value"]:.3f}</b>{_interval(score)}</td>'),
        (figures["k"], f'<td class="n">{figures["k"]}</td>'),
        *((value, f'<td class="n">{value:.3f}</td>') for value in (
            _point(figures["pass_at"], "1"), _point(figures["pass_at"], k), _point(figures["pass_hat"], k))),
        (failed, f'<td class="n{" bad" if failed else ""}">{failed:.1%}</td>'),
        (per["acts"], f'<td class="n">{per["acts"]:.1f}</td>'),
        (per["tokens_out"], f'<td class="n">{per["tokens_out"]:,.0f}</td>'),
        (cost, f'<td class="n">{f"${cost:.4f}" if cost else "–"}</td>'),
        (entry.results["run"]["date"], f'<td class="n faint">{escape(str(entry.results["run"]["date"])[:10])}</td>'),
        ("", f'<td><a href="traces/{entry.slug}.html">look</a></td>'),
    ]  # fmt: skip
    with_keys = "".join(
        html.replace("<td", f'<td data-label="{escape(name)}" data-value="{escape(value)}"', 1)
        for (value, html), name in zip(cells, columns, strict=True)
    )
    return f'<tbody><tr class="entry">{with_keys}</tr><tr class="detail" hidden><td colspan="{len(columns)}">{_detail(entry)}</td></tr></tbody>'


def _magnitude(size: str) -> float:
    """Return a size as a number for sorting. Unknown sizes come last."""
    match = _SIZE.search(size)
    return float(match[1]) * (1e9 if match[2] in "Bb" else 1e6) if match else 0.0


def _interval(score: EstimateDict) -> str:
    """Draw the interval as a line with a dot, on a scale from 0 to 1, or to the score if that is larger."""
    top = max(1.0, score["high"] or score["value"])
    low, high = score["low"], score["high"]
    x = [
        _WIDTH * min(1.0, max(0.0, v / top))
        for v in (score["value"], low if low is not None else 0, high if high is not None else 0)
    ]
    words = f"{low:.3f} to {high:.3f}" if low is not None and high is not None else "no interval: one task"
    line = f'<line class="ci" x1="{x[1]:.1f}" x2="{x[2]:.1f}" y1="5" y2="5"/>' if low is not None else ""
    return (f'<svg viewBox="-3 0 {_WIDTH + 6} 10" role="img" aria-label="{words}"><title>{words}</title>'
            f'<line class="axis" x1="0" x2="{_WIDTH}" y1="5" y2="5"/>{line}<circle cx="{x[0]:.1f}" cy="5" r="3"/></svg>')  # fmt: skip


def _detail(entry: Entry) -> str:
    roles = "".join(
        f"<tr><td>{escape(role, 60)}</td><td>{escape(', '.join(_players(entry, role)), 80)}</td><td class='n'>{did['calls_per_episode']:.2f}</td>"
        f"<td class='n'>{did['format_validity']:.1%}</td><td class='n'>{did['mean_credit']:+.3f}</td><td class='n'>{did['tokens_out']:.0f}</td></tr>"
        for role, did in islice(entry.figures["roles"].items(), _MOST_ROLES)
    )
    failures = "".join(
        f"<li>{count} × {escape(cause, 160)}</li>"
        for cause, count in list(entry.figures["failures"].items())[:6]
    )
    libraries = ", ".join(
        f"{name} {version}" for name, version in entry.results["provenance"]["libraries"].items()
    )
    url = str(entry.metadata.get("url") or "")
    link = (
        f'<p><a rel="nofollow noopener" href="{escape(url)}">{escape(url, 100)}</a></p>'
        if re.match(r"https?://", url)
        else ""
    )
    return f"""<div class="sheet"><div><p>{escape(entry.metadata["description"], 2000)}</p>{link}
<p class="soft">{escape(entry.metadata["authors"], 300)}</p><p class="soft mono">{escape(entry.results["run"]["command"], 500)}</p>
<p class="faint">{escape(libraries, 500)}</p>{f"<ul class='soft'>{failures}</ul>" if failures else ""}</div>
<table class="roles"><thead><tr><th>role</th><th>played by</th><th class="n">calls</th><th class="n">legal</th><th class="n">credit</th><th class="n">tokens</th></tr></thead><tbody>{roles}</tbody></table></div>"""


def _players(entry: Entry, role: str | None = None) -> list[str]:
    seats = entry.results["provenance"]["roles"].values()
    return list(dict.fromkeys(str(s["player"]) for s in seats if role is None or s["role"] == role))


def _rejections(rejected: Mapping[str, list[str]]) -> str:
    if not rejected:
        return ""
    items = "".join(f"<li><b>{escape(name, 200)}</b>: {escape(problems[0], 300)}{f' (and {len(problems) - 1} more)' if len(problems) > 1 else ''}</li>"
                    for name, problems in islice(rejected.items(), _MOST_NAMED))  # fmt: skip
    if len(rejected) > _MOST_NAMED:
        items += f"<li>and {len(rejected) - _MOST_NAMED:,} more</li>"
    return f'<section id="rejected"><h2>Not listed</h2><p class="facts">What they claim is not what the harness would have written.</p><ul>{items}</ul></section>'


def _point(table: Mapping[str, EstimateDict], k: str) -> float:
    return float(table[k]["value"]) if k in table else float("nan")


def _slug(name: str) -> str:
    """Return a short file name for a folder, with enough of a hash that no other folder can be made to have it."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", printable(name)).strip("-.")[:80] + "-" + digest(name)


def leaderboard_main(argv: list[str] | None = None) -> int:
    """Run ``unitymas leaderboard build DIR -o SITE`` or ``unitymas leaderboard rerun ENTRY``."""
    parser = Parser(
        prog="unitymas leaderboard", description="Build the static leaderboard site, or play entries again."
    )
    actions = parser.add_subparsers(dest="action", required=True, help="what to do")
    site = actions.add_parser("build", help="build the static site of a folder of submissions")
    site.add_argument("folder", type=Path, help="folder of submissions")
    site.add_argument(
        "-o", "--out", type=Path, default=Path("site"), help="folder of the site (default: site)"
    )
    site.add_argument("--title", default="unitymas leaderboard", help="title of the page")
    site.add_argument(
        "--seconds",
        type=float,
        default=SECONDS,
        help="longest time for checking one entry, in seconds (default: %(default)s)",
    )
    site.add_argument(
        "--memory-mb",
        type=int,
        default=MEMORY_MB,
        help="largest memory for checking one entry, in MB (default: %(default)s)",
    )
    rerun.add_arguments(
        actions.add_parser("rerun", help="play a random tenth of an entry again, and compare")
    )
    options = parser.parse_args(argv)
    if options.action == "rerun":
        return rerun.rerun_command(options)
    if not options.folder.is_dir():
        raise FileNotFoundError(f"{options.folder} is no folder; give one that holds submissions")
    if not found_in(options.folder):
        raise ValueError(
            f"{options.folder} holds no submission (a folder with metadata.yaml); pack one with: "
            f"unitymas submit EVALUATION --name NAME -o {options.folder}/NAME"
        )
    entries, rejected = build(
        options.folder, options.out, title=options.title, seconds=options.seconds, memory_mb=options.memory_mb
    )
    for name, problems in rejected.items():
        print(f"not listed: {printable(name)}: {printable(problems[0], 300)}")
    for entry in entries:
        for why in entry.unverified:
            print(f"not ranked: {printable(entry.slug)}: {printable(why, 300)}")
    print(
        f"{options.out / 'index.html'}  ({counted(len(entries), 'entry', 'entries')}, {sum(e.verified for e in entries)} verified, {len(rejected)} not listed)"
    )
    return 0
