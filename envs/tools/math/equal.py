"""Equality of mathematical answers: ``math_equal("\\\\boxed{\\\\frac{1}{2}}", "0.5")`` is True.

There are three steps. First the answer is extracted from both sides (``extract_answer``). Two plain numbers are then
compared exactly (``numerals``). All other answers, such as roots, intervals and matrices, go to ``math-verify`` in a small
pool of worker processes (`worker`) with limits on processor time and memory. So ``math_equal`` is safe in any thread and
event loop, and no input makes it raise or hang.

``math_equal`` blocks for some microseconds as a rule, and for a few times ``seconds`` at most. So as a tool it is
``blocking``.
"""

from __future__ import annotations

import re
from functools import lru_cache

from . import numerals
from .processes import POOL

LONGEST_TEXT = 50_000  # of a longer text only the end is read, where the answer is
LONGEST_ANSWER = 4_000  # longer answers are equal only if their texts are
SECONDS = 2.0  # processor time of a symbolic comparison


def math_equal(prediction: str | None, gold: str | float, *, seconds: float = SECONDS) -> bool:
    """Tell whether ``prediction`` has the value of ``gold``. Each may be an answer or a whole solution.

    Integers must be equal; other numbers must agree to six decimals. 5% equals both 5 and 0.05. Units are compared only if
    both sides have one. The order of a set does not matter, that of a tuple or an interval does. An empty prediction is
    never right.
    """
    if prediction is None:
        return False
    guess, want = _short(str(prediction)), _short(str(gold))
    if not guess or not want:
        return False
    if guess == want:
        return True
    answer, truth = extract_answer(guess), extract_answer(want)
    number, true_number = _number(answer), _number(truth)
    if number is not None and true_number is not None:
        return numerals.same(number, true_number)
    verdict = _same_words(answer, truth)
    if verdict is not None:
        return verdict
    # math-verify has its own eye for the answer in a text; a bare answer first needs plain notation made LaTeX.
    return _symbolic(_prepared(guess, answer), _prepared(want, truth), seconds)


_TAG = re.compile(r"<(/?)(?:final_)?answer>", re.IGNORECASE)
_SAID = re.compile(r"(?:answer|solution)[\s*]{0,9}(?:is|:|=)[\s*:]{0,9}([^\n]*)", re.IGNORECASE)
_HOPE = re.compile(r"\.? {0,3}I hope.*", re.DOTALL)


def extract_answer(text: str) -> str:
    """Return the final answer of a solution: the last answer tag, or else ``\\boxed``, ``####``, or "answer is …".

    A "final answer is …" after the last box replaces the box. A text without any of these is returned whole.
    """
    text = _short(text)
    tagged = _last_tagged(text)
    if tagged is not None:
        return extract_answer(tagged) if tagged.strip() else ""
    boxed, end = _last_boxed(text)
    match = _last(_SAID, text, end)
    marked = boxed is not None or "####" in text
    if (
        match is not None
        and match[1].strip()
        and not (marked and "final" not in text[end : match.start()].lower())
    ):
        return _HOPE.sub("", match[1]).strip()
    if boxed is not None:
        return boxed
    return text.rpartition("####")[2].strip().partition("\n")[0].strip() if "####" in text else text


def _short(text: str) -> str:
    return text[-LONGEST_TEXT:].strip()


def _last(pattern: re.Pattern[str], text: str, start: int = 0) -> re.Match[str] | None:
    matches = list(pattern.finditer(text, start))
    return matches[-1] if matches else None


def _last_tagged(text: str) -> str | None:
    """Return the text between the last closing tag and the nearest opening tag before it."""
    tags = list(_TAG.finditer(text))
    for opening, closing in zip(reversed(tags[:-1]), reversed(tags[1:]), strict=True):
        if closing[1] and not opening[1]:
            return text[opening.end() : closing.start()]
    return None


_BOX = re.compile(r"\\f?boxed(?![A-Za-z])")
_BETWEEN_BOXES = re.compile(r"[\s,$.]*(?:(?:[\w()]+\s+){0,3}(?:and|or))?[\s$]*(?:[A-Za-z]\w*\s*=\s*)?")
_MARKUP = re.compile(r"\\(?:quad|qquad|text)|\\[,;\[\]()]|[{}]")


def _last_boxed(text: str) -> tuple[str | None, int]:
    """Return content and end of the last ``\\boxed{…}``. Boxes that follow each other directly are one list."""
    contents: list[str] = []
    begin = end = 0
    for box in reversed(list(_BOX.finditer(text))[-8:]):
        content, after = _braced(text, box.end())
        if content is None or (contents and not _adjoining(text[after:begin])):
            break
        contents.insert(0, content)
        begin, end = box.start(), end or after
    return (", ".join(contents), end) if contents else (None, 0)


def _adjoining(between: str) -> bool:
    return len(between) < 60 and _BETWEEN_BOXES.fullmatch(_MARKUP.sub(" ", between)) is not None


def _braced(text: str, at: int) -> tuple[str | None, int]:
    """Return content and end of the group that begins at ``at``, such as "{a{b}c}" or " 7"."""
    bare = re.compile(r"\s+([^\s${}\\]+)").match(text, at)
    if bare:
        return bare[1].rstrip("."), bare.end()
    if text[at : at + 1] != "{":
        return None, at
    depth = 0
    for brace in re.compile(r"\\?[{}]").finditer(text, at):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return text[at + 1 : brace.start()].strip(), brace.end()
    return None, at


# ------------------------------------------------------------------------- comparisons


@lru_cache(maxsize=50_000)
def _number(text: str) -> numerals.Numeral | None:
    return numerals.read(text)


_WORDS = re.compile(r"[A-Za-z]{3,}(?:[ '-][A-Za-z]+)*")
_NAMES_OF_VALUES = {"infinity", "inf", "emptyset"}


def _same_words(answer: str, truth: str) -> bool | None:
    """Compare answers that are words ("Evelyn", "\\text{even}"), in which algebra would read products of letters.

    Return None if one of them is not a word.
    """
    if max(len(answer), len(truth)) > LONGEST_ANSWER:
        return None
    left, right = numerals.tidy(answer), numerals.tidy(truth)
    if answer.split() == truth.split() or left == right:
        return True
    words = [_WORDS.fullmatch(side) and side.lower() not in _NAMES_OF_VALUES for side in (left, right)]
    return left.casefold() == right.casefold() if all(words) else None


@lru_cache(maxsize=100_000)
def _symbolic(predictions: tuple[str, ...], golds: tuple[str, ...], seconds: float) -> bool:
    return POOL.compare(predictions, golds, seconds)


# ---------------------------------------------------------------- plain notation to LaTeX

_MARKED = re.compile(r"\$|\\\(|\\\[|\\boxed")
_KNOWN_WORDS = re.compile(
    r"(?:arc)?(?:sin|cos|tan|cot|sec|csc)h?|log|ln|exp|sqrt|pi|inf|infinity|and|or|mod|min|max"
)
_PLAIN = {
    "√": r"\sqrt", "π": r"\pi ", "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∪": r"\cup ",
    "∩": r"\cap ", "∈": r"\in ", "±": r"\pm ", "÷": "/", "∅": r"\emptyset ", "ℝ": r"\mathbb{R}", "°": r"^\circ ",
}  # fmt: skip
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")


def _prepared(text: str, answer: str) -> tuple[str, ...]:
    """Return the texts for ``math-verify``: a sentence unchanged, a bare answer as LaTeX."""
    if answer and not _is_prose(answer):
        text = answer
    result = text.rpartition("=")[2]
    if not _MARKED.search(text) and _is_prose(text) and result and not _is_prose(result):
        text = result  # "the area = \\frac{3}{2}"
    if len(text) > LONGEST_ANSWER or _MARKED.search(text) or _is_prose(text):
        return (text,)
    latex = f"${to_latex(text)}$"
    return (latex, text) if re.fullmatch(r"[+-]?[0-9]+,[0-9]+", text) else (latex,)  # a list, or 1,22 = 1.22


def _is_prose(text: str) -> bool:
    bare = re.sub(r"\\(?:text|mathrm|textbf|mbox|operatorname|begin|end)\s*\{[^{}]*\}|\\[A-Za-z]+", " ", text)
    words = re.findall(r"[A-Za-z]{3,}", bare)
    return sum(_KNOWN_WORDS.fullmatch(word.lower()) is None for word in words) >= (1 if " " in text else 2)


def to_latex(text: str) -> str:
    """Write ``2**10``, ``sqrt(3)/2``, ``x² ≥ 1`` and ``2 or 3`` as LaTeX. LaTeX itself stays unchanged."""
    text = numerals.tidy(text).replace("$", " ").replace("**", "^")
    text = re.sub(r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+", lambda match: f"^{{{match[0].translate(_SUPERSCRIPTS)}}}", text)
    for sign, latex in _PLAIN.items():
        text = text.replace(sign, latex)
    text = re.sub(r"(?<![\\A-Za-z])(sqrt|pi|sin|cos|tan|log|ln)(?![A-Za-z])", r"\\\1 ", text)
    text = re.sub(r"(?<![\\A-Za-z])(?:infinity|inf|oo)(?![A-Za-z])", r"\\infty ", text)
    text = re.sub(r"\\sqrt\s*([0-9.]+|[a-z])", r"\\sqrt{\1}", text)
    text = re.sub(r"(\\sqrt|\^)\s*\(([^()]*)\)", r"\1{\2}", text)
    text = re.sub(r"\^\s*([+-]?[0-9]{2,}|[+-][0-9])", r"^{\1}", text)
    text = text.replace("<=", r"\le ").replace(">=", r"\ge ").replace("!=", r"\ne ").replace("*", r"\cdot ")
    text = re.sub(r"(?<=[0-9])(?=[A-Za-z])", "*", text)  # otherwise math-verify drops the m of 5m as a unit
    return re.sub(r",?\s+(?:and|or)\s+|\s*\\text\s*\{\s*(?:and|or)\s*\}\s*", ", ", text)
