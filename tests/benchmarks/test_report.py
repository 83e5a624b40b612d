"""The training report: what a run leaves behind, torn or whole, hostile or not, as one page."""

from __future__ import annotations

import json
import math
import random
import re
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest

from unitymas.benchmarks.pages import charts, report
from unitymas.envs.core.drivers import rollout
from unitymas.envs.core.trace import write

HOSTILE = "</pre><script>document.title='owned'</script>\x1b[2J\ud800"


def make_run(folder: Path, seed: int = 0, steps: int = 24, sick: bool = False) -> Path:
    rng = random.Random(seed)
    rows: list[dict[str, Any]] = [{"kind": "begin", "step": 0, "time": 1000.0, "env_id": "mask-hotpotqa-v0", "data": "mini",
                                   "fingerprint": "f00d", "headline": "f1", "config": {"note": HOSTILE}}]  # fmt: skip
    for step in range(steps + 1):
        learnt = step / steps
        if step:
            rows.append({
                "kind": "step", "step": step, "time": 1000.0 + 60 * step, "episodes": 16.0, "failures": 0.0, "truncated": 0.1,
                "acts": 30.0 if sick and step > 15 else 8 + rng.gauss(0, 0.2), "train/f1": 0.2 + 0.5 * learnt + rng.gauss(0, 0.03),
                "role/planner/credit": learnt, "role/planner/plan": learnt + 0.1, "role/planner/format": -0.1, "role/planner/acts": 16.0,
                "role/planner/tokens": 20.0, "policy/team/entropy": 2 - learnt, "policy/team/zero_share": 0.3, "policy/team/kl": 0.01 * step,
                "time/step": 10.0, "time/collect": 6.0, "time/rollout_tokens_per_second": 900.0,
            })  # fmt: skip
        if step % 6 == 0:
            rows.append(
                {
                    "kind": "validation",
                    "step": step,
                    "time": 0.0,
                    "f1": 0.2 + 0.4 * learnt + rng.gauss(0, 0.01),
                }
            )
    rows.append({"kind": "end", "step": -1, "ending": "done"})
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write(
        rollout("mask-hotpotqa", {"planner": "random", "*": "scripted"}, tasks=8, data="mini"),
        folder / "traces" / "validation-000024.jsonl.zst",
    )
    return folder


def test_deaths_of_groups_are_told(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    with (run / "metrics.jsonl").open("a") as book:
        for attempt in (1, 2):
            row = {
                "kind": "loss",
                "step": 3,
                "cause": "group 'main' is gone",
                "steps_lost": 2,
                "attempt": attempt,
            }
            book.write(json.dumps(row) + "\n")
    report.report_main([str(run)])
    html = (run / "report.html").read_text()
    assert (
        "went on after 2 deaths of a group (4 steps played again; last: group &#x27;main&#x27; is gone)"
        in html
    )


def test_one_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", sick=True)
    assert report.report_main([str(run)]) == 0
    html = (run / "report.html").read_text()
    assert "<script" not in html and "\x1b" not in html and "style=" not in html
    assert "length drift</b> at step 16" in html and "threshold × 1.50" in html
    assert (
        "planner: credit a decision" in html and "zero_share" in html and "generated tokens a second" in html
    )
    assert "report-episodes.html#a=" in html and (run / "report-episodes.html").exists()


def test_what_never_moved_is_said_in_words(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    html = report.build([run], run / "report.html").read_text()
    captions = re.findall("<figcaption>(.*?)</figcaption>", html)
    still = re.findall("<span>([^<]*) <b>([^<]*)</b></span>", html)
    assert ("failed episodes a step", "0") in still and ("zero_share", "0.3") in still
    assert ("planner: credit a decision, format", "−0.1") in still, "one line of a chart that moves"
    assert not {name for name, _ in still} & set(captions)
    assert html.count("<span>failed episodes") == 1 and "lr" not in captions


def test_axes_are_labelled_and_a_phone_has_its_own_drawing(tmp_path: Path) -> None:
    drawn = charts.chart("score", [charts.Series("f1", range(21), range(21))], unit="f1", width=1120)
    assert drawn.count("<svg") == 2 and 'class="narrow" viewBox="0 0 372 ' in drawn
    for svg in drawn.split("<svg")[1:]:
        assert [*re.findall('class="axis"[^>]*>([^<]*)', svg)] == ["f1", "step"]
        ticks = [*map(int, re.findall('text-anchor="middle">([0-9]+)<', svg))]
        assert ticks == [0, 5, 10, 15, 20] or ticks == [0, 10, 20]
    assert charts.chart("small", [charts.Series("a", [1, 2], [1, 2])], width=360).count("<svg") == 1
    one = charts.chart("one", [charts.Series("a", [7], [1.0])])
    assert re.findall('text-anchor="middle">([0-9]+)<', one) == ["7", "7"], (
        "one step: one tick, in each drawing"
    )


def test_several_seeds_give_the_mean_and_its_t_interval(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / f"seed{i}", seed=i) for i in range(3)]
    histories = [report.read_run(run) for run in runs]
    series = report.over_seeds("x", [h.validations for h in histories], "f1")
    values = [h.validations[-1]["f1"] for h in histories]
    assert series.y[-1] == pytest.approx(fmean(values))
    assert series.high[-1] - series.y[-1] == pytest.approx(4.3027 * stdev(values) / math.sqrt(3), rel=1e-3)
    out = report.build(runs, tmp_path / "all.html")
    assert '<polygon class="band s0"' in out.read_text() and "3 runs" in out.read_text()


def test_a_killed_run_is_readable(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=6)
    path = run / "metrics.jsonl"
    path.write_text(path.read_text()[:-150])
    history = report.read_run(run)
    assert history.steps and history.ending == "still running, or killed"
    report.build([run], run / "report.html")
    path.write_text(path.read_text().splitlines()[0] + "\n")
    report.build([run], run / "report.html")
    with pytest.raises(FileNotFoundError, match="directory of a training run"):
        report.read_run(tmp_path)


def test_charts_cope_with_odd_series() -> None:
    assert charts.chart("empty", []) == "" == charts.chart("nan", [charts.Series("a", [1], [math.nan])])
    one = charts.chart("one <point>", [charts.Series("a<b", [3], [2.0])])
    assert "one &lt;point&gt;" in one and "nan" not in one
    long = charts.chart(
        "long", [charts.Series("a", range(100_000), [math.sin(i / 500) for i in range(100_000)])]
    )
    assert len(long) < 20_000


@pytest.mark.parametrize(
    ("low", "high"), [(0.0, 1.0), (-3.2, 0.01), (1e-6, 3e-6), (5.0, 5.0), (120.0, 98_000.0), (0.0, 0.0)]
)
def test_ticks_are_few_round_and_cover(low: float, high: float) -> None:
    ticks = charts.nice_ticks(low, high)
    assert 2 <= len(ticks) <= 7 and ticks[0] <= low + 1e-12 and ticks[-1] >= high - 1e-12


@pytest.mark.browser
@pytest.mark.parametrize("width", [1280, 380])
def test_in_the_browser(tmp_path: Path, browser: Any, width: int) -> None:
    run = make_run(tmp_path / "run")
    report.build([run], run / "report.html")
    page = browser.new_page(viewport={"width": width, "height": 900})
    errors: list[str] = []
    page.on("console", lambda m: errors.append(m.text))
    page.goto((run / "report.html").as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") <= width and not errors
    sizes = """[...document.querySelectorAll('.chart svg')].filter(e => e.clientWidth).map(
        e => parseFloat(getComputedStyle(e.querySelector('.tick')).fontSize) * e.getBoundingClientRect().width / e.viewBox.baseVal.width)"""
    assert min(page.evaluate(sizes)) >= 9, "the text of a chart is readable at every width"
    page.click("text=all 8 kept episodes")
    page.wait_for_selector("html[data-ready]")
    page.close()
