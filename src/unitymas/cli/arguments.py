"""Parsers of a command's arguments. An error is one line that names the nearest valid argument."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from ..agents.basics.hints import nearest
from .shell_completion import ASKED, answer


class Parser(argparse.ArgumentParser):
    """Argument parser whose errors are one line. `hint` names another way to pass an unknown argument.

    Options are written out: a beginning of one (`--mod`) would mean another option, or none, in a later version.
    """

    def __init__(self, *args: Any, hint: str = "", **how: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **how})
        self.hint, self.words = hint, list[str]()

    @property
    def options(self) -> Sequence[str]:
        """Return the options that the command has, such as `--team` and `-k`."""
        return list(self._option_string_actions)

    def parse_known_args(  # type: ignore[override]  # its overloads are for namespaces of one's own
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse the arguments. If the shell asks for completion, answer it instead."""
        if ASKED in os.environ:
            answer(self)
        self.words = self.words or list(sys.argv[1:] if args is None else args)
        return super().parse_known_args(args, namespace)

    def parse_known_intermixed_args(  # type: ignore[override]  # its overloads are for namespaces of one's own
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse mixed arguments. If the shell asks for completion, answer it before the positional arguments are
        removed.
        """
        if ASKED in os.environ:
            answer(self)
        return super().parse_known_intermixed_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Print the error without the usage, and exit with status 2."""
        unknown = message.removeprefix("unrecognized arguments: ")
        missing = message.removeprefix("the following arguments are required: ")
        if unknown != message:
            message = self.unknown(unknown.split()[0])
        elif stray := self._stray():  # its value was taken for another argument, which the message is about
            message = self.unknown(stray)
        elif missing != message:
            message = f"missing: {', '.join(self._explained(name) for name in missing.split(', '))}"
        print(f"{self.prog}: {message.removeprefix('argument ')} (see {self.prog} --help)", file=sys.stderr)
        sys.exit(2)

    def _stray(self) -> str:
        """Return the first option that the command does not have. Commands with parts leave their options to them."""
        if any(isinstance(action, argparse._SubParsersAction) for action in self._actions):
            return ""
        known = set(self._option_string_actions)
        words = self.words[: self.words.index("--")] if "--" in self.words else self.words
        return next((w for w in words if w.startswith("--") and w.partition("=")[0] not in known), "")

    def _explained(self, name: str) -> str:
        """Return the name of an argument with its help."""
        for action in self._actions:
            if name in (action.metavar, action.dest, "/".join(action.option_strings)):
                parts = action.choices if isinstance(action, argparse._SubParsersAction) else None
                told = ", ".join(parts) if parts else action.help
                return f"{name} ({told})" if told else name
        return name

    def unknown(self, word: str) -> str:
        """Return the message for an argument that the command does not have."""
        if not word.startswith("-"):
            return f"{word!r} is one argument too many"
        option, known = word.partition("=")[0], [*self.options]
        for action in self._actions:  # the part of the command that was chosen has options of its own
            if isinstance(action, argparse._SubParsersAction):
                known += [
                    o for part in self.words if part in action.choices for o in action.choices[part].options
                ]
        begun = [name for name in known if name.startswith(option) and len(option) > 2]
        near = nearest(option, begun or known, alike=0.0 if begun else 0.7, instead="")
        told = f"unknown option {word!r}"
        if not near:
            return f"{told}; {self.hint}" if self.hint else told
        return f"{told}; {near} {self.hint[:1].upper()}{self.hint[1:]}".rstrip()

    def _check_value(self, action: argparse.Action, value: object) -> None:
        if action.choices is not None and value not in action.choices:
            raise argparse.ArgumentError(
                action, f"unknown {value!r}; {nearest(str(value), map(str, action.choices))}"
            )


def module_parser(text: str | None, prog: str | None = None) -> Parser:
    """Return the parser of a module that runs as a command. Its help is the module's docstring, as it is written."""
    return Parser(prog=prog, description=text, formatter_class=argparse.RawDescriptionHelpFormatter)


def number(
    low: float, high: float = float("inf"), kind: Callable[[str], float] = int
) -> Callable[[str], float]:
    """Return an argument type: a number of this kind between `low` and `high`."""

    def read(text: str) -> float:
        value: float | None
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not low <= value <= high:
            what = "a whole number" if kind is int else "a number"
            bounds = f"{low} or more" if high == float("inf") else f"{low} to {high}"
            raise argparse.ArgumentTypeError(f"{text!r} does not fit; give {what}, {bounds}")
        return value

    return read


def counts(text: str) -> list[int]:
    """Read whole numbers, 1 or more, with commas between."""
    return [int(COUNT(word.strip())) for word in text.split(",")]


def pattern(text: str) -> re.Pattern[str]:
    """Read a regular expression."""
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression: {error}") from error


_SEAT = re.compile(r"([a-z][a-z0-9_]*|\*)=(.+)", re.S)


def parse_team(text: str) -> str | dict[str, str]:
    """Read the value of `--team`: a player such as `tiny`, or pairs such as `planner=openai:gpt@https://…,*=tiny`.

    A comma or an equals sign in the query of a URL belongs to the URL.
    """
    seats: dict[str, str] = {}
    for part in filter(None, text.split(",")):
        word = part.strip()
        if "?" not in text and (word.endswith("=") or word.startswith("=")):
            raise ValueError(
                f"--team {text!r}: {word!r} lacks the role or its player; write role=player, and *=player for the rest"
            )
        match = _SEAT.fullmatch(word)
        last = next(reversed(seats), "")
        if match is not None and match[1] in seats:
            raise ValueError(f"--team {text!r}: two players for {match[1]!r}; leave one out")
        if match is not None:
            seats[match[1]] = match[2]
        elif "?" in seats.get(last, "").partition("://")[2]:
            seats[last] += f",{part}"
        elif seats:
            raise ValueError(
                f"--team {text!r}: {part!r} is no seat; write role=player, and *=player for the rest"
            )
        else:
            return text
    return seats or text


COUNT = number(1)
PORT = number(0, 65535)
