"""The mistakes of a first hour, typed at the command line: each ends in one precise line, and leaves nothing behind."""

import errno
import os
import re
import resource
import shlex
import socket
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

import unitymas
from unitymas.benchmarks.evaluation.episode_files import Store
from unitymas.benchmarks.evaluation.evaluate import Evaluation
from unitymas.benchmarks.speed.__main__ import main as speed_main
from unitymas.cli import main
from unitymas.cli.arguments import COUNT
from unitymas.cli.commands import refused
from unitymas.envs.registry import unregister
from unitymas.trainers.controller.checkpoint import write_whole

PAGE = (Path(__file__).parent.parent / "docs" / "first-workflow.md").read_text()
TEAM = PAGE.split("```python\n")[1].split("```")[0]
SCORED = next(line for line in TEAM.splitlines() if line.startswith('    return {"guesser": score'))
FILES = {
    "good.py": TEAM,
    "broken.py": TEAM.replace("def right(trace, task):", "def right(trace, task)"),
    "none.py": TEAM.replace(SCORED, "    pass"),
    "nan.py": TEAM.replace(SCORED, "    return float('nan')"),
    "role.py": TEAM.replace('{"guesser": score,', '{"gueser": score,'),
    "typo.py": TEAM.replace('ep.act("checker"', 'ep.act("cheker"'),
    "bad.yaml": "steps: [1\n",
    "list.yaml": "- 1\n",
    "bin.yaml": b"\xff\xfe\x00\x01",
    "afile": "x",
    "tasks.jsonl": '{"id": "a"}\n',
    "notasks.jsonl": "",
    "text.jsonl": "garbage\n",
    "run/config.yaml": "a: 1\n",
    "run/metrics.jsonl": '{"kind": "begin"}\nnot json\n[1,2]\n',
    "list/metrics.jsonl": '[1, 2]\n{"kind": "end"}\n',
    "word/metrics.jsonl": '{"kind": "begin"}\n{"kind": "step", "step": 1, "train/f1": "high"}\n',
}
MINI = "--data mini --tasks 2"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A folder with a newcomer's files; what they register and import is forgotten afterwards."""
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    before, path = set(sys.modules), list(sys.path)
    yield tmp_path
    sys.path[:] = path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]
    with suppress(KeyError):
        unregister("capitals")


def typed(words):
    """Type a command. -> its exit status"""
    try:
        return main(shlex.split(words))
    except SystemExit as stop:  # argparse
        return stop.code


MISTAKES = {
    # what is asked for
    "lst": "unitymas: unknown command 'lst'; did you mean 'list'?",
    "list mask-hotpotq-qa": "unitymas list: no environment's id contains 'mask-hotpotq-qa'; did you mean 'mask-hotpotqa'?",
    "list --import broken.py": "unitymas: broken.py cannot be imported: SyntaxError: expected ':' (broken.py:22)",
    "--import": "unitymas: --import needs a file or a module: --import my_team.py",
    "info zzzz": "unitymas info: unknown environment 'zzzz'; unitymas list shows all 39 (your own: --import FILE.py, or module:id)",
    "info good.py:capitls": "unitymas info: unknown environment 'capitls'; did you mean capitals? (good.py registers none of this name)",
    "info mask-hotpotqa --data hotpotq": "unitymas info: no data set is called 'hotpotq'; did you mean hotpotqa?",
    # who plays
    "play mask-hotpotqa --data mini --team scriptd": "unitymas play: seat '*': unknown policy 'scriptd'; did you mean 'scripted'?",
    "play mask-hotpotqa --data mini --team planer=human,*=scripted": "unitymas play: the team names 'planer', but this environment has no such agent or role; did you mean 'planner'?",
    "play mask-hotpotqa --data mini --team planner=human": "unitymas play: nobody plays 'searcher'; add 'searcher' or '*' to the team",
    "play mask-hotpotqa --data mini --team run:empty": "unitymas play: empty is no run directory: it holds no config.yaml",
    "play mask-hotpotqa --data mini --team tiny --temperature -1": "unitymas play: temperature=-1.0, but it must be 0 (greedy) or more",
    "play mask-hotpotqa --data mini --team tiny --temperature hot": "unitymas play: --temperature: invalid float value: 'hot' (see unitymas play --help)",
    "play mask-hotpotqa --data mini --team scripted --watch -1": "unitymas play: --watch: '-1' does not fit; give a number, 0 or more (see unitymas play --help)",
    "play good.py:capitals --team scripted": "unitymas play: this environment has no scripted expert; give each role a policy",
    "play mask-hotpotqa --data mini --team planner=fool,planner=random,*=fool": "unitymas play: --team 'planner=fool,planner=random,*=fool': two players for 'planner'; leave one out",
    "eval good.py --team fool": "unitymas eval: 'good.py' is no environment id; ids look like 'mask-hotpotqa' or 'mask-hotpotqa-v0'; an environment of a file is good.py:ID",
    "play mask-hotpotqa --data mini --team scripted --split tset": "unitymas play: the mini world has no split 'tset'; its splits are train, validation, test",
    "play mask-hotpotqa --data mini --team scripted --prompts ful": "unitymas play: prompts='ful': Mask has no such set; did you mean 'full'?, or give a mapping, a .yaml or a .py file",
    # numbers
    "validate mask-hotpotqa --tasks 0": "unitymas validate: --tasks: '0' does not fit; give a whole number, 1 or more (see unitymas validate --help)",
    f"eval mask-hotpotqa {MINI} --team scripted -k 0": "unitymas eval: -k: '0' does not fit; give a whole number, 1 or more (see unitymas eval --help)",
    "eval mask-hotpotqa --data mini --team scripted --tasks -2": "unitymas eval: --tasks: '-2' does not fit; give a whole number, 1 or more (see unitymas eval --help)",
    f"eval mask-hotpotqa {MINI} --team scripted --concurrency 0": "unitymas eval: --concurrency: '0' does not fit; give a whole number, 1 or more (see unitymas eval --help)",
    f"eval mask-hotpotqa {MINI} --team scripted --price cheap": "unitymas eval: --price takes two numbers from 0 on, IN,OUT; got 'cheap' (see unitymas eval --help)",
    "warmstart mask-hotpotqa --out w --tasks 0": "unitymas warmstart: --tasks: '0' does not fit; give a whole number, 1 or more (see unitymas warmstart --help)",
    "warmstart mask-hotpotqa --out w --epochs 0": "unitymas warmstart: --epochs 0 learns nothing; give --epochs or --replies (see unitymas warmstart --help)",
    "warmstart mask-hotpotqa --out w --lr 1e99": "unitymas warmstart: --lr: '1e99' does not fit; give a number, 0 to 1 (see unitymas warmstart --help)",
    "view run --live --port 99999": "unitymas view: --port: '99999' does not fit; give a whole number, 0 to 65535 (see unitymas view --help)",
    # options
    "train mask-hotpotqa --preset lroa": "unitymas train: unknown preset 'lroa'; did you mean 'lora'?",
    "train mask-hotpotqa --steps 2": "unitymas train: unknown option '--steps'; settings are written a.b=c, such as steps=40 (see unitymas train --help)",
    "train mask-hotpotqa --anew": "unitymas train: --anew goes with --resume DIR (see unitymas train --help)",
    "eval mask-hotpotqa --team scripted --tasks 2 --taskz 2": "unitymas eval: unknown option '--taskz'; did you mean '--tasks'? The environment is configured by name=value (see unitymas eval --help)",
    "eval suite:mini --team scripted --baseline fool": "unitymas eval: --baseline compares on one environment; name one instead of a suite (see unitymas eval --help)",
    f"eval mask-hotpotqa {MINI} --team scripted --baseline foool": "unitymas eval: seat '*': unknown policy 'foool'; did you mean 'fool'?",
    "export text.jsonl --to parqet": "unitymas export: --to: unknown 'parqet'; did you mean 'parquet'? (see unitymas export --help)",
    "bench enigne": "unitymas bench: there is no benchmark 'enigne'; did you mean 'engine'?",
    "launch slurn -- train mask-hotpotqa": "unitymas launch: slurm | kuberay | ssh: unknown 'slurn'; did you mean 'slurm'? (see unitymas launch --help)",
    "launch slurm -- train mask-hotpotqa --presett x": "unitymas train: unknown option '--presett'; did you mean '--preset'? Settings are written a.b=c, such as steps=40 (see unitymas train --help)",
    # settings of a run
    "train mask-hotpotqa env.data=mini map.planer=team": "unitymas train: the team names 'planer', but this environment has no such agent or role; did you mean 'planner'?",
    "train mask-hotpotqa env.data=mini steps=0": "unitymas train: steps: must be at least 1, got 0",
    "train mask-hotpotqa env.data=mini env.reward=mymod:f": "unitymas train: env.reward: there is no module 'mymod'",
    "train --config missing.yaml": "unitymas train: config file missing.yaml: No such file or directory",
    "train mask-hotpotqa stpes=2": "unitymas train: stpes: unknown key; did you mean 'steps'?",
    "train": "unitymas train: name an environment: unitymas train ID, such as mask-hotpotqa (see unitymas train --help)",
    "train steps=2": "unitymas train: name an environment: unitymas train ID, such as mask-hotpotqa (see unitymas train --help)",
    "train mask-hotpotqa env.id=rag-nq": "unitymas train: env.id: 'rag-nq' is given beside 'mask-hotpotqa': name one environment",
    "train mask-hotpotqa steps=two": "unitymas train: steps: expected int, got 'two'",
    "train mask-hotpotqa env.data=mini env.args.max_turn=3": "unitymas train: env.args: mask-hotpotqa-v0: unknown argument 'max_turn'; did you mean 'max_turns'?",
    "train mask-hotpotqa recipe=malty": "unitymas train: recipe: unknown recipe 'malty': did you mean 'malt'?",
    "train mask-hotpotqa k=1 policies.*.algorithm.name=grpo": "unitymas train: policies.team.algorithm (grpo) compares trajectories of one task: it needs k >= 2, and k is 1",
    "train --config bad.yaml": "unitymas train: config file bad.yaml, line 2: expected ',' or ']', but got '<stream end>'",
    "train --config list.yaml": "unitymas train: config file list.yaml: expected keys and values, got list",
    "train --config bin.yaml": "unitymas train: config file bin.yaml: not UTF-8 at byte 0; is it a YAML file?",
    # places
    "train --resume empty": "unitymas train: empty is no run directory: it holds no config.yaml",
    "train mask-hotpotqa env.data=mini --dir run": "unitymas train: run already holds a run; resume it (--resume), or name another directory",
    "train mask-hotpotqa env.data=mini --dir afile": "unitymas train: afile: it is a file, and a folder is needed there; name another",
    f"eval mask-hotpotqa {MINI} --team scripted --out afile": "unitymas eval: afile: it is a file, and a folder is needed there; name another",
    "report run": "unitymas report: run/metrics.jsonl, line 2: this is not a line of a run's figures (Expecting value: line 1 column 1 (char 0))",
    "report list": "unitymas report: list/metrics.jsonl, line 1: this is not a line of a run's figures (it holds no 'kind')",
    "report word": "unitymas report: word/metrics.jsonl, line 2: this is not a line of a run's figures (train/f1 is no number)",
    "view empty": "unitymas view: empty holds no traces (looked for traces/*.jsonl.zst and traces.jsonl.zst)",
    "export nowhere": "unitymas export: nowhere does not exist; give a run directory or a file of traces",
    "export text.jsonl": "unitymas export: text.jsonl, line 1: not JSON (Expecting value: line 1 column 1 (char 0))",
    "submit nowhere --name x": "unitymas submit: nowhere/results.json does not exist; `unitymas eval … --out nowhere` writes it",
    "serve retriever nowhere": "unitymas serve: nowhere is no index: it has no manifest.json. Build one with `unitymas data index CORPUS`.",
    "leaderboard build empty -o site": "unitymas leaderboard: empty holds no submission (a folder with metadata.yaml); pack one with: unitymas submit EVALUATION --name NAME -o empty/NAME",
    # tasks and rewards of one's own
    "eval mask-hotpotqa --team scripted --data tasks.jsonl": "unitymas eval: tasks.jsonl, row 1: field 'question': is missing (also looked for query, problem, Question, input, extra_info.question)",
    "eval mask-hotpotqa --team scripted --data notasks.jsonl": "unitymas eval: notasks.jsonl: holds no task",
    "play none.py:capitals --team fool": "unitymas play: reward 'right' gave None; give a number, a dict by node, agent or role, or Credits (none.py:22)",
    "play nan.py:capitals --team fool": "unitymas play: reward 'right' gave nan to node '0' as 'right'; an amount must be a finite number (nan.py:22)",
    "play role.py:capitals --team fool": "unitymas play: reward 'right' names 'gueser', which is no act, agent or role of the trace (role.py:22)",
}  # fmt: skip


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_one_line_and_leaves_nothing(words, here, capsys):
    before = sorted(here.rglob("*"))
    assert typed(words) not in (0, None)
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines == [MISTAKES[words]]
    left = {path for path in here.rglob("*") if "__pycache__" not in path.parts} - set(before)
    assert not left


BENCH = {
    "memory --ranks 1,x": "--ranks: 'x' does not fit; give a whole number, 1 or more (see unitymas bench memory --help)",
    "memory --tokens 0": "--tokens: '0' does not fit; give a whole number, 8 or more (see unitymas bench memory --help)",
    "memory --shape 0.6B": "--shape: unknown '0.6B'; did you mean '0.5B'? (see unitymas bench memory --help)",
    "memory --out nowhere/m.json": "--out nowhere/m.json: there is no folder nowhere (see unitymas bench memory --help)",
    "star --calls 0": "--calls: '0' does not fit; give a whole number, 1 or more (see unitymas bench star --help)",
    "simulate --groups 4, --rounds 1": "--groups: '' does not fit; give a whole number, 1 or more (see unitymas bench simulate --help)",
    "overlap --stepz 3": "unknown option '--stepz'; did you mean '--steps'? (see unitymas bench overlap --help)",
    "routing --env mask-hotpotq": "unknown environment 'mask-hotpotq'; did you mean mask-hotpotqa, rag-hotpotqa, mask-router-hotpotqa? (your own: --import FILE.py, or module:id)",
    "update --only (": "--only: '(' is no regular expression: missing ), unterminated subpattern at position 0 (see unitymas bench update --help)",
}  # fmt: skip


@pytest.mark.parametrize("words", BENCH)
def test_a_mistake_in_a_benchmark_is_one_line(words, monkeypatch, capsys):
    """As typed after `unitymas bench`, in the process that it starts."""
    monkeypatch.setattr(sys, "argv", ["speed", *words.split()])
    try:
        status = speed_main()
    except SystemExit as stop:
        status = stop.code
    assert status in (1, 2)
    captured = capsys.readouterr()
    assert captured.err.splitlines() == [f"unitymas bench {words.split()[0]}: {BENCH[words]}"]
    assert not captured.out


def test_a_reader_that_has_left_is_no_error():
    reader, writer = os.pipe()
    os.close(reader)  # as `unitymas list | head` does when it has seen enough
    command = [sys.executable, "-m", "unitymas.cli", "list"]
    with os.fdopen(writer, "w") as gone:
        done = subprocess.run(command, stdout=gone, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_interrupted_evaluation_says_what_it_keeps(monkeypatch, capsys):
    def stop(self, **how):
        raise KeyboardInterrupt

    monkeypatch.setattr(Evaluation, "run", stop)
    assert typed(f"eval mask-hotpotqa {MINI} --team fool --out kept -q") == 130
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert said == "unitymas: interrupted: kept keeps what was played; the same command plays the rest"


@pytest.mark.parametrize("imported", ["unitymas.own", "difflib", "unitymas.cli.environments", "pettingzoo"])
def test_ctrl_c_while_python_still_imports_is_one_line(imported):
    """A key that is pressed within the first moments of a command."""
    code = f"""
import signal, sys

class Finger:
    def find_spec(name, path, target=None):
        if name == {imported!r}:
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Finger)
from unitymas.cli import main
sys.exit(main(["list"]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/")
    assert (done.returncode, done.stderr) == (130, "\nunitymas: interrupted\n")


def test_a_port_in_use_is_one_line(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        assert typed(f"view run --live --no-open --port {port}") == 1
    said = capsys.readouterr().err.strip()
    assert said == f"unitymas view: --port {port}: Address already in use; choose another, or leave it out"


@pytest.mark.parametrize(
    ("number", "what"),
    [
        (errno.ENOSPC, "place/x: the disk is full; make room, or name another place"),
        (errno.EACCES, "place/x: this user has no permission; name another place, or ask for the right"),
        (errno.ENOENT, "place/x: No such file or directory"),
    ],
)
def test_what_the_system_refuses_is_said_with_a_way_out(number, what):
    import os

    assert refused(OSError(number, os.strerror(number), "place/x")) == what
    assert refused(OSError("in words")) == "in words"


def test_an_evaluation_that_failed_throughout_is_an_error(capsys):
    assert typed("eval typo.py:capitals --team fool -k 1 -q") == 1
    lines = capsys.readouterr().err.strip().splitlines()
    assert "unknown agent 'cheker'; did you mean 'checker'? (typo.py:16): 2 × in 2 episodes" in lines[0]
    assert lines[-1].startswith("unitymas eval: every episode failed")


SHORT = "steps=1 tasks_per_step=2 k=2 eval.tasks=1 log.traces_every=1 --dir 'my run'"


def pointed(out):
    """The commands at the end of a run's output."""
    return re.findall(r"^(?:episodes|play it) +unitymas (.*)$", out, re.M)


def test_pointers_are_commands_and_a_finished_run_is_not_resumed(capsys):
    assert typed(f"train capitals --import good.py {SHORT}") == 0
    view, play = pointed(capsys.readouterr().out)
    assert typed(f"{view} --no-open") == 0
    unregister("capitals")
    sys.modules.pop("good", None)
    assert typed(f"{play} --tasks 1 -k 1 -q --max-tokens 4") == 0
    capsys.readouterr()
    before = {path: path.read_bytes() for path in Path("my run").rglob("*") if path.is_file()}
    assert typed("train --resume 'my run' --dry-run steps=2") == 0  # says what would go on, and does not
    assert "\n# steps 1 → 2\nimports:\n" in capsys.readouterr().out
    assert before == {path: path.read_bytes() for path in Path("my run").rglob("*") if path.is_file()}
    assert typed("train --resume 'my run'") == 1
    said = capsys.readouterr().err.strip()
    assert said == (
        "unitymas train: my run has done all of its 1 steps; for more of them: unitymas train --resume 'my run' steps=N"
    )


def test_a_stopped_run_points_at_its_report_too(here, capsys):
    assert typed(f"train typo.py:capitals {SHORT}") == 1
    said = capsys.readouterr()
    assert "unknown agent 'cheker'" in said.err and (here / "my run" / "report.html").exists()
    assert "report         my run/report.html" in said.out and pointed(said.out) == ["view 'my run'"]


def test_what_an_outage_ended_is_owed_again(here):
    rows = [{"id": "a", "question": "q", "answers": ["x"]}, {"id": "b", "question": "r", "answers": ["y"]}]
    down = []

    class Server:
        def act(self, call):
            if down:
                raise ConnectionError("the endpoint is down")
            return "<answer>x</answer>"

        def identity(self):
            return {"model": "server"}

    def evaluation():
        from unitymas import Outcome, Role, Tags, Workflow

        class One(Workflow):
            roles = (Role("one", reply=Tags("answer")),)

            async def run(self, ep):
                said = await ep.act("one", ep.task.question)
                if ep.task.id == "b":
                    raise RuntimeError("a fault of the workflow")
                return Outcome(answer=said.value)

        import unitymas

        unitymas.register("capitals", workflow=One, reward=lambda trace, task: 1.0, tasks=rows)
        return Evaluation("capitals", Server(), k=1, out=here / "out")

    down.append(True)
    evaluation().run()
    assert evaluation().plan()["owed"] == 2
    down.clear()
    evaluation().run()
    assert evaluation().plan()["owed"] == 0  # the workflow's own fault is not an outage's


def test_a_count_is_a_whole_number():
    assert COUNT("3") == 3


@contextmanager
def small_files(size):
    """Files of this process may have so many bytes: as on a full disk, a write ends half way, and the next one fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_leaves_whole_episodes_and_names_the_file(tmp_path):
    store, trace = Store(tmp_path), unitymas.rollout("mask-hotpotqa", "scripted", data="mini", tasks=1)[0]
    store.write(trace, "first")
    whole = store.path.read_bytes()
    with small_files(len(whole) + 100), pytest.raises(OSError) as error:
        store.write(trace, "second")
    assert error.value.filename == str(store.path) and store.path.read_bytes() == whole
    store.write(trace, "third")  # there is room again: nothing torn lies between
    assert [episode["tags"]["key"] for episode in store.episodes()] == ["first", "third"]
    store.close()


def test_a_full_disk_leaves_the_old_file_and_no_draft(tmp_path):
    path = tmp_path / "config.yaml"
    write_whole(path, b"old")
    with small_files(100), pytest.raises(OSError) as error:
        write_whole(path, b"new" * 100)
    assert error.value.filename == str(path)
    assert [p.name for p in tmp_path.glob("config*")] == ["config.yaml"] and path.read_bytes() == b"old"
