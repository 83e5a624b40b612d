"""Ranks as processes of this machine.

    group ── socket ──▶ rank 0          One process imports torch and forks all ranks, so they share its pages and begin
          ── socket ──▶ rank 1          at once. It computes nothing: it waits for them, and tells how one died.
          ── pipe ────▶ supervisor

A rank whose socket closes ends at once, in the middle of a computation too. So none outlives its group, however that ends.
"""

from __future__ import annotations

import json
import os
import pickle
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from ....agents.basics.failures import GroupEnded, GroupLost, out_of_memory
from ...config.group_settings import GroupSpec

GRACE = 10.0
"""Seconds in which the other ranks may report the error that one of them has reported."""


WORD = 60.0
"""Seconds in which the supervisor must tell how a rank died, or end. A busy machine needs some."""


class RankError(GroupEnded):
    """Raised when ranks have ended. Their group cannot continue."""


class RankLost(RankError, GroupLost):
    """Raised when a rank has died. The run continues by itself from its newest checkpoint."""


class RankProcesses:
    """The ranks of one group. Every call goes to all of them."""

    def __init__(self, spec: GroupSpec) -> None:
        self.name, self.ended, self.lost = spec.name, "", False
        self.lock = threading.Lock()
        self.folder = tempfile.TemporaryDirectory(prefix="unitymas-ranks-", ignore_cleanup_errors=True)
        pairs = [socket.socketpair() for _ in range(spec.ranks)]
        far = [theirs.fileno() for _, theirs in pairs]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self.supervisor = subprocess.Popen(
            [sys.executable, "-m", __name__, self.folder.name, *map(str, far)],
            pass_fds=far, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env=environment,
        )  # fmt: skip
        self.links = [Connection(ours.detach()) for ours, _ in pairs]
        for _, theirs in pairs:
            theirs.close()
        try:
            self._start(spec)
        except BaseException:
            self.close()
            raise

    def _start(self, spec: GroupSpec) -> None:
        store = str(Path(self.folder.name) / "store")
        with self.lock:
            for index, link in enumerate(self.links):
                self._send(index, link, pickle.dumps(("start", (spec, index, store))))
            self._answers("starting")

    def call(self, method: str, *arguments: object) -> list[Any]:
        """Call a method on every rank. Return the result of each.

        An error that all ranks report is raised unchanged, and the group continues. After any other error, all ranks
        end.
        """
        with self.lock:
            if self.ended:
                raise (RankLost if self.lost else RankError)(self.ended)
            message = _packed((method, arguments))
            for index, link in enumerate(self.links):
                self._send(index, link, message)
            return self._answers(method)

    def _send(self, index: int, link: Connection, message: bytes) -> None:
        try:
            link.send_bytes(message)
        except OSError:
            self._end(index, "before it was asked")

    def _answers(self, what: str) -> list[Any]:
        answers: dict[int, Any] = {}
        errors: dict[int, BaseException] = {}
        while waiting := [link for i, link in enumerate(self.links) if i not in answers and i not in errors]:
            ready = wait(waiting, GRACE if errors else None)
            if not ready:
                break
            for link in ready:
                index = self.links.index(link)  # type: ignore[arg-type]
                try:
                    fine, value = pickle.loads(link.recv_bytes())  # type: ignore[union-attr]
                except (EOFError, OSError):
                    self._end(index, f"in {what}", errors)
                if fine:
                    answers[index] = value
                else:
                    errors[index] = value
        if errors:
            self._raise(what, errors)
        return [answers[index] for index in range(len(self.links))]

    def _raise(self, what: str, errors: dict[int, BaseException]) -> None:
        index, error = min(errors.items())
        if len(errors) == len(self.links) and what != "starting" and recoverable(error):
            raise error
        self.close()
        self.ended = f"group {self.name!r}: {told(index, what, error)}"
        raise RankError(self.ended) from error

    def _end(self, index: int, when: str, errors: dict[int, BaseException] | None = None) -> None:
        """End all ranks, because one has died. Raise the cause."""
        if errors:  # it ended because of them
            self._raise(when.removeprefix("in "), errors)
        for link in self.links:
            link.close()
        try:
            word, _ = self.supervisor.communicate(timeout=WORD)
        except subprocess.TimeoutExpired:
            word = b""
        cause = json.loads(word) if word.strip() else {}
        index = cause.get("rank", index)
        self.close()
        self.lost, self.ended = (
            True,
            f"group {self.name!r}: rank {index} of {len(self.links)} ended {when}{died(cause.get('code'))}. All its ranks "
            "are ended; the run can go on from its newest checkpoint",
        )
        raise RankLost(self.ended)

    def close(self) -> None:
        """End all ranks in any state."""
        self.ended = self.ended or f"group {self.name!r} is closed"
        for link in self.links:
            link.close()
        try:
            self.supervisor.wait(WORD)
        except subprocess.TimeoutExpired:
            self.supervisor.terminate()
            self.supervisor.wait()
        if self.supervisor.stdout is not None:
            self.supervisor.stdout.close()
        self.folder.cleanup()


def recoverable(error: BaseException) -> bool:
    """Tell whether ranks that all report this error have the same state as before the call."""
    from ..learning.update import UpdateError

    return isinstance(error, UpdateError | ValueError | KeyError | TypeError)


def told(index: int, what: str, error: BaseException) -> str:
    """Return why a rank ended, and what to do if memory was the cause."""
    text = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    if out_of_memory(error):
        return (
            f"rank {index} ran out of memory in {what} ({text:.300}). Take more ranks (groups.*.ranks), lower "
            "policies.*.learning.micro_tokens, or set policies.*.learning.checkpointing or .offload"
        )
    return f"rank {index} failed in {what}: {text:.500}"


def died(code: int | None) -> str:
    """Return how a process ended, in words."""
    if code is None:
        return ""
    if code == -signal.SIGKILL:
        return ", killed by signal 9 (where nobody killed it, the machine ran out of memory)"
    return f", killed by signal {-code}" if code < 0 else f", with exit code {code}"


def _packed(message: tuple[str, tuple[object, ...]]) -> bytes:
    """Pickle a call. Classes that other processes cannot import travel by value where cloudpickle is installed."""
    try:
        import cloudpickle  # type: ignore[import-untyped]
    except ImportError:
        return pickle.dumps(message)
    packed: bytes = cloudpickle.dumps(message)
    return packed


# in the other processes ----------------------------------------------------------------------------------


def serve(link: Connection) -> None:
    """Answer the group's calls, one after the other, until the group closes the link."""
    from torch.distributed import FileStore  # type: ignore[attr-defined]

    from .one_rank import Rank

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the controller handles Ctrl-C
    threading.Thread(target=_end_with, args=(link.fileno(),), daemon=True).start()
    rank: Rank | None = None
    while True:
        try:
            method, arguments = pickle.loads(link.recv_bytes())
        except EOFError:
            return
        try:
            if method == "start":
                spec, index, store = arguments
                rank, value = Rank(spec, index, FileStore(store, spec.ranks)), None
            else:
                value = getattr(rank, method)(*arguments)
            answer = pickle.dumps((True, value))
        except BaseException as error:
            answer = _failure(error)
        link.send_bytes(answer)


def _failure(error: BaseException) -> bytes:
    try:
        packed = pickle.dumps((False, error))
        pickle.loads(packed)
    except Exception:  # an exception that cannot be pickled
        packed = pickle.dumps((False, RuntimeError(f"{type(error).__name__}: {error}")))
    return packed


def _end_with(link: int) -> None:
    """End this process when the other end of its link is gone."""
    poll = select.poll()
    poll.register(link, 0)  # a hang-up alone
    poll.poll()
    os._exit(1)


def supervise(folder: str, links: Sequence[int]) -> int:
    """Fork a rank for each link, and wait for them. If one ends badly, end the others, and print which one and how.

    The folder is removed at the end, because a killed group cannot remove it.
    """
    # torch comes in here, and what reads the configurations of models: once for all ranks
    from transformers import AutoConfig, LlamaConfig  # noqa: F401

    from . import one_rank  # noqa: F401

    children: dict[int, int] = {}
    for index, link in enumerate(links):
        child = os.fork()
        if not child:
            for other in links:
                if other != link:
                    os.close(other)
            os.close(1)
            try:
                serve(Connection(link))
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        children[child] = index
    for link in links:
        os.close(link)

    def end(*_: object) -> None:
        for child in children:
            os.kill(child, signal.SIGKILL)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, end)
    first = True
    while children:
        child, status = os.wait()
        index = children.pop(child)
        if status and first:
            first = False
            with suppress(BrokenPipeError):  # the group may be gone first
                print(json.dumps({"rank": index, "code": os.waitstatus_to_exitcode(status)}), flush=True)
            end()
    shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(supervise(sys.argv[1], [int(word) for word in sys.argv[2:]]))
