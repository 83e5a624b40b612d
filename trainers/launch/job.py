"""Job: a training command, and the nodes that it needs. All recipes quote it in the same way."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass

WORD = re.compile(r"[A-Za-z0-9_%][A-Za-z0-9_.,:=@%+/-]*")
"""Pattern of words that need no quotes, in any shell and in a line that sbatch reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Training command, and the nodes that it needs."""

    command: tuple[str, ...]
    """Words of the command after `unitymas`."""
    name: str = "unitymas"
    nodes: int = 2
    cpus: int = 0
    """CPUs of each node that Ray may use. 0: as many as Ray finds."""
    gpus: int = 0
    """GPUs of each node."""
    folder: str = ""
    """Working directory on all nodes. Empty: the directory in which the job begins."""
    setup: str = ""
    """Lines of shell that run first (`module load …`, `source venv/bin/activate`), unchanged."""
    wait: int = 600
    """Seconds in which all nodes must join."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "command", ray_command(self.command))
        check_word("--name", self.name)
        if "\0" in self.setup + self.folder or any("\0" in word for word in self.command):
            raise ValueError("a zero byte cannot stand in a command")

    def line(self) -> str:
        """Return the command as one line of shell: first wait for all nodes, then train."""
        return f"python -m unitymas.trainers.launch.gather {self.nodes} --wait {self.wait} && {shlex.join(['unitymas', *self.command])}"

    def before(self) -> list[str]:
        """Return the lines of shell that come first on every node."""
        return [
            *([self.setup] if self.setup else []),
            *([f"cd -- {shlex.quote(self.folder)}"] if self.folder else []),
        ]

    def ray_start(self, *options: str) -> str:
        """Return the line that starts Ray on a node. `options` are quoted already. Ray ends with the job."""
        room = [f"--num-cpus={self.cpus}"] if self.cpus else []
        return " ".join(
            ["ray start --block --disable-usage-stats", *options, *room, f"--num-gpus={self.gpus}"]
        )


def ray_command(words: tuple[str, ...]) -> tuple[str, ...]:
    """Return a training command that joins the job's cluster."""
    if words[:1] == ("unitymas",):
        words = words[1:]
    if words[:1] != ("train",):
        raise ValueError(
            f"a job runs `unitymas train …`, not {shlex.join(words) or 'nothing'!r}: put it last, after --"
        )
    for word in words:
        if word == "--submit":
            raise ValueError("--submit is launch's own, and train knows none: put it before --")
        if word.startswith("ray.address="):
            raise ValueError(f"{word}: the job starts a cluster of its own; leave it out")
        if word.startswith("runtime=") and word != "runtime=ray":
            raise ValueError(
                f"{word}: on a cluster the groups are Ray actors; leave it out, or set runtime=ray"
            )
    return words if "runtime=ray" in words else (*words, "runtime=ray")


def check_word(option: str, word: str) -> str:
    """Check that a word needs no quotes, and return it. Other words are refused, because their readers have other rules
    of quoting.
    """
    if not WORD.fullmatch(word):
        raise ValueError(f"{option} {word!r}: only letters, digits and _.,:=@%+/- may stand there")
    return word


UNTIL_OPEN = """\
until_open() {  # host port: wait until somebody listens there
    for _ in $(seq SECONDS); do
        if (exec 3<>"/dev/tcp/$1/$2") 2>/dev/null; then return 0; fi
        sleep 1
    done
    echo "no Ray listens at $1:$2" >&2
    return 1
}"""
"""Bash function that waits for a port."""


def until_open(seconds: int) -> str:
    """Return the bash function that waits for a port."""
    return UNTIL_OPEN.replace("SECONDS", str(seconds))
