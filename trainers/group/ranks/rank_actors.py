"""Ranks as Ray actors, on any node. Each has one GPU if the group is on GPUs."""

from __future__ import annotations

import socket
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...config.group_settings import GroupSpec
from ..actor import check_versions, versions
from .forked import GRACE, RankError, RankLost, recoverable, told

if TYPE_CHECKING:
    from ray import ObjectRef
    from torch.distributed import Store  # type: ignore[attr-defined]


class RankActor:
    """One rank in a Ray actor."""

    def __init__(self, spec: GroupSpec, index: int) -> None:
        self.spec, self.index = spec, index
        self.store: Store | None = None

    def versions(self) -> dict[str, str]:
        """Return the versions on which equal results depend."""
        return versions()

    def listen(self) -> tuple[str, int]:
        """Open the store through which the ranks find each other. Return its address."""
        import ray
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        host = ray.util.get_node_ip_address()
        with socket.socket() as free:
            free.bind(("", 0))
            port = int(free.getsockname()[1])
        self.store = TCPStore(host, port, self.spec.ranks, is_master=True, wait_for_workers=False)
        return host, port

    def start(self, host: str, port: int) -> None:
        """Connect to the other ranks, and load."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        from .one_rank import Rank

        store = self.store or TCPStore(host, port, self.spec.ranks, is_master=False, wait_for_workers=False)
        self.rank = Rank(self.spec, self.index, store)

    def call(self, method: str, arguments: tuple[object, ...]) -> object:
        """Answer a call of the group."""
        return getattr(self.rank, method)(*arguments)


class RankActors:
    """The ranks of one group as actors. Every call goes to all of them."""

    def __init__(self, spec: GroupSpec) -> None:
        import ray

        self.name, self.ended, self.lost, self.lock = spec.name, "", False, threading.Lock()
        gpus = 1 if spec.device.startswith("cuda") else 0
        made = ray.remote(RankActor).options(num_gpus=gpus, num_cpus=0)
        spec = replace(spec, threads=spec.threads or 1)
        self.actors = [made.remote(spec, index) for index in range(spec.ranks)]
        try:
            for index, there in enumerate(ray.get([actor.versions.remote() for actor in self.actors])):
                check_versions(f"groups.{spec.name}.ranks: rank {index}", there)
            place = ray.get(self.actors[0].listen.remote())
            self._answers("starting", [actor.start.remote(*place) for actor in self.actors])
        except BaseException:
            self.close()
            raise

    def call(self, method: str, *arguments: object) -> list[Any]:
        """Call a method on every rank. Return the result of each."""
        import ray

        with self.lock:
            if self.ended:
                raise (RankLost if self.lost else RankError)(self.ended)
            shared = ray.put(arguments)  # one copy for all ranks of a node
            return self._answers(method, [actor.call.remote(method, shared) for actor in self.actors])

    def _answers(self, what: str, references: list[ObjectRef]) -> list[Any]:
        import ray
        from ray.exceptions import RayTaskError

        errors: dict[int, BaseException] = {}
        waiting = list(references)
        while waiting:
            ready, waiting = ray.wait(waiting, timeout=GRACE if errors else None)
            if not ready:
                break
            for reference in ready:
                try:
                    ray.get(reference)
                except RayTaskError as error:
                    errors[references.index(reference)] = error.cause
                except Exception as error:  # the actor, or its node, is gone
                    self.lost = True
                    errors = {references.index(reference): error}
                    waiting = []
                    break  # the errors of the others are consequences of this one
        if not errors:
            return list(ray.get(references))
        index, first = min(errors.items())
        if not self.lost and len(errors) == len(references) and what != "starting" and recoverable(first):
            raise first
        self.close()
        self.ended = f"group {self.name!r}: {told(index, what, first)}; all its ranks are ended"
        raise (RankLost if self.lost else RankError)(self.ended) from first

    def close(self) -> None:
        """End all ranks in any state."""
        import ray

        self.ended = self.ended or f"group {self.name!r} is closed"
        if ray.is_initialized():
            for actor in self.actors:
                ray.kill(actor)
