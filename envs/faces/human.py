"""Human player: the display and the input of `unitymas play` at a terminal.

Text that was shown before is not shown again: system messages, earlier parts of a conversation, an unchanged board. After
a typing error the player is asked again, without losing a move. On a real terminal, a single key selects one of a few
choices. Ctrl-D ends the game.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Mapping, Sequence

from rich.console import Console
from rich.text import Text

from ...agents.policies import Message
from ...agents.roles import Format, form_in_words, read_reply
from ...agents.text.reply_readers import MAX_REPLY
from ..core.trace import Trace, jsonable
from ..core.workflow import Act, Node
from .render import clip, harmless, use_in_words

ARROWS = {"\x1b[A": "up", "\x1b[B": "down", "\x1b[C": "right", "\x1b[D": "left"}
END = "\x04"  # Ctrl-D, as a terminal without line editing gives it
MANY = 9  # with more choices, there are no keys: the player types a choice
SHOWN = 12  # of more choices, only some are listed
_CLOSING = re.compile(r"</(\w+)>")


KeyReader = Callable[[Callable[[], None]], str]
"""Function that reads one key. Its argument prints the choices; it is called when the terminal is ready."""


class Left(Exception):
    """Raised when the player ends the game."""


class EpisodeView:
    """Terminal view of one episode."""

    def __init__(
        self,
        console: Console | None = None,
        read: Callable[[str], str] = input,
        key: KeyReader | None = None,
    ) -> None:
        """Build a view. `read` reads a line, `key` a single key. Without `key` (no real terminal), choices are typed."""
        self.console = console or Console(highlight=False, markup=False, soft_wrap=True)
        self.read = read
        self.key = key if key is not None else single_key()
        self._heard: dict[str, tuple[Message, ...]] = {}  # agent -> messages that were shown
        self._shown: set[str] = set()  # paragraphs of the last prompt
        self._hint = ""
        self._nodes: dict[str, bool] = {}  # id -> whether its credits were shown

    # showing -------------------------------------------------------------------------------------------

    def say(self, *parts: str | tuple[str, str], end: str = "\n") -> None:
        """Print a line of texts and (text, style) pairs. Control characters are escaped."""
        styled = (Text(harmless(p)) if isinstance(p, str) else Text(harmless(p[0]), p[1]) for p in parts)
        self.console.print(Text.assemble(*styled), end=end)

    def journal(
        self, nodes: Sequence[Node], rewards: Callable[[str], Mapping[str, float]], mine: set[str]
    ) -> None:
        """Print the nodes that are new since the last call, without those of `mine`, and the new rewards of all nodes."""
        for node in nodes:
            earned = _earned(rewards(node.id))
            if node.id not in self._nodes:
                self._nodes[node.id] = False
                if node.agent not in mine:
                    self._tell(node)
            if earned and not self._nodes[node.id]:
                self._nodes[node.id] = True
                self.say("  ", (f"{node.agent} earned {earned}", "green" if "+" in earned else "red"))

    def _tell(self, node: Node) -> None:
        if node.kind == "use":
            asked, answer = use_in_words(node, 160)
            self.say((f"  ({node.tool}) {asked} -> {answer}", "dim"))
            return
        mark = () if node.ok else (("  malformed", "red"),)
        self.say((f"{node.agent}: ", "bold cyan"), clip(node.text or ""), *mark)

    def prompt(self, agent: str, messages: Sequence[Message]) -> None:
        """Print the new messages of an agent's prompt."""
        heard = self._heard.get(agent, ())
        count = 0
        while count < min(len(heard), len(messages)) and heard[count] == messages[count]:
            count += 1
        self._heard[agent] = tuple(messages)
        for message in messages[count:]:
            if message["role"] == "system":
                self.say((f"{agent}: ", "bold magenta"), (message["content"], "dim"))
                continue
            blocks = str(message["content"]).split("\n\n")
            fresh = [block for block in blocks if block not in self._shown]
            self._shown = set(blocks)
            for block in fresh:
                self.say(block.strip("\n"))

    def close(self, trace: Trace, left: bool) -> None:
        """Print the outcome and the score. If the player left, print the episode so far."""
        total: dict[str, float] = {}
        for credit in trace.credits:
            total[credit.component] = total.get(credit.component, 0.0) + credit.amount
        acts = len(trace.acts())
        if left:
            self.say((f"\nYou left after {acts} {'reply' if acts == 1 else 'replies'}:", "bold"))
            for node in trace.nodes:
                words = node.text if node.kind == "act" else node.result
                self.say(f"{node.id:>6}  {node.agent or f'({node.tool})'}: {_line(words, 80)}")
        else:
            outcome = {k: str(v) for k, v in (trace.outcome or {}).items()}
            self.say(
                (f"\n{trace.ended}", "bold"),
                *(f"  {k}={clip(v, 120)}" for k, v in outcome.items() if "\n" not in v),
            )
            for picture in (v for v in outcome.values() if "\n" in v):
                self.say(clip(picture, 1200))
        self.say("credits  ", _earned(total) or "none so far")
        if trace.metrics and not left:
            self.say("score    ", "  ".join(f"{k} {v:.3g}" for k, v in sorted(trace.metrics.items())))

    # asking --------------------------------------------------------------------------------------------

    def ask(self, node: Node, lenient: bool | None = None) -> str:
        """Return the player's reply for a node's agent. Raise `Left` if the player ends the game."""
        assert isinstance(node, Act)
        agent, form = node.agent or "", node.format
        self.prompt(agent, node.messages)
        try:
            if form.choices:
                return self._choose(agent, tuple(form.choices))
            return self._speak(agent, form, lenient)
        except (EOFError, KeyboardInterrupt):
            raise Left from None

    def _choose(self, agent: str, choices: tuple[str, ...]) -> str:
        keys = keys_of(choices) if self.key is not None else {}
        while True:
            if keys and self.key is not None:
                pressed = self.key(lambda: self._offer(agent, keys))
                if pressed == END:
                    raise EOFError
                move = ARROWS.get(pressed)
                reply = move if move in choices else keys.get(pressed.casefold())
                self.say(reply or "")
                if reply is not None:
                    return reply
                self.say(("No move has this key; try again.", "yellow"))
                continue
            hint = f"one of: {some_of(choices)}"
            typed = self._line(agent, hint).strip().casefold()
            exact = [c for c in choices if c.casefold() == typed]
            near = exact or [c for c in choices if typed and c.casefold().startswith(typed)]
            if len(near) == 1:
                return near[0]
            why = f"That may be {some_of(near, ' or ')}" if near else f"{typed[:40]!r} is no move; {hint}"
            self.say((f"{why}. Try again.", "yellow"))

    def _offer(self, agent: str, keys: Mapping[str, str]) -> None:
        parts: list[str | tuple[str, str]] = [(f"{agent}> ", "bold magenta")]
        for key, choice in keys.items():
            marked = choice[1:] if choice.casefold().startswith(key) else f" {choice}"
            parts += [(key, "bold green"), f"{marked}  "]
        self.say(*parts, end="")

    def _speak(self, agent: str, form: Format, lenient: bool | None) -> str:
        hint, refused = f"replies with {form_in_words(form)}", None
        while True:
            typed = self._line(agent, hint)
            if refused is not None and not typed.strip():
                return refused
            reply = completed(form, typed, lenient)
            if reply is not None:
                return reply
            refused = typed
            self.say(
                (
                    f"{agent} {hint}, and this is something else. Type it again, or press Enter to say it as it is.",
                    "yellow",
                )
            )

    def _line(self, agent: str, hint: str) -> str:
        """Read a line. A backslash at its end continues it in the next line."""
        if hint and self._hint != hint:
            self.say((f"({hint}; Ctrl-D leaves)", "dim"))
            self._hint = hint
        lines = [self.read(f"{agent}> ")]  # not printed by us, because the line editor must know its prompt
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(self.read("… "))
        return "\n".join(lines)[:MAX_REPLY]


def some_of(choices: Sequence[str], between: str = ", ") -> str:
    """List choices in words. Of many choices, list the first and the last ones, and their number."""
    if len(choices) <= SHOWN:
        return between.join(choices)
    return f"{between.join(choices[:5])} … {choices[-1]} ({len(choices)} in all)"


def completed(form: Format, typed: str, lenient: bool | None = None) -> str | None:
    """Return a legal reply from a typed text, or None: the text itself, or the text in the format's only tag."""
    if read_reply(form, typed, lenient=lenient).ok:
        return typed
    tags = [match[1] for end in form.stop if (match := _CLOSING.fullmatch(end))]
    if len(tags) == 1 and typed.strip() and "<" not in typed:
        whole = f"<{tags[0]}>{typed}</{tags[0]}>"
        if read_reply(form, whole, lenient=lenient).ok:
            return whole
    return None


def keys_of(choices: Sequence[str]) -> dict[str, str]:
    """Return a key for each choice: its first letter if all of these differ, else a number. Many choices have no keys."""
    if len(choices) > MANY:
        return {}
    letters = {choice[:1].casefold(): choice for choice in choices}
    if len(letters) == len(choices) and all(letter.isalnum() for letter in letters):
        return letters
    return {str(number): choice for number, choice in enumerate(choices, 1)}


def single_key() -> KeyReader | None:
    """Return a function that reads a key without Enter, or None without a real terminal."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return None
    try:
        import termios
        import tty
    except ImportError:  # no POSIX terminal
        return None
    import os
    import select

    def press(offer: Callable[[], None]) -> str:
        file = sys.stdin.fileno()
        before = termios.tcgetattr(file)
        try:
            tty.setcbreak(file, termios.TCSADRAIN)  # keys that were typed early still count
            offer()
            sys.stdout.flush()
            pressed = os.read(file, 1)
            while pressed[:1] == b"\x1b" and len(pressed) < 3 and select.select([file], [], [], 0.05)[0]:
                pressed += os.read(file, 1)
        finally:
            termios.tcsetattr(file, termios.TCSADRAIN, before)
        return pressed.decode("utf-8", "replace") or END

    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (lines that are typed can be edited)
    return press


def _line(value: object, width: int) -> str:
    return clip(" ".join(str(jsonable(value)).split()), width)


def _earned(rewards: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {amount:+.3g}" for name, amount in rewards.items() if amount)
