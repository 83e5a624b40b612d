"""One documentation page per environment, written from the environment itself: `python -m unitymas.benchmarks.pages docs`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from ..envs.commands import info_text
from ..envs.registry import list_envs, resolve, spec


def main(argv: Sequence[str]) -> int:
    """Write `environments.md` and a page per environment under DIR/environments."""
    root = Path(argv[0] if argv else "docs")
    folder = root / "environments"
    folder.mkdir(parents=True, exist_ok=True)
    rows = ["# Environments", "", "Written by `make docs` from the environments themselves.", ""]
    rows += ["| id | roles | headline | |", "|---|---|---|---|"]
    for id in list_envs():
        known = spec(id)
        roles = ", ".join(r.name + (f" × {r.instances}" if r.instances > 1 else "") for r in known.roles)
        rows.append(f"| [{id}](environments/{id}.md) | {roles} | {known.headline} | {known.description} |")
        (folder / f"{id}.md").write_text(page(id))
    (root / "environments.md").write_text("\n".join(rows) + "\n")
    print(f"{len(list_envs())} pages in {folder}")
    return 0


def page(id: str) -> str:
    """An environment's page."""
    known = spec(id)
    text = (sys.modules[resolve(known.workflow).__module__].__doc__ or "").strip()
    return f"# {known.id}\n\n```text\n{text}\n```\n\n`unitymas info {id}`:\n\n```text\n{info_text(id)}\n```\n"


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
