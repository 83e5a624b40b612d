"""A person plays, through a pseudo-terminal: single keys, typos, boards shown once, leaving."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console

import unitymas
from unitymas.agents.roles import Choice, Json, Tags
from unitymas.envs.faces.human import EpisodeView, completed, keys_of
from unitymas.envs.workflows.mask import ROLES

SEED = 3


class Player:
    """`unitymas play …` at a terminal of its own."""

    def __init__(self, *args: str) -> None:
        self.end, terminal = pty.openpty()
        self.heard = self.raw = ""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "unitymas.cli", "play", *args],
            stdin=terminal, stdout=terminal, stderr=terminal, env={**os.environ, "TERM": "xterm", "COLUMNS": "200"},
        )  # fmt: skip
        os.close(terminal)

    def until(self, words: str, seconds: float = 60.0) -> str:
        """All that is said up to some words, without colours."""
        end = time.monotonic() + seconds
        while words not in (plain := _plain(self.heard)):
            assert time.monotonic() < end, plain
            if select.select([self.end], [], [], 0.2)[0]:
                try:
                    read = os.read(self.end, 65536).decode()
                    self.heard += read
                    self.raw += read
                except OSError:  # the other end is closed
                    assert words in _plain(self.heard), _plain(self.heard)
        before, _, after = plain.partition(words)
        self.heard = after
        return before + words

    def type(self, keys: str) -> None:
        os.write(self.end, keys.encode())

    def leave(self) -> tuple[str, int]:
        """What is said after Ctrl-D, and the exit status."""
        self.type("\x04")
        rest = self.until("credits")
        return rest, self.process.wait(30)


def _plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r\n", "\n")


@pytest.fixture
def play() -> Iterator[Any]:
    players: list[Player] = []

    def begin(*args: str) -> Player:
        players.append(Player(*args))
        return players[-1]

    yield begin
    for player in players:
        player.process.kill()
        player.process.wait()
        os.close(player.end)


def test_a_game_by_single_keys_with_typos(play: Any) -> None:
    env = unitymas.make("sokoban-solo", split="validation")
    task = env.arena.task(env.arena.task_ids[0])
    solution = task.reference["solution"]
    player = play("sokoban-solo", "--split", "validation", "--task", task.id)
    first = player.until("up  down  left  right")
    assert task.view["start"] in first and "\x1b[1;32mu" in player.raw  # (colours are in what was cut off)
    player.type("x")
    again = player.until("up  down  left  right")
    assert "No move has this key" in again and "# #" not in again  # asked anew; the board is not told again
    arrows = {"up": "\x1b[A", "down": "\x1b[B", "right": "\x1b[C", "left": "\x1b[D"}
    for number, move in enumerate(solution):
        player.type(arrows[move] if number % 2 else move[0])
        if number + 1 < len(solution):
            shown = player.until("up  down  left  right")
            assert (
                shown.count("# # #\n") <= 2 * task.view["start"].count("\n") + 2
                and "Push every box" not in shown
            )
    ending = player.until("score")
    assert f"solved=True  steps={len(solution)}" in ending and player.process.wait(30) == 0


def test_leaving_in_the_middle_of_a_game_is_quiet(play: Any) -> None:
    player = play("sokoban-solo", "--seed", str(SEED))
    player.until("up  down  left  right")
    player.type("u")
    player.until("up  down  left  right")
    said, status = player.leave()
    assert (
        status == 0 and "You left after 1 reply" in said and "planner: up" in said and "Traceback" not in said
    )


def test_a_role_by_typed_lines(play: Any) -> None:
    player = play(
        "mask-hotpotqa", "--data", "mini", "--team", "updater=human,*=scripted", "--seed", str(SEED),
        "--prompts", "short",
    )  # fmt: skip
    first = player.until("updater> ")
    assert first.count("Which step does the new evidence answer?") == 1
    player.type("the first one\n")
    assert "press Enter to say it as it is" in player.until("updater> ")
    player.type("<update>1</update>\n")
    second = player.until("updater> ")
    assert "Which step" not in second and "answerer: <final_answer>" in second
    said, status = player.leave()
    assert status == 0 and "updater: <update>1</update>" in said


def test_without_a_terminal_lines_are_read_and_the_end_leaves() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "unitymas.cli", "play", "sokoban-solo", "--seed", str(SEED)],
        input="sideways\nUP\nd\n", capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert ran.returncode == 0 and not ran.stderr and "\x1b" not in ran.stdout
    assert "'sideways' is no move; one of: up, down, left, right" in ran.stdout
    assert (
        "planner: up" in ran.stdout and "planner: down" in ran.stdout and "left after 2 replies" in ran.stdout
    )


def test_keys() -> None:
    assert keys_of(["approve", "up", "down"]) == {"a": "approve", "u": "up", "d": "down"}
    assert keys_of(["1 1 1", "1 1 2"]) == {"1": "1 1 1", "2": "1 1 2"}
    assert keys_of([str(n) for n in range(10)]) == {}


def test_every_typo_is_told_and_of_many_moves_some_are_shown() -> None:
    """Words that are wrong a second time are told too; Enter sends the last ones."""
    typed = ["the first one", "<update>one</update>", "three", ""]
    told, out = io.StringIO(), iter(typed)
    view = EpisodeView(Console(file=told, width=1000), read=lambda _: next(out))
    reply = view._speak("updater", Tags("update", update=("1", "2")), None)
    assert reply == "three" and told.getvalue().count("Type it again") == 3
    moves = [f"{row} {column} {digit}" for row in "1234" for column in "1234" for digit in "1234"]
    lines = iter(["9", "1", "4 4 4"])
    view = EpisodeView(Console(file=told, width=1000), read=lambda _: next(lines))
    assert view._choose("planner", tuple(moves)) == "4 4 4"
    assert "'9' is no move; one of: 1 1 1, 1 1 2, 1 1 3, 1 1 4, 1 2 1 … 4 4 4 (64 in all)" in told.getvalue()
    assert (
        "That may be 1 1 1 or 1 1 2 or 1 1 3 or 1 1 4 or 1 2 1 … 1 4 4 (16 in all). Try again."
        in told.getvalue()
    )


def test_the_only_tag_of_a_format_need_not_be_typed() -> None:
    answer, updater = ROLES[-1].reply, ROLES[3].reply
    assert completed(answer, "Paris") == "<final_answer>Paris</final_answer>"
    assert completed(answer, "<final_answer>Paris</final_answer>") == "<final_answer>Paris</final_answer>"
    assert completed(Tags("verify", verify=("yes", "no")), "maybe") is None
    assert completed(updater, "t1") is completed(Json("a"), "x") is completed(answer, "<b>") is None
    assert completed(Choice("a", "b"), "a") == "a"
