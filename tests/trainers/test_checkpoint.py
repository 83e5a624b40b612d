"""A checkpoint is whole or absent: killed between any two writes, on a full disk, replaced, damaged."""

import dataclasses
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from unitymas.agents.basics.failures import GroupLost
from unitymas.trainers.config.schema import RunConfig
from unitymas.trainers.controller import checkpoint
from unitymas.trainers.controller.checkpoint import CheckpointError, finished, latest, prune, verify, writing
from unitymas.trainers.group.ranks.forked import RankError


def save(target: Path, number: int) -> None:
    """A composed checkpoint: the controller's file and one group's folder inside."""
    with writing(target) as folder:
        checkpoint.write_json(folder / "controller.json", {"step": number})
        with writing(folder / "groups" / "shared") as inner:
            checkpoint.write_tensors(inner / "weights.pt", {"w": torch.full((1000,), float(number))})


def load(folder: Path) -> tuple[int, float]:
    group = verify(folder / "groups" / "shared")
    step = checkpoint.read_json(folder / "controller.json")["step"]
    return step, float(checkpoint.read_tensors(group / "weights.pt")["w"][0])


def test_a_group_that_dies_while_it_reads_is_no_damage(tmp_path: Path) -> None:
    """The run goes on from that very checkpoint; what the block cannot use is told with the file's name."""
    checkpoint.write_json(tmp_path / "shards.json", {"team": {}})
    with pytest.raises(GroupLost, match="rank 0 of 2"), checkpoint.reading(tmp_path / "shards.json"):
        raise GroupLost("rank 0 of 2 ended in load")
    words = r"shards\.json holds something else"
    with pytest.raises(CheckpointError, match=words), checkpoint.reading(tmp_path / "shards.json") as steps:
        steps["critic"]


def test_memory_that_ends_while_a_file_is_read_is_no_damage(tmp_path: Path) -> None:
    """In the block that uses the file, in reading it, and in ranks that read it."""
    path = tmp_path / "weights.pt"
    checkpoint.write_tensors(path, torch.zeros(1 << 25))
    words = r"memory ended while .*weights\.pt was read .*not at fault"
    with pytest.raises(MemoryError, match=words), checkpoint.reading(path) as state:
        state.new_empty(1 << 50)
    with pytest.raises(MemoryError, match=words), less_memory(64 * 2**20):
        checkpoint.read_tensors(path)
    with pytest.raises(RankError, match="rank 1 ran out of memory in load"), checkpoint.reading(path):
        raise RankError("group 'main': rank 1 ran out of memory in load")


@contextmanager
def less_memory(left: int) -> Iterator[None]:
    """Give this process so many more bytes of memory, and no more."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + left, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    assert latest(tmp_path) is None
    for step in (1, 2, 3):
        save(tmp_path / f"step-{step:06d}", step)
    newest = latest(tmp_path)
    assert newest is not None and load(newest) == (3, 3.0)
    prune(tmp_path, keep=2)
    assert [folder.name for folder in finished(tmp_path)] == ["step-000002", "step-000003"]


def test_drafts_that_a_kill_left_go_with_the_next_writing(tmp_path: Path) -> None:
    """Whatever process left them: a policy's export stands beside its own drafts, and nobody prunes there."""
    (tmp_path / "team.writing-1234").mkdir()
    (tmp_path / "team.writing-1234" / "model.safetensors").write_bytes(b"half")
    (tmp_path / "teams.writing-1234").mkdir()  # another one's
    with writing(tmp_path / "team") as folder:
        checkpoint.write_json(folder / "config.json", {})
    (tmp_path / "config.yaml.writing-7").write_text("st")
    checkpoint.write_whole(tmp_path / "config.yaml", b"steps: 1")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.yaml", "team", "teams.writing-1234"]


def test_writing_again_replaces(tmp_path: Path) -> None:
    save(tmp_path / "step-000001", 1)
    save(tmp_path / "step-000001", 7)
    assert load(tmp_path / "step-000001") == (7, 7.0)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]


def die_at(moment: int, root: Path) -> int:
    """In a fork, replace checkpoint 1 and die at the n-th system call that matters, as a kill does it:
    nothing is cleaned up, nothing is flushed. Says how the fork ended.
    """
    process = os.fork()
    if process:
        return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    countdown = moment

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal countdown
            if countdown == 0:
                os._exit(9)
            countdown -= 1
            return real(*arguments, **options)

        return call

    os.fsync = counted(os.fsync)
    Path.rename = counted(Path.rename)  # type: ignore[method-assign]
    Path.open = counted(Path.open)  # type: ignore[method-assign]
    save(root / "step-000001", 2)
    os._exit(0)


def test_killed_between_any_two_writes(tmp_path: Path) -> None:
    """Either the old or the new one stands, whole, and nothing else is left."""
    seen = set()
    for moment in range(22):
        root = tmp_path / f"run-{moment}"
        save(root / "step-000001", 1)
        ended = die_at(moment, root)
        newest = latest(root)
        assert newest is not None and newest.name == "step-000001"
        outcome = load(newest)
        assert outcome in ((1, 1.0), (2, 2.0))
        seen.add((ended, outcome[0]))
        prune(root, keep=1)
        assert [path.name for path in root.iterdir()] == ["step-000001"]
    assert (9, 1) in seen and (0, 2) in seen


FULL = """
import resource, sys
from pathlib import Path
import torch
from unitymas.trainers import checkpoint

resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    with checkpoint.writing(Path(sys.argv[1])) as folder:
        checkpoint.write_json(folder / "controller.json", {"step": 2})
        checkpoint.write_tensors(folder / "weights.pt", torch.zeros(1_000_000))
except checkpoint.CheckpointError as error:
    print(error)
    sys.exit(3)
"""


def test_no_room_for_the_new_one_leaves_the_old_one(tmp_path: Path) -> None:
    save(tmp_path / "step-000001", 1)
    script = [sys.executable, "-c", FULL, str(tmp_path / "step-000002")]
    ended = subprocess.run(script, capture_output=True, text=True, check=False)
    assert ended.returncode == 3, ended.stderr
    assert "disk is full" in ended.stdout and "untouched" in ended.stdout
    advised = re.findall(r"(\w+)=\d", ended.stdout)
    assert advised and set(advised) <= {field.name for field in dataclasses.fields(RunConfig)}
    newest = latest(tmp_path)
    assert newest is not None and load(newest) == (1, 1.0)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_really_full_disk(tmp_path: Path) -> None:
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", str(tmp_path)], check=False)
    if mounted.returncode:
        pytest.skip("mounting is not allowed here")
    try:
        save(tmp_path / "step-000001", 1)
        with (
            pytest.raises(CheckpointError, match="disk is full"),
            writing(tmp_path / "step-000002") as folder,
        ):
            checkpoint.write_tensors(folder / "weights.pt", torch.zeros(1_000_000))
        newest = latest(tmp_path)
        assert newest is not None and load(newest) == (1, 1.0)
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_an_error_inside_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), writing(tmp_path / "step-000001"):
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_checkpoint_is_named_and_the_one_before_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (1, 2, 3):
        save(tmp_path / f"step-{step:06d}", step)
    weights = tmp_path / "step-000003" / "groups" / "shared" / "weights.pt"
    data = bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 4  # one bit
    weights.write_bytes(data)
    (tmp_path / "step-000002" / "MANIFEST.json").unlink()
    newest = latest(tmp_path)
    assert newest is not None and load(newest) == (1, 1.0)
    said = capsys.readouterr().err
    assert "step-000003 is damaged" in said and "weights.pt" in said and "step-000002 is no finished" in said
    assert said.count(f"Going back to {tmp_path / 'step-000001'}") == 2
    save(tmp_path / "step-000002", 7)  # the run goes on, and keeps one: what was set aside does not count
    prune(tmp_path, keep=1)
    assert [folder.name for folder in finished(tmp_path)] == ["step-000002"]
    assert (tmp_path / "step-000003.damaged").is_dir()


def test_damage_is_named(tmp_path: Path) -> None:
    save(tmp_path / "step-000001", 1)
    (tmp_path / "step-000001" / "controller.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"controller\.json"):
        latest(tmp_path)
    with pytest.raises(CheckpointError, match="no finished checkpoint"):
        verify(tmp_path)
