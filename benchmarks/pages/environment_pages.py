"""Generator of the documentation's pages of environments, from the environments themselves.

    python -m unitymas.benchmarks.pages.environment_pages docs

It writes a gallery, a table, and for each environment a page with an episode and its picture.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from ...agents.basics.hints import counted
from ...cli.environments import info_text
from ...envs.core.drivers import rollout
from ...envs.core.trace import Trace
from ...envs.faces.render import clip, use_in_words
from ...envs.registry import PACKAGE, list_envs, make, resolve, spec
from .curve import curves_page, training
from .episode_picture import MOST, ending, picture
from .html import escape
from .settings import settings_page

EPISODES = 4
"""Number of scripted episodes. The longest one that fits into a picture is shown."""
HALLS = {
    "Questions": ("rag-", "mask-", "search-", "tool-qa-"),
    "Mathematics": ("math-", "chain-", "debate-", "solver-"),
    "Code": ("code",),
    "Games": ("blocksworld-", "eight-queens-", "planpath-", "sokoban-", "sudoku-"),
}
"""Headings of the gallery, with the prefixes of their ids."""


def main(argv: Sequence[str]) -> int:
    """Write the pages into a folder, and remove those of environments that no longer exist."""
    root = Path(argv[0] if argv else "docs")
    texts = pages()
    for folder, kind in (("environments", "*.md"), ("images/episodes", "*.svg")):
        (root / folder).mkdir(parents=True, exist_ok=True)
        for old in (root / folder).glob(kind):
            if f"{folder}/{old.name}" not in texts:
                old.unlink()
    for name, text in texts.items():
        (root / name).write_text(text, encoding="utf-8")
    print(f"{counted(len(texts), 'file')} in {root}")
    return 0


def pages() -> dict[str, str]:
    """Return the path of each generated file under ``docs/``, and its text."""
    texts = {"environments.md": contents(), "gallery.md": gallery(), "settings.md": settings_page()}
    texts["curves.md"] = curves_page()
    texts |= {f"environments/{id}.md": page(id) for id in ours()}
    return texts | {f"images/episodes/{first}.svg": drawn(first) for first in families()}


def ours() -> list[str]:
    """Return the ids that come with the package, without those of plug-ins and notebooks."""
    home = f"{PACKAGE}.envs."
    return [id for id in list_envs() if isinstance(w := spec(id).workflow, str) and w.startswith(home)]


def families() -> dict[str, list[str]]:
    """Return groups of environments that differ only in their data, by the first of each. They share a picture."""
    members: dict[tuple[object, ...], list[str]] = {}
    for id in ours():
        members.setdefault((spec(id).workflow, spec(id).description, spec(id).role_names), []).append(id)
    return {ids[0]: ids for ids in members.values()}


@cache
def episode(id: str) -> Trace:
    """Return the scripted episode that represents an environment: the longest of the first few that fits a picture."""
    env = make(id, data=None if spec(id).tasks is not None else "mini")
    traces = rollout(env, "scripted", tasks=EPISODES)
    fitting = [trace for trace in traces if len(trace.nodes) <= MOST] or traces[:1]
    return max(fitting, key=lambda trace: len(trace.nodes))


def drawn(id: str) -> str:
    """Return the picture of an environment's episode."""
    return picture(episode(id), spec(id).role_names)


def gallery() -> str:
    """Return the gallery: every family of environments, with an episode of its expert."""
    lines = [
        "# Gallery",
        "",
        "One episode of each kind of team. The environment's scripted expert plays it on generated tasks. Each name links to a page with",
        "the episode step by step.",
        "",
        "Time runs downwards. Each role has a lane and a colour. A dot is a reply, and a square is the use of a tool. A line connects a",
        "reply with the replies that read it. The number on the right is the reward of the reply.",
        "",
        "`make docs` plays these episodes and writes this page. **Not run** for it: models. [Curves](curves.md) shows what training gave.",
    ]
    for hall, starts in HALLS.items():
        lines += ["", f"## {hall}", "", '<div class="gallery" markdown="1">', ""]
        for first, ids in families().items():
            if first.startswith(starts):
                names = " · ".join(f"[{id}](environments/{id}.md)" for id in ids)
                lines += ['<div markdown="1">', "", f"**{names}**<br>{spec(first).description}", ""]
                lines += [f"![{alt(first)}](images/episodes/{first}.svg)", "", "</div>", ""]
        lines += ["</div>"]
    return "\n".join(lines) + "\n"


def alt(id: str) -> str:
    """Return a description of a picture, for readers who cannot see it."""
    return (
        f"An episode of {id}: {counted(len(episode(id).nodes), 'step')} of {', '.join(spec(id).role_names)}"
    )


def contents() -> str:
    """Return the table of all environments."""
    rows = [
        "# Environments",
        "",
        "All environments that come with the package. `unitymas list` prints this list, and `unitymas info ID` describes one of them.",
        "[The gallery](gallery.md) shows an episode of each kind. *Headline* is the main metric of an environment, by which the",
        "leaderboard ranks teams. An id is `<workflow>-<data set>`. Every environment can play generated tasks, so none needs a",
        "download.",
        "",
        "`make docs` writes this page. **What was run:** the tests play every environment with its expert and with bad players, on generated",
        "tasks. **Not run:** most published data sets, which need a download ([data](data.md)).",
        "",
    ]
    rows += ["| id | roles | headline | what the team does |", "|---|---|---|---|"]
    for id in ours():
        known = spec(id)
        roles = ", ".join(r.name + (f" × {r.instances}" if r.instances > 1 else "") for r in known.roles)
        rows.append(f"| [{id}](environments/{id}.md) | {roles} | {known.headline} | {known.description} |")
    return "\n".join(rows) + "\n"


def page(id: str) -> str:
    """Return an environment's page: its description, an episode step by step, and the prompts of the roles."""
    known = spec(id)
    first = next(first for first, ids in families().items() if id in ids)
    text = (sys.modules[resolve(known.workflow).__module__].__doc__ or "").strip()
    return "\n".join(
        [
            f"# {known.id}",
            "",
            f"{known.description[:1].upper()}{known.description[1:]}. [All environments](../environments.md).",
            "",
            f"`unitymas play {id} --team scripted` plays it.",
            "",
            training(id),
            "",
            *prose(text),
            f"`unitymas validate {id}` checks on generated tasks that the scripted expert scores 1, and that a bad player scores 0.",
            "The tests run this for every environment.",
            "",
            f"![{alt(first)}](../images/episodes/{first}.svg)",
            "",
            *([] if first == id else [f"The picture shows `{first}`: the same team with other data.", ""]),
            "## An episode, step by step",
            "",
            *steps(id),
            "",
            "## Roles, reply formats, rewards, data",
            "",
            f"`unitymas info {id}` prints this. It ends with a sample of each role's prompt and reply.",
            "",
            f"```text\n{info_text(id)}\n```",
            "",
        ]
    )


def prose(text: str) -> list[str]:
    """Return a docstring as Markdown: paragraphs, and indented parts as blocks."""
    lines = []
    for part in text.split("\n\n"):
        if all(line.startswith("    ") for line in part.splitlines()):
            lines += [f"```text\n{textwrap.dedent(part)}\n```", ""]
        else:
            pieces = part.split("`")  # every second one is code
            lines += ["`".join(p if i % 2 else p.replace("<", "&lt;") for i, p in enumerate(pieces)), ""]
    return lines


def steps(id: str) -> list[str]:
    """Return an environment's episode as a list, with the task first."""
    trace = episode(id)
    _, _, task = trace.origin
    lines = [
        f"The expert plays task `{trace.task_id}`" + (f": {asked}" if (asked := told(task.view)) else ".")
    ]
    for number, node in enumerate(trace.nodes, 1):
        if node.kind == "use":
            asked, answer = use_in_words(node, 240)
            lines += [
                "",
                f"{number}. tool **{node.tool}**",
                *fenced(f"{asked}\n-> {answer}" if asked else answer),
            ]
        else:
            earned = ", ".join(
                f"{name} {amount:+.3g}" for name, amount in trace.rewards(node.id).items() if amount
            )
            lines += [
                "",
                f"{number}. **{node.agent}**" + (f" (earns {earned})" if earned else ""),
                *fenced(clip(node.text or "")),
            ]
    scores = ", ".join(
        f"{name} {trace.metrics[name]:.3g}"
        for name in dict.fromkeys((spec(id).headline, "score"))
        if name in trace.metrics
    )
    return [*lines, "", f"End: {escape(ending(trace))}. {scores}."]


def told(task: object) -> str:
    """Return the question or the problem of a task in one line; empty for a board."""
    words = next((str(getattr(task, name)) for name in ("question", "problem") if hasattr(task, name)), "")
    return escape(" ".join(words.split())[:300])


def fenced(text: str) -> list[str]:
    """Return a text as a block inside a list."""
    return ["", "    ```text", *(f"    {line}" for line in text.splitlines()), "    ```"]


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
