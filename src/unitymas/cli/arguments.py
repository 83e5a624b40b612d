"""Parsers of a command's arguments. An error is one line that names the nearest valid argument."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from ..agents.basics.hints import nearest
from .completion import ASKED, answer


class Parser(argparse.ArgumentParser):
    """Argument parser whose errors are one line. `hint` names another way to pass an unknown argument."""

    def __init__(self, *args: Any, hint: str = "", **how: Any) -> None:
        super().__init__(*args, **how)
        self.hint = hint

    def parse_known_args(  # type: ignore[override]  # its overloads are for namespaces of one's own
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse the arguments. If the shell asks for completion, answer it instead."""
        if ASKED in os.environ:
            answer(self)
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
        if unknown != message:
            message = self.unknown(unknown.split()[0])
        print(f"{self.prog}: {message.removeprefix('argument ')} (see {self.prog} --help)", file=sys.stderr)
        sys.exit(2)

    def unknown(self, word: str) -> str:
        """Return the message for an argument that the command does not have."""
        if not word.startswith("-"):
            return f"{word!r} is one argument too many"
        hints = [
            nearest(word.partition("=")[0], self._option_string_actions, alike=0.7, instead=""),
            self.hint,
        ]
        return "; ".join([f"unknown option {word!r}", *filter(None, hints)])

    def _check_value(self, action: argparse.Action, value: object) -> None:
        if action.choices is not None and value not in action.choices:
            raise argparse.ArgumentError(
                action, f"unknown {value!r}; {nearest(str(value), map(str, action.choices))}"
            )


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
        match = _SEAT.fullmatch(part.strip())
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
