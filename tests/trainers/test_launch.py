"""`unitymas launch`: recipes run by stand-ins of sbatch, srun, kubectl, ssh and ray, which write down what reaches them; and
once by real Rays behind a stand-in of ssh.
"""

import json
import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from unitymas.cli import main
from unitymas.trainers.launch.by_ssh import script as ssh_script
from unitymas.trainers.launch.job import Job
from unitymas.trainers.launch.slurm import script as slurm_script

HOSTILE = ("env.data='; touch stolen", "a\"b$(touch stolen)`touch stolen`", "x\n#SBATCH --uid=root\ntouch stolen", "%d {0} \\ *", "ü →")  # fmt: skip
COMMAND = ("train", "mask-hotpotqa", *HOSTILE)

NOTE = """#!{python}
import json, os, socket, sys, time
name = os.path.basename(sys.argv[0])
with open({log!r}, "a") as log:
    log.write(json.dumps([name, sys.argv[1:], os.getcwd(), os.environ.get("RAY_ADDRESS", ""), os.environ.get("PREPARED", "")]) + "\\n")
if name == "ray" and "--head" in sys.argv:
    port = next(int(word.partition("=")[2]) for word in sys.argv if word.startswith("--port="))
    listener = socket.create_server(("127.0.0.1", port))
if name == "ray":
    time.sleep(60)  # as `ray start --block`: until it is ended
"""
SHELL = {
    "srun": 'while [[ "$1" == --* ]]; do shift; done; exec "$@"',
    "scontrol": "echo node-1; echo node-2",
    "hostname": "echo 127.0.0.1",
    "ssh": 'while [[ "$1" == -* && "$1" != -- ]]; do [[ "$1" == -o ]] && shift; shift; done; shift 2; exec bash -c "$1"',
    "sbatch": 'cat > "$HANDED_IN"; echo Submitted batch job 7',
    "kubectl": 'echo "$@" > "$HANDED_IN.words"; cat > "$HANDED_IN"',
}
"""Stand-ins: what goes before the command is dropped, and the command is run here."""


class Stage:
    """A folder of stand-ins, and what reached them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.log, self.handed_in = folder, folder / "log", folder / "handed-in"
        bin = folder / "bin"
        bin.mkdir()
        for name in ("ray", "python", "unitymas"):
            (bin / name).write_text(NOTE.format(python=sys.executable, log=str(self.log)))
        for name, body in SHELL.items():
            (bin / name).write_text(f"#!/bin/bash\n{body}\n")
        for file in bin.iterdir():
            file.chmod(file.stat().st_mode | stat.S_IXUSR)
        (folder / ".bash_profile").write_text(f"export PATH={bin}:$PATH\n")  # of the hosts that ssh reaches
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.env = {
            **os.environ, "PATH": f"{bin}:/usr/bin:/bin", "HANDED_IN": str(self.handed_in), "HOME": str(folder),
            "SLURM_JOB_NODELIST": "node-[1-2]", "SLURM_JOB_ID": "7",
        }  # fmt: skip
        self.env.pop("RAY_ADDRESS", None)

    def run(self, *command: str, text: str | None = None, patience: float = 120) -> list[Any]:
        """Run a recipe. Return the calls of what it started: name, words, folder, RAY_ADDRESS, PREPARED."""
        done = subprocess.run(
            command,
            env=self.env,
            cwd=self.folder,
            input=text,
            capture_output=True,
            text=True,
            timeout=patience,
        )
        assert done.returncode == 0, done.stderr
        assert not (self.folder / "stolen").exists() and not (self.folder / "work dir" / "stolen").exists()
        return [json.loads(line) for line in self.log.read_text().splitlines()]


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    stage = Stage(tmp_path)
    (tmp_path / "work dir").mkdir()
    for name in ("PATH", "HANDED_IN"):
        monkeypatch.setenv(name, stage.env[name])
    return stage


def own(stage: Stage) -> list[str]:
    """Options of every way."""
    return [
        "--folder",
        str(stage.folder / "work dir"),
        "--setup",
        "export PREPARED='yes, it is'",
        "--wait",
        "30",
        "--no-check",
    ]


def check(stage: Stage, calls: list[Any], address: str) -> None:
    """The command arrived word by word, in its folder, on a cluster of two."""
    (_, words, folder, joined, prepared) = next(call for call in calls if call[0] == "unitymas")
    assert tuple(words) == (*COMMAND, "runtime=ray")
    assert folder == str(stage.folder / "work dir") and prepared == "yes, it is"
    assert joined == address
    assert [call[1] for call in calls if call[0] == "python"] == [
        ["-m", "unitymas.trainers.launch.gather", "2", "--wait", "30"]
    ]


def test_slurm(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "launch",
        "slurm",
        *own(stage),
        "--gpus=4",
        "--cpus=16",
        "--sbatch",
        "time=04:00:00",
        "--name",
        "team-1",
    ]
    assert main([*words, "--", *COMMAND]) == 0
    printed = capsys.readouterr().out
    assert main([*words, "--submit", "--", "unitymas", *COMMAND]) == 0
    assert stage.handed_in.read_text() == printed
    head = list(dict.fromkeys(line for line in printed.split("set -euo")[0].splitlines()))
    assert head == [
        "#!/bin/bash", "#SBATCH --job-name=team-1", "#SBATCH --nodes=2", "#SBATCH --ntasks-per-node=1",
        "#SBATCH --output=%x-%j.out", "#SBATCH --cpus-per-task=16", "#SBATCH --gpus-per-node=4", "#SBATCH --time=04:00:00",
    ]  # fmt: skip
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = 20000 + taken.getsockname()[1] % 20000
    stage.env["SLURM_JOB_ID"] = str(port - 20000 + 40000)
    calls = stage.run("bash", str(stage.handed_in))
    check(stage, calls, f"127.0.0.1:{port}")
    rays = [call[1] for call in calls if call[0] == "ray"]
    both = ["start", "--block", "--disable-usage-stats"], ["--num-cpus=16", "--num-gpus=4"]
    assert [
        *both[0],
        "--head",
        "--include-dashboard=false",
        "--node-ip-address=127.0.0.1",
        f"--port={port}",
        *both[1],
    ] in rays
    assert (
        len(rays) == 1 or [*both[0], f"--address=127.0.0.1:{port}", *both[1]] in rays
    )  # it may end before it has begun


def test_kuberay(stage: Stage) -> None:
    words = [
        "launch", "kuberay", *own(stage), "--gpus=8", "--cpus=32", "--image", "me/it:1", "--volume", "runs:/data", "--submit",
    ]  # fmt: skip
    assert main([*words, "--", *COMMAND]) == 0
    assert Path(f"{stage.handed_in}.words").read_text() == "create -f -\n"
    job = yaml.safe_load(stage.handed_in.read_text())
    assert (job["apiVersion"], job["kind"], job["metadata"]) == ("ray.io/v1", "RayJob", {"name": "unitymas"})
    workers = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert [(group["replicas"], group["minReplicas"]) for group in workers] == [(1, 1)]
    for pod in (job["spec"]["rayClusterSpec"]["headGroupSpec"], workers[0]):
        (container,) = pod["template"]["spec"]["containers"]
        assert container["resources"]["limits"] == {"cpu": "32", "memory": "64Gi", "nvidia.com/gpu": "8"}
        assert container["volumeMounts"] == [{"name": "shared", "mountPath": "/data"}]
    check(stage, stage.run("sh", "-c", job["spec"]["entrypoint"]), "")  # Ray itself sets the address there


def test_ssh(stage: Stage) -> None:
    words = [
        "launch",
        "ssh",
        *own(stage),
        "--hosts",
        "me@one,two",
        f"--port={stage.port}",
        "--address=127.0.0.1",
        "--gpus=1",
    ]
    printed = subprocess.run(
        [sys.executable, "-m", "unitymas.cli", *words, "--", *COMMAND], env={**stage.env, "PATH": os.environ["PATH"]},
        capture_output=True, text=True,
    )  # fmt: skip
    assert printed.returncode == 0, printed.stderr
    calls = stage.run("bash", "-s", text=printed.stdout)
    check(stage, calls, f"127.0.0.1:{stage.port}")
    (first,) = (call[1] for call in calls if call[0] == "ray" and "--head" in call[1])
    assert first[:5] == ["start", "--block", "--disable-usage-stats", "--head", "--include-dashboard=false"]
    assert first[5:] == ["--node-ip-address=127.0.0.1", f"--port={stage.port}", "--num-gpus=1"]


@pytest.mark.ray
@pytest.mark.timeout(900)
def test_two_real_nodes_are_joined_by_ssh(stage: Stage) -> None:
    """Ray itself on two "hosts". The command begins when both have joined, and no process is left when it has ended."""
    place = tempfile.mkdtemp(prefix="rl", dir="/tmp")  # a short path: sockets lie under it
    for name, words in (("ray", "-m ray.scripts.scripts"), ("python", "")):
        (stage.folder / "bin" / name).write_text(f'#!/bin/bash\nexec {sys.executable} {words} "$@"\n')
    stage.env |= {
        "RAY_TMPDIR": place, "RAY_AUTH_MODE": "disabled", "PYTHONPATH": os.pathsep.join(sys.path),
        "RAY_raylet_start_wait_time_s": "600",
    }  # fmt: skip
    job = Job(
        command=COMMAND, cpus=1, folder=str(stage.folder / "work dir"), setup="export PREPARED=yes", wait=600
    )
    try:
        text = ssh_script(job, ["one", "two"], stage.port, "127.0.0.1")
        calls = stage.run("bash", "-s", text=text, patience=800)
        assert [call[0] for call in calls] == ["unitymas"]  # `gather` let it through: two nodes were there
        assert tuple(calls[0][1]) == (*COMMAND, "runtime=ray") and calls[0][3] == f"127.0.0.1:{stage.port}"
        until = time.monotonic() + 120
        while (left := running(place)) and time.monotonic() < until:
            time.sleep(0.1)
        assert not left
    finally:
        shutil.rmtree(place, ignore_errors=True)


def running(words: str) -> list[str]:
    """Return the command lines of living processes that hold these words."""
    lines = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            lines.append(entry.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return [line for line in lines if words in line]


def test_one_node_starts_no_worker() -> None:
    one = Job(command=("train", "x"), nodes=1)
    assert "--exclude" not in slurm_script(one, {}) and "--head" in slurm_script(one, {})
    assert ssh_script(one, ["a"], 1).count("ssh -tt -o BatchMode=yes -- a ") == 2  # Ray and the command


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["slurm", "--", "eval", "x"], "a job runs `unitymas train …`, not 'eval x': put it last, after --"),
        (["slurm"], "not 'nothing'"),
        (["slurm", "train", "x"], "the training command stands last, after --: unitymas launch WAY [options] -- train ID …"),
        (["slurm", "--", "train", "mask-hotpotq"], "refused: unknown environment 'mask-hotpotq'; did you mean mask-hotpotqa"),
        (["slurm", "--", "train", "mask-hotpotqa", "stepz=3"], "refused: stepz: unknown key; did you mean 'steps'? (where only"),
        (["ssh", "--hosts", "a", "--", "train", "mask-hotpotqa", "recipe=cross"], "refused: recipe 'cross' needs two policies"),
        (["slurm", "--", "train", "--resume", "nowhere"], "refused: nowhere is no run directory: it holds no config.yaml"),
        (["slurm", "--folder", "/", "--", "train", "--config", "c.yaml"], "refused: config file c.yaml: No such file"),
        (["slurm", "--", "train", "x", "runtime=local"], "runtime=local: on a cluster the groups are Ray actors"),
        (["slurm", "--", "train", "x", "ray.address=h:1"], "ray.address=h:1: the job starts a cluster of its own"),
        (["slurm", "--", "train", "x", "--submit"], "--submit is launch's own, and train knows none: put it before --"),
        (["slurm", "--name", "a\n#SBATCH --uid=0", "--", "train", "x"], "--name 'a\\n#SBATCH --uid=0': only letters"),
        (["slurm", "--sbatch", "time=1 2", "--", "train", "x"], "--sbatch '1 2': only letters"),
        (["slurm", "--sbatch", "time", "--", "train", "x"], "--sbatch 'time': give KEY=VALUE"),
        (["kuberay", "--image", "i", "--name", "A_b", "--cpus=1", "--", "train", "x"], "--name 'A_b': Kubernetes takes"),
        (["kuberay", "--image", "i", "--", "train", "x"], "--cpus: Kubernetes must know"),
        (["kuberay", "--image", "i", "--cpus=1", "--volume", "runs", "--", "train", "x"], "--volume 'runs': give CLAIM:/PATH"),
        (["ssh", "--hosts", "-oProxyCommand=touch stolen", "--", "train", "x"], "--hosts '-oProxyCommand"),
        (["ssh", "--hosts", "a b", "--", "train", "x"], "--hosts 'a b': a host is a name"),
        (["ssh", "--hosts", "a,b,a", "--", "train", "x"], "--hosts: 'a' stands there twice; a host is one node"),
        (["kuberay", "--image", "i", "--memory=64GB", "--cpus=1", "--", "train", "x"], "--memory '64GB': Kubernetes takes a number and"),
    ],
)  # fmt: skip
def test_what_no_recipe_can_be_is_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"{word}={words.pop(i + 1)}" if word == "--hosts" else word for i, word in enumerate(words)]
    assert main(["launch", *words]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("unitymas launch: ") and message in captured.err and not captured.out


def test_a_missing_program_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["launch", "slurm", "--submit", "--no-check", "--", "train", "x"]) == 1
    assert "sbatch is not on this machine: print the recipe without --submit" in capsys.readouterr().err
