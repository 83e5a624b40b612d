"""A RayJob for Kubernetes: KubeRay starts the cluster, runs the training command, and takes the cluster down."""

from __future__ import annotations

import re
import shlex

import yaml

from ...agents.basics.json_types import JsonObject
from .job import Job


def manifest(job: Job, image: str, memory: str, claim: str = "", namespace: str = "") -> str:
    """Return the RayJob as YAML. `claim` is CLAIM:PATH, a volume for runs and models that all nodes see."""
    if not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,45}[a-z0-9])?", job.name):
        raise ValueError(f"--name {job.name!r}: Kubernetes takes up to 47 small letters, digits and -")
    if not re.fullmatch(r"[0-9]+(\.[0-9]+)?([KMGTPE]i|[kMGTPE])?", memory):
        raise ValueError(
            f"--memory {memory!r}: Kubernetes takes a number and Ki, Mi, Gi, k, M or G, such as 64Gi"
        )
    if not job.cpus:
        raise ValueError("--cpus: Kubernetes must know how many each node has")
    resources = {"cpu": str(job.cpus), "memory": memory} | (
        {"nvidia.com/gpu": str(job.gpus)} if job.gpus else {}
    )
    container: JsonObject = {
        "name": "ray", "image": image, "resources": {"requests": resources, "limits": dict(resources)},
    }  # fmt: skip
    pod: JsonObject = {"containers": [container]}
    if claim:
        volume, _, path = claim.partition(":")
        if not (volume and path.startswith("/")):
            raise ValueError(f"--volume {claim!r}: give CLAIM:/PATH")
        container["volumeMounts"] = [{"name": "shared", "mountPath": path}]
        pod["volumes"] = [{"name": "shared", "persistentVolumeClaim": {"claimName": volume}}]
    workers = {
        "groupName": "workers", "replicas": job.nodes - 1, "minReplicas": job.nodes - 1, "maxReplicas": job.nodes - 1,
        "rayStartParams": {}, "template": {"spec": pod},
    }  # fmt: skip
    script = "\n".join(["set -e", *job.before(), job.line()])
    tree = {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"name": job.name, **({"namespace": namespace} if namespace else {})},
        "spec": {
            "entrypoint": f"bash -c {shlex.quote(script)}",
            "shutdownAfterJobFinishes": True,
            "rayClusterSpec": {
                "headGroupSpec": {"rayStartParams": {}, "template": {"spec": pod}},
                "workerGroupSpecs": [workers] if job.nodes > 1 else [],
            },
        },
    }
    return yaml.dump(tree, Dumper=_Plain, sort_keys=False, allow_unicode=True, width=10_000)


class _Plain(yaml.SafeDumper):
    """YAML without anchors, which some readers of manifests do not know."""

    def ignore_aliases(self, data: object) -> bool:
        return True
