"""Threads for work whose failures are never lost.

A future cannot carry every exception. `StopIteration` leaves its waiter waiting for ever. A cancellation looks like the
waiter's own. `SystemExit` ends the event loop that it reaches. Work that runs through this module raises `ThreadError`
in their place, with the original as its cause.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Executor
from typing import TypeVar

T = TypeVar("T")


class ThreadError(RuntimeError):
    """Raised when work in a thread or a task raises an exception that no future can carry. `__cause__` is the original."""


def contained(work: Callable[..., T]) -> Callable[..., T]:
    """Wrap `work` so that it raises only exceptions that a future can carry."""

    def run(*arguments: object, **options: object) -> T:
        try:
            return work(*arguments, **options)
        except (StopIteration, concurrent.futures.CancelledError) as error:
            raise _carried(error) from error
        except Exception:
            raise
        except (
            BaseException
        ) as error:  # a Ctrl-C reaches the main thread alone, so this exception is the work's own
            raise _carried(error) from error

    return run


async def contained_async(work: Awaitable[T]) -> T:
    """Wrap a coroutine in the same way. A requested cancellation stays a cancellation."""
    try:
        return await work
    except KeyboardInterrupt as error:
        raise _carried(error) from error
    except BaseException as error:
        if (held := ordinary(error)) is not error:
            raise held from error
        raise


def ordinary(error: BaseException) -> Exception:
    """Return the error as one that ends only the work that raised it: of a policy, a tool, a workflow, a rule, an episode.

    A user's code may raise `SystemExit`, or a cancellation that was not requested. Neither may stop the event loop, or look
    like a cancellation of the waiting code. A requested cancellation is raised again.
    """
    if isinstance(error, KeyboardInterrupt | GeneratorExit):
        raise error
    if isinstance(error, asyncio.CancelledError):
        try:
            task = asyncio.current_task()
        except RuntimeError:  # no loop is visible to a workflow
            task = None
        if task is not None and getattr(task, "cancelling", lambda: 1)():  # Python 3.10 cannot tell
            raise error
    elif isinstance(error, Exception) and not isinstance(error, concurrent.futures.CancelledError):
        return error
    return _carried(error)


def _carried(error: BaseException) -> ThreadError:
    carried = ThreadError(f"raised {type(error).__name__}{f': {error}' if str(error) else ''}")
    carried.__cause__ = error
    return carried


class Background:
    """Event loop in a thread of its own. It starts at first use, and again in a forked process.

    Callers from other loops, from several loops or from none can use it.
    """

    def __init__(self, name: str) -> None:
        self.name, self._lock = name, threading.Lock()
        self._loop: tuple[int, asyncio.AbstractEventLoop] | None = None

    def run(self, work: Coroutine[object, None, T]) -> concurrent.futures.Future[T]:
        """Run a coroutine in this loop. Cancelling the future cancels it."""
        with self._lock:
            if self._loop is None or self._loop[0] != os.getpid():
                loop = asyncio.new_event_loop()
                threading.Thread(target=loop.run_forever, name=self.name, daemon=True).start()
                self._loop = (os.getpid(), loop)
            return asyncio.run_coroutine_threadsafe(contained_async(work), self._loop[1])


async def in_thread(pool: Executor | None, work: Callable[[], T]) -> T:
    """Run `work` in a thread of `pool`, and raise its error here.

    A thread cannot be stopped. A cancelled waiter continues when the thread has ended, and the error of the thread is
    printed.
    """
    task = asyncio.get_running_loop().run_in_executor(pool, contained(work))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        if not task.cancelled() and (error := task.exception()) is not None:
            tell(error)
        raise


async def together(*work: Coroutine[object, None, T]) -> list[T]:
    """Return the results of all, in order. The first error is raised at once. Later errors are printed."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException as first:
        raised = first  # `first` is deleted before the callbacks run

        def late(task: asyncio.Future[T]) -> None:
            if not task.cancelled() and task.exception() not in (None, raised):
                tell(task.exception())

        for task in tasks:
            task.add_done_callback(late)
        raise


def tell(error: BaseException | None) -> None:
    """Print an error that no caller waits for any more."""
    print(f"unitymas: besides, {type(error).__name__}: {error}", file=sys.stderr, flush=True)
