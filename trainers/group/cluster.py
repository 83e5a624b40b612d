"""Ray cluster of a run: joining or starting it, and placing the groups' actors on its nodes."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ..config.group_settings import GroupSpec, sharded
from ..config.schema import ConfigError, RayConfig

CALLS_AT_ONCE = 10_000
OBJECT_STORE = 256 * 2**20
"""Bytes of shared memory for a Ray that is started here. Few are enough, because only thin records cross."""
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
    address "local", start a Ray here."""
    import ray

    if ray.is_initialized():
        return
    address = settings.address or os.environ.get("RAY_ADDRESS", "")
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
    except TypeError as error:
        raise ConfigError(f"ray.options: {error}") from error
    except RuntimeError as error:
        if "ersion mismatch" not in str(error):
            raise
        ray.shutdown()  # it has joined already
        words = " ".join(str(error).split())
        raise ConfigError(f"runtime=ray: {words}; install the same Python and Ray on all nodes") from error


def runs_here() -> bool:
    """Tell whether a Ray runs on this machine. A killed one leaves its address, and Ray would wait for minutes for
    it."""
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


def check_room(specs: Mapping[str, GroupSpec], gpus: float) -> None:
    """Refuse groups that fit on no node, because Ray would wait for ever."""
    import ray

    total = ray.cluster_resources()
    for key, needed in (("GPU", gpus), ("CPU", sum(spec.cpus for spec in specs.values()))):
        if needed > total.get(key, 0):
            raise ConfigError(
                f"the groups ask for {needed:g} {key}s (groups.*.{key.lower()}s), and Ray has {total.get(key, 0):g}"
            )
    for name, spec in specs.items():
        if not any(fits(spec, node["Resources"]) for node in ray.nodes() if node["Alive"]):
            raise ConfigError(
                f"groups.{name}: no node has {spec.gpus:g} GPUs and {spec.cpus:g} CPUs together; the nodes have {nodes()}"
            )


def beside(spec: GroupSpec) -> int:
    """Return how many GPUs a group's ranks and further replicas reserve, in addition to its own actor."""
    if not spec.device.startswith("cuda"):
        return 0
    return spec.replicas - 1 + (spec.ranks if sharded(spec) else 0)


def fits(spec: GroupSpec, resources: Mapping[str, float]) -> bool:
    """Tell whether a node with these resources could hold a group."""
    return spec.gpus <= resources.get("GPU", 0) and spec.cpus <= resources.get("CPU", 0)


def nodes() -> str:
    """Describe the resources of the living nodes: `10.0.0.1: 8 CPU, 2 GPU; …`."""
    import ray

    return "; ".join(
        f"{node['NodeManagerAddress']}: {node['Resources'].get('CPU', 0):g} CPU, {node['Resources'].get('GPU', 0):g} GPU"
        for node in ray.nodes()
        if node["Alive"]
    )


async def reserve(specs: Mapping[str, GroupSpec], settings: RayConfig) -> PlacementGroup | None:
    """Reserve a bundle for each group, by the strategy. Return the placement group, or None without a strategy."""
    if not settings.strategy:
        return None
    from ray.util import placement_group, remove_placement_group

    bundles = [
        {"CPU": max(spec.cpus, 0.001), **({"GPU": spec.gpus} if spec.gpus else {})} for spec in specs.values()
    ]
    group = placement_group(bundles, strategy=settings.strategy.upper())
    try:
        await asyncio.wait_for(asyncio.wrap_future(group.ready().future()), settings.wait)
    except TimeoutError:
        remove_placement_group(group)
        raise ConfigError(
            f"ray.strategy: {len(bundles)} groups cannot be placed by {settings.strategy!r} (waited {settings.wait:g} s, "
            f"ray.wait); the nodes have {nodes()}, and others may use them"
        ) from None
    return group


def placement(reserved: PlacementGroup | None, index: int) -> dict[str, object]:
    """Return options that put an actor, and the actors that it makes, into its bundle."""
    if reserved is None:
        return {}
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    return {
        "scheduling_strategy": PlacementGroupSchedulingStrategy(reserved, placement_group_bundle_index=index)
    }


def release(reserved: PlacementGroup | None) -> None:
    """Release the bundles."""
    if reserved is not None:
        from ray.util import remove_placement_group

        remove_placement_group(reserved)
