"""The viewer page: harmless whatever a trace says, and used by keyboard, mouse and link in a real browser."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zstandard

from unitymas.benchmarks.pages import html as page
from unitymas.benchmarks.pages import viewer
from unitymas.benchmarks.pages.tours import tours
from unitymas.benchmarks.pages.trace_sources import labelled_episodes
from unitymas.cli.pages import view_main

Make = Callable[..., dict[str, Any]]


def test_page_is_self_contained_and_ascii_where_data_is(tmp_path: Path, episode: Make, hostile: str) -> None:
    out = viewer.build([episode(0, hostile=hostile)], tmp_path / "v.html", title=hostile)
    html = out.read_bytes()
    assert b"<img" not in html and html.count(b"<script") == 3, (
        "index, program, one block: no tag from outside"
    )
    assert not re.search(rb"https?://(?!www\.w3\.org/2000/svg)", html), "nothing is fetched"
    assert b"default-src 'none'" in html and b"unsafe-inline" not in html


@pytest.mark.parametrize("odd", ["\x1b[2J", "\ud800", "\u202e", "\x00", "\x9b31m"])
def test_printable_shows_control_characters_instead_of_obeying_them(odd: str) -> None:
    shown = page.printable(f"a{odd}b\n")
    assert shown.startswith("a⟨") and shown.endswith("b\n")
    shown.encode("utf-8")
    assert "<" not in page.escape(f"<b {odd} '\">") and '"' not in page.escape('"')


def test_ten_megabyte_replies_are_clipped_and_say_so(tmp_path: Path, episode: Make) -> None:
    big = episode(0)
    big["nodes"][0]["reply"] = "".join(random.Random(0).choices("abcdefgh ", k=10_000_000))
    out = viewer.build([big], tmp_path / "v.html")
    assert out.stat().st_size < 300_000
    assert viewer._clipped("x" * 200_000).endswith("100,000 more characters are in the trace file")


def test_sources_label_by_file_and_skip_a_torn_tail(tmp_path: Path, episode: Make) -> None:
    traces = tmp_path / "run" / "traces"
    traces.mkdir(parents=True)
    for step in (2, 10):
        lines = (json.dumps(episode(i)) + "\n" for i in range(3))
        (traces / f"step-{step}.jsonl.zst").write_bytes(
            b"".join(zstandard.compress(x.encode()) for x in lines)
        )
    with open(traces / "step-10.jsonl.zst", "r+b") as file:
        file.truncate(file.seek(0, 2) - 7)
    assert view_main([str(tmp_path / "run"), "--no-open", "-o", str(tmp_path / "v.html")]) == 0
    labels = [label for label, _ in labelled_episodes([tmp_path / "run"])]
    assert labels == ["step-2"] * 3 + ["step-10"] * 2, (
        "files in numeric order, the torn last episode left out"
    )


def opened(*rows: tuple[str, str, str, float]) -> list[tuple[Any, ...]]:
    """The tours of episodes given as (part, label, task, score)."""
    parts, labels, tasks, scores = zip(*rows, strict=True)
    blank = [""] * len(rows)
    index = {"part": parts, "label": labels, "task": tasks, "score": scores, "env": blank, "ended": blank,
             "malformed": blank, "errors": [0] * len(rows), "acts": [1] * len(rows)}  # fmt: skip
    return [(tour["name"], tour["a"], tour.get("b")) for tour in tours(index)]


def test_the_page_opens_on_the_task_that_improved_most() -> None:
    rows = [
        ("train", "train 1", "x", 0.0), ("train", "train 9", "x", 1.0),
        ("validation", "validation 0", "t", 0.5), ("validation", "validation 0", "u", 0.1), ("validation", "validation 0", "v", 1.0),
        ("validation", "validation 4", "u", 1.0),
        ("validation", "validation 8", "t", 0.8), ("validation", "validation 8", "u", 0.9), ("validation", "validation 8", "v", 0.0),
    ]  # fmt: skip
    assert opened(*rows) == [("improved most", 7, 3), ("worsened most", 8, 4), ("a failure", 8, None)]
    assert opened(*rows[2:5]) == [("a success", 2, None)], "one validation: nothing to compare"
    assert opened(("", "", "t", 1.0), ("", "", "t", 0.0)) == [("a failure", 1, None), ("a success", 0, None)]
    assert opened(rows[0]) == []
    apart = [("", "a", "t", 0.0), ("", "b", "u", 1.0)]
    assert [name for name, *_ in opened(*apart)] == ["a failure", "a success"], "not before and after"


def test_of_failures_the_one_with_a_cause_is_shown() -> None:
    index = {"part": [""] * 3, "label": [""] * 3, "task": list("tuv"), "score": [0.0, None, 0.0], "env": [""] * 3, "acts": [1] * 3,
             "ended": ["terminal", "error", "terminal"], "malformed": ["", "", "planner"], "errors": [0, 0, 0]}  # fmt: skip
    assert tours(index)[0]["a"] == 2


@pytest.mark.parametrize(
    ("label", "words"),
    [
        ("validation-000000", "validation 0"),
        ("a train-000000", "a train 1"),
        ("train-7", "train-7"),
        ("", ""),
    ],
)
def test_labels_count_steps_as_the_curves_do(label: str, words: str) -> None:
    assert viewer.label_words(label) == words


def test_text_has_contrast() -> None:
    """WCAG 2.2 AA, 4.5 : 1, of every text colour on every ground, light and dark."""

    def light(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    css = page.asset("theme.css")
    themes = [dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6});", part)) for part in css.split("@media")[:2]]
    for theme in themes:
        for ink in ("ink", "soft", "faint", "accent", "good", "bad", "warn", "violet", "teal"):
            for ground in ("paper", "card", "wash", "accent-wash"):
                dark, bright = sorted((light(theme[ink]), light(theme[ground])))
                ratio = (bright + 0.05) / (dark + 0.05)
                assert ratio >= 4.5, f"{ink} on {ground}: {ratio:.2f}"


def test_a_source_without_traces_says_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"traces/\*\.jsonl\.zst"):
        list(labelled_episodes([tmp_path]))


@pytest.fixture
def run(tmp_path: Path, episode: Make) -> Path:
    """A training run's directory: an episode, and beside it the tokens of its last two acts."""
    made = episode(0)
    for node in made["nodes"]:
        node["meta"]["sample"] = f"0/t0#0/{node['id']}"
    rows = [
        {"id": "0/t0#0/7", "tokens": ["Ada", " Lorn"], "logprobs": [-0.123456, -2.0], "advantages": [0.5, -1.0]},
        {"id": "0/t0#0/6", "tokens": ["<evidence>"], "logprobs": [-1.5], "advantages": None},
    ]  # fmt: skip
    for folder, lines in (("traces", [made]), ("samples", rows)):
        (tmp_path / "run" / folder).mkdir(parents=True)
        data = b"".join(zstandard.compress((json.dumps(line) + "\n").encode()) for line in lines)
        (tmp_path / "run" / folder / "train-000000.jsonl.zst").write_bytes(data)
    return tmp_path / "run"


def test_a_runs_tokens_are_joined_to_the_nodes_that_said_them(run: Path) -> None:
    ((_, episode),) = labelled_episodes([run])
    found = {node["id"]: node["meta"].get("tokens") for node in episode["nodes"]}
    assert found["7"] == {"text": ["Ada", " Lorn"], "logprob": [-0.1235, -2.0], "advantage": [0.5, -1.0]}
    assert found["6"] == {"text": ["<evidence>"], "logprob": [-1.5]}
    assert found["0"] is None


# ---------------------------------------------------------------- in the browser


@pytest.fixture
def viewed(tmp_path: Path, episode: Make, hostile: str) -> Path:
    made = [episode(i, good=i % 3 != 1, tokens=True, hostile=hostile if i == 7 else "") for i in range(200)]
    pairs = ((f"step {0 if i % 2 else 20}", e) for i, e in enumerate(made))
    return viewer.build_labelled(pairs, tmp_path / "view.html", title="before and after")


@pytest.mark.browser
def test_hostile_text_is_shown_as_text(visit: Callable[..., Any], viewed: Path) -> None:
    seen = visit(viewed, "#a=7&node=3")
    assert seen.page.title() == "before and after"
    assert "</script><script>" in seen.text(".episode h2")
    assert "⟨1B⟩[31m⟨202E⟩⟨D800⟩⟨00⟩" in seen.text("#main .reply pre")
    assert seen.page.query_selector("#main img") is None


@pytest.mark.browser
def test_filters_search_and_sort_narrow_the_list(visit: Callable[..., Any], viewed: Path) -> None:
    seen = visit(viewed)
    assert "200 of 200" in seen.text("#counts")
    seen.page.select_option("[data-key=trouble]", "malformed")
    assert seen.text("#counts").startswith("67 of 200")
    seen.page.select_option("[data-key=role]", "planner")  # the planner is never malformed
    assert seen.text("#counts").startswith("0 of 200")
    seen.page.select_option("[data-key=role]", "searcher")
    seen.page.select_option("[data-key=label]", "step 0")
    assert seen.text("#counts").startswith("34 of 200")
    seen.page.fill("#query", "Harrow")
    seen.page.get_by_text(re.compile(r"^6 of")).wait_for()
    assert "role=searcher" in seen.page.url and "q=Harrow" in seen.page.url
    again = visit(viewed, "#" + seen.page.url.split("#")[1])
    assert again.text("#counts") == seen.text("#counts"), "a view is a link"


@pytest.mark.browser
def test_enter_searches_whole_texts(visit: Callable[..., Any], viewed: Path) -> None:
    seen = visit(viewed)
    seen.page.fill("#query", "the index did not answer")
    seen.page.get_by_text(re.compile(r"^0 of")).wait_for()
    seen.page.press("#query", "Enter")
    seen.page.get_by_text(re.compile(r"^67 of")).wait_for()


@pytest.mark.browser
def test_keyboard_walks_episodes_and_nodes_and_compares(visit: Callable[..., Any], viewed: Path) -> None:
    seen = visit(viewed, "#a=0&node=0")
    keys = seen.page.keyboard
    keys.press("ArrowRight")
    assert seen.text(".node-head h3") == "searcher"
    keys.press("j")
    seen.page.wait_for_selector(".episode[data-i='1']")
    keys.press("c")
    seen.page.click(".row[data-i='3']")
    seen.page.wait_for_selector(".episode[data-side=b][data-i='3']")
    assert seen.page.url.endswith("a=1&b=3&node=7&nodeB=7")
    keys.press("Escape")
    seen.page.wait_for_selector(".episode[data-side=b]", state="detached")
    keys.press("/")
    assert seen.page.evaluate("document.activeElement.id") == "query"


@pytest.mark.browser
def test_a_node_shows_prompt_reply_verdict_tokens_and_credit(visit: Callable[..., Any], viewed: Path) -> None:
    seen = visit(viewed, "#a=1&node=7")
    assert "You are the answerer" in seen.text(".message.system pre")
    assert seen.page.locator(".tok").count() == 7
    seen.page.click("text=advantage")
    assert "coloured by advantage" in seen.text(".reply .label").lower()
    assert [*map(str.split, seen.text(".rewards").splitlines())][-1] == ["credit", "−0.05"]
    seen.page.click(".node[data-node='4']")
    assert "malformed" in seen.text(".verdict") and "no value" in seen.text(".verdict")
    seen.page.click(".node[data-node='5']")
    assert "TimeoutError" in seen.text(".detail")


@pytest.mark.browser
def test_a_training_run_colours_its_tokens(visit: Callable[..., Any], run: Path) -> None:
    assert view_main([str(run), "--no-open"]) == 0
    seen = visit(run / "view.html", "#a=0&node=7")
    colours = "all => all.map(e => e.style.backgroundColor)"
    by_logprob = seen.page.eval_on_selector_all(".tok", colours)
    seen.page.get_by_role("button", name="advantage").click()
    by_advantage = seen.page.eval_on_selector_all(".tok", colours)
    assert len(by_logprob) == len(by_advantage) == 2 and len({*by_logprob, *by_advantage}) == 4
    assert "logprob −0.123" in seen.page.get_attribute(".tok", "title")
    seen.page.click(".node[data-node='6']")
    assert seen.page.get_by_role("button", name="advantage").count() == 0, "nobody trained on it"


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_narrow_screens_show_one_pane_at_a_time(visit: Callable[..., Any], viewed: Path, scheme: str) -> None:
    seen = visit(viewed, viewport={"width": 380, "height": 700}, color_scheme=scheme)
    assert seen.page.is_visible("#side") and not seen.page.is_visible("#main")
    seen.page.click(".row[data-i='2']")
    seen.page.wait_for_selector(".episode[data-i='2']")
    assert not seen.page.is_visible("#side")
    assert seen.page.evaluate("document.documentElement.scrollWidth") <= 380
    seen.page.click("#back")
    assert seen.page.is_visible("#side")


@pytest.mark.browser
def test_ten_thousand_episodes_paint_within_two_seconds(
    visit: Callable[..., Any], tmp_path: Path, episode: Make
) -> None:
    words = [f"w{i:x}" for i in range(5000)]
    rng = random.Random(1)

    def many() -> Iterator[dict[str, Any]]:
        some = [episode(i, good=i % 3 != 0) for i in range(250)]
        for one in some:
            for node in one["nodes"][::3]:  # prompts that do not compress away
                text = f"Question: who? {' '.join(rng.choices(words, k=60))}"
                node["messages"] = [{"role": "user", "content": text}]
        for i in range(10_000):
            yield {**some[i % 250], "task_id": f"t{i}"}

    out = viewer.build(many(), tmp_path / "view.html")
    assert out.stat().st_size > 5_000_000
    seen = visit(out, "#a=9000")
    paint = seen.page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
    assert paint < 2000
    assert "10,000 of 10,000" in seen.text("#counts")
    assert seen.page.locator(".row").count() < 60, "rows outside the window are not in the document"


@pytest.fixture
def trained(tmp_path: Path, episode: Make) -> Path:
    """Two validations of ten tasks, and a training step of two tasks with four samples each."""
    pairs = []
    for step in (0, 8):
        for i in range(0, 20, 2):
            made = episode(i, good=step == 8 and i == 6)
            pairs.append(
                (f"validation-{step:06d}", {**made, "data": {"name": "mini", "split": "validation"}})
            )
    for i in range(8):
        made = {**episode(i), "task_id": f"train-{i // 4}", "sample": i % 4, "data": {"split": "train"}}
        pairs.append(("train-000003", made))
    return viewer.build_labelled(pairs, tmp_path / "trained.html", title="run")


@pytest.mark.browser
@pytest.mark.parametrize("width", [1400, 400])
def test_the_first_sight(visit: Callable[..., Any], trained: Path, width: int) -> None:
    seen = visit(trained, viewport={"width": width, "height": 900})
    seen.page.eval_on_selector("#list", "list => { list.scrollTop = 0; }")
    seen.page.get_by_text("20 episodes, 10 tasks").wait_for()
    assert seen.text(".head.part").startswith("Validation")
    assert seen.text("#histogram").split()[:2] == ["19", "9"] and "episodes by f1" in seen.text("#histogram")
    if width == 400:
        seen.page.get_by_role("button", name="improved most").click()
    seen.page.wait_for_selector(".episode[data-i='13']")
    assert "Improved most from validation 0 to validation 8: 0.25 → 1." in seen.text(".why")
    assert seen.text(".outcome").split("\n")[:2] == ["answer", "Ada Lorn"] and "{" not in seen.text(
        ".episode"
    )
    fits = "[...document.querySelectorAll('.scroll')].every(e => e.scrollWidth <= e.clientWidth)"
    assert seen.page.evaluate(fits) and seen.page.evaluate("document.documentElement.scrollWidth") <= width
    assert seen.page.locator(".graph" if width == 1400 else ".steps").count() == 1
    seen.page.locator(".node[data-node='1']").press("Enter")
    assert seen.text(".node-head h3") == "searcher"
    seen.page.get_by_role("button", name="side by side").click()
    seen.page.wait_for_selector(".episode[data-side=b][data-i='3']")


@pytest.mark.browser
def test_a_part_is_shown_alone(visit: Callable[..., Any], trained: Path) -> None:
    seen = visit(trained)
    seen.page.locator("#parts").get_by_role("button", name="train").click()
    assert seen.text("#counts").startswith("8 of 28") and "part=train" in seen.page.url
    assert seen.page.locator(".head.task").count() == 2 and seen.page.locator(".row.sample").count() == 8
    assert "sample 4" in seen.text(".row[data-i='23']")
