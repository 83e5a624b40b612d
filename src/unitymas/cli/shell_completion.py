"""Completion in the shell, by argcomplete: commands, their options and choices, environment ids and file names.

    eval "$(register-python-argcomplete unitymas)"        # bash and zsh; once a shell, or in its start file

The shell asks by calling `unitymas` with `_ARGCOMPLETE` set. The parser of the command that is being typed then answers,
and ends the process.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Sequence

ASKED = "_ARGCOMPLETE"
"""Environment variable by which the shell function of argcomplete asks for completions."""

_answering = False


def complete(commands: Iterable[str], run: Callable[[str, Sequence[str]], object]) -> None:
    """Answer the shell with the names of the commands, or with the arguments of the command that is being typed."""
    line = os.environ["COMP_LINE"][: int(os.environ["COMP_POINT"])]
    words = line.split()
    if len(words) + line.endswith(" ") > 2:
        os.environ[ASKED] = "2"  # argcomplete counts the arguments of a command from its second word
        if words[1] in commands:
            run(words[1], words[2:])
        return
    parser = argparse.ArgumentParser("unitymas")
    parser.add_argument("command", choices=list(commands))
    answer(parser)


def answer(parser: argparse.ArgumentParser) -> None:
    """Print the completions of a parser, and end the process. Do nothing if argcomplete itself is parsing."""
    global _answering
    if _answering:
        return
    _answering = True
    import argcomplete

    from ..envs.registry import list_envs

    for action in parser._actions:
        if action.dest in ("id", "env"):
            action.completer = lambda **_: list_envs()  # type: ignore[attr-defined]
    argcomplete.autocomplete(parser)
