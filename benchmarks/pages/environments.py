"""One documentation page per environment, written from the environment itself: `python -m unitymas.benchmarks.pages.environments docs`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from ...agents.hints import counted
from ...cli.environments import info_text
from ...envs.registry import PACKAGE, list_envs, resolve, spec


def main(argv: Sequence[str]) -> int:
    """Write the pages under DIR, and remove those of environments that are no more."""
    root = Path(argv[0] if argv else "docs")
    texts = pages()
    (root / "environments").mkdir(parents=True, exist_ok=True)
    for old in (root / "environments").glob("*.md"):
        if f"environments/{old.name}" not in texts:
            old.unlink()
    for name, text in texts.items():
        (root / name).write_text(text, encoding="utf-8")
    print(f"{counted(len(texts), 'page')} in {root}")
    return 0


def pages() -> dict[str, str]:
    """The path of each generated page under ``docs/``, and its text."""
    texts = {f"environments/{id}.md": page(id) for id in ours()}
    return {"environments.md": contents(), **texts}


def ours() -> list[str]:
    """The ids that come with the package; what a plug-in or a notebook registered has pages elsewhere."""
    home = f"{PACKAGE}.envs."
    return [id for id in list_envs() if isinstance(w := spec(id).workflow, str) and w.startswith(home)]


def contents() -> str:
    """The table of all environments."""
    rows = ["# Environments", "", "Written by `make docs` from the environments themselves.", ""]
    rows += ["| id | roles | headline | |", "|---|---|---|---|"]
    for id in ours():
        known = spec(id)
        roles = ", ".join(r.name + (f" × {r.instances}" if r.instances > 1 else "") for r in known.roles)
        rows.append(f"| [{id}](environments/{id}.md) | {roles} | {known.headline} | {known.description} |")
    return "\n".join(rows) + "\n"


def page(id: str) -> str:
    """An environment's page."""
    known = spec(id)
    text = (sys.modules[resolve(known.workflow).__module__].__doc__ or "").strip()
    return f"# {known.id}\n\n```text\n{text}\n```\n\n`unitymas info {id}`:\n\n```text\n{info_text(id)}\n```\n"


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
