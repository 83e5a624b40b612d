"""A room's programs in a control group, where the machine allows one; and without, as everywhere before."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from unitymas.envs.tools.sandbox import cgroups, runner
from unitymas.envs.tools.sandbox.accounting import ProcessTree
from unitymas.envs.tools.sandbox.cgroups import CaseGroup, own_group
from unitymas.envs.tools.sandbox.runner import Limits, Program, SandboxError, resolve

WORK = """
import os, time
def work(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end: pass
"""
TREE = (
    WORK + "for _ in range(4):\n    if os.fork() == 0: work(0.05); os._exit(0)\nfor _ in range(4): os.wait()"
)
ORPHANS = WORK + "if os.fork() == 0:\n    for _ in range(3): os.fork()\n    work(60)\nos.wait()"
LEVELS = ["bubblewrap", "namespaces"]


def sandbox_works() -> bool:
    try:
        return resolve("auto") != "unsafe"
    except SandboxError:
        return False


needs_sandbox = pytest.mark.skipif(not sandbox_works(), reason="no sandbox here")


@pytest.fixture
def group() -> Iterator[CaseGroup]:
    made = CaseGroup.make()
    if made is None:
        pytest.skip("no control group of version 2 may be made here")
    yield made
    made.close()


@pytest.fixture(params=LEVELS)
def room(request: pytest.FixtureRequest) -> Iterator[runner._Room]:
    try:
        made = runner._Room(request.param)
    except SandboxError as error:
        pytest.skip(str(error))
    yield made
    made.close()


def used(group: CaseGroup) -> float:
    return int((group.folder / "cpu.stat").read_text().split()[1]) / 1e6


@needs_sandbox
def test_the_kernel_counts_the_whole_tree(group: CaseGroup, room: runner._Room) -> None:
    """Each case anew: what the one before has used is not the next one's."""
    assert room.group is not None
    folder, before = room.group.folder, 0.0
    for _ in range(2):
        result = room.run(Program(TREE), Limits(5.0))
        assert result.ended == "finished" and result.cpu >= 0.2
        # what ending its processes costs is counted later, and more of it where the machine is busy
        assert result.cpu >= 0.8 * (used(room.group) - before) - 0.02
        before = used(room.group)
    assert room.run(Program(ORPHANS), Limits(0.3, wall_limit=60.0)).ended == "time_limit"
    assert room.group.folder.joinpath("cgroup.procs").read_text() == ""  # nobody is left in it
    room.close()
    assert not folder.exists()


SIGNALS = (
    WORK
    + """
import signal
heard = []
signal.signal(signal.SIGCHLD, lambda *_: heard.append(1))
if os.fork() == 0: os._exit(0)
while not heard: time.sleep(0.01)
print(os.wait()[1], len(heard))
"""
)
UNHEARD = (
    WORK
    + """
import signal
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for _ in range(2000):
    try:
        if os.fork() == 0: work(0.015); os._exit(0)
    except BlockingIOError: pass  # a busy machine: enough of them are there
    time.sleep(0.02)
"""
)


@needs_sandbox
def test_sigchld_is_the_programs_own_and_hides_nothing(group: CaseGroup, room: runner._Room) -> None:
    """Its handlers fire; and children that the kernel buries by itself count all the same."""
    assert room.run(Program(SIGNALS), Limits(5.0)).stdout == "0 1\n"
    result = room.run(Program(UNHEARD), Limits(0.5, wall_limit=60.0))
    assert result.ended == "time_limit" and 0.45 < result.cpu < 1.5


@needs_sandbox
@pytest.mark.parametrize("level", LEVELS)
def test_a_group_that_nobody_may_enter_is_left_aside(
    level: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "group"
    folder.mkdir()
    (folder / "cpu.stat").write_text("usage_usec 0\n")
    (folder / "cgroup.procs").symlink_to("/dev/full")
    monkeypatch.setattr(CaseGroup, "make", classmethod(lambda cls: CaseGroup(folder)))
    try:
        room = runner._Room(level)  # type: ignore[arg-type]
    except SandboxError as error:
        pytest.skip(str(error))
    try:
        assert room.run(Program(TREE), Limits(5.0)).cpu >= 0.19
        assert room.run(Program(ORPHANS), Limits(0.3, wall_limit=60.0)).ended == "time_limit"
    finally:
        room.close()


@needs_sandbox
def test_no_program_reaches_its_group(room: runner._Room) -> None:
    program = "import os\nprint(sorted(os.listdir('/proc/self/fd')), os.path.exists('/sys/fs/cgroup'))"
    assert room.run(Program(program), Limits(5.0)).stdout == "['0', '1', '2'] False\n"
    tries = "import os\nfor n in range(3, 1024):\n    try: os.write(n, b'0'); print(n)\n    except OSError: pass\n"
    assert not [n for n in room.run(Program(tries), Limits(5.0)).stdout.split() if int(n) > 3]


@needs_sandbox
@pytest.mark.parametrize("level", LEVELS)
def test_without_a_group_the_tree_is_counted_as_before(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CaseGroup, "make", classmethod(lambda cls: None))
    try:
        room = runner._Room(level)  # type: ignore[arg-type]
    except SandboxError as error:
        pytest.skip(str(error))
    try:
        assert room.group is None
        assert room.run(Program(TREE), Limits(5.0)).cpu >= 0.19
        assert room.run(Program(ORPHANS), Limits(0.3, wall_limit=60.0)).ended == "time_limit"
    finally:
        room.close()


MOUNTS = """30 22 0:26 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory
31 22 0:27 {root} {place} rw,nosuid shared:9 - cgroup2 cgroup2 rw
"""


@pytest.mark.parametrize(
    ("mounts", "mine", "group"),
    [
        (MOUNTS.format(root="/", place="/sys/fs/cgroup"), "0::/", "/sys/fs/cgroup"),
        (MOUNTS.format(root="/", place="/sys/fs/cgroup"), "4:memory:/x\n0::/user.slice/a", "/sys/fs/cgroup/user.slice/a"),
        (MOUNTS.format(root="/docker/1", place="/cg"), "0::/docker/1/leaf", "/cg/leaf"),
        (MOUNTS.format(root="/docker/1", place="/cg"), "0::/elsewhere", None),
        (MOUNTS.splitlines()[0], "0::/", None),
        (MOUNTS.format(root="/", place="/cg"), "4:memory:/x", None),
        ("broken", "0::/", None),
    ],
)  # fmt: skip
def test_our_group_is_found_by_what_the_kernel_says(
    tmp_path: Path, mounts: str, mine: str, group: str | None
) -> None:
    for name, text in (("mounts", mounts), ("mine", mine)):
        (tmp_path / name).write_text(text)
    assert own_group(tmp_path / "mounts", tmp_path / "mine") == (None if group is None else Path(group))
    assert own_group(tmp_path / "nothing", tmp_path / "mine") is None


def fake(folder: Path, *controllers: str) -> CaseGroup:
    """The files that the kernel makes in a group; their protocol is all that is tried."""
    folder.mkdir()
    for name in ("cgroup.procs", "cpu.stat", *controllers):
        (folder / name).write_text("usage_usec 1500000\nuser_usec 7\n" if name == "cpu.stat" else "max\n")
    return CaseGroup(folder)


def test_controllers_that_are_there_are_set(tmp_path: Path) -> None:
    group = fake(tmp_path / "full", "memory.max", "memory.swap.max", "pids.max")
    group.limit(100 << 20, 8)
    told = {name: (group.folder / name).read_text() for name in ("memory.max", "memory.swap.max", "pids.max")}
    assert told == {"memory.max": str((100 + 64) << 20), "memory.swap.max": "0", "pids.max": "9"}
    poor = fake(tmp_path / "poor")
    poor.limit(100 << 20, 8)
    assert not (poor.folder / "memory.max").exists()
    for one in (group, poor):
        one.close()
        assert not one.descriptors


def test_the_time_before_a_case_is_not_its_own(tmp_path: Path) -> None:
    group = fake(tmp_path / "group")
    tree = ProcessTree(1 << 30, group.descriptors[1])
    assert tree.final_cpu() == 0.0
    (group.folder / "cpu.stat").write_text("usage_usec 1750000\n")
    assert tree.final_cpu() == 0.25
    assert ProcessTree(1 << 30).final_cpu() == 0.0
    group.close()


def test_where_no_folder_may_be_made_there_is_no_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for parent in (None, tmp_path / "nowhere", tmp_path):  # the last: a folder, but no group
        monkeypatch.setattr(cgroups, "own_group", lambda parent=parent: parent)
        assert CaseGroup.make() is None
    assert not list(tmp_path.iterdir())
