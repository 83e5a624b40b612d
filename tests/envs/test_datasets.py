"""Adapters: records as the data sets' authors publish them, and the rows they become."""

import base64
import json
import pickle
import zlib
from typing import Any

import pytest

from unitymas.envs.core.tasks import SCHEMAS, Task
from unitymas.envs.data.code_adapters import code, mbpp
from unitymas.envs.data.published import CATALOGUE
from unitymas.envs.data.qa_adapters import paragraphs
from unitymas.envs.data.row_schemas import DataError, FieldError, check_row
from unitymas.envs.data.sets import read_tasks

HOTPOT_HUB = {
    "id": "h1", "question": "Which town is older?", "answer": "Arden", "type": "comparison", "level": "easy",
    "supporting_facts": {"title": ["Arden", "Bexley", "Arden"], "sent_id": [0, 0, 1]},
    "context": {"title": ["Arden", "Bexley"], "sentences": [["Arden is old.", " Very."], ["Bexley is new."]]},
}  # fmt: skip
HOTPOT_AUTHORS = {
    "_id": "h1", "question": "Which town is older?", "answer": "Arden",
    "supporting_facts": [["Arden", 0], ["Bexley", 0]],
    "context": [["Arden", ["Arden is old.", " Very."]], ["Bexley", ["Bexley is new."]]],
}  # fmt: skip
TWOWIKI_PYTHON = {
    "_id": "w1", "question": "Who is the father?", "answer": "Tom", "supporting_facts": "[['A', 0]]",
    "context": "[['A', ['A is.', 'Tom too.']]]",
}  # fmt: skip
MUSIQUE = {
    "id": "2hop__1", "question": "Where?", "answer": "Rome", "answer_aliases": ["Roma", "Rome"], "answerable": True,
    "paragraphs": [
        {"idx": 0, "title": "Rome", "paragraph_text": "Rome is old.", "is_supporting": True},
        {"idx": 1, "title": "Oslo", "paragraph_text": "Oslo is cold.", "is_supporting": False},
    ],
}  # fmt: skip
STDIN = {"inputs": ["1 2\n", "3 4\n", "5 6\n"], "outputs": ["3\n", "7\n", "11\n"]}
STDIN_TESTS = [{"input": i, "output": o} for i, o in zip(STDIN["inputs"], STDIN["outputs"], strict=True)]
PACKED = base64.b64encode(
    zlib.compress(pickle.dumps(json.dumps([{"input": "[1]\n2", "output": "3"}])))
).decode()

QA_CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("nq", {"question": "q?", "answer": ["a", "b", "a"]}, {"answers": ["a", "b"]}),
    ("hotpotqa", HOTPOT_HUB, {"id": "h1", "answers": ["Arden"], "supporting": ["Arden", "Bexley"]}),
    ("hotpotqa", HOTPOT_AUTHORS, {"id": "h1", "supporting": ["Arden", "Bexley"]}),
    ("2wiki", TWOWIKI_PYTHON, {"id": "w1", "supporting": ["A"]}),
    ("musique", MUSIQUE, {"answers": ["Rome", "Roma"], "supporting": ["Rome"]}),
    (
        "triviaqa",
        {"question": "q", "question_id": "tc_1", "answer": {"value": "B", "aliases": ["A", "B"], "type": "x"}},
        {"id": "tc_1", "answers": ["B", "A"]},
    ),
    ("popqa", {"id": 7, "question": "q", "possible_answers": '["politician", "pol"]'}, {"id": "7", "answers": ["politician", "pol"]}),
    ("bamboogle", {"Question": "Who?", "Answer": "Me"}, {"question": "Who?", "answers": ["Me"]}),
    ("nq", {"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "q?"}],
            "reward_model": {"ground_truth": {"target": ["x"]}}}, {"question": "q?", "answers": ["x"]}),
    ("nq", {"query": "q?", "golden_answers": ["x"], "query_id": "z9"}, {"id": "z9", "answers": ["x"]}),
    ("nq", {"question": "is it?", "answer": True}, {"answers": ["yes"]}),
    ("squad-full", {"id": "s1", "title": "New_Town", "context": "It is old.", "question": "How old?",
                    "answers": {"text": ["old", "old", "very old"], "answer_start": [6, 6, 6]}},
     {"id": "s1", "question": "How old?", "answers": ["old", "very old"], "supporting": ["New Town"]}),
    ("squad", {"id": "s2", "title": "New_Town", "answers_text": ["old"],
               "query": "Title: New Town\nBackground: It is old.\nQuestion: How old?\nAnswer:"},
     {"id": "s2", "question": "How old?", "answers": ["old"], "supporting": ["New Town"]}),
]  # fmt: skip

MATH_CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("gsm8k", {"question": "q", "answer": "2+2=<<2+2=4>>4\n#### 1,004"}, {"problem": "q", "answer": "1,004"}),
    ("math", {"problem": "p", "solution": r"so \boxed{\frac{1}{2}}", "level": "Level 3", "type": "Algebra"},
     {"answer": r"\frac{1}{2}", "level": "Level 3"}),
    ("math-500", {"problem": "p", "solution": r"\boxed{\left(3\right)}", "answer": r"\le(3\right)", "unique_id": "t/1.json"},
     {"id": "t/1.json", "answer": r"\left(3\right)"}),
    ("deepscaler", {"problem": "p", "answer": "[1, 2]", "solution": "s"}, {"answer": "[1, 2]"}),
    ("aime25", {"id": "aime25-0", "question": "q", "expected_answer": "70"}, {"id": "aime25-0", "answer": "70"}),
    ("aime26", {"problem_idx": 1, "problem": "p", "answer": 277}, {"answer": "277"}),
    ("amc23", {"id": 0, "question": "q", "answer": 27.0}, {"id": "0", "answer": "27"}),
    ("olympiadbench", {"id": 1606, "question": "q", "context": "Let it be.", "final_answer": ["$2$", "3"], "answer_type": "N"},
     {"problem": "Let it be.\n\nq", "answer": "2, 3"}),
    ("deepscaler", {"prompt": [{"role": "user", "content": "p"}], "reward_model": {"ground_truth": "5"}}, {"problem": "p", "answer": "5"}),
]  # fmt: skip

CODE_CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("taco", {"question": "add", "input_output": json.dumps(STDIN), "starter_code": ""},
     {"problem": "add", "visible_tests": STDIN_TESTS[:1], "hidden_tests": STDIN_TESTS[1:]}),
    ("apps", {"id": 0, "question": "add", "input_output": json.dumps({"inputs": [[1, 2]], "outputs": [[3]], "fn_name": "add"})},
     {"fn_name": "add", "visible_tests": [], "hidden_tests": [{"input": [1, 2], "output": [3]}]}),
    ("deepcoder", {"problem": "add", "tests": json.dumps([{"type": "stdin_stdout", "input": t["input"], "output": t["output"]} for t in STDIN_TESTS])},
     {"hidden_tests": STDIN_TESTS[1:]}),
    ("deepcoder", {"problem": "f", "tests": json.dumps([{"type": "function_call", "fn_name": "f", "input": [1, "a"], "output": True}] * 2)},
     {"fn_name": "f", "hidden_tests": [{"input": [1, "a"], "output": True}]}),
    ("deepcoder", {"problem": "f", "starter_code": "class Solution: ...", "tests": json.dumps(
        [{"input": "[1,2]\n3", "output": "4", "testtype": "functional", "metadata": {"func_name": "f"}}] * 2)},
     {"fn_name": "f", "starter_code": "class Solution: ...", "hidden_tests": [{"input": [[1, 2], 3], "output": 4}]}),
    ("synthetic-1", {"problem_id": "v1", "prompt": "add", "verification_info": json.dumps(
        {"language": "python", "test_cases": [{"type": "stdin_stdout", **test} for test in STDIN_TESTS]})},
     {"id": "v1", "hidden_tests": STDIN_TESTS[1:]}),
    ("codecontests", {"name": "1_A", "description": "add", "public_tests": {"input": ["1 2\n"], "output": ["3\n"]},
                      "private_tests": {"input": ["3 4\n"], "output": ["7\n"]}, "generated_tests": {"input": [], "output": []}},
     {"id": "1_A", "visible_tests": STDIN_TESTS[:1], "hidden_tests": STDIN_TESTS[1:2]}),
    ("livecodebench", {"question_id": "abc", "question_content": "f", "metadata": '{"func_name": "f"}', "starter_code": "s",
                       "public_test_cases": '[{"input": "[0]\\n1", "output": "1", "testtype": "functional"}]', "private_test_cases": PACKED},
     {"id": "abc", "visible_tests": [{"input": [[0], 1], "output": 1}], "hidden_tests": [{"input": [[1], 2], "output": 3}]}),
    ("humaneval", {"task_id": "HumanEval/0", "prompt": "def f(a):", "entry_point": "f", "canonical_solution": "    return a",
                   "test": "def check(candidate):\n    assert candidate((1, 2)) == (1, 2)\n    assert abs(candidate(.5) - 0.5) < 1e-6\n"
                           "    assert candidate(True)\n    assert not candidate(0)\n    assert True, 'done'\n    assert candidate({1}) == {1}\n"},
     {"fn_name": "f", "visible_tests": [{"input": [[1, 2]], "output": [1, 2]}, {"input": [0.5], "output": 0.5}],
      "hidden_tests": [{"input": [True], "output": True}, {"input": [0], "output": False}]}),
    ("mbpp", {"task_id": 1, "text": "add", "code": "def add(a, b): return a + b", "test_list": ["assert add(1, 2) == 3", "assert add(2, 2) == 4"],
              "test_setup_code": "", "challenge_test_list": ["assert add(-1, 1) == 0"]},
     {"id": "mbpp-1", "fn_name": "add", "visible_tests": [{"input": [1, 2], "output": 3}],
      "hidden_tests": [{"input": [2, 2], "output": 4}, {"input": [-1, 1], "output": 0}]}),
    ("deepcoder", {"question": "Solve.\n### Question: add\n### Format: stdin\n### Answer:", "tests": [{"stdin": "1", "stdout": "1"}] * 2},
     {"problem": "add", "hidden_tests": [{"input": "1", "output": "1"}]}),
    ("deepcoder", {"problem": "p", "extra_info": {"public_test_cases": [{"input": "1", "output": "1"}], "private_test_cases": [{"input": "2", "output": "2"}]}},
     {"visible_tests": [{"input": "1", "output": "1"}], "hidden_tests": [{"input": "2", "output": "2"}]}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "record", "expected"), QA_CASES + MATH_CASES + CODE_CASES)
def test_a_record_as_published_becomes_a_row(
    name: str, record: dict[str, Any], expected: dict[str, Any]
) -> None:
    known = CATALOGUE[name]
    row = known.adapter(record)
    assert row is not None
    assert {key: row[key] for key in expected} == expected
    check_row(row, known.kind)
    task = Task.of(row, SCHEMAS[known.kind])
    assert not {"answer", "answers", "hidden_tests", "solution"} & set(task.view)


def test_every_registered_set_has_a_case() -> None:
    tried = {name for name, _, _ in QA_CASES + MATH_CASES + CODE_CASES}
    same_adapter = {"hotpotqa-fullwiki", "aime24"}
    assert set(CATALOGUE) == tried | same_adapter


def test_paragraphs_become_passages() -> None:
    wanted = [
        {"title": "Arden", "text": "Arden is old. Very."},
        {"title": "Bexley", "text": "Bexley is new."},
    ]
    assert list(paragraphs(HOTPOT_HUB)) == list(paragraphs(HOTPOT_AUTHORS)) == wanted
    assert list(paragraphs(TWOWIKI_PYTHON)) == [{"title": "A", "text": "A is. Tom too."}]
    assert [p["title"] for p in paragraphs(MUSIQUE)] == ["Rome", "Oslo"]


def test_what_is_no_task_is_left_out() -> None:
    assert CATALOGUE["musique"].adapter({**MUSIQUE, "answerable": False}) is None
    assert CATALOGUE["olympiadbench"].adapter({"question": "prove it", "final_answer": None}) is None
    assert mbpp({"task_id": 75, "text": "t", "test_list": ["assert f(1) == 1"] * 3}) is None
    loops = "def check(candidate):\n    for i in range(9):\n        assert candidate(i) == i\n"
    assert CATALOGUE["humaneval"].adapter({"prompt": "p", "entry_point": "f", "test": loops}) is None


def test_the_same_question_has_the_same_id_in_any_file() -> None:
    adapter = CATALOGUE["nq"].adapter
    first, again, other = (adapter({"question": q, "answer": "a"}) for q in ("q?", "q?", "r?"))
    assert first and again and other
    assert first["id"] == again["id"] != other["id"]


@pytest.mark.parametrize("number", [1, 2, 3, 6, 7, 200])
def test_without_the_distinction_the_first_few_tests_are_shown(number: int) -> None:
    row = code({"problem": "p", "tests": [{"input": str(n), "output": str(n)} for n in range(number)]})
    assert row is not None
    shown, hidden = row["visible_tests"], row["hidden_tests"]
    assert len(shown) == min(3, min(number, 50) // 2) and len(shown) + len(hidden) == min(number, 50)
    assert not [test for test in hidden if test in shown]


class Evil:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return eval, ("1/0",)


FAULTS: list[tuple[str, dict[str, Any], str]] = [
    ("nq", {"answer": ["a"]}, "field 'question': is missing"),
    ("nq", {"question": "q"}, "field 'answers': is missing"),
    ("nq", {"question": "q", "answer": [None]}, "field 'answers'"),
    ("nq", {"question": "q", "answer": {"foo": 1}}, "field 'answers': no answer in"),
    ("nq", {"question": ["q"], "answer": "a"}, "field 'question': wanted a text, got ['q'] (list)"),
    ("triviaqa", {"question": "q", "answer": "a"}, "field 'answer': wanted {value, aliases}"),
    ("hotpotqa", {**HOTPOT_HUB, "supporting_facts": {"title": ["A"], "sent_id": []}}, "field 'supporting_facts'"),
    ("gsm8k", {"question": "q", "answer": ""}, "field 'answer'"),
    ("taco", {"question": "q", "input_output": '{"inputs": ["1"], "outputs": []}'}, "field 'tests': 1 inputs but 0 outputs"),
    ("taco", {"question": "q", "input_output": "not json"}, "field 'tests': wanted tests, got 'not json'"),
    ("taco", {"question": "q"}, "field 'hidden_tests': there is none"),
    ("deepcoder", {"problem": "q", "tests": [{"input": "1"}]}, "field 'tests[0].output': is missing"),
    ("deepcoder", {"problem": "q", "tests": [7]}, "field 'tests[0]': wanted {input, output}, got 7 (int)"),
    ("livecodebench", {"question_content": "q", "public_test_cases": "[]", "private_test_cases": "AAAA"}, "cannot be unpacked"),
    ("livecodebench", {"question_content": "q", "public_test_cases": "[]",
                       "private_test_cases": base64.b64encode(zlib.compress(pickle.dumps(Evil()))).decode()},
     "refused: its pickle wants to import builtins.eval"),
    ("humaneval", {"prompt": "p", "entry_point": "f", "test": "def check(:"}, "field 'test': not Python"),
    ("mbpp", {"task_id": 1, "text": "t", "test_list": ["assert True"]}, "the assertions call no function"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "record", "message"), FAULTS)
def test_a_faulty_record_names_the_field(name: str, record: dict[str, Any], message: str) -> None:
    known = CATALOGUE[name]
    with pytest.raises(FieldError) as caught:
        row = known.adapter(record)
        assert row is not None
        check_row(row, known.kind)
    assert message in str(caught.value)


DEEP = "[" * 200_000
HOSTILE_FILES: list[tuple[str, bytes, str]] = [
    ("a.jsonl", b'{"question": "q", "answer": "a"}\n{"question": \n', "a.jsonl, line 2: not JSON"),
    ("a.jsonl", b'{"question": "q", "answer": "a"}\n[1, 2]\n', "a.jsonl, row 2: wanted an object with fields, got [1, 2] (list)"),
    ("a.jsonl", b'{"question": "q", "answer": "a"}\n{"question": "q"}\n', "a.jsonl, row 2: field 'answers': is missing"),
    ("a.jsonl", b"\xff\xfe{}", "a.jsonl, line 1: not UTF-8 at byte 0"),
    ("a.jsonl", DEEP.encode(), "a.jsonl, line 1: nested too deeply"),
    ("a.json", b'{"a": NaN}', "a.json: not JSON (NaN is not a JSON value)"),
    ("a.json", b'[{"question": "q", "answer": 1' + b"0" * 5000 + b"}]", "a.json: not JSON"),
    ("a.json", b'"text"', "a.json: wanted a list of records, got 'text'"),
    ("a.jsonl.gz", b"\x1f\x8b\x08\x00broken", "cannot be read to the end"),
    ("a.jsonl.zst", b"(\xb5/\xfdbroken", "cannot be read to the end"),
    ("a.parquet", b"PAR1 but not really PAR1", "not a readable Parquet file"),
    ("a.csv", b"question,answer", "cannot read this kind of file"),
    ("a.jsonl", b'{"foo": 1}\n', "cannot tell what kind of task this is (fields: foo)"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "content", "message"), HOSTILE_FILES)
def test_a_hostile_file_is_told_with_its_place(
    tmp_path: Any, name: str, content: bytes, message: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        list(read_tasks(path))
    assert message in str(caught.value)


@pytest.mark.parametrize("suffix", ["json", "jsonl", "jsonl.gz", "jsonl.zst", "parquet"])
def test_every_kind_of_file_reads_the_same(tmp_path: Any, suffix: str) -> None:
    import gzip

    import pyarrow
    import pyarrow.parquet
    import zstandard

    rows = [{"id": f"t{n}", "question": f"Ünï {n}?", "answers": ["a", "b"]} for n in range(3)]
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    path = tmp_path / f"mine.{suffix}"
    if suffix == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        content = {
            "json": json.dumps({"version": 1, "data": rows}).encode(),
            "jsonl": lines,
            "jsonl.gz": gzip.compress(lines),
            "jsonl.zst": zstandard.compress(lines),
        }
        path.write_bytes(content[suffix])
    assert list(read_tasks(path)) == rows
