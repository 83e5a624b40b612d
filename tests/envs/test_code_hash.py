"""What an episode is made by has a hash: of the code, not of the words around it."""

from hypothesis import given
from hypothesis import strategies as st

from unitymas.envs.core.arena import bare_code

PROGRAM = '''"""Words."""
from __future__ import annotations
import os, sys

class Team:
    """More words,
    ä over lines."""

    x = "# no comment"  # a comment with ü

    def run(self, ep):
        import math
        text = """kept # as it is

        and every blank line of it"""; return f"{self.x}#{math.pi}", text
'''
KEPT = '''class Team:
    x = "# no comment"
    def run(self, ep):
        text = """kept # as it is

        and every blank line of it"""; return f"{self.x}#{math.pi}", text'''


def test_words_comments_and_imports_do_not_count():
    assert bare_code(PROGRAM) == KEPT
    moved = PROGRAM.replace("Words", "Others").replace(
        "import os, sys", "from ..a import (\n    b,\n)\n\n# moved"
    )
    assert bare_code(moved) == KEPT


@given(st.text(st.characters(exclude_characters='"\\\r\x00', exclude_categories=["Cs"])))
def test_whatever_the_words_are(words):
    assert bare_code(PROGRAM.replace("More words", words)) == KEPT


def test_every_change_of_code_counts():
    for old, new in [
        ("no comment", "a comment"),
        ("math.pi", "math.e"),
        ("kept", "lost"),
        ("Team", "Group"),
        ("is\n\n", "is\n"),
        ("is\n", "is \n"),
    ]:
        assert bare_code(PROGRAM.replace(old, new)) != KEPT
