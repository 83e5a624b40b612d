"""Plain values: what JSON says, and what crosses files, processes and the wire."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

JsonObject: TypeAlias = dict[str, Any]
"""JSON object as `json.loads` gives it. The code that reads a field checks its type."""

JsonView: TypeAlias = Mapping[str, Any]
"""A JSON object that is only read."""
