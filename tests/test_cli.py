"""The front door of the command line: what a user can mend is said in one line; all commands have their help."""

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

import unitymas
from unitymas import Outcome, Role, Workflow, __version__
from unitymas.agents.basics.hints import counted
from unitymas.cli import COMMANDS, environments, evaluation, main
from unitymas.cli.arguments import parse_team
from unitymas.envs.registry import unregister


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(name, capsys):
    try:
        code = main([name, "--help"])
    except SystemExit as ended:  # argparse's own way
        code = ended.code
    assert code == 0 and f"usage: unitymas {name}" in capsys.readouterr().out


def test_help_lists_the_commands(capsys):
    assert main([]) == 0 and main(["--help"]) == 0
    said = capsys.readouterr().out
    assert all(f"\n  {name} " in said for name in COMMANDS)
    assert main(["--version"]) == 0 and __version__ in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("trian mask-hotpotqa", "unknown command 'trian'; did you mean 'train'?"),
        ("info mask-hotpotq", "did you mean"),
        (
            "eval mask-hotpotqa --data mini --team vlm:tiny",
            "unitymas eval: seat '*': unknown policy 'vlm:tiny'",
        ),
        ("train mask-hotpotqa --dry-run groups.*.model=vllm:tiny", "'vllm:tiny' plays, but is no model"),
        ("train mask-hotpotqa --dry-run policies.*.algorithm.name=gropo", "did you mean 'grpo'"),
        ("view /nowhere/at/all", "unitymas view: "),
        (
            "warmstart",
            "name an environment (ID, such as mask-hotpotqa) and the folder of the new model (--out DIR)",
        ),
        ("warmstart --out here", "unitymas warmstart: name an environment (ID, such as mask-hotpotqa) (see"),
        ("warmstart rag-nq", "unitymas warmstart: name the folder of the new model (--out DIR) (see"),
        ("train rag-nq preset=shared", "preset is an option, and no key of the config: --preset shared"),
        ("serve --index gone", "unknown option '--index'"),
        ("report", "unitymas report: missing: runs ("),
        ("launch", "missing: slurm | kuberay | ssh (slurm, kuberay, ssh)"),
        ("models tinny", "no model is called 'tinny'; did you mean 'tiny'? Others are written hf:ORG/NAME"),
        ("info rag-nq --reward defualt --data mini reward=x", "unknown option '--reward'"),
        # a beginning of an option is not that option
        ("train rag-nq --mod tiny", "unknown option '--mod'; did you mean '--model'?"),
        ("eval rag-nq prompts=[a", "unitymas eval: prompts: '[a' is no YAML value"),
        ("warmstart rag-nq top_k=[a --out here", "unitymas warmstart: top_k: '[a' is no YAML value"),
        ("eval rag-nq --budget 3", "unknown option '--budget'; did you mean '--budget-tokens'?"),
        ("view runs/1 --no-o", "unknown option '--no-o'; did you mean '--no-open'?"),
        ("data prepare nq --ag", "unknown option '--ag'; did you mean '--again'?"),
    ],
)
def test_mistakes_are_one_line(words, says, capsys):
    try:
        assert main(words.split()) != 0
    except SystemExit as ended:  # of argparse
        assert ended.code == 2
    said = capsys.readouterr().err.strip()
    assert says in said and len(said.splitlines()) == 1


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_a_missing_package_is_one_line_with_its_name(capsys, tmp_path):
    assert (
        main(["eval", "mask-hotpotqa", "--team", "vllm:tiny", "--data", "mini", "--out", str(tmp_path)]) == 1
    )
    assert "pip install 'unitymas[vllm]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text, team",
    [
        ("tiny", "tiny"),
        ("openai:m@http://h:1/v1?a=b", "openai:m@http://h:1/v1?a=b"),
        ("openai:m@http://h:1/v1?a=b,c", "openai:m@http://h:1/v1?a=b,c"),
        ("planner=human,*=scripted", {"planner": "human", "*": "scripted"}),
        (" planner=tiny, *=fool,", {"planner": "tiny", "*": "fool"}),
        ("planner=openai:m@http://h/v1?a=1,2,*=tiny", {"planner": "openai:m@http://h/v1?a=1,2", "*": "tiny"}),
        ("players.py:Shy", "players.py:Shy"),
    ],
)
def test_every_command_reads_a_team_in_one_way(text, team, monkeypatch):
    teams = []
    monkeypatch.setattr(environments, "Team", lambda seats, **_: teams.append(seats))
    monkeypatch.setattr(environments, "play_episode", lambda *_, **__: None)
    environments.play_main(["rag-nq", "--data", "mini", "--team", text])
    monkeypatch.setattr(evaluation, "Team", lambda seats, **_: teams.append(seats))
    evaluation._team(text, evaluation.parser().parse_args(["rag-nq"]))
    assert teams == [team, team]


@pytest.mark.parametrize(
    "line, words",
    [
        ("unitymas ev", {"eval"}),
        ("unitymas info rag-evi", {"rag-evidence-hotpotqa", "rag-evidence-nq"}),
        ("unitymas train rag-nq --dr", {"--dry-run"}),
        ("unitymas eval rag-nq --team tiny --budget-d", {"--budget-dollars"}),
        ("unitymas data prepare --ki", {"--kind"}),
    ],
)
def test_the_shell_completes_commands_ids_and_options(line, words, tmp_path):
    pytest.importorskip("argcomplete")
    out = tmp_path / "out"
    asked = {
        "_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": "\n", "_ARGCOMPLETE_STDOUT_FILENAME": str(out), "COMP_LINE": line,
        "COMP_POINT": str(len(line)), "COMP_TYPE": "9",
    }  # fmt: skip
    subprocess.run([sys.executable, "-m", "unitymas.cli"], env={**os.environ, **asked}, check=False)
    assert set(map(str.strip, out.read_text().split("\n"))) == words


def test_a_team_with_a_part_that_is_no_seat_is_refused():
    with pytest.raises(ValueError, match="'oops' is no seat"):
        parse_team("planner=tiny,oops")
    for text in ("planner=", "=tiny", "planner=tiny,*="):
        with pytest.raises(ValueError, match="lacks the role or its player; write role=player"):
            parse_team(text)
    query = "planner=openai:m@http://h/v1?a=1,b="
    assert parse_team(query) == {"planner": query.removeprefix("planner=")}


def test_debug_shows_where_it_happened():
    with pytest.raises(ValueError, match="unknown policy"):
        main(["eval", "mask-hotpotqa", "--team", "vlm:tiny", "--debug"])


@given(st.integers(0, 10**7))
def test_a_number_agrees_with_its_noun(number):
    shown, noun = counted(number, "entry", "entries").split(" ")
    assert int(shown.replace(",", "")) == number and noun == ("entry" if number == 1 else "entries")


def test_one_is_singular(capsys):
    """Of roles, tasks, episodes and pages of the commands that count them."""
    assert main(["list", "solo"]) == 0
    assert main(["info", "planpath-solo"]) == 0
    assert (
        main(
            ["eval", "rag-nq", "--data", "mini", "--team", "scripted", "--tasks", "1", "-k", "1", "--dry-run"]
        )
        == 0
    )
    told = capsys.readouterr().out
    assert "  1 role " in told and "1 task × 1 = 1 episode," in told
    assert not re.search(r"\b1 (roles|tasks|episodes|tokens|samples|steps)\b", told)


class Asked(BaseException):
    """Carries the parser of a command past what the command line catches."""


def parser_of(name, monkeypatch):
    def stop(self, *_, **__):
        raise Asked(self)

    for method in ("parse_args", "parse_known_args", "parse_intermixed_args"):
        monkeypatch.setattr(argparse.ArgumentParser, method, stop)
    with pytest.raises(Asked) as asked:
        main([name, "--help"])
    return asked.value.args[0]


def actions(parser):
    for action in parser._actions:
        yield parser.prog, action
        for part in action.choices.values() if isinstance(action, argparse._SubParsersAction) else ():
            yield from actions(part)


@pytest.mark.parametrize("name", sorted({*COMMANDS} - {"bench"}))
def test_every_argument_says_what_it_is(name, monkeypatch):
    parser = parser_of(name, monkeypatch)
    silent = [f"{prog} {action.dest}" for prog, action in actions(parser) if not action.help]
    assert not silent and parser.description


class Gentle(Workflow):
    """A workflow with arguments of three types."""

    roles = (Role("speaker"),)

    def __init__(self, rate: float = 0.1, loud: bool = True, mode: Literal["on", "off"] = "on") -> None:
        self.rate, self.loud, self.mode = rate, loud, mode

    async def run(self, ep):
        return Outcome(answer=(await ep.act("speaker", "Say it.")).text)


def right(trace, task):
    return 1.0


def test_arguments_of_a_workflow_are_read_as_a_config_reads_them(tmp_path, capsys):
    unitymas.register(
        "gentle", workflow=Gentle, reward=right, tasks=[{"id": "1", "question": "?", "answers": ["x"]}]
    )
    try:
        words = [
            "rate=1e-5",
            "loud=off",
            "mode=off",
            "--team",
            "fool",
            "-k",
            "1",
            "--out",
            str(tmp_path),
            "-q",
        ]
        assert main(["eval", "gentle", *words]) == 0
    finally:
        unregister("gentle")
    config = json.loads((tmp_path / "results.json").read_text())["provenance"]["env"]["config"]
    assert config == {"rate": 1e-5, "loud": False, "mode": "off", "modified": ["loud", "mode", "rate"]}
