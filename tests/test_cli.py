"""The front door of the command line: what a user can mend is said in one line; all commands have their help."""

import argparse
import importlib.util
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unitymas import __version__
from unitymas.agents.hints import counted
from unitymas.cli import COMMANDS, main


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
    ],
)
def test_mistakes_are_one_line(words, says, capsys):
    assert main(words.split()) != 0
    said = capsys.readouterr().err.strip()
    assert says in said and len(said.splitlines()) == 1


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_a_missing_package_is_one_line_with_its_name(capsys, tmp_path):
    assert (
        main(["eval", "mask-hotpotqa", "--team", "vllm:tiny", "--data", "mini", "--out", str(tmp_path)]) == 1
    )
    assert "pip install 'unitymas[vllm]'" in capsys.readouterr().err


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
