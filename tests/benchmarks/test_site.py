"""The leaderboard site: only checked entries, only comparable ones side by side, harmless, and used in a
browser.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from unitymas.benchmarks.evaluation.evaluate import evaluate
from unitymas.benchmarks.leaderboard import board as leaderboard
from unitymas.benchmarks.leaderboard import entries, submission

HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=alert(1)>\x1b[31m\u202e\ud800"
TEAMS = {"Expert": "scripted", "Fool": "fool", HOSTILE: {"summarizer": "fool", "*": "scripted"}}


@pytest.fixture(scope="module")
def submissions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("board")
    for i, (name, team) in enumerate(TEAMS.items()):
        evaluate("mask-hotpotqa", team, k=2, tasks=5, data="mini", out=root / f"run{i}")
        submission.pack(
            root / f"run{i}",
            root / "all" / f"entry{i}",
            name=name,
            description=HOSTILE,
            url="https://example.org/",
        )
    evaluate("mask-hotpotqa", "scripted", k=2, tasks=4, data="mini", out=root / "fewer")
    submission.pack(root / "fewer", root / "all" / "fewer", name="Expert on fewer tasks")
    evaluate("mask-hotpotqa", "scripted", k=2, tasks=5, data="mini", max_turns=1, out=root / "modified")
    submission.pack(root / "modified", root / "all" / "modified", name="Expert, one turn")
    bad = Path(shutil.copytree(root / "all" / "entry0", root / "all" / "tampered"))
    results = json.loads((bad / "results.json").read_text())
    results["figures"]["score"]["value"] = 1.5
    (bad / "results.json").write_text(json.dumps(results))
    return root / "all"


@pytest.fixture
def site(submissions: Path, tmp_path: Path) -> Path:
    leaderboard.build(submissions, tmp_path / "site", title="a board")
    return tmp_path / "site" / "index.html"


def test_results_that_do_not_compare_never_share_a_table(submissions: Path, tmp_path: Path) -> None:
    entries, rejected = leaderboard.build(submissions, tmp_path)
    assert [len(group) for group in leaderboard._grouped(entries)] == [3, 1, 1]
    assert list(rejected) == ["tampered"]
    best = leaderboard._grouped(entries)[0][0]
    assert best.metadata["name"] == "Expert" and best.verified
    modified = next(e for e in entries if e.metadata["name"] == "Expert, one turn")
    assert modified.verified, (
        "its setting is in the config, so it can be played again; it has a table of its own"
    )


def test_the_page_is_harmless_and_complete_without_its_script(site: Path) -> None:
    html = site.read_text()
    assert html.count("<script") == 1 and "<img" not in html and "\x1b" not in html
    assert not re.search(r"(src|href)=\"(?!#|traces/|leaderboard\.json|https://example\.org/)", html)
    assert "tampered</b>: results.json: its SHA-256" in html and "modified: max_turns" in html
    summary = json.loads((site.parent / "leaderboard.json").read_text())
    assert len(summary) == 5 and summary[0]["score"]["value"] == 1.0
    for entry in summary:
        assert (site.parent / entry["traces"]).is_file()


def test_command_line(submissions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert leaderboard.leaderboard_main(["build", str(submissions), "-o", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "not listed: tampered" in printed and "5 entries, 5 verified, 1 not listed" in printed


def test_an_empty_folder_gives_an_empty_board(tmp_path: Path) -> None:
    leaderboard.build(tmp_path, tmp_path / "site")
    assert "No entry yet" in (tmp_path / "site" / "index.html").read_text()


@pytest.mark.browser
def test_sort_filter_open_and_follow(visit: Callable[..., Any], site: Path) -> None:
    seen = visit(site)
    names = "document.querySelectorAll('section:first-of-type .more')"
    order = f"[...{names}].map((b) => b.textContent.slice(0, 6))"
    assert seen.page.evaluate(order) == ["Expert", "</scri", "Fool"]
    seen.page.click("section:first-of-type th >> text=f1 avg@k")
    assert seen.page.evaluate(order) == ["Fool", "</scri", "Expert"]
    seen.page.click("section:first-of-type .more >> nth=2")
    assert "planner" in seen.text("section:first-of-type tr.detail:not([hidden])")
    seen.page.keyboard.press("/")
    seen.page.keyboard.type("fewer")
    assert seen.page.locator("tr.entry:visible").count() == 1
    again = visit(site, "#q=fewer")
    assert again.page.locator("tr.entry:visible").count() == 1, "a filtered board is a link"
    again.page.click("text=look >> visible=true")
    again.page.wait_for_selector("html[data-ready] .episode")
    assert again.page.title() == "Expert on fewer tasks on mask-hotpotqa-v0"


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_narrow_screens_scroll_tables_not_the_page(
    visit: Callable[..., Any], site: Path, scheme: str
) -> None:
    seen = visit(site, viewport={"width": 360, "height": 700}, color_scheme=scheme)
    assert seen.page.evaluate("document.documentElement.scrollWidth") <= 360
    assert seen.page.title() == "a board"


def test_our_own_entries_are_verified_and_in_the_order_one_expects(tmp_path: Path) -> None:
    how = ["--only", "Scripted expert", "Fool", "--envs", "rag-hotpotqa", "--tasks", "4", "-k", "2"]
    assert entries.main([*how, "-o", str(tmp_path), "--also", "Half=random"]) == 0
    made, rejected = leaderboard.build(tmp_path, tmp_path / "site")
    (group,) = leaderboard._grouped(made)
    assert group[0].metadata["name"] == "Scripted expert" and all(entry.verified for entry in group)
    assert {entry.metadata["name"] for entry in group} == {"Scripted expert", "Fool", "Half"} and not rejected


def entry(metadata: dict[str, Any], *models: str | None) -> leaderboard.Entry:
    seats = {str(i): {"player": "p", **({"model": m} if m else {})} for i, m in enumerate(models)}
    return leaderboard.Entry("slug", metadata, {"provenance": {"roles": seats}})


@pytest.mark.parametrize(
    ("metadata", "models", "size"),
    [
        ({}, [None], "no model"),
        ({}, ["tiny"], "2.06M"),
        ({}, ["Qwen/Qwen3-0.6B", "tiny", "tiny"], "0.6B + 2.06M"),
        ({}, ["meta-llama/Llama-3.1-8b-Instruct"], "8B"),
        ({}, ["gpt-5-mini"], "unknown"),
        ({}, ["model-v2B2"], "unknown"),
        ({}, ["tiny", "gpt-5-mini"], "2.06M + ?"),
        ({"parameters": "7B"}, ["gpt-5-mini"], "7B"),
        ({"parameters": "\x1b" * 99}, ["tiny"], None),
    ],
)
def test_the_size_of_a_team(metadata: dict[str, Any], models: list[str | None], size: str | None) -> None:
    shown = leaderboard.parameters(entry(metadata, *models))
    assert shown == size if size else len(shown) < 80 and "\x1b" not in shown


def test_the_board_says_what_it_costs_and_how_to_submit(site: Path) -> None:
    html = site.read_text()
    assert 'title="dollars an episode' in html and ">size<" in html and "no model" in html
    assert "unitymas submit --check --verify" in html and "differ from the README" in html
    assert re.search(r"data-label=\"date\" data-value=\"\d{4}-\d\d-\d\d", html)


def test_a_table_that_is_not_ranked_says_so_in_the_contents_too(submissions: Path, tmp_path: Path) -> None:
    entry = leaderboard.build(submissions, tmp_path)[0][0]
    twin = replace(entry, unverified=("for this test",))
    html = leaderboard._body("a board", [[entry], [twin]], {})
    links = re.findall(r'<li><a href="#(.*?)">(.*?)</a>', html)
    assert links == re.findall(r'<section id="(.*?)"><h2>(.*?)</h2>', html)[:2] and len(set(links)) == 2
