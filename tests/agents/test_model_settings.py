"""How a team's models are sampled and where they compute is said in one place: on the command line, or to `Team`."""

import pytest
import torch

from unitymas.agents.basics import machine
from unitymas.agents.llm import load_policy
from unitymas.agents.team import Team, TeamError
from unitymas.cli import environments as commands
from unitymas.cli import evaluation as evalcli
from unitymas.cli import main
from unitymas.envs.registry import spec

ENV = "mask-hotpotqa"


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def seated(team):
    return team.bind({role.name: role for role in spec(ENV).roles}).policies


def eval_team(words):
    return evalcli._team(
        *(lambda given: (given.team, given))(evalcli.parser().parse_args([ENV, *words.split()]))
    )


def test_eval_tells_the_model_how_to_sample_and_where():
    team = eval_team(
        "--team tiny --temperature 0 --max-tokens 17 --top-p 0.9 --device cpu --dtype bfloat16 --threads 2"
    )
    policy = seated(team)["planner"]
    assert (policy.sampling.temperature, policy.sampling.max_tokens, policy.sampling.top_p) == (0, 17, 0.9)
    assert policy.engine.dtype is torch.bfloat16 and policy.engine.device.type == "cpu"
    assert torch.get_num_threads() == 2
    assert policy.identity()["dtype"] == "bfloat16" and policy.identity()["sampling"]["max_tokens"] == 17


def test_what_is_not_said_is_the_models_own():
    policy = seated(eval_team("--team tiny"))["planner"]
    assert policy.sampling == type(policy.sampling)() and policy.engine.dtype is torch.float32
    assert "dtype" not in policy.identity()  # so that keys of evaluations stay


def test_play_and_eval_pass_settings_on(monkeypatch, tmp_path, capsys):
    seen = []
    monkeypatch.setattr(commands, "play_episode", lambda env, team, **_: seen.append(team.settings.told()))
    assert (
        main(["play", ENV, "--data", "mini", "--team", "tiny", "--temperature", "0.5", "--threads", "1"]) == 0
    )
    assert seen == [{"temperature": 0.5, "threads": 1}]
    out = tmp_path / "e"
    words = f"eval {ENV} --data mini --team tiny --tasks 1 -k 1 --max-tokens 1 --concurrency 3 -q --out {out}"
    assert main(words.split()) == 0
    assert main(["play", ENV, "--team", "scripted", "--device", "cpu"]) == 1
    assert "device was given, but nobody in Team({'*': 'scripted'}) takes it" in capsys.readouterr().err


def test_an_endpoint_takes_what_the_protocol_has():
    team = eval_team(
        "--team planner=openai:m@http://h/v1,*=tiny --temperature 0.3 --max-tokens 9 --device cpu --concurrency 5"
    )
    policies = seated(team)
    remote = policies["planner"]
    assert remote.options == {"temperature": 0.3, "max_tokens": 9}
    assert remote.concurrency == 5
    assert policies["answerer"].sampling.temperature == 0.3


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"temperature": -1}, "temperature=-1, but it must be 0"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_p": 0}, "top_p=0, but it must be in"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"dtype": "int8"}, "dtype='int8', but it must be float32 or bfloat16"),
        ({"threads": 0}, "threads=0"),
    ],
)  # fmt: skip
def test_settings_out_of_range_are_refused_by_name(given, says):
    with pytest.raises(ValueError, match=says):
        Team("tiny", **given)


def test_settings_for_nobody_are_refused():
    with pytest.raises(TeamError, match="temperature was given, but nobody"):
        Team("scripted", temperature=0)
    with pytest.raises(TeamError, match="device was given, but nobody"):
        Team({"*": "openai:m@http://h/v1"}, device="cpu")


def test_devices_are_named_and_a_gpu_is_taken_where_there_is_one(monkeypatch):
    with pytest.raises(ValueError, match="'tpu' is no device; give cpu, cuda"):
        machine.device_of("tpu")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert machine.device_of("").type == "cuda"
    with pytest.raises(ValueError, match="'cuda:7' is not there: torch sees 1 GPU"):
        machine.device_of("cuda:7")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert machine.device_of("").type == "mps"


def test_small_models_use_one_thread_until_a_large_one_comes(monkeypatch):
    monkeypatch.setattr(machine, "_chosen", 0)
    monkeypatch.setattr(machine, "_ALL", 3)
    machine.use_threads(None, 2_000_000)
    assert torch.get_num_threads() == 1
    machine.use_threads(None, 500_000_000)
    machine.use_threads(None, 2_000_000)
    assert torch.get_num_threads() == 3
    machine.use_threads(2, 2_000_000)
    assert torch.get_num_threads() == 2


def test_the_tiny_model_takes_one_thread(monkeypatch):
    monkeypatch.setattr(machine, "_chosen", 0)
    torch.set_num_threads(3)
    load_policy("tiny")
    assert torch.get_num_threads() == 1
