"""Tokens and dollars that endpoints cost, by role, and a budget that they may not pass.

    spending = Spending(dollars=5.0)
    await spending.hold(guess)            # waits, or raises BudgetSpent
    …
    spending.book("planner", guess, bill)  # as the server counted it

What calls under way may cost is held back until they have ended. A call that could pass the budget waits for them; when
none is left and it still could, the budget is spent.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from .basics.failures import Outage
from .basics.hints import counted

Price = tuple[float, float]
"""Dollars for a million tokens in, and for a million tokens out."""


class BudgetSpent(Outage):
    """Raised when the next call could cost more than is left of the budget."""


class Unlimited(Outage):
    """Raised when a budget cannot hold, because a reply may have any length."""


@dataclass(slots=True)
class Bill:
    """Sums of tokens, requests and dollars of endpoints."""

    requests: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    dollars: float = 0.0
    estimated: int = 0
    """Number of requests whose tokens the server did not report. Their text length is counted instead."""

    def add(self, other: Bill) -> None:
        """Add the sums of another bill."""
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


def cost(price: Price | None, tokens_in: int, tokens_out: int) -> float:
    """Return the dollars of one call; 0 without a price."""
    return (tokens_in * price[0] + tokens_out * price[1]) / 1e6 if price else 0.0


class Spending:
    """The bill of each role, and the budget of all together."""

    file_name = "spending.json"
    """Name of the file with all bills, in the folder of a run or an evaluation."""

    def __init__(self, dollars: float | None = None, tokens: int | None = None) -> None:
        self.dollars, self.tokens = dollars, tokens
        self.roles: dict[str, Bill] = {}
        self._held = Bill()
        self._spent = ""  # sentence about the first call that did not fit
        self._file: tuple[Path, dict[str, Bill]] | None = None
        self._known: set[Path] = set()  # files whose bills are counted
        self._dearest, self._mark = Bill(), Bill()
        self._ended: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None

    @property
    def total(self) -> Bill:
        """Return the sum over all roles."""
        total = Bill()
        for bill in list(self.roles.values()):
            total.add(bill)
        return total

    @property
    def limited(self) -> bool:
        """Flag: there is a budget."""
        return self.dollars is not None or self.tokens is not None

    async def hold(self, guess: Bill) -> None:
        """Reserve the largest cost of a call. Wait until the budget has room for it."""
        while self._spent or not self._fits(guess):
            if self._spent or not self._held.requests:
                # the work stops, so no other call may begin: it would be cancelled, and paid for
                self._spent = self._spent or self._sentence(guess)
                raise BudgetSpent(self._spent)
            loop = asyncio.get_running_loop()
            if self._ended is None or self._ended[0] is not loop or self._ended[1].is_set():
                self._ended = (loop, asyncio.Event())
            await self._ended[1].wait()
        self._held.add(guess)

    def book(self, role: str, guess: Bill, bill: Bill) -> None:
        """Replace the reservation of a call by its actual bill."""
        for name in Bill.__slots__:
            setattr(self._held, name, getattr(self._held, name) - getattr(guess, name))
        if bill.requests:
            self.roles.setdefault(role, Bill()).add(bill)
        if self._ended is not None:
            self._ended[1].set()
        if bill.requests and self._file is not None:
            path, bills = self._file
            bills.setdefault(role, Bill()).add(bill)
            path.parent.mkdir(parents=True, exist_ok=True)
            draft = path.with_name(f"{path.name}.part")
            draft.write_text(json.dumps(_plain(bills), indent=1), encoding="utf-8")
            os.replace(draft, path)

    def may_end(self) -> bool:
        """Tell whether a step with twice the cost of the most expensive step could spend the rest. Call it once before
        each step.
        """
        total = self.total
        for name in Bill.__slots__:
            step = getattr(total, name) - getattr(self._mark, name)
            setattr(self._dearest, name, max(getattr(self._dearest, name), step))
        self._mark = total
        twice = Bill()
        twice.add(self._dearest)
        twice.add(self._dearest)
        return not self._fits(twice)

    def add_from(self, path: Path) -> None:
        """Add the bills of a file, if it exists: earlier commands have spent them. A file is added once."""
        if path.absolute() in self._known:
            return
        self._known.add(path.absolute())
        for role, bill in _read(path).items():
            self.roles.setdefault(role, Bill()).add(bill)
        self._mark = self.total

    @contextmanager
    def kept_in(self, path: Path) -> Iterator[None]:
        """Add every bill to a file while the context is open, so that a kill forgets none."""
        self.add_from(path)
        self._file = path, _read(path)
        try:
            yield
        finally:
            self._file = None

    def _fits(self, guess: Bill) -> bool:
        total = self.total
        total.add(self._held)
        total.add(guess)
        return (self.dollars is None or total.dollars <= self.dollars * (1 + 1e-9)) and (
            self.tokens is None or total.tokens_in + total.tokens_out <= self.tokens
        )

    def _sentence(self, guess: Bill) -> str:
        limits = [f"${self.dollars:g}"] if self.dollars is not None else []
        limits += [counted(self.tokens, "token")] if self.tokens is not None else []
        keys = ["budget_dollars"] if self.dollars is not None else []
        keys += ["budget_tokens"] if self.tokens is not None else []
        next_one = f"${guess.dollars:.4g}" if self.dollars is not None else ""
        next_one = next_one or f"{guess.tokens_in + guess.tokens_out:,} tokens"
        return (
            f"the budget of {' and '.join(limits)} is spent: {self}; the next call may cost {next_one}. "
            f"Raise {' or '.join(keys)} to go on"
        )

    def __str__(self) -> str:
        total = self.total
        tokens = f"{counted(total.tokens_in, 'token')} in and {total.tokens_out:,} out"
        dollars = f"${total.dollars:.4g} for " if total.dollars else ""
        return f"{dollars}{counted(total.requests, 'request')}, {tokens}"

    def figures(self) -> dict[str, float]:
        """Return the sums so far as metrics of a run: `spent/dollars`, `spent/ROLE/tokens_in` …"""
        figures: dict[str, float] = {}
        for place, bill in (
            ("spent", self.total),
            *((f"spent/{r}", b) for r, b in sorted(self.roles.items())),
        ):
            figures |= {f"{place}/{name}": float(value) for name, value in asdict(bill).items()}
        return figures if self.roles else {}


def _plain(bills: Mapping[str, Bill]) -> dict[str, dict[str, float]]:
    return {role: asdict(bill) for role, bill in bills.items()}


def _read(path: Path) -> dict[str, Bill]:
    """Return the bills of a file by role; none if there is no file."""
    if not path.is_file():
        return {}
    known = {field.name for field in fields(Bill)}
    try:
        bills = {
            role: Bill(**{name: value + 0 for name, value in bill.items() if name in known})
            for role, bill in json.loads(path.read_text(encoding="utf-8")).items()
        }
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} is damaged, so it is not known what endpoints have cost so far; remove it to count anew "
            f"({type(error).__name__}: {error})"
        ) from None
    return bills
