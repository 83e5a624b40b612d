"""Where what is fetched once is kept on this machine: prepared data, packaged models."""

from __future__ import annotations

import os
from pathlib import Path


def home() -> Path:
    """`$UNITYMAS_HOME`, else `~/.cache/unitymas`."""
    return Path(os.environ.get("UNITYMAS_HOME") or "~/.cache/unitymas").expanduser()
