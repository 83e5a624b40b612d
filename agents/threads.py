"""Work in threads of which no failure is lost.

A future cannot carry everything that can be raised: `StopIteration` leaves whoever awaits it waiting for ever, a
cancellation looks like the waiter's own, and `SystemExit` ends the event loop that it is handed to. What is run
through here raises `ThreadError` in their place, with the original as its cause.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import sys
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, TypeVar

T = TypeVar("T")


class ThreadError(RuntimeError):
    """Work in a thread raised what no future can carry; `__cause__` is the original."""


def contained(work: Callable[..., T]) -> Callable[..., T]:
    """`work`, raising only what a future can carry."""

    def run(*arguments: Any, **options: Any) -> T:
        try:
            return work(*arguments, **options)
        except (StopIteration, concurrent.futures.CancelledError) as error:
            raise _carried(error) from error
        except Exception:
            raise
        except BaseException as error:  # a Ctrl-C reaches the main thread alone: nobody's but the work's own
            raise _carried(error) from error

    return run


async def contained_async(work: Awaitable[T]) -> T:
    """The same of a coroutine; a cancellation that was asked for stays one."""
    try:
        return await work
    except (Exception, GeneratorExit):
        raise
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or getattr(task, "cancelling", lambda: 1)():  # Python 3.10 cannot tell
            raise
        raise _carried(error) from error
    except BaseException as error:
        raise _carried(error) from error


def _carried(error: BaseException) -> ThreadError:
    return ThreadError(f"raised in a thread: {type(error).__name__}{f': {error}' if str(error) else ''}")


async def in_thread(pool: Executor | None, work: Callable[[], T]) -> T:
    """Run `work` in a thread of `pool`; whatever it raises is raised here.

    A thread cannot be stopped: whoever is cancelled meanwhile goes on when it has ended, and what it raised is told.
    """
    task = asyncio.get_running_loop().run_in_executor(pool, contained(work))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        if not task.cancelled() and (error := task.exception()) is not None:
            tell(error)
        raise


async def together(*work: Coroutine[Any, Any, T]) -> list[T]:
    """Results of all, in order. The first error is raised at once, and one that comes after it is told, not lost."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException as first:
        raised = first  # `first` is gone when the callbacks run

        def late(task: asyncio.Future[Any]) -> None:
            if not task.cancelled() and task.exception() not in (None, raised):
                tell(task.exception())

        for task in tasks:
            task.add_done_callback(late)
        raise


def tell(error: BaseException | None) -> None:
    """Show an error that nobody waits for any more."""
    print(f"unitymas: besides, {type(error).__name__}: {error}", file=sys.stderr, flush=True)
