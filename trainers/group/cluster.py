"""Ray cluster of a run: joining or starting it, and placing the groups' actors on its nodes."""

from __future__ import annotations

import asyncio
import os
import re
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..config.group_settings import GroupSpec, replica_gpus, sharded
from ..config.schema import ConfigError, RayConfig

CALLS_AT_ONCE = 10_000
OBJECT_STORE = 256 * 2**20
"""Bytes of shared memory for a Ray that is started here. Few are enough, because only thin records cross."""
ADDRESS = re.compile(r"(?!https?://)([a-z]\w*://.+|(\[[0-9a-fA-F:.]+\]|[^\s:/]+):\d+)")
"""Address of a cluster: HOST:PORT, or with the scheme of a client (`ray://`)."""
ANSWER = 15.0
"""Seconds in which a cluster's address must answer."""
GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""Beginning of an HTTP/2 connection, which is what Ray's servers speak: the preface, and empty settings."""
SETTINGS = 4
"""Kind of the frame with which a server answers it."""

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup


def connect(settings: RayConfig) -> None:
    """Join the cluster at `address`, at RAY_ADDRESS, or on this machine (`ray start --head`). Otherwise, and with the
    address "local", start a Ray here.
    """
    import ray

    if ray.is_initialized():
        return
    address = settings.address or os.environ.get("RAY_ADDRESS", "")
    if address not in ("", "auto", "local") and not ADDRESS.fullmatch(address):
        raise ConfigError(
            f"{'ray.address' if settings.address else 'RAY_ADDRESS'}: {address!r} is no address of a cluster; write HOST:PORT "
            "(that `ray start --head` prints), ray://HOST:PORT, auto (the cluster of this machine) or local (a new Ray)"
        )
    options = {"log_to_driver": False, **settings.options}
    here: dict[str, object] = {
        "include_dashboard": False,
        "object_store_memory": OBJECT_STORE,
        "_system_config": {"worker_niceness": 0},  # groups are the main work here, not background work
    }
    if not address:
        address = "auto" if runs_here() else "local"
    try:
        if address == "local":
            ray.init(address="local", **{**here, **options})
            return
        if address != "auto":  # a Ray on this machine is joined; its settings cannot change
            check_answers(address)
        ray.init(address=address, **options)
    except (ConnectionError, OSError) as error:
        raise ConnectionError(
            f"runtime=ray: no cluster answers at {address} ({error}). Start it (`ray start --head`), or correct ray.address or "
            "RAY_ADDRESS (both empty, a Ray is started on this machine)"
        ) from error
    except (TypeError, ValueError) as error:
        raise ConfigError(f"ray.options: {error}") from error
    except RuntimeError as error:
        if "Unknown keyword" in str(error):
            raise ConfigError(f"ray.options: {error}") from error
        if "ersion mismatch" not in str(error):
            raise
        ray.shutdown()  # it has joined already
        words = " ".join(str(error).split())
        raise ConfigError(f"runtime=ray: {words}; install the same Python and Ray on all nodes") from error


def runs_here() -> bool:
    """Tell whether a Ray runs on this machine. A killed one leaves its address, and Ray would wait for minutes for
    it.
    """
    file = Path(os.environ.get("RAY_TMPDIR") or "/tmp", "ray", "ray_current_cluster")
    try:
        check_answers(file.read_text().strip())
    except OSError:
        return False
    return True


def check_answers(address: str) -> None:
    """Check within seconds that Ray listens at an address. Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not (host and port.isdigit()):
        return
    with socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER) as link:
        if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
            return
        link.sendall(GREETING)
        frame = link.recv(9)
        if len(frame) < 4 or frame[3] != SETTINGS:
            raise ConnectionError("something else than Ray listens there")


def with_engine_gpus(specs: Mapping[str, GroupSpec]) -> dict[str, GroupSpec]:
    """Give engines their GPUs if the cluster has any. Ray hides all GPUs from an actor that reserves none."""
    import ray

    if not ray.cluster_resources().get("GPU"):
        return dict(specs)
    return {name: replace(spec, gpus=spec.gpus or spec.gpus_if_any) for name, spec in specs.items()}


def check_room(specs: Mapping[str, GroupSpec], strategy: str = "") -> None:
    """Refuse groups for which the empty nodes have too little room. Ray would wait for ever."""
    import ray

    rooms = {
        str(node["NodeID"]): (node["Resources"].get("CPU", 0.0), node["Resources"].get("GPU", 0.0))
        for node in ray.nodes()
        if node["Alive"]
    }
    parts = [
        part
        for spec in specs.values()
        for part in (_own(spec), *((0.0, float(gpus)) for gpus in beside(spec)))
    ]
    for kind, name in enumerate(("CPU", "GPU")):
        needed, total = sum(part[kind] for part in parts), sum(room[kind] for room in rooms.values())
        if needed > total:
            raise ConfigError(
                f"the groups ask for {needed:g} {name}s (groups.*.{name.lower()}s), and Ray has {total:g}"
            )
    for name, spec in specs.items():
        if not any(_holds(room, _own(spec)) for room in rooms.values()):
            raise ConfigError(
                f"groups.{name}: no node has {spec.gpus:g} GPUs and {spec.cpus:g} CPUs together; the nodes have {nodes()}"
            )
    if not strategy.startswith("strict") and not _packs(sorted(parts, reverse=True), list(rooms.values())):
        raise ConfigError(
            f"the groups do not fit on the nodes together: {asked(specs)}; the nodes have {nodes()}"
        )


def _own(spec: GroupSpec) -> tuple[float, float]:
    """Return the CPUs and GPUs of a group's own actor."""
    return spec.cpus, spec.gpus


def _holds(room: tuple[float, float], part: tuple[float, float]) -> bool:
    return all(want <= have + 1e-6 for want, have in zip(part, room, strict=True))


def _packs(parts: Sequence[tuple[float, float]], rooms: list[tuple[float, float]]) -> bool:
    """Tell whether actors find room on the nodes, each on one of them. Every way is tried; nodes that are alike are one."""
    if not parts or not any(parts[0]):  # they are sorted: no other asks for anything
        return True
    tried = set()
    for i, room in enumerate(rooms):
        if room in tried or not _holds(room, parts[0]):
            continue
        tried.add(room)
        left = (room[0] - parts[0][0], room[1] - parts[0][1])
        if _packs(parts[1:], [*rooms[:i], left, *rooms[i + 1 :]]):
            return True
    return False


def asked(specs: Mapping[str, GroupSpec]) -> str:
    """Describe what each group asks for: `a 2 CPUs; b 1 CPUs, 1 GPUs and 4 more of 1 GPU each`."""
    words = []
    for name, spec in specs.items():
        sizes = sorted(Counter(beside(spec)).items())
        more = "".join(f" and {many} more of {size} GPU{'s' * (size > 1)} each" for size, many in sizes)
        words.append(f"{name} {spec.cpus:g} CPUs, {spec.gpus:g} GPUs{more}")
    return "; ".join(words)


def beside(spec: GroupSpec) -> list[int]:
    """Return the GPUs that each rank and each further replica of a group reserves, in addition to those of its own actor."""
    ranks = [1] * spec.ranks if spec.device.startswith("cuda") and sharded(spec) else []
    gpus = replica_gpus(spec)
    return ranks + ([gpus] * (spec.replicas - 1) if gpus else [])


def nodes() -> str:
    """Describe what the living nodes have, and what is free of all: `10.0.0.1: 8 CPU, 2 GPU; … (free: 3 CPU, 0 GPU)`."""
    import ray

    own = "; ".join(
        f"{node['NodeManagerAddress']}: {node['Resources'].get('CPU', 0):g} CPU, {node['Resources'].get('GPU', 0):g} GPU"
        for node in ray.nodes()
        if node["Alive"]
    )
    free = ray.available_resources()
    return f"{own} (free: {free.get('CPU', 0):g} CPU, {free.get('GPU', 0):g} GPU)"


@dataclass(frozen=True)
class Places:
    """Bundles that are reserved on the nodes, by group. A group without one asks for nothing, and lives anywhere."""

    reserved: PlacementGroup | None = None
    bundles: tuple[str, ...] = ()

    def of(self, group: str) -> dict[str, object]:
        """Return options that put a group's actor into its bundle."""
        if group not in self.bundles:
            return {}
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        return {
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self.reserved, placement_group_bundle_index=self.bundles.index(group)
            )
        }


async def reserve(specs: Mapping[str, GroupSpec], settings: RayConfig) -> Places:
    """Reserve a bundle for each group: by the strategy, else wherever there is room for those that ask for anything. An actor
    by itself would wait without end where others hold what it asks for.
    """
    chosen = {name: spec for name, spec in specs.items() if settings.strategy or spec.cpus or spec.gpus}
    if not chosen:
        return Places()
    from ray.util import placement_group, remove_placement_group

    bundles = [
        {"CPU": max(spec.cpus, 0.001), **({"GPU": spec.gpus} if spec.gpus else {})}
        for spec in chosen.values()
    ]
    group = placement_group(bundles, strategy=(settings.strategy or "pack").upper())
    try:
        await asyncio.wait_for(asyncio.wrap_future(group.ready().future()), settings.wait)
    except TimeoutError:
        remove_placement_group(group)
        how = f"ray.strategy: {len(bundles)} groups cannot be placed by {settings.strategy!r}"
        raise ConfigError(
            f"{how if settings.strategy else 'the groups find no room'} (waited {settings.wait:g} s, ray.wait); they ask for "
            f"{asked(chosen)}; the nodes have {nodes()}, and others may use them"
        ) from None
    return Places(group, tuple(chosen))


def release(reserved: PlacementGroup | None) -> None:
    """Release the bundles."""
    if reserved is not None:
        from ray.util import remove_placement_group

        remove_placement_group(reserved)
