"""A script that starts Ray on some hosts by ssh, and runs the training command on the first.

It needs keys that open the hosts without a question, the same software on all of them, and a folder that all of them
see. Each Ray ends with its ssh: when the command has ended, or the script is interrupted.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from .job import Job, until_open

HOST = re.compile(r"([A-Za-z0-9_][A-Za-z0-9_.-]*@)?[A-Za-z0-9][A-Za-z0-9.-]*")


def script(job: Job, hosts: Sequence[str], port: int, address: str = "") -> str:
    """Return the text of the script. `address` is the first host's, as the others see it."""
    for host in (*hosts, *filter(None, [address])):
        if not HOST.fullmatch(host):
            raise ValueError(
                f"--hosts {host!r}: a host is a name or an IPv4 address, USER@ before it if need be"
            )
    if twice := {host for host in hosts if hosts.count(host) > 1}:
        raise ValueError(f"--hosts: {min(twice)!r} stands there twice; a host is one node")
    if len(hosts) != job.nodes:
        raise ValueError(f"--nodes {job.nodes}: {len(hosts)} hosts are given")
    head, *others = hosts
    address = address or head.rpartition("@")[2]
    first = job.ray_start(
        "--head --include-dashboard=false", f"--node-ip-address={address}", f"--port={port}"
    )
    further = job.ray_start(f"--address={address}:{port}")
    wait = [until_open(job.wait), f"until_open {address} {port}"]
    lines = ["#!/bin/bash", "set -euo pipefail", "trap 'kill $(jobs -p) 2>/dev/null || true' EXIT", ""]
    lines += [f"{_ssh(head, [*job.before(), f'exec {first}'])} </dev/null &"]
    lines += [f"{_ssh(host, [*job.before(), *wait, f'exec {further}'])} </dev/null &" for host in others]
    train = [*job.before(), *wait, f"export RAY_ADDRESS={address}:{port}", job.line()]
    lines += ["", f"{_ssh(head, train)} </dev/null"]
    return "\n".join(lines) + "\n"


def _ssh(host: str, lines: Sequence[str]) -> str:
    """Return a line that runs lines of bash on a host. A terminal (-tt) ends there what is ended here."""
    there = shlex.join(["bash", "-lc", "\n".join(["set -e", *lines])])
    return f"ssh -tt -o BatchMode=yes -- {host} {shlex.quote(there)}"
