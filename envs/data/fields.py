"""Readers of a record's fields, which have different names in different data sets."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, TypeAlias

from ...agents.basics.json_types import JsonView
from .row_schemas import FieldError, brief

Record: TypeAlias = JsonView
"""Record of a data set, as published."""
_WRAPPERS = ("ground_truth", "answer", "target", "golden_answers", "aliases", "value")


def pick(record: Record, *names: str) -> Any:
    """Return the first value under these names that is not empty, else None. "a.b" means the field b inside ``a``."""
    for name in names:
        value: object = record
        for step in name.split("."):
            value = decoded(value) if isinstance(value, str) else value
            value = value.get(step) if isinstance(value, Mapping) else None
        if value is not None and value != "" and value != [] and value != {}:
            return value
    return None


def text(record: Record, *names: str) -> str:
    """Return the first non-empty text or number under these names. Without one, raise a ``FieldError`` with all names."""
    value = pick(record, *names)
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        trouble = "is missing" if value is None else f"wanted a text, got {brief(value)}"
        raise FieldError(
            names[0], trouble + (f" (also looked for {', '.join(names[1:])})" if names[1:] else "")
        )
    return str(value).strip()


def spoken(record: Record, *names: str) -> str:
    """Return ``text`` of these names, or else the last user message in ``prompt`` or ``raw_prompt``."""
    try:
        return text(record, *names)
    except FieldError:
        for name in ("prompt", "raw_prompt"):
            messages = decoded(record.get(name))
            if isinstance(messages, str) and messages.strip():
                return messages.strip()
            for message in reversed(messages if isinstance(messages, list) else []):
                if isinstance(message, Mapping) and message.get("role") == "user":
                    return text(message, "content")
        raise


def texts(value: object, field: str) -> list[str]:
    """Return reference answers in any published form: a text, a list, a JSON list, an object with "answer" …"""
    value = decoded(value)
    if isinstance(value, Mapping):
        inner = [value[name] for name in _WRAPPERS if value.get(name) not in (None, "", [])]
        if not inner:
            raise FieldError(field, f"no answer in {brief(dict(value))}")
        answers = [answer for part in inner for answer in texts(part, field)]
    elif isinstance(value, list | tuple):
        answers = [answer for part in value for answer in texts(part, field)]
    elif isinstance(value, bool):
        answers = ["yes" if value else "no"]
    elif isinstance(value, str | int | float):
        answers = [str(value).strip()]
    else:
        raise FieldError(field, "is missing" if value is None else f"wanted texts, got {brief(value)}")
    return list(dict.fromkeys(answer for answer in answers if answer))


def decoded(value: object) -> Any:
    """Parse a text that is a JSON list or object. Return any other value unchanged."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def row_id(record: Record, *content: str) -> str:
    """Return the record's own id, or an id made of its content, which does not depend on the order of the file."""
    own = pick(record, "id", "_id", "uid", "query_id", "task_id", "problem_id", "question_id", "unique_id")
    if isinstance(own, str | int) and not isinstance(own, bool):
        return str(own)
    return hashlib.sha256("\0".join(content).encode("utf-8", "surrogatepass")).hexdigest()[:16]
