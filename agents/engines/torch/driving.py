"""Driving an engine from asyncio: `step` is called on the loop's own thread, while there is work.

A second thread would compete with the controller for Python's lock after every small product.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence

from ..generation import Generation, Request
from ..sampling import SamplingParams


class Driven(ABC):
    """Engine whose `step` gives every request its next token."""

    turns = 8  # passes of the loop between an answer and the team's next request; no step may run before it
    waiting: deque[Request]
    running: list[Request]
    _driver: asyncio.Task[None] | None = None

    @abstractmethod
    def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        key: tuple[str, str] | None = None,
        adapter: str | None = None,
        begun: Generation | None = None,
    ) -> Request:
        """Queue a request."""

    @abstractmethod
    def cancel(self, request: Request) -> None:
        """End a request now."""

    @abstractmethod
    def step(self) -> None:
        """Give every request its next token."""

    @abstractmethod
    def _fail(self, error: Exception) -> None:
        """Pass the error of a failed step to all requests."""

    @property
    @abstractmethod
    def busy(self) -> bool:
        """Tell whether requests run or wait."""

    async def agenerate(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        key: tuple[str, str] | None = None,
        adapter: str | None = None,
        begun: Generation | None = None,
    ) -> Generation:
        """Answer one prompt, at the same time as other requests. Cancelling the task cancels the request."""
        request = self.submit(prompt, params, key, adapter, begun)
        if not request.done:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            request.on_done = lambda _: None if future.done() else future.set_result(None)
            self._drive()
            try:
                await future
            finally:
                self.cancel(request)
        return result_of(request)

    def _drive(self) -> None:
        """Make sure that a task on this loop calls `step` while there is work."""
        loop = asyncio.get_running_loop()
        if self._driver is None or self._driver.done() or self._driver.get_loop() is not loop:
            self._driver = loop.create_task(self._steps())

    async def _steps(self) -> None:
        # tasks that are ready to submit a request do so first, and share the forward pass
        await asyncio.sleep(0)
        while self.busy:
            before = len(self.running) + len(self.waiting)
            try:
                self.step()
            except Exception as error:
                self._fail(error)
            answered = len(self.running) + len(self.waiting) < before
            for _ in range(self.turns if answered else 1):
                await asyncio.sleep(0)


def result_of(request: Request) -> Generation:
    """Return a finished request's result, or raise its error."""
    if isinstance(request.result, BaseException):
        raise request.result
    assert request.result is not None
    return request.result
