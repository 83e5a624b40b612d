"""Folders that keep on this machine what is fetched once: prepared data, packaged models."""

from __future__ import annotations

import os
from pathlib import Path


def home() -> Path:
    """`$UNITYMAS_HOME`, else `~/.cache/unitymas`."""
    return Path(os.environ.get("UNITYMAS_HOME") or "~/.cache/unitymas").expanduser()
