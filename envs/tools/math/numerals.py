"""Exact reader of one written number: integers, decimals, fractions, mixed numbers, percentages, units.

``read("1½ m")`` is ``Numeral(3/2, unit="m")``. A text that is not clearly one number is read as ``None`` and compared
symbolically. Values are exact (``Fraction``), so 1000001 is never "close to" 1000000.

Other graders often read these cases wrongly: "2,3" is a list and not 23, because a thousands separator needs groups of
three digits. 1½ is 3/2. "5 million" is not 5. "5 cm" and "5 m" differ, "5 cm" and "5" do not.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

LONGEST = 400  # characters; a longer text is no numeral


@dataclass(frozen=True, slots=True)
class Numeral:
    """Number as it was written. A ``malformed`` one, such as "4 0/0", equals no number."""

    value: Fraction
    percent: bool = False
    unit: str = ""
    base: int = 0
    malformed: bool = False


def same(prediction: Numeral, gold: Numeral) -> bool:
    """Tell whether two numerals are equal: integers exactly, 5% as 5 or 0.05, units only if both have one."""
    if prediction.malformed or gold.malformed:
        return False
    if prediction.unit and gold.unit and prediction.unit != gold.unit:
        return False
    if prediction.base and gold.base and prediction.base != gold.base:
        return False
    if close(_scaled(prediction), _scaled(gold)):
        return True
    return prediction.percent != gold.percent and close(prediction.value, gold.value)


def close(left: Fraction, right: Fraction) -> bool:
    """Tell whether two numbers are equal, or are no integers and agree to six decimals and five digits (1/3, 0.333333)."""
    if left == right:
        return True
    if left.denominator == 1 or right.denominator == 1:
        return False
    return round(left, 6) == round(right, 6) and abs(left - right) * 100_000 <= max(abs(left), abs(right))


def _scaled(numeral: Numeral) -> Fraction:
    return numeral.value / 100 if numeral.percent else numeral.value


_INTEGER = r"(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+|[1-9][0-9]{0,2}(?: [0-9]{3})+|[0-9]+)"
_DECIMAL = rf"(?:{_INTEGER}(?:\.[0-9]*)?|\.[0-9]+)"
_POWER_OF_TEN = (
    r"(?:[eE](?P<exponent>[+-]?[0-9]{1,3})(?![0-9])"
    r"|\s*(?:\*|x|\\times|\\cdot)\s*10\s*\^\s*\{?(?P<power>[+-]?[0-9]{1,3})\}?)"
)
_RATIO = (
    rf"(?:\\frac\s*\{{\s*(?P<top1>-?{_DECIMAL})\s*\}}\s*\{{\s*(?P<bottom1>{_DECIMAL})\s*\}}"
    r"|\\frac\s*(?P<top2>[0-9])\s*(?P<bottom2>[0-9])"
    rf"|(?P<top3>{_DECIMAL})\s*/\s*(?P<bottom3>{_DECIMAL}))"
)
_NUMERAL = re.compile(
    r"(?P<sign>[+-]?)\s*(?:"
    rf"(?P<whole>{_INTEGER})(?:\s+(?=[0-9.])|\s*(?=\\frac)){_RATIO.replace('<', '<of_')}"
    rf"|{_RATIO}"
    rf"|(?P<digits>[0-9]+)_\{{?(?P<base>[0-9]{{1,2}})\}}?"
    rf"|(?P<decimal>{_DECIMAL}){_POWER_OF_TEN}?"
    r")(?P<rest>.*)",
    re.DOTALL,
)


def read(text: str) -> Numeral | None:
    """Return the number that ``text`` is, or None for any other text (an expression, a list, a sentence)."""
    if len(text) > LONGEST:
        return None
    text, currency = _without_currency(tidy(text))
    match = _NUMERAL.fullmatch(text)
    if match is None:
        return None
    tail = _tail(match["rest"])
    if tail is None:
        return None
    value, malformed = _value(match)
    sign = -1 if match["sign"] == "-" else 1
    return Numeral(
        sign * value * tail.scale, tail.percent, tail.unit or currency, int(match["base"] or 0), malformed
    )


def _value(match: re.Match[str]) -> tuple[Fraction, bool]:
    """Return the magnitude of a match, and whether it is malformed (a zero denominator, "11 7/6")."""
    top = _first(match, "top1", "top2", "top3")
    if top is not None:
        return _divide(top, _first(match, "bottom1", "bottom2", "bottom3"))
    if match["whole"] is not None:
        part, malformed = _divide(
            _first(match, "of_top1", "of_top2", "of_top3"),
            _first(match, "of_bottom1", "of_bottom2", "of_bottom3"),
        )
        return _fraction(match["whole"]) + part, malformed or not 0 <= part < 1
    if match["digits"] is not None:
        return Fraction(match["digits"]), False
    exponent = int(match["exponent"] or match["power"] or 0)
    return _fraction(match["decimal"]) * Fraction(10) ** exponent, False


def _first(match: re.Match[str], *groups: str) -> str | None:
    return next((match[group] for group in groups if match[group] is not None), None)


def _divide(top: str | None, bottom: str | None) -> tuple[Fraction, bool]:
    numerator, denominator = _fraction(top or "0"), _fraction(bottom or "0")
    return (Fraction(0), True) if denominator == 0 else (numerator / denominator, False)


def _fraction(digits: str) -> Fraction:
    return Fraction(re.sub("[, ]", "", digits))


# ---------------------------------------------------------------------- notation

_VULGAR = {
    "¼": "1/4", "½": "1/2", "¾": "3/4", "⅐": "1/7", "⅑": "1/9", "⅒": "1/10", "⅓": "1/3", "⅔": "2/3", "⅕": "1/5",
    "⅖": "2/5", "⅗": "3/5", "⅘": "4/5", "⅙": "1/6", "⅚": "5/6", "⅛": "1/8", "⅜": "3/8", "⅝": "5/8", "⅞": "7/8",
}  # fmt: skip
_ASCII = str.maketrans(
    {"−": "-", "–": "-", "⁄": "/", "∕": "/", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot "}
    | {"\u00a0": " ", "\u202f": " "}  # no-break spaces
    | {vulgar: f" {ratio}" for vulgar, ratio in _VULGAR.items()}
)
_SPACING = re.compile(
    r"(?<!\\)\\[,;:!> ]|\\(?:left|right|displaystyle|textstyle|quad|qquad)(?![A-Za-z])|~|^\*\*|\*\*$|,\s*\\!"
)
_DELIMITERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"))


def tidy(text: str) -> str:
    """Return the number in plain notation: without delimiters, LaTeX spacing or typographic signs."""
    text = text.translate(_ASCII).strip()
    text = re.sub(r"\{,\}|,\s*\\!\s*", ",", text)
    text = _SPACING.sub(lambda match: "" if match[0] in (r"\!", "**") else " ", text)
    text = re.sub(r"\\[dtc]frac", r"\\frac", text)
    stripped = ""
    while stripped != text:
        stripped = text
        text = _unwrapped(text.strip().rstrip(".").rstrip())
    return text


def _unwrapped(text: str) -> str:
    for opening, closing in _DELIMITERS:
        if len(text) > len(opening) + len(closing) and text.startswith(opening) and text.endswith(closing):
            return text[len(opening) : -len(closing)]
    boxed = re.fullmatch(
        r"\\(?:boxed|fbox|text|mathrm|mathbf|textbf|mathit)\s*\{([^{}]*(?:\{[^{}]*\}[^{}]*)*)\}", text
    )
    if boxed:
        return boxed[1]
    grouped = re.fullmatch(r"[({]([^(){},\[\]]*)[)}]", text)
    return grouped[1] if grouped else text


# ------------------------------------------------------------------ units and the like


@dataclass(frozen=True, slots=True)
class _Tail:
    """Text after the digits: a percent sign, a magnitude word, a unit, or nothing."""

    scale: int = 1
    percent: bool = False
    unit: str = ""


_CURRENCIES = {r"\$": "dollar", "$": "dollar", "€": "euro", "¥": "yen", "₹": "rupee"}
_MAGNITUDES = {
    "hundred": 10**2,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
    "dozen": 12,
}
_PERCENT = {"%", r"\%", "percent", "percentage", "pct", "per cent"}
_UNITS = {
    alias: names.split()[0]
    for names in (
        "mm millimeter millimetre", "cm centimeter centimetre", "dm decimeter", "m meter metre", "km kilometer kilometre",
        "in inch inches", "ft foot feet", "yd yard", "mi mile", "mg milligram", "g gram gramme", "kg kilogram kilo",
        "lb pound lbs", "oz ounce", "ton tonne", "ml milliliter millilitre", "cl centiliter", "l liter litre", "gal gallon",
        "ms millisecond", "s second sec", "min minute", "h hour hr", "day", "week", "month", "year yr", "degree deg °",
        "radian rad", "dollar usd buck", "cent ¢", "euro eur", "yen", "rupee", "hz hertz", "n newton",
        "j joule", "w watt", "v volt", "pa pascal", "k kelvin", "celsius °c", "fahrenheit °f", "mph", "mol mole",
    )
    for alias in names.split()
}  # fmt: skip
_TEXT_UNIT = re.compile(r"\\(?:text|mathrm|textrm|mbox|textbf|operatorname|mathbf|rm)\s*\{([^{}]*)\}")
_NOT_UNITS = {
    "and",
    "or",
    "to",
    "pi",
    "sqrt",
    "sin",
    "cos",
    "tan",
    "log",
    "ln",
    "exp",
    "squared",
    "cubed",
    "half",
    "halves",
}


def _without_currency(text: str) -> tuple[str, str]:
    """Split off a currency sign at either end ("$5", "-$5", "1,000.99 €")."""
    for sign, unit in _CURRENCIES.items():
        if text.startswith(sign):
            return text[len(sign) :].strip(), unit
        if text.startswith("-" + sign):
            return "-" + text[len(sign) + 1 :].strip(), unit
        if text.endswith(sign):
            return text[: -len(sign)].strip(), unit
    return text, ""


def _tail(rest: str) -> _Tail | None:
    """Read the text after a number. Return None if it makes the number a part of a larger expression."""
    spelled = bool(_TEXT_UNIT.search(rest))
    words = _TEXT_UNIT.sub(r" \1 ", rest).strip().rstrip(".").lower()
    if not words:
        return _Tail()
    if words in _PERCENT:
        return _Tail(percent=True)
    head, _, after = words.partition(" ")
    scale = _MAGNITUDES.get(head.removesuffix("s"))
    if scale is not None:
        inner = _tail(after)
        return _Tail(scale, inner.percent, inner.unit) if inner and inner.scale == 1 else None
    if not spelled and rest[0] != " " and re.fullmatch(r"[a-z](?:\^?\{?[0-9]\}?)?", words):
        return None  # a letter that touches the digits is a variable: 5m is not 5, but 5 m is
    unit = _unit(words)
    if unit is not None:
        return _Tail(unit=unit)
    plain_words = re.fullmatch(r"[a-z][a-z '-]*", words) and not _NOT_UNITS & set(words.split())
    return _Tail() if spelled and plain_words else None  # "18 \text{ apples}": a noun, which is not compared


def _unit(words: str) -> str | None:
    """Return the canonical name of a known unit ("km/h", "square meters", "^\\circ"), "" for the word "units", or None."""
    words = re.sub(r"\^\s*\{?\s*(?:\\circ|\\degree|∘)\s*\}?|\\degree|\\circ", "°", words)
    words = words.replace("²", "^2").replace("³", "^3").replace("\\", " ").replace("{", "").replace("}", "")
    words = re.sub(r"\bsquared?\s+(\S+)", r"\1^2", words)
    words = re.sub(r"\bcubic\s+(\S+)", r"\1^3", words)
    if re.fullmatch(r"units?(?:\^[23])?", words.strip()):
        return ""
    parts = re.split(r"\s*/\s*|\s+per\s+", words.strip())
    units = [_single_unit(part) for part in parts]
    return "/".join(part for part in units if part) if all(units) else None


def _single_unit(word: str) -> str | None:
    match = re.fullmatch(r"([a-z°¢]+)\s*(?:\^?\s*([23]))?", word.strip())
    if match is None:
        return None
    name = _UNITS.get(match[1]) or _UNITS.get(match[1].removesuffix("s"))
    return None if name is None else name + (f"^{match[2]}" if match[2] else "")
