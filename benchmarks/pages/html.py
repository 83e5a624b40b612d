"""Common parts of the three pages. Each page is one file, needs no server, fetches nothing, and runs only its own script.

Text from models is untrusted. So data enters a page as gzipped JSON in base64, of which no byte can close a tag, and is shown
only through `textContent`. A Content-Security-Policy allows only the script with the named hash, and no network. All text that
Python writes into the HTML passes through `escape`.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
import os
import re
import tempfile
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path

from ...agents.basics.hints import counted

_INVISIBLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: object, limit: int | None = None) -> str:
    """Return a text that is safe in a terminal and a file.

    Control characters, direction overrides and lone surrogates are shown as ``⟨1B⟩``. Newlines and tabs stay.
    """
    shown = str(text)
    if limit is not None and len(shown) > limit:
        shown = f"{shown[:limit]}… ({counted(len(shown) - limit, 'more character')})"
    return _INVISIBLE.sub(lambda match: f"⟨{ord(match[0]):02X}⟩", shown)


def escape(text: object, limit: int | None = None) -> str:
    """Return the `printable` text, escaped for HTML and for quoted attributes."""
    return html.escape(printable(text, limit), quote=True)


def pack(value: object) -> str:
    """Return a value as gzipped JSON in base64, the only form in which data enters a page."""
    plain = json.dumps(value, ensure_ascii=True, separators=(",", ":"), default=str)
    return base64.b64encode(gzip.compress(plain.encode("ascii"), 6, mtime=0)).decode("ascii")


def data_block(value: object, name: str) -> str:
    """Return a data element, which the page's script reads with ``unpack(id)``."""
    return f'<script type="application/octet-stream" id="{escape(name)}">{pack(value)}</script>\n'


def asset(name: str) -> str:
    """Return the text of a file in ``benchmarks/pages/assets``."""
    return files(__package__).joinpath("assets", name).read_text(encoding="utf-8")


def page(
    title: str,
    body: str,
    *,
    style: str,
    scripts: tuple[str, ...] = (),
    before_script: str = "",
    live: bool = False,
) -> str:
    """Return a page up to ``</body>``. The caller adds this tag, because data blocks may follow the script.

    A `live` page may send requests to its own server.
    """
    look = asset("theme.css") + asset(style)
    code = "".join(map(asset, ("common.js", *scripts))) if scripts else ""
    policy = (
        f"default-src 'none'; style-src '{_hash(look)}'; img-src data:; base-uri 'none'; form-action 'none'"
    )
    policy += f"; script-src '{_hash(code)}'" if code else ""
    policy += "; connect-src 'self'" if live else ""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)}</title>\n<style>{look}</style>\n</head>\n<body>\n{body}\n{before_script}"
        + (f"<script>{code}</script>\n" if code else "")
    )


def write_page(path: Path, parts: Iterable[str]) -> Path:
    """Write a page in one step, so that the file is never incomplete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, scratch = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", errors="replace") as file:
            file.writelines(parts)
        os.chmod(scratch, 0o644)
        os.replace(scratch, path)
    except BaseException:
        os.unlink(scratch)
        raise
    return path


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")
