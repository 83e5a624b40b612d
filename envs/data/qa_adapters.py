"""Adapters that turn records of published QA and mathematics data sets into rows of our schemas.

An adapter takes one published record and returns one row, or None for a record that is no task, such as a question
without an answer. ``qa`` and ``math`` read most data sets; each of the others reads one. A corpus function yields the
paragraphs that come with a question.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from typing import TypeAlias

from ...agents.basics.json_types import JsonObject
from ..tools.math.equal import extract_answer
from .fields import Record, decoded, pick, row_id, spoken, text, texts
from .row_schemas import FieldError, brief

TaskRow: TypeAlias = JsonObject
"""Task in one of our schemas (`row_schemas`)."""
RowAdapter = Callable[[Record], TaskRow | None]
Corpus = Callable[[Record], Iterator[dict[str, str]]]


def qa(record: Record) -> TaskRow:
    """Read a question with reference answers, under the field names that public data sets use."""
    question = spoken(record, "question", "query", "problem", "Question", "input", "extra_info.question")
    answers = pick(
        record, "answers", "golden_answers", "ground_truth", "answer", "target", "possible_answers", "Answer",
        "extra_info.answer", "reward_model.ground_truth", "reward_model",
    )  # fmt: skip
    return {"id": row_id(record, question), "question": question, "answers": texts(answers, "answers")}


def triviaqa(record: Record) -> TaskRow:
    """Read a record of TriviaQA: the main answer comes first, then its aliases."""
    question = text(record, "question")
    answer = record.get("answer")
    if not isinstance(answer, dict):
        raise FieldError("answer", f"wanted {{value, aliases}}, got {brief(answer)}")
    answers = texts([answer.get("value") or [], answer.get("aliases") or []], "answer")
    return {"id": row_id(record, question), "question": question, "answers": answers}


def multihop(record: Record) -> TaskRow | None:
    """Read a record of HotpotQA, 2WikiMultihopQA or MuSiQue, with the titles of the supporting paragraphs."""
    if record.get("answerable") is False:
        return None
    row: TaskRow = qa(record)
    row["answers"] = list(
        dict.fromkeys([*row["answers"], *texts(record.get("answer_aliases") or [], "answer_aliases")])
    )
    supporting = list(dict.fromkeys(_supporting(record)))
    return {**row, "supporting": supporting} if supporting else row


_SQUAD_QUERY = re.compile(r"Title: .*?\nBackground: (.*)\nQuestion: (.*?)(?:\nAnswer:\s*)?", re.S)


def squad(record: Record) -> TaskRow:
    """Read a record of SQuAD, as published or with title, paragraph and question in one field ``query``."""
    question = pick(record, "question") or _squad_query(record)[1]
    answers = pick(record, "answers_text", "answers.text")
    row = {"question": question, "answers": texts(answers, "answers"), "supporting": [_squad_title(record)]}
    return {"id": row_id(record, question), **row}


def squad_paragraph(record: Record) -> Iterator[dict[str, str]]:
    """Yield the paragraph of a SQuAD question, without line breaks, because a prompt shows each passage in one line."""
    paragraph = pick(record, "context") or _squad_query(record)[0]
    yield {"title": _squad_title(record), "text": " ".join(paragraph.split())}


def _squad_query(record: Record) -> tuple[str, str]:
    match = _SQUAD_QUERY.fullmatch(text(record, "query"))
    if match is None:
        raise FieldError("query", "wanted lines that begin with Title:, Background: and Question:")
    return match[1].strip(), match[2].strip()


def _squad_title(record: Record) -> str:
    return text(record, "title").replace("_", " ")


def paragraphs(record: Record) -> Iterator[dict[str, str]]:
    """Yield the paragraphs of a question of HotpotQA, 2WikiMultihopQA or MuSiQue."""
    if "paragraphs" in record:
        for paragraph in _list(record["paragraphs"], "paragraphs"):
            yield {"title": text(paragraph, "title"), "text": text(paragraph, "paragraph_text", "text")}
        return
    for title, sentences in _pairs(record.get("context"), "context", "title", "sentences", "content"):
        # HotpotQA's sentences begin with a space, those of the others do not.
        joined = "".join(s if s.startswith(" ") else f" {s}" for s in texts_as_they_are(sentences))
        yield {"title": str(title).strip(), "text": joined.strip()}


def texts_as_they_are(sentences: object) -> list[str]:
    """Return the sentences of a paragraph, with their spaces."""
    if not isinstance(sentences, list) or not all(isinstance(sentence, str) for sentence in sentences):
        raise FieldError("context", f"wanted a list of sentences, got {brief(sentences)}")
    return sentences


def _supporting(record: Record) -> Iterator[str]:
    for paragraph in _list(record.get("paragraphs") or [], "paragraphs"):
        if paragraph.get("is_supporting"):
            yield text(paragraph, "title")
    for title, _ in _pairs(record.get("supporting_facts") or [], "supporting_facts", "title", "sent_id"):
        yield str(title).strip()


def _list(value: object, field: str) -> list[Record]:
    if not isinstance(value, list) or not all(isinstance(part, dict) for part in value):
        raise FieldError(field, f"wanted a list of objects, got {brief(value)}")
    return value


def _pairs(value: object, field: str, *columns: str) -> list[tuple[object, object]]:
    """Return pairs from [[title, x], …] (the authors' form) or from {title: […], x: […]} (the hub's form)."""
    value = _python_or_json(value)
    if isinstance(value, dict):
        left = value.get(columns[0])
        right = next((value[name] for name in columns[1:] if name in value), None)
        if isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
            return list(zip(left, right, strict=True))
    if isinstance(value, list) and all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in value):
        return [(pair[0], pair[1]) for pair in value]
    raise FieldError(field, f"wanted pairs of {columns[0]} and {columns[1]}, got {brief(value)}")


def _python_or_json(value: object) -> object:
    """Parse a text with JSON, or with a Python literal (2WikiMultihopQA on the hub)."""
    value = decoded(value)
    if isinstance(value, str):
        try:
            return ast.literal_eval(value)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return value
    return value


def math(record: Record) -> TaskRow:
    """Read a problem with one final answer, which may be part of a solution."""
    problem = spoken(record, "problem", "question", "query", "Problem", "Question", "extra_info.question")
    answer = pick(
        record, "reward_model.ground_truth", "reward_model.answer", "reward_model.target", "answer", "ground_truth",
        "target", "expected_answer", "final_answer", "short_answer", "Answer", "solution",
    )  # fmt: skip
    parts = [extract_answer(part) for part in _answers(answer)]
    row = {
        "id": row_id(record, problem),
        "problem": problem,
        "answer": ", ".join(part.strip("$ ") for part in parts),
    }
    return row | {name: str(record[name]) for name in ("level", "subject", "type") if record.get(name)}


def _answers(value: object) -> list[str]:
    """Return answers as ``fields.texts`` does, but never parse a text: the answer "[1, 2]" is an interval, not a list."""
    if isinstance(value, str) and value.strip():
        return [value.strip()]
    if isinstance(value, float) and value.is_integer():
        return [str(int(value))]
    if isinstance(value, list):
        return [answer for part in value for answer in _answers(part)]
    return texts(value, "answer")


def math_by_solution(record: Record) -> TaskRow:
    """Read a record of MATH. The answer is the boxed part of the solution, because some copies have a damaged ``answer``."""
    row = math(record)
    solution = record.get("solution")
    if isinstance(solution, str) and "\\boxed" in solution:
        row["answer"] = extract_answer(solution)
    return row


def olympiad(record: Record) -> TaskRow | None:
    """Read a record of OlympiadBench. The context is part of the problem, and several final answers form one list."""
    if pick(record, "final_answer") is None:
        return None  # a proof
    row = math({key: value for key, value in record.items() if key != "answer"})
    context = pick(record, "context")
    return {**row, "problem": f"{context}\n\n{row['problem']}"} if isinstance(context, str) else row
