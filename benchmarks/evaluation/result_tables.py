"""Tables of results: Markdown for pages, LaTeX (booktabs) for papers.

Every table names its estimators. Intervals are 95%, over tasks. A figure without an interval comes from a single task.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..pages.html import printable
from .result_types import EstimateDict, FiguresDict, Results
from .stats import Difference, RoleEffect

TableRow = tuple[str, ...]


def markdown(results: Sequence[Results]) -> str:
    """Return a table with one line for each result, a table of roles, and an explanation of the columns."""
    parts = [_grid(*_scores(results)), _grid(*_role_rows(results))]
    failures = _failures(results)
    return "\n\n".join([*parts, *([failures] if failures else []), _notes(results)]) + "\n"


def latex(results: Sequence[Results]) -> str:
    """Return the table of scores as a booktabs tabular."""
    header, rows = _scores(results)
    columns = "l" + "r" * (len(header) - 1)
    lines = [
        rf"\begin{{tabular}}{{{columns}}}", r"\toprule", " & ".join(map(_tex, header)) + r" \\", r"\midrule",
        *(" & ".join(map(_tex, row)) + r" \\" for row in rows), r"\bottomrule", r"\end{tabular}",
    ]  # fmt: skip
    return "\n".join(lines) + "\n% " + _notes(results).replace("\n", "\n% ") + "\n"


def effects_markdown(name: str, effects: Sequence[RoleEffect]) -> str:
    """Return the table of a role ablation or swap: one line for each role, the largest effect first."""
    rows = [
        (e.role, number(e.score.value), signed(e.difference.value), between(e.difference.low, e.difference.high),
         p_value(e.difference.p))
        for e in sorted(effects, key=lambda e: -abs(e.difference.value))
    ]  # fmt: skip
    return _grid((name, "score", "difference", "95% interval", "p"), rows) + "\n"


def difference_markdown(name: str, difference: Difference) -> str:
    """Describe one paired difference in a sentence."""
    return (
        f"{name}: {signed(difference.value)} {between(difference.low, difference.high)}, {p_value(difference.p, 'p ')} "
        f"({difference.tasks} shared tasks; {difference.estimator}; {difference.test})\n"
    )


def number(value: float | None, digits: int = 3) -> str:
    """Return a number as text."""
    return "–" if value is None else f"{value:.{digits}f}"


def signed(value: float) -> str:
    """Return a number as text with its sign."""
    return f"{value:+.3f}".replace("-", "−")


def between(low: float | None, high: float | None) -> str:
    """Return an interval as text."""
    return "–" if low is None or high is None else f"[{low:.3f}, {high:.3f}]".replace("-", "−")


def p_value(p: float, name: str = "") -> str:
    """Return a p-value as text."""
    return f"{name}≤ 0.001" if p <= 0.001 else f"{name}{'= ' if name else ''}{p:.3f}"


def estimate(plain: EstimateDict | None) -> str:
    """Return ``0.512 ± 0.031`` for a symmetric interval, else ``0.512 [0.470, 0.533]``."""
    if plain is None:
        return "–"
    value, low, high = plain["value"], plain["low"], plain["high"]
    if low is None or high is None:
        return f"{value:.3f}"
    if abs((high - value) - (value - low)) < 0.1 * (high - low) + 1e-9:
        return f"{value:.3f} ± {(high - low) / 2:.3f}"
    return f"{value:.3f} {between(low, high)}"


def _scores(results: Sequence[Results]) -> tuple[TableRow, list[TableRow]]:
    headlines = {plain["figures"]["headline"] for plain in results}
    name = min(headlines) if len(headlines) == 1 else "score"
    ks = {plain["figures"]["k"] for plain in results}
    k = str(min(ks)) if len(ks) == 1 else "k"
    chances = () if ks == {1} else (f"pass@{k}", f"pass^{k}")
    header = ("environment", "tasks", f"{name} avg@{k}", "pass@1", *chances, "failed", "acts", "tokens out")
    rows: list[TableRow] = []
    for plain in results:
        figures, per = plain["figures"], plain["figures"]["per_episode"]
        most = str(figures["k"])
        more = (_value(figures["pass_at"], most), _value(figures["pass_hat"], most)) if chances else ()
        rows.append(
            (
                plain["env_id"] if len(headlines) == 1 else f"{plain['env_id']} ({figures['headline']})",
                f"{figures['tasks']:,}",
                estimate(figures["score"]),
                _value(figures["pass_at"], "1"),
                *more,
                f"{_failed(figures) / figures['episodes']:.1%}",
                f"{per['acts']:.1f}",
                f"{per['tokens_out']:.0f}",
            )
        )
    return header, rows


def _role_rows(results: Sequence[Results]) -> tuple[TableRow, list[TableRow]]:
    many = len(results) > 1
    header: TableRow = (("environment",) if many else ()) + (
        "role", "played by", "calls / episode", "legal replies", "mean credit", "tokens in", "tokens out",
    )  # fmt: skip
    priced = any("cost" in did for plain in results for did in plain["figures"]["roles"].values())
    header += ("$ / 1,000 episodes",) if priced else ()
    rows: list[TableRow] = []
    for plain in results:
        for role, did in plain["figures"]["roles"].items():
            players = [
                seat["player"] for seat in plain["provenance"]["roles"].values() if seat["role"] == role
            ]
            rows.append((
                *((plain["env_id"],) if many else ()), role, ", ".join(dict.fromkeys(map(str, players))),
                f"{did['calls_per_episode']:.2f}", f"{did['format_validity']:.1%}", signed(did["mean_credit"]),
                f"{did['tokens_in']:.0f}", f"{did['tokens_out']:.0f}",
                *((f"{1000 * did.get('cost', 0.0):.4g}",) if priced else ()),
            ))  # fmt: skip
    return header, rows


def _failures(results: Sequence[Results]) -> str:
    lines = [
        f"- {plain['env_id']}: {count} × {printable(cause, 120)}"
        for plain in results
        for cause, count in list(plain["figures"]["failures"].items())[:5]
    ]
    return "Episodes that did not end by themselves:\n\n" + "\n".join(lines) if lines else ""


def _notes(results: Sequence[Results]) -> str:
    figures = results[0]["figures"]
    data = dict.fromkeys(
        f"{d['name']} {d['split']}, fingerprint {d['fingerprint']}"
        for d in (p["provenance"]["data"] for p in results)
    )
    successes = dict.fromkeys(plain["figures"]["success"] for plain in results)
    return "\n".join([
        f"avg@k: mean over tasks of the mean over k samples, failures counted as 0; ± or [ ]: {figures['score']['level']:.0%} "
        f"interval, {'; '.join(dict.fromkeys(p['figures']['score']['interval'] for p in results))}.",
        f"pass@k, pass^k: unbiased (at least one, all of k samples drawn without replacement); success: {', '.join(successes)}.",
        f"Data: {'; '.join(data)}.",
    ])  # fmt: skip


def _failed(figures: FiguresDict) -> int:
    return int(figures["endings"].get("error", 0))


def _value(table: Mapping[str, EstimateDict], k: str) -> str:
    return number(table[k]["value"]) if k in table else "–"


def _grid(header: TableRow, rows: Sequence[TableRow]) -> str:
    """Return a Markdown table with an aligned source: numbers to the right, words to the left."""
    cells = [tuple(_cell(c) for c in row) for row in (header, *rows)]
    widths = [max(3, *(len(row[i]) for row in cells)) for i in range(len(header))]
    numeric = [all(row[i][:1] in "0123456789+−–[≤" for row in cells[1:]) for i in range(len(header))]

    def line(row: TableRow) -> str:
        aligned = (c.rjust(w) if n else c.ljust(w) for c, w, n in zip(row, widths, numeric, strict=True))
        return f"| {' | '.join(aligned)} |"

    rule = "|".join("-" * (w + 1) + ":" if n else "-" * (w + 2) for w, n in zip(widths, numeric, strict=True))
    return "\n".join([line(cells[0]), f"|{rule}|", *map(line, cells[1:])])


def _cell(text: object) -> str:
    return printable(text, 80).replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")


def _tex(text: str) -> str:
    plain = printable(text, 80)
    for mark in "\\{}$&#%_~":
        plain = plain.replace(
            mark, {"\\": r"\textbackslash ", "~": r"\textasciitilde "}.get(mark, "\\" + mark)
        )
    return (
        plain.replace("^", r"\textasciicircum{}")
        .replace("±", r"$\pm$")
        .replace("−", r"$-$")
        .replace("–", "--")
    )
