"""What is written in a config is read as it is meant, wherever it stands; what cannot be is an error at its key."""

import dataclasses
import math
import os
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

import unitymas
from unitymas import Outcome, Role, Tags, Workflow
from unitymas.cli import main
from unitymas.envs.registry import unregister
from unitymas.trainers.config.reader import as_meant, parse_yaml, read, to_dict, written
from unitymas.trainers.config.resolve import resolve
from unitymas.trainers.config.schema import ConfigError, RunConfig, build, dump
from unitymas.trainers.controller.resume import read_config


class Two(Workflow):
    roles = (Role("speaker"), Role("listener", reply=Tags("answer")))

    def __init__(self, padding: int = 0, loud: bool = True, speed: float = 1.0) -> None:
        self.padding, self.loud, self.speed = padding, loud, speed

    async def run(self, ep):
        heard = await ep.act("listener", (await ep.act("speaker", ep.task.question)).text)
        return Outcome(answer=heard.text)


@pytest.fixture(autouse=True)
def environment():
    rows = [{"id": str(i), "question": "w1", "answers": ["w2"]} for i in range(4)]
    unitymas.register("two-of-config", workflow=Two, reward=lambda trace, task: 1.0, tasks=rows)
    yield
    unregister("two-of-config")


def value_at(tree, key):
    for part in key.split("."):
        tree = tree[part]
    return tree


MEANT = [
    ("policies.team.learning.lr", "1e-5", 1e-5), ("policies.team.learning.lr", "1", 1.0),
    ("policies.team.algorithm.clip_high", "3e-1", 0.3), ("policies.team.algorithm.value_clip", "off", None),
    ("policies.team.algorithm.importance", "off", "off"), ("policies.team.learning.betas", "[9e-1, 1e-3]", (0.9, 1e-3)),
    ("log.console", "off", "off"), ("log.tensorboard", "on", True), ("starved", "off", False), ("starved", "no", False),
    ("deterministic", "yes", True), ("episode_seconds", "off", None), ("episode_seconds", "1e2", 100.0),
    ("policies.team.adapter", "off", None), ("steps", "1e2", 100), ("env.args.loud", "off", False),
    ("env.args.speed", "1e-2", 0.01), ("env.data", "007", "007"), ("env.data", "no", "no"),
    ("log.wandb", "2024-01-01", "2024-01-01"), ("policies.team.algorithm", "grpo", {"name": "grpo"}),
]  # fmt: skip


@pytest.mark.parametrize(("key", "text", "meant"), MEANT)
def test_text_means_the_same_in_a_file_an_override_and_python(key, text, meant, tmp_path):
    (tmp_path / "mine.yaml").write_text(nested(key, text, yaml_text=True))
    plain = text if not text.startswith("[") else parse_yaml(text)
    for how in (
        {"overrides": [f"{key}={text}"]},
        {"file": tmp_path / "mine.yaml"},
        nested(key, plain),
    ):
        config = resolve("two-of-config", **how)
        assert value_at(to_dict(config), key) == meant and type(value_at(to_dict(config), key)) is type(meant)
        again = build(RunConfig, parse_yaml(dump(config)))
        assert value_at(written(to_dict(again)), key) == value_at(written(to_dict(config)), key)


def nested(key, value, yaml_text=False):
    first, *rest = reversed(key.split("."))
    tree = f"{{{first}: {value}}}" if yaml_text else {first: value}
    for name in rest:
        tree = f"{{{name}: {tree}}}" if yaml_text else {name: tree}
    return tree


def test_python_values_of_their_own_kinds_are_taken(tmp_path):
    config = resolve(
        "two-of-config", steps=np.int64(3), k=np.float32(4), groups={"main": {"model": tmp_path}}, starved=False,
    )  # fmt: skip
    assert (config.steps, config.k, config.groups["main"].model) == (3, 4, str(tmp_path))
    assert type(config.steps) is int and yaml.safe_load(dump(config))["steps"] == 3


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"steps: 3\nsteps: 4\n", "mine.yaml, line 2: the key 'steps' stands twice; leave one out"),
        (b"eval:\n  tasks: 3\n  tasks: 4\n", "mine.yaml, line 3: the key 'tasks' stands twice"),
        (b"\xff\xfesteps", "mine.yaml: not UTF-8 at byte 0; is it a YAML file?"),
        (
            b"groups: {main: {device: gpu0}}\n",
            "groups.main: device: 'gpu0' is no device; give auto, cpu, cuda",
        ),
    ],
)
def test_a_file_that_cannot_be_meant_is_refused(content, says, tmp_path):
    (tmp_path / "mine.yaml").write_bytes(content)
    with pytest.raises(ConfigError) as error:
        resolve("two-of-config", file=tmp_path / "mine.yaml")
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["steps=2.5"], r"steps: expected int, got 2\.5"),
        (["steps=on"], "steps: expected int"),
        (["starved=maybe"], "starved: expected bool, got 'maybe'"),
        (["steps=[1"], r"steps: '\[1' is no YAML value"),
        (["policies.team.learning.betas=[0.9]"], r"policies\.team\.learning\.betas: expected 2 values"),
        (["policies..team=1"], "overrides look like a.b=c"),
        (["policies.team=3"], "policies.team: expected keys of PolicyConfig, got 3"),
        (["policies=3"], "policies: expected keys and values, got 3"),
        (["env.args.padding=many"], "env.args: .*padding must be int"),
        (["env.args.lod=1"], "env.args: .*did you mean 'loud'"),
        (["env.reward=no_such_module:fn"], "env.reward: there is no module 'no_such_module'"),
        (["env.reward=math:nope"], "env.reward: math has no 'nope'"),
        (["env.reward=math:pi"], "env.reward: .* is no reward"),
        (["env.rules=[math:nope]"], "env.rules: math has no 'nope'"),
        (
            ["policies.team.credit={answerer: {mix: 0.5}}"],
            r"policies\.team\.credit\.answerer: got .*give a list of transforms",
        ),
        (
            ["policies.team.credit={answerer: [mix]}"],
            r"policies\.team\.credit\.answerer: got .*give a list of transforms",
        ),
        (["recipe=alternate", "recipe_args.every=often"], "recipe_args.every: expected int, got 'often'"),
        (["recipe=alternate", "recipe_args.every=0"], "recipe_args.every: must be at least 1"),
        (["policies.team.algorithm=grppo"], r"policies\.team\.algorithm: .*did you mean 'grpo'"),
        (["policies.team.algorithm.name=no_such:Rank"], "there is no module 'no_such'"),
        (["imports=[no_such_module]"], "imports: there is no module 'no_such_module'"),
    ],
)
def test_what_cannot_be_is_an_error_at_its_key(overrides, says):
    with pytest.raises(ConfigError, match=says):
        resolve("two-of-config", overrides=overrides)


@pytest.mark.parametrize("content", ["[1, 2]", "3", "{a: [}", "\x00", "{a: 1\n"])
def test_a_file_that_is_no_config_is_named(content, tmp_path):
    (tmp_path / "mine.yaml").write_text(content)
    with pytest.raises(ConfigError, match=r"config file .*mine\.yaml"):
        resolve("two-of-config", file=tmp_path / "mine.yaml")


def test_an_empty_section_is_its_defaults(tmp_path):
    (tmp_path / "mine.yaml").write_text("policies:\n  team:\ngroups:\n  main:\nsteps: 3\n")
    assert resolve("two-of-config", file=tmp_path / "mine.yaml") == resolve("two-of-config", steps=3)
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    assert resolve("two-of-config", file=tmp_path / "empty.yaml") == resolve("two-of-config")


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_every_float_is_read_as_python_writes_it(x):
    assert parse_yaml(repr(x)) == x and as_meant(repr(x), float) == x and as_meant(repr(x), float | None) == x
    assert parse_yaml(f"{{a: {x:.3e}}}")["a"] == float(f"{x:.3e}")


PLAIN = st.text(st.characters(exclude_categories=["C", "Zl", "Zp"]), max_size=6)


@example({"0E0": None})
@example(["1e5", "on", "0o7", "1_0", "2001-01-01", "1:30", ".5", "~", "<<"])
@given(st.recursive(st.none() | st.booleans() | st.integers() | PLAIN | st.floats(allow_nan=False),
                    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(PLAIN, inner, max_size=3)))  # fmt: skip
def test_what_is_written_is_read_back(value):
    assert parse_yaml(dump({"a": value})) == {"a": value}


@given(
    st.sampled_from(
        [int, float, bool, str, int | None, Literal["off", "on", "a"], tuple[float, ...], dict[str, int]]
    ),
    st.data(),
)
def test_reading_what_was_read_changes_nothing(hint: Any, data: Any) -> None:
    scalars = (
        st.booleans()
        | st.integers(-9, 9)
        | st.floats()
        | st.sampled_from(["off", "on", "1e-5", "a", "", "nan"])
    )
    value = data.draw(
        scalars | st.lists(scalars, max_size=2) | st.dictionaries(st.text(max_size=2), scalars, max_size=2)
    )
    try:
        once = read(hint, value, "key")
    except ConfigError as error:
        assert str(error).startswith("key")
        return
    assert once == read(hint, once, "key") or (isinstance(once, float) and math.isnan(once))


# code of one's own ---------------------------------------------------------------------------------------

OWN = """
from unitymas.trainers.algorithms.grpo import GRPO
from dataclasses import dataclass

@dataclass(frozen=True, kw_only=True)
class Rank(GRPO):
    name = "rank"
    sharp: float = 1.0

def generous(trace, task):
    return 1.0
"""


def test_imports_are_recorded_and_checked_by_the_dry_run(tmp_path, monkeypatch, capsys):
    name = f"own_of_config_{os.getpid()}"
    (tmp_path / f"{name}.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    words = ["train", "two-of-config", f"policies.team.algorithm={{name: {name}:Rank, sharp: 1e-1}}", "--dry-run",
             "--import", f"{name}.py", f"env.reward={name}:generous"]  # fmt: skip
    assert main(words) == 0
    (tmp_path / "again.yaml").write_text(capsys.readouterr().out)
    config = resolve(file=tmp_path / "again.yaml")
    assert config.imports == (str(tmp_path / f"{name}.py"),)
    assert config.policies["team"].algorithm == {"name": f"{name}:Rank", "sharp": 0.1}
    for wrong, says in (
        (f"env.reward={name}:generos", "env.reward: "), (f"policies.team.algorithm={{name: {name}:Rank, shrp: 1}}", "sharp"),
        ("map.speker=team", "did you mean 'speaker'"), ("counterfactual.nobody.samples=1", "counterfactual.nobody"),
        ("recipe=mlpo recipe_args.leader=nobody", "recipe_args.leader"), ("eval.split=nowhere env.data=no-such-set", "data"),
    ):  # fmt: skip
        assert main([*words, *wrong.split()] if "Rank," not in wrong else [*words, wrong]) == 1, wrong
        assert says in capsys.readouterr().err, wrong


def test_a_dry_run_loads_no_model(monkeypatch, capsys):
    import subprocess
    import sys

    code = "import sys; from unitymas.cli import main; main(['train', 'math-deepscaler', '--dry-run', 'env.data=mini']); sys.exit('torch' in sys.modules or 'ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=120).returncode == 0


def test_every_setting_is_documented_and_survives_writing():
    config = resolve("two-of-config", preset_name="separate")
    assert build(RunConfig, parse_yaml(dump(config))) == config
    for field in dataclasses.fields(RunConfig):
        assert f"\n{field.name}:" in "\n" + dump(config)


def test_a_run_of_an_older_version_lacks_imports_only(tmp_path):
    lines = dump(resolve("two-of-config")).partition("env:")
    (tmp_path / "config.yaml").write_text(lines[1] + lines[2])
    assert read_config(Path(tmp_path)).imports == ()
