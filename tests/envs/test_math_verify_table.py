"""math-verify's own test table, read from its source archive where there is one: we agree, but for seven rows.

    pip download --no-deps --no-binary :all: math-verify==0.9.0
    MATH_VERIFY_SDIST=math_verify-0.9.0.tar.gz pytest tests/envs/test_math_verify_table.py

Only the rows are read (gold, prediction, expected), never its code. Our own table is in test_math_equal.py.
"""

import ast
import os
import tarfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from unitymas.envs.tools.math.equal import math_equal

SDIST = Path(os.environ.get("MATH_VERIFY_SDIST", "math_verify-0.9.0.tar.gz"))
PATIENT = 20.0  # seconds of processor time: here we ask what is right, not how fast
OURS = {
    "test_latex_notation": 2,  # they forbid an answer outside of LaTeX, or one with line breaks in it
    "test_complex_math_expressions": 2,  # declared with a precision of two decimals; ours is six
    "test_set_rel_assymetry": 1,  # declared with a flag: an inequality for an interval, where the set is gold
    "test_strict_variable_comparison": 1,  # declared not strict: f(y) for f(x)
    "test_boxed": 1,  # two boxes with "++++++" between them are no list to us
}


def rows() -> Iterator[tuple[str, str, str, bool]]:
    """(the test's name, gold, prediction, expected) of all rows that are literals."""
    with tarfile.open(SDIST) as archive:
        files = [m for m in archive.getmembers() if "/tests/test_" in m.name]
        trees = [ast.parse(archive.extractfile(m).read()) for m in files]
    for tree in trees:
        for test in ast.walk(tree):
            for mark in test.decorator_list if isinstance(test, ast.FunctionDef) else ():
                if not (isinstance(mark, ast.Call) and mark.args and isinstance(mark.args[0], ast.Constant)):
                    continue
                names = [name.strip() for name in mark.args[0].value.split(",")]
                if names[:2] != ["gold", "pred"]:
                    continue
                expected = next(i for i, name in enumerate(names) if name in ("expected", "result"))
                for row in mark.args[1].elts:
                    try:
                        values = ast.literal_eval(row)
                    except ValueError:  # one row is computed
                        continue
                    yield test.name, values[0], values[1], bool(values[expected])


@pytest.mark.skipif(not SDIST.is_file(), reason="no source archive of math-verify 0.9.0 (MATH_VERIFY_SDIST)")
def test_we_agree_with_math_verifys_own_table() -> None:
    table = list(rows())
    assert len(table) == 274
    wrong = [row for row in table if math_equal(row[2], row[1], seconds=PATIENT) is not row[3]]
    assert Counter(row[0] for row in wrong) == OURS, wrong
