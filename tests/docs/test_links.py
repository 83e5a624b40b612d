"""The documentation hangs together: generated pages are fresh, links lead somewhere, and every page is linked."""

import re
from pathlib import Path

import pytest

from unitymas.benchmarks.pages.environment_pages import main, pages

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
FENCE = re.compile(r"^(```|~~~).*?^\1", re.DOTALL | re.MULTILINE)
LINK = re.compile(
    r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(\s*<?([^)\s>]+)>?[^)]*\)|^\[[^\]]+\]:\s*(\S+)", re.MULTILINE
)
HEADING = re.compile(r"^#{1,6}\s+(.+?)\s*#*$", re.MULTILINE)
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *DOCS.rglob("*.md")])


def prose(file):
    """A page without its blocks and pieces of code."""
    return re.sub(r"`[^`\n]*`", "", FENCE.sub("", file.read_text(encoding="utf-8")))


def targets(file):
    """The local files and anchors that a page links to."""
    for match in LINK.finditer(prose(file)):
        target = match[1] or match[2]
        if not re.match(r"[a-z]+:", target):
            path, _, anchor = target.partition("#")
            yield target, (file.parent / path).resolve() if path else file, anchor


def anchors(file):
    """The anchors of a page's headings, as GitHub and its relatives make them."""
    counts = {}
    for title in HEADING.findall(FENCE.sub("", file.read_text(encoding="utf-8"))):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).replace("`", "").replace("*", "")
        slug = re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-")
        counts[slug] = counts.get(slug, -1) + 1
        yield f"{slug}-{counts[slug]}" if counts[slug] else slug


def broken(file):
    """What is wrong with the links of a page."""
    for target, path, anchor in targets(file):
        if not path.exists():
            yield f"{file.relative_to(ROOT)}: {target} does not exist"
        elif anchor and path.suffix == ".md" and anchor not in set(anchors(path)):
            yield f"{file.relative_to(ROOT)}: {target}: no such heading"


def reached(start, at):
    """All pages that a reader comes to from one of them by following links."""
    seen, todo = set(), [start]
    while todo:
        file = todo.pop()
        if (
            file in seen
            or at not in (file.parent, *file.parents)
            or file.suffix != ".md"
            or not file.exists()
        ):
            continue
        seen.add(file)
        todo += [path for _, path, _ in targets(file)]
    return seen


def test_generated_pages_are_fresh():
    texts = pages()
    files = [*(DOCS / "environments").glob("*.md"), *(DOCS / "images/episodes").glob("*.svg")]
    kept = {str(f.relative_to(DOCS)) for f in files} | {
        "environments.md",
        "gallery.md",
        "settings.md",
        "curves.md",
    }
    stale = sorted(
        kept.symmetric_difference(texts)
        | {n for n in kept & set(texts) if (DOCS / n).read_text() != texts[n]}
    )
    assert not stale, (
        f"run `make docs` (python -m unitymas.benchmarks.pages.environment_pages docs) and commit: {stale}"
    )


def test_pages_of_environments_that_are_no_more_go(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "unitymas.benchmarks.pages.environment_pages.pages", lambda: {"environments/a.md": "a"}
    )
    (tmp_path / "environments").mkdir()
    (tmp_path / "environments/old.md").write_text("old")
    assert main([str(tmp_path)]) == 0
    assert [f.name for f in (tmp_path / "environments").iterdir()] == ["a.md"]


def test_links_lead_somewhere():
    assert not [problem for file in PAGES for problem in broken(file)]


def test_every_page_is_linked():
    assert set(DOCS.rglob("*.md")) <= reached(ROOT / "README.md", ROOT), "link it in docs/index.md"
    named = {path for _, path, _ in targets(DOCS / "index.md")}
    missing = {f for f in DOCS.glob("*.md") if f.name != "index.md"} - named
    assert not missing, f"docs/index.md does not name {sorted(f.name for f in missing)}"


def test_every_picture_is_shown():
    shown = {path for file in PAGES for _, path, _ in targets(file)}
    assert not {f for f in DOCS.rglob("*.png")} - shown


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[x](gone.md)", "gone.md does not exist"),
        ("![x](gone.png)", "gone.png does not exist"),
        ("[a [b] c](gone.md)", "gone.md does not exist"),
        ("[x]: gone.md", "gone.md does not exist"),
        ("[x](other.md#nowhere)", "no such heading"),
        ("# Here\n[x](#there)", "no such heading"),
        ("[x](other.md#a-title-with-code-and-signs)", None),
        ("[x](other.md#twice-1) [y](#z)\n# Z", None),
        ("[x](other.md#in-a-block)", "no such heading"),
        ("```\n[x](gone.md)\n```\n`[x](gone.md)` [w](https://example.org)", None),
    ],
)
def test_a_dead_link_is_found(tmp_path, monkeypatch, text, problem):
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    (tmp_path / "other.md").write_text(
        "# A *title*, with `code` and signs!\n## Twice\n## Twice\n```\n# In a block\n```\n"
    )
    page = tmp_path / "page.md"
    page.write_text(text)
    problems = list(broken(page))
    assert len(problems) == bool(problem) and (not problem or problem in problems[0])
