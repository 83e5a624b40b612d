"""Records of the published QA and mathematics data sets as rows of our schemas.

An adapter takes one record (a dict as its authors publish it) and gives one row, or None for a record that is
no task (a question marked unanswerable). ``qa`` and ``math`` read most sets; the others know a set's peculiarity.
A corpus function gives the paragraphs that come with a question.
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

Row: TypeAlias = JsonObject
"""A task of one of our schemas, made of a record and checked by `row_schemas`."""
Adapter = Callable[[Record], Row | None]
Corpus = Callable[[Record], Iterator[dict[str, str]]]


def qa(record: Record) -> Row:
    """Any question with reference answers, under the names that public sets use for them."""
    question = spoken(record, "question", "query", "problem", "Question", "input", "extra_info.question")
    answers = pick(
        record, "answers", "golden_answers", "ground_truth", "answer", "target", "possible_answers", "Answer",
        "extra_info.answer", "reward_model.ground_truth", "reward_model",
    )  # fmt: skip
    return {"id": row_id(record, question), "question": question, "answers": texts(answers, "answers")}


def triviaqa(record: Record) -> Row:
    """The answer proper first, then its aliases."""
    question = text(record, "question")
    answer = record.get("answer")
    if not isinstance(answer, dict):
        raise FieldError("answer", f"wanted {{value, aliases}}, got {brief(answer)}")
    answers = texts([answer.get("value") or [], answer.get("aliases") or []], "answer")
    return {"id": row_id(record, question), "question": question, "answers": answers}


def multihop(record: Record) -> Row | None:
    """HotpotQA, 2WikiMultihopQA and MuSiQue: also which paragraphs (by title) support the answer."""
    if record.get("answerable") is False:
        return None
    row: Row = qa(record)
    row["answers"] = list(
        dict.fromkeys([*row["answers"], *texts(record.get("answer_aliases") or [], "answer_aliases")])
    )
    supporting = list(dict.fromkeys(_supporting(record)))
    return {**row, "supporting": supporting} if supporting else row


_SQUAD_QUERY = re.compile(r"Title: .*?\nBackground: (.*)\nQuestion: (.*?)(?:\nAnswer:\s*)?", re.S)


def squad(record: Record) -> Row:
    """SQuAD as published, or as evaluation harnesses pack it: title, paragraph and question in one ``query``."""
    question = pick(record, "question") or _squad_query(record)[1]
    answers = pick(record, "answers_text", "answers.text")
    row = {"question": question, "answers": texts(answers, "answers"), "supporting": [_squad_title(record)]}
    return {"id": row_id(record, question), **row}


def squad_paragraph(record: Record) -> Iterator[dict[str, str]]:
    """The one paragraph that a question of SQuAD is asked on; a line of passages holds it, so it has no line breaks."""
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
    """The paragraphs that come with a question of HotpotQA, 2WikiMultihopQA or MuSiQue."""
    if "paragraphs" in record:
        for paragraph in _list(record["paragraphs"], "paragraphs"):
            yield {"title": text(paragraph, "title"), "text": text(paragraph, "paragraph_text", "text")}
        return
    for title, sentences in _pairs(record.get("context"), "context", "title", "sentences", "content"):
        # HotpotQA's sentences carry their own leading spaces, the others' do not.
        joined = "".join(s if s.startswith(" ") else f" {s}" for s in texts_as_they_are(sentences))
        yield {"title": str(title).strip(), "text": joined.strip()}


def texts_as_they_are(sentences: object) -> list[str]:
    """Return the sentences of a paragraph, with their blanks."""
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
    """[[title, x], …] as published by the authors, or {title: […], x: […]} as the hub stores it."""
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
    """Text that holds JSON, or (2WikiMultihopQA on the hub) a Python literal."""
    value = decoded(value)
    if isinstance(value, str):
        try:
            return ast.literal_eval(value)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return value
    return value


def math(record: Record) -> Row:
    """Any problem with one final answer, which may have to be taken out of a solution."""
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
    """Read answers like ``fields.texts``, but text stays text: the answer "[1, 2]" is an interval, not a list."""
    if isinstance(value, str) and value.strip():
        return [value.strip()]
    if isinstance(value, float) and value.is_integer():
        return [str(int(value))]
    if isinstance(value, list):
        return [answer for part in value for answer in _answers(part)]
    return texts(value, "answer")


def math_by_solution(record: Record) -> Row:
    """MATH: the answer is what the solution boxes; some copies garble their ``answer`` field."""
    row = math(record)
    solution = record.get("solution")
    if isinstance(solution, str) and "\\boxed" in solution:
        row["answer"] = extract_answer(solution)
    return row


def olympiad(record: Record) -> Row | None:
    """OlympiadBench: open-ended text problems; several final answers are one list, with the context in front."""
    if pick(record, "final_answer") is None:
        return None  # a proof
    row = math({key: value for key, value in record.items() if key != "answer"})
    context = pick(record, "context")
    return {**row, "problem": f"{context}\n\n{row['problem']}"} if isinstance(context, str) else row
