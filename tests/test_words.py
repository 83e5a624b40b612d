"""The words of the house: docstrings that stand alone, and names that are nouns (CONTRIBUTING.md, "Words").

A count in `MOST` may only fall: lower it when you mend some, so that none comes back.
"""

import ast
import inspect
import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ["agents", "envs", "rewards", "trainers", "benchmarks"]

RIDDLES = """
as at be by for from how in is it its of see that there this to up
what when where whether which who whoever whom whose why with …
"""
"""First words that make a docstring a fragment: pronouns, prepositions, question words, and "See …" alone."""
PARTICIPLES = {"found", "said", "given", "praised"}
"""Names of variables that tell what was done to a thing, and not what it is."""
PRIVATE = re.compile(
    r"\b(whoever|whatever|somebody|nobody|one's own|(is|are|was|were) (told|said)|by turns|goes on|go on|hands? (in|out|on|back))\b",
    re.IGNORECASE,
)
"""Words of a docstring that stand for the field's own terms, such as "continue", "any user" or "return"."""
ENDINGS = tuple(".!?:`)…\"'")

MOST = {
    "agents": [31, 0, 0, 11, 0],
    "envs": [0, 0, 5, 2, 1],
    "rewards": [0, 0, 0, 0, 0],
    "trainers": [103, 3, 5, 15, 17],
    "benchmarks": [0, 0, 0, 0, 0],
}
"""How many of each kind are left in a room, in the order of `KINDS`."""


def definitions(tree):
    """The module and its public functions, classes and methods. Methods that others call for us (`__init__` …) are private."""
    yield "module", tree
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name[0] != "_":
            yield node.name, node
            if isinstance(node, ast.ClassDef):
                for inner in node.body:
                    if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef) and inner.name[0] != "_":
                        yield f"{node.name}.{inner.name}", inner


def docs(tree):
    """Every docstring, those of fields included: (line, text without its indentation)."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for item in body if isinstance(body, list) else ():
            if (
                isinstance(item, ast.Expr)
                and isinstance(item.value, ast.Constant)
                and isinstance(item.value.value, str)
            ):
                yield item.lineno, inspect.cleandoc(item.value.value)


def first_word(text):
    """The first word of a docstring, without its punctuation."""
    return text.split()[0].strip("*_,;:.").lower() if text else ""


def names(tree):
    """Names that are bound in functions: variables and parameters."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg


def faults(source):
    """What is wrong in a source, by kind: (kind, line, words)."""
    tree = ast.parse(source)
    for name, node in definitions(tree):
        if not ast.get_docstring(node):
            yield "no docstring", getattr(node, "lineno", 1), name
    for line, text in docs(tree):
        if first_word(text) in RIDDLES.split():
            yield "begins as a fragment", line, text[:60]
        if not text.endswith(ENDINGS) and not text.split("\n")[-1].startswith(
            " "
        ):  # a table or an example may end it
            yield "ends without punctuation", line, text[-60:]
        if PRIVATE.search(text):
            yield "private words", line, PRIVATE.search(text)[0]
    for line, name in names(tree):
        if name in PARTICIPLES:
            yield "a name is no noun", line, name


KINDS = [
    "no docstring",
    "begins as a fragment",
    "ends without punctuation",
    "private words",
    "a name is no noun",
]


@pytest.mark.parametrize("room", ROOMS)
def test_words_get_better_only(room):
    places = {kind: [] for kind in KINDS}
    for file in sorted((ROOT / room).rglob("*.py")):
        for kind, line, words in faults(file.read_text()):
            places[kind].append(f"{file.relative_to(ROOT)}:{line}: {words}")
    counts = [len(places[kind]) for kind in KINDS]
    for kind, count, most in zip(KINDS, counts, MOST[room], strict=True):
        listed = "\n".join(places[kind])
        assert count <= most, f"{room}: {kind}: {count}, and at most {most} are left. Mend yours:\n{listed}"


def test_the_rule_sees_faults():
    source = '"""See `x`, whoever you are."""\ndef f(given):\n    found = 1\nclass A:\n    """Of a group"""\n    x: int\n    """The size."""\n'
    assert Counter(kind for kind, _, _ in faults(source)) == {
        "no docstring": 1,
        "begins as a fragment": 2,
        "ends without punctuation": 1,
        "private words": 1,
        "a name is no noun": 2,
    }
