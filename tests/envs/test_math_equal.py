"""Math grading: the cases other graders get wrong, math-verify's behaviour, and input made to break a grader."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unitymas.envs.tools.math import numerals
from unitymas.envs.tools.math import processes as math_pool
from unitymas.envs.tools.math.equal import extract_answer, math_equal

EQUAL = [
    # numbers, however they are written
    ("5", "5"), ("+5", "5"), ("073", "73"), ("5.0", "5"), ("1,000", "1000"), ("1 000", "1000"), ("14{,}916", "14916"),
    (r"11,\! 111,\! 111,\! 100", "11111111100"), ("1e3", "1000"), ("1.5e-7", r"1.5 \times 10^{-7}"), (".4", "0.4"),
    ("10^{-7}", "0.0000001"), ("2^10", "1024"), ("2**10", "1024"), ("5!", "120"), ("5 million", "5000000"),
    ("1,22", "1.22"), ("1000,99", "1000.99"), ("−5", "-5"),
    # fractions and mixed numbers
    ("1½", "3/2"), ("1 1/2", "1.5"), (r"2\frac{3}{4}", "11/4"), ("-2 3/4", "-2.75"), (r"\frac12", "0.5"),
    (r"\dfrac{3}{4}", "0.75"), (r"-\frac{1}{2}", "-0.5"), ("0.333333", "1/3"), (r"\frac{1}{12}", "0.0833333333333333"),
    # percentages, units, money
    ("5%", "5"), ("5%", "0.05"), (r"28\%", "28"), ("28 percent", r"28\%"), ("50%", "1/2"), ("28.5 %", "28.5"),
    ("5 cm", "5"), (r"5\text{ cm}", "5 centimeters"), (r"90^\circ", "90"), ("90 degrees", "90°"), ("5 m", "5 meters"),
    ("60 km per hour", "60 km/h"), ("5 square meters", "5 m^2"), ("$18", "18"), ("18 dollars", "$18.00"),
    (r"18 \text{ apples}", "18"), ("1,000.99€", "1000.99"), (r"8 \text{ units}", "8"),
    # surds, constants, algebra
    ("1/√2", "√2/2"), (r"\frac{1}{\sqrt2}", r"\frac{\sqrt{2}}{2}"), ("sqrt(2)/2", r"\frac{\sqrt{2}}{2}"), ("2*pi", r"2\pi"),
    ("x²+1", "x^2+1"), ("(x+1)^2", "x^2+2x+1"), (r"\tan^2(y)+1", r"\sec^2(y)"), ("3+4i", "4i+3"), ("x^(1/2)", r"\sqrt{x}"),
    (r"\frac{x+2}{7}", r"\frac{x}{7}+\frac{2}{7}"),
    # equations, inequalities
    ("x=5", "5"), ("5", "x=5"), ("y = 2x + 3", "2x+3"), ("x>5", "5<x"), ("x >= 5", r"x \geq 5"), ("-x > -1", "x < 1"),
    (r"y=-\frac{1}{2}x+\frac{3}{4}", "2x+4y-3=0"), ("x = 5+5+1 = 11", "x = 11"),
    # sets, lists, intervals, points, matrices
    ("{1,2}", "{2,1}"), ("1, 2", r"\{1,2\}"), ("2 and 1", "1, 2"), ("x=2 or x=3", "2,3"), (r"\pm 3", "{-3, 3}"),
    ("[1,2)", "[1, 2)"), ("(-∞, 2]", r"(-\infty,2]"), (r"(2,12) \cup (12,102)", "(2, 12)∪(12, 102)"), ("(1, 9/2)", "(1,4.5)"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{bmatrix}1\\2\end{bmatrix}"), ("∅", r"\emptyset"),
    # words and letters
    ("Evelyn", r"\text{Evelyn}"), (r"\text{(C)}", "C"), ("Even.", "even"),
    # whole solutions
    (r"Thus $x-p=\boxed{2-2p}$.", "2-2p"), ("Natalia sold 48/2 = 24.\n#### 72", "72"), ("72", "so 48+24 = 72\n#### 72"),
    ("<answer>5</answer>", "5"), (r"<FINAL_ANSWER> \boxed{5} </FINAL_ANSWER>", "5"), ("The answer is 5.", "5"),
    (r"**Answer:** $\frac12$", "1/2"), ("Final Answer: The final answer is $10,455$. I hope it is correct.", "10455"),
    (r"$\boxed{1}$ and $\boxed{2}$", "1,2"), (r"\boxed{3}? No. The final answer is 4", "4"), ("Therefore, x = 7", "7"),
    ("it's not 10, it is 1,000.99m²", "1000.99"), (r"\boxed{\{1,2\}}", "{2,1}"),
    (r"\boxed{1} papers and \boxed{2} bins", "1,2"), (r"$x = \boxed{3}$ and $y = \boxed{4}$", "3,4"),
    (r"$\boxed{(3,3)} \text{ for part (a) and } \boxed{(1,1)}$", "(3,3), (1,1)"),
]  # fmt: skip

DIFFERENT = [
    ("2,3", "23"), ("23", "2,3"), ("1½", "11/2"), ("a/b+c", "a/(b+c)"), ("1000001", "1000000"), ("4.9999999", "5"),
    ("100000000000000000001", "100000000000000000000"), ("5 cm", "5 m"), ("5x", "5"), ("5m", "5"), ("2n", "2"),
    ("5 million", "5"), ("listen", "silent"), ("e^{-100}", "0"), (r"\frac{1}{2004!}", r"\frac{1}{2006!}"),
    (r"\frac{1}{2^{99}}", r"\frac{1}{2^{98}}"), ("(2,1)", "(1,2)"), ("[1,2]", "(1,2)"), ("12_3", "12_4"), ("4 0/0", "4"),
    ("11 6/6", "12"), ("500%", "5%"), ("0.28", "28"), ("28/100", "28"), ("28", r"28*\frac{1}{100}"), ("5 or 6", "5"),
    ("0.0000001", "0.0000002"), ("1/3", "0.33"), ("{1,2,3}", "{1,2}"), ("x < 5", "x > 5"), ("3.14", r"\pi"),
    (r"2021", r"\pm 2021"), ("12:00", "1:00"), ("32, 349", "32349"), (r"4\sqrt{2}", "4"), ("AZYUK2A", "2"),
    ("11a+c", "7=11a+c"), ("1", "2x+z=1"), (r"\boxed{4}, no: \boxed{5}", "4"), ("", "5"), ("", ""), (r"\begin{pmatrix} 1 \\ 4 \\ 3 \end{pmatrix}", r"\begin{pmatrix} 1 \\ 7 \end{pmatrix}"), ("yes", "no"),
    (r"\boxed{}", "5"), ("<answer></answer>", "5"), ("5 cm^2", "5 cm"),
    (r"\boxed{1} no no no \boxed{2}", "1,2"), (r"\boxed{1} and then I see that \boxed{2}", "1,2"),
]  # fmt: skip


@pytest.mark.parametrize(("prediction", "gold"), EQUAL)
def test_equal(prediction: str, gold: str) -> None:
    assert math_equal(prediction, gold) is True


@pytest.mark.parametrize(("prediction", "gold"), DIFFERENT)
def test_different(prediction: str, gold: str) -> None:
    assert math_equal(prediction, gold) is False


def test_no_answer_is_never_right() -> None:
    assert math_equal(None, "5") is False


def test_a_number_may_be_gold() -> None:
    assert math_equal("42", 42) and math_equal("0.5", 0.5)


@given(st.integers(), st.integers())
def test_integers_are_strict(left: int, right: int) -> None:
    assert math_equal(f"{left}", f"{right}") == (left == right)
    assert math_equal(f"{left:,}", f"{left}")


@given(st.fractions(max_denominator=10_000), st.fractions(max_denominator=10_000))
def test_fractions_against_exact_arithmetic(left: Fraction, right: Fraction) -> None:
    written = rf"\frac{{{left.numerator}}}{{{left.denominator}}}"
    assert math_equal(written, str(left))
    if abs(left - right) > Fraction(1, 1_000):
        assert not math_equal(written, str(right))


@given(st.text(max_size=40), st.sampled_from(["5", r"\frac{1}{2}", "1,2"]))
def test_reading_never_raises(text: str, gold: str) -> None:
    numerals.read(text)
    extract_answer(text)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{\frac{1}{2}} it is", r"\frac{1}{2}"),
        (r"\boxed{1}, \boxed{2}", "1, 2"),
        (r"\boxed{1}. Let me check again: \boxed{2}", "2"),
        (r"\boxed 7", "7"),
        (r"\boxed{never closed", r"\boxed{never closed"),
        ("<answer>3</answer> or <answer>4</answer>", "4"),
        ("a #### 3\nb #### 18\n", "18"),
        ("the answer is 7\nDone.", "7"),
        ("42", "42"),
    ],
)
def test_extract_answer(text: str, answer: str) -> None:
    assert extract_answer(text) == answer


HOSTILE = {
    "ten megabytes": "9" * 10_000_000,
    "power tower": "9^{9^{9}}",
    "factorial": "10000000!",
    "expansion": "(x+1)^{100000} - (x+2)^{100000}",
    "deep parentheses": "(" * 1_900 + "1" + ")" * 1_900,
    "deep braces": "{" * 10_000_000,
    "open tags": "<answer>" * 1_000_000,
    "spaces": "answer" + " " * 1_000_000,
    "open boxes": r"\boxed{" * 1_000_000,
    "delimiters": "$" * 1_000_000,
    "nul and surrogate": "\x00\ud800",
    "endless exponent": "1e999999999",
    "code": "__import__('os').system('touch /tmp/owned')",
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_input_is_just_wrong(text: str) -> None:
    assert math_equal(text, r"\frac{\pi}{7}", seconds=0.5) is False
    assert math_equal("7", "7")


def test_the_limit_holds_outside_the_main_thread_and_others_go_on() -> None:
    def ask(pair: tuple[str, str]) -> bool:
        return math_equal(*pair, seconds=0.5)

    pairs = [(rf"\frac{{{n}}}{{\sqrt{{{n}}}}}", rf"\sqrt{{{n}}}") for n in range(2, 12)] + [
        ("7^{7^{77}}", "x")
    ]
    started, before = time.monotonic(), threading.active_count()
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(ask, pairs)) == [True] * 10 + [False]
    assert time.monotonic() - started < 60
    assert threading.active_count() < before + 15


def test_a_worker_that_is_killed_is_replaced() -> None:
    assert math_pool.POOL.compare(["$x+x$"], ["$2x$"], 5.0)
    for worker in math_pool.POOL._idle:
        worker._process.kill()
        worker._process.wait()
    assert math_pool.POOL.compare(["$x+x+x$"], ["$3x$"], 5.0)


def test_workers_see_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_KEY", "secret")
    assert "API_KEY" not in math_pool._environment()
