"""Hand-made traces in the shape of `trace.to_dict()`, and a headless browser where there is one."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

HOSTILE = (
    "</script><script>document.title='owned'</script><img src=x onerror=alert(1)>\x1b[31m\u202e\ud800\x00"
)
TOPICS = (
    "the Elmar bridge",
    "Quinta Varo",
    "the Harrow observatory",
    "Port Selwyn",
    "the 1931 Orla expedition",
)


def make_episode(
    index: int = 0, *, good: bool = True, hostile: str = "", tokens: bool = False
) -> dict[str, Any]:
    """One small M-ASK episode: plan, then search, retrieve, summarise twice, then answer."""
    rng = random.Random(index)
    topic = TOPICS[index % len(TOPICS)]
    question = hostile or f"Who designed {topic}, and in which town were they born?"
    nodes: list[dict[str, Any]] = []

    def add(kind: str, role: str, turn: int, text: str, parents: list[str], **more: Any) -> str:
        node: dict[str, Any] = {
            "id": str(len(nodes)), "kind": kind, "role": role, "agent": role, "turn": turn, "round": len(nodes), "parents": parents, "messages": [],
            "reply": None, "ok": True, "value": None, "tool": None, "args": None, "result": None, "private": None, "error": None, "rewards": {}, "credit": 0.0,
            "meta": {"tokens_in": rng.randint(80, 400), "tokens_out": len(text) // 4 + 1, "seconds": rng.random()},
        }  # fmt: skip
        if kind == "use":
            node |= {"role": None, "agent": None, "turn": None}
        else:
            node |= {
                "messages": [
                    {"role": "system", "content": f"You are the {role} of a search team."},
                    {"role": "user", "content": f"Question: {question}\n\nReply inside the tags you were given."},
                ],
                "reply": text, "ok": True, "value": text.split(">")[1].split("<")[0] if ">" in text else text,
            }  # fmt: skip
        node |= more
        node["value"] = node["value"] if node["ok"] else None
        node["credit"] = sum(node["rewards"].values())
        nodes.append(node)
        return str(node["id"])

    plan = add(
        "act", "planner", 0, f"<q1>Who designed {topic}?</q1><a1>unknown</a1>", [], rewards={"f1": 0.2}
    )
    seen = plan
    for turn in (1, 2):
        ok = good or turn == 1
        text = f"<search>designer of {topic}, part {turn}</search>" if ok else f"search for {topic} please"
        query = add(
            "act", "searcher", turn, text, [seen], rewards={"delta": 0.25} if ok else {"format": -1.0}, ok=ok
        )
        found = add("use", "", turn, "", [query], tool="retrieve", args={"query": topic, "k": 3},
                    result=[{"id": f"p{turn}", "title": topic.title(), "text": f"{topic} was drawn by Ada Lorn."}],
                    error=None if good else "TimeoutError: the index did not answer")  # fmt: skip
        seen = add("act", "summarizer", turn, f"<evidence>{topic}: Ada Lorn, {hostile}</evidence>", [found],
                   rewards={"delta": 0.25 if good else 0.0})  # fmt: skip
    add(
        "act",
        "answerer",
        3,
        "<answer>Ada Lorn, of Selwyn</answer>",
        [seen, plan],
        rewards={"f1": float(good), "cost": -0.05},
    )
    if tokens:
        words = ["<answer>", "Ada", " Lorn", ",", " of", " Selwyn", "</answer>"]
        nodes[-1]["meta"]["tokens"] = {"text": words, "logprob": [-rng.expovariate(1) for _ in words],
                               "advantage": [rng.gauss(0, 1) for _ in words]}  # fmt: skip
    return {
        "schema": "unitymas.trace/1", "env_id": "mask-hotpotqa-v0", "config": {"split": "test", "max_turns": 3}, "code_hash": "c0de",
        "task_id": f"t{index // 2:05d}", "seed": index, "sample": index % 2, "data": {"name": "mini", "fingerprint": "f00d"},
        "ended": "terminal" if good else "truncated", "reason": "", "error": None, "outcome": {"answer": "Ada Lorn"}, "grade": None, "tags": {},
        "metrics": {"f1": 1.0 if good else 0.25, "em": float(good), "turns": 2}, "nodes": nodes,
    }  # fmt: skip


@pytest.fixture
def episode() -> Callable[..., dict[str, Any]]:
    return make_episode


@pytest.fixture
def hostile() -> str:
    return HOSTILE


CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync")  # fmt: skip


# no wider scope: while playwright is open, its event loop seems to run, and no asyncio.run works
@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Headless Chromium, or a skip that says what is missing."""
    api = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    if not CHROMIUM:
        pytest.skip("no Chromium on this machine (set CHROMIUM to its path)")
    with api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield chromium
        chromium.close()


class Page:
    """A page with its errors collected: a script error fails the test that caused it."""

    def __init__(self, context: Any, url: str) -> None:
        self.errors: list[str] = []
        self.page = context.new_page()
        self.page.set_default_timeout(15_000)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", lambda m: self.errors.append(m.text) if m.type == "error" else None)
        self.page.on("dialog", lambda dialog: (self.errors.append("dialog"), dialog.dismiss()))
        self.page.on("request", lambda r: None if r.url.startswith("file:") else self.errors.append(r.url))
        self.page.goto(url)
        self.page.wait_for_selector("html[data-ready]", timeout=30_000)

    def text(self, selector: str) -> str:
        return str(self.page.inner_text(selector))


@pytest.fixture
def visit(browser: Any) -> Iterator[Callable[..., Page]]:
    opened: list[tuple[Any, Page]] = []

    def open_(path: Path, hash_: str = "", **context: Any) -> Page:
        made = browser.new_context(**context)
        opened.append((made, Page(made, path.as_uri() + hash_)))
        return opened[-1][1]

    yield open_
    for context, page_ in opened:
        assert not page_.errors
        context.close()
