"""A script for sbatch: one Ray on each node of the job, and the training command on the first."""

from __future__ import annotations

from collections.abc import Mapping

from .job import Job, check_word, until_open

BODY = """\
set -euo pipefail
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
{until_open}

{before}
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${{hosts%%[[:space:]]*}}
addresses=$(srun --overlap --nodes=1 --ntasks=1 --nodelist="$head" hostname --ip-address)
address=${{addresses%%[[:space:]]*}}
port=$((20000 + SLURM_JOB_ID % 20000))  # of this job alone, where nodes are shared

srun --overlap --nodes=1 --ntasks=1 --nodelist="$head" \\
    {head} &
until_open "$address" "$port"
{workers}
export RAY_ADDRESS="$address:$port"
{line}
"""

WORKERS = """\
srun --overlap --nodes={others} --ntasks={others} --ntasks-per-node=1 --exclude="$head" \\
    {worker} &"""


def script(job: Job, options: Mapping[str, str]) -> str:
    """Return the text of the script. `options` are sbatch's own: partition, time, account …"""
    lines = {
        "job-name": job.name, "nodes": str(job.nodes), "ntasks-per-node": "1", "output": "%x-%j.out",
        **({"cpus-per-task": str(job.cpus)} if job.cpus else {}),
        **({"gpus-per-node": str(job.gpus)} if job.gpus else {}),
        **options,
    }  # fmt: skip
    directives = [
        f"#SBATCH --{check_word('--sbatch', key)}={check_word('--sbatch', value)}"
        for key, value in lines.items()
    ]
    head = job.ray_start("--head --include-dashboard=false", '--node-ip-address="$address"', '--port="$port"')
    worker = job.ray_start('--address="$address:$port"')
    body = BODY.format(
        until_open=until_open(job.wait),
        before="\n".join(job.before()),
        head=head,
        workers=WORKERS.format(others=job.nodes - 1, worker=worker) if job.nodes > 1 else "",
        line=job.line(),
    )
    return "\n".join(["#!/bin/bash", *directives, body])
