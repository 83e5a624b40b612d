"""Requests and responses of retrieval servers, in two dialects.

| dialect     | request                                                | response                                        |
|-------------|--------------------------------------------------------|-------------------------------------------------|
| `unitymas`  | `{"questions": [...], "N": 5}`                         | `[{"top_k_docs": [doc, ...]}, ...]`             |
| `search-r1` | `{"queries": [...], "topk": 5, "return_scores": true}` | `{"result": [[{"document": doc, "score": 1.0}, ...], ...]}` |

A `doc` may be a string or an object, with its text under `text`, `contents`, `content` or `document`; Search-R1's
contents are `"Title"` in quotes, a line break, and the text. Our server also repeats the queries that it answers
(`"question"` in each row, `"queries"` beside the result), and our client checks them where they are repeated.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

from .retriever import Passage

DIALECTS = ("unitymas", "search-r1")
TEXT_FIELDS = ("text", "contents", "content", "document", "passage", "paragraph_text", "body")
TITLE_FIELDS = ("title", "wikipedia_title", "name")
ID_FIELDS = ("id", "_id", "doc_id", "docid", "passage_id", "pid")


class BadAnswer(ValueError):
    """Raised when a server's response does not follow its dialect."""


class Misaligned(BadAnswer):
    """Raised when a response follows the dialect, but its rows do not belong to the queries."""


@dataclass(frozen=True, slots=True)
class SearchRequest:
    """Request, decoded."""

    queries: tuple[str, ...]
    k: int
    dialect: str
    scores: bool = False
    """Flag: a `search-r1` client asks for scores."""


def encode_request(dialect: str, queries: Sequence[str], k: int) -> dict[str, object]:
    """Return the body of a request in this dialect."""
    if dialect == "unitymas":
        return {"questions": list(queries), "N": k}
    return {"queries": list(queries), "topk": k, "return_scores": False}


def decode_request(body: object, *, most_queries: int, most_k: int) -> SearchRequest:
    """Decode a request of either dialect. For other bodies, raise a ValueError with a message for the client."""
    if not isinstance(body, dict) or ("questions" in body) == ("queries" in body):
        raise ValueError('send {"questions": [...], "N": 5} or {"queries": [...], "topk": 5}')
    dialect, field, count = (
        ("unitymas", "questions", "N") if "questions" in body else ("search-r1", "queries", "topk")
    )
    queries, k = body[field], body.get(count, 5)
    if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
        raise ValueError(f"{field} must be a list of strings")
    if len(queries) > most_queries:
        raise ValueError(f"{field} holds {len(queries)} queries; this server takes {most_queries} at a time")
    if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= most_k:
        raise ValueError(f"{count} must be a whole number from 1 to {most_k}")
    return SearchRequest(tuple(queries), k, dialect, bool(body.get("return_scores", False)))


def encode_response(request: SearchRequest, rows: Sequence[Sequence[tuple[Passage, float]]]) -> object:
    """Return the body of the response to a request. `rows` has (passage, score) pairs for every query."""
    if request.dialect == "unitymas":
        return [
            {"question": query, "top_k_docs": [{**passage, "score": score} for passage, score in row]}
            for query, row in zip(request.queries, rows, strict=True)
        ]

    def item(passage: Passage, score: float) -> dict[str, object]:
        title = passage["title"]
        contents = f'"{title}"\n{passage["text"]}'
        document: dict[str, object] = {"id": passage["id"], "title": title, "contents": contents}
        return {"document": document, "score": score} if request.scores else document

    return {"result": [[item(*pair) for pair in row] for row in rows], "queries": list(request.queries)}


def decode_response(raw: bytes, queries: Sequence[str], k: int) -> list[list[Passage]]:
    """Return the passages for every query, in order. Raise BadAnswer unless there is exactly one row for each query."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise BadAnswer(f"the answer is not JSON ({error}): {raw[:80]!r}") from None
    rows = _rows(body, queries)
    if len(rows) != len(queries):
        wrong = Misaligned if rows else BadAnswer  # a server that ignores the queries may send no rows at all
        raise wrong(f"{len(queries)} queries were sent, {len(rows)} rows came back")
    return [_row(row, query)[:k] for row, query in zip(rows, queries, strict=True)]


def _rows(body: object, queries: Sequence[str]) -> list[object]:
    if isinstance(body, dict) and isinstance(body.get("result"), list):
        if body.get("queries", list(queries)) != list(queries):
            raise Misaligned("the rows answer other queries than were asked")
        return list(body["result"])
    if isinstance(body, dict) and isinstance(body.get("top_k_docs"), list):
        docs = body["top_k_docs"]
        return docs if docs and all(isinstance(row, list) for row in docs) else [docs]
    if isinstance(body, list):
        return body
    fields = sorted(map(str, body)) if isinstance(body, dict) else type(body).__name__
    raise BadAnswer(f"the answer has neither 'result' nor 'top_k_docs': {fields}"[:500])


def _row(row: object, query: str) -> list[Passage]:
    if isinstance(row, dict):
        if str(row.get("question", query)).strip() != query.strip():
            raise Misaligned(f"a row answers {row['question']!r} where {query!r} was asked"[:500])
        row = row.get("top_k_docs")
    if not isinstance(row, list):
        raise BadAnswer(f"a row is {type(row).__name__}, not a list of passages")
    return [read_passage(doc) for doc in row]


def read_passage(doc: object) -> Passage:
    """Read a passage in any form that servers and corpora use. Raise BadAnswer if it has no text."""
    if isinstance(doc, str):
        doc = {"text": doc}
    if not isinstance(doc, dict):
        raise BadAnswer(f"a passage is {type(doc).__name__}, not text or an object")
    inner = doc.get("document")
    if isinstance(inner, dict):  # {"document": {...}, "score": ...}
        doc = inner
    text = next((doc[field] for field in TEXT_FIELDS if isinstance(doc.get(field), str)), None)
    if text is None:
        raise BadAnswer(
            f"a passage has no text: none of {', '.join(TEXT_FIELDS)} is a string in it; "
            f"it has {str(sorted(map(str, doc))):.300}"
        )
    title = next((doc[field] for field in TITLE_FIELDS if isinstance(doc.get(field), str)), None)
    if isinstance(doc.get("contents"), str) and not isinstance(doc.get("text"), str):
        title, text = _split_contents(text, title)
    number = next((doc[field] for field in ID_FIELDS if isinstance(doc.get(field), (str, int))), None)
    if number is None:
        number = "text-" + hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:16]
    return Passage(id=str(number), title=title or "", text=text)


def _split_contents(contents: str, title: str | None) -> tuple[str | None, str]:
    """Return title and text. Search-R1 writes the title, in quotes, in the first line of the contents."""
    if title is not None:
        return title, contents.removeprefix(f'"{title}"\n')
    first, line_break, rest = contents.partition("\n")
    if line_break and len(first) >= 2 and first[0] == first[-1] == '"':
        return first[1:-1], rest
    return None, contents
