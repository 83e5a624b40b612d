"""Command line of `unitymas launch`: it prints a recipe, or submits it."""

from __future__ import annotations

import contextlib
import io
import shutil
import subprocess
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from ...cli.arguments import COUNT, PORT, Parser, number
from . import by_ssh, kuberay, slurm
from .job import Job, ray_command

HANDED_IN = {"slurm": ["sbatch"], "kuberay": ["kubectl", "create", "-f", "-"], "ssh": ["bash", "-s"]}
"""Programs that take a recipe on their standard input."""


def launch_main(words: Sequence[str]) -> int:
    """Run `unitymas launch slurm|kuberay|ssh … -- train ID …`: print the recipe, or submit it."""
    own, command = list(words), []
    if "--" in own:
        at = own.index("--")
        own, command = own[:at], own[at + 1 :]
    elif "train" in own:
        raise ValueError(
            "the training command stands last, after --: unitymas launch WAY [options] -- train ID …"
        )
    args = _parser().parse_args(own)
    recipe = _recipe(args, command)
    if args.check:
        _check(command, args.folder)
    if not args.submit:
        print(recipe, end="")
        return 0
    program = HANDED_IN[args.way]
    if shutil.which(program[0]) is None:
        raise ValueError(
            f"{program[0]} is not on this machine: print the recipe without --submit, and hand it in elsewhere"
        )
    sys.stdout.flush()
    return subprocess.run(program, input=recipe.encode()).returncode


def _check(command: Sequence[str], folder: str) -> None:
    """Refuse a training command that `unitymas train … --dry-run` refuses here."""
    from ...cli.training import train_main

    words = [*ray_command(tuple(command))[1:], "--dry-run"]
    there = contextlib.chdir(folder or ".") if Path(folder or ".").is_dir() else contextlib.nullcontext()
    output, notes = io.StringIO(), io.StringIO()  # what is missing here may be on the cluster
    try:
        with there, contextlib.redirect_stdout(output), contextlib.redirect_stderr(notes):
            train_main(words)
    except SystemExit:  # of the parser, which has said why
        print(notes.getvalue(), end="", file=sys.stderr)
        raise
    except (ValueError, KeyError, TypeError, OSError, RuntimeError, ImportError) as error:
        text = error.args[0] if isinstance(error, KeyError) and error.args else error
        raise ValueError(
            f"the training command is refused: {text} (where only the cluster has its files: --no-check before the --)"
        ) from error


def _recipe(args: Namespace, command: Sequence[str]) -> str:
    hosts = [host.strip() for host in getattr(args, "hosts", "").split(",") if host.strip()]
    job = Job(
        command=tuple(command), name=args.name, nodes=len(hosts) or args.nodes, cpus=args.cpus, gpus=args.gpus,
        folder=args.folder, setup="\n".join(args.setup), wait=args.wait,
    )  # fmt: skip
    if args.way == "slurm":
        odd = [option for option in args.sbatch if not option.partition("=")[2]]
        if odd:
            raise ValueError(f"--sbatch {odd[0]!r}: give KEY=VALUE, as in --sbatch partition=gpu")
        return slurm.script(job, dict(option.split("=", 1) for option in args.sbatch))
    if args.way == "kuberay":
        return kuberay.manifest(job, args.image, args.memory, args.volume, args.namespace)
    return by_ssh.script(job, hosts, args.port, args.address)


def _parser() -> Parser:
    parser = Parser(prog="unitymas launch", description="Start a Ray cluster and train on it.")
    ways = parser.add_subparsers(
        dest="way", required=True, metavar="slurm | kuberay | ssh", help="who starts it"
    )
    for name, what in (
        ("slurm", "a script for sbatch"), ("kuberay", "a RayJob for kubectl"), ("ssh", "a script that starts Ray by ssh"),
    ):  # fmt: skip
        way = ways.add_parser(
            name, help=what, description=f"Print {what}. The training command stands last, after --."
        )
        way.add_argument("--submit", action="store_true", help="hand the recipe in instead of printing it")
        way.add_argument(
            "--no-check", dest="check", action="store_false",
            help="do not check the training command as `unitymas train --dry-run` does: its files are on the cluster alone",
        )  # fmt: skip
        way.add_argument("--name", default="unitymas", help="name of the job (default unitymas)")
        way.add_argument(
            "--cpus", type=number(0), default=0, help="CPUs of each node (default 0: as many as Ray finds)"
        )
        way.add_argument("--gpus", type=number(0), default=0, help="GPUs of each node (default 0)")
        way.add_argument("--folder", default="", help="working directory; all nodes must see it")
        way.add_argument(
            "--setup",
            action="append",
            default=[],
            metavar="SHELL",
            help="line of shell that runs first on every node; may be repeated",
        )
        way.add_argument(
            "--wait", type=COUNT, default=600, help="longest wait for all nodes in seconds (default 600)"
        )
        if name != "ssh":
            way.add_argument(
                "--nodes", type=COUNT, default=2, help="number of nodes, with the head (default 2)"
            )
    slurm_way, kuberay_way, ssh_way = (ways.choices[name] for name in ("slurm", "kuberay", "ssh"))
    slurm_way.add_argument(
        "--sbatch",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="option of sbatch: partition=gpu, time=04:00:00 …",
    )
    kuberay_way.add_argument("--image", required=True, help="image with unitymas, torch and Ray")
    kuberay_way.add_argument("--memory", default="64Gi", help="memory of each node (default 64Gi)")
    kuberay_way.add_argument(
        "--volume", default="", metavar="CLAIM:PATH", help="shared volume for runs and models"
    )
    kuberay_way.add_argument(
        "--namespace", default="", help="namespace of the cluster (default: that of kubectl)"
    )
    ssh_way.add_argument(
        "--hosts", required=True, help="hosts, separated by commas; the first one is the head"
    )
    ssh_way.add_argument("--port", type=PORT, default=6379, help="port of Ray on the head (default 6379)")
    ssh_way.add_argument("--address", default="", help="address of the head as the others see it")
    return parser
