"""Models of the hub: `huggingface_hub` itself downloads them, from a hub of this machine (`tests/hub_server.py`)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file
from transformers import LlamaConfig

import unitymas
from unitymas import Outcome, Role, Tags, Workflow
from unitymas.agents import TINY, model_path
from unitymas.agents.fetch import hub as fetch
from unitymas.agents.fetch import packaged
from unitymas.agents.llm import load_policy
from unitymas.agents.model.weights import (
    from_config,
    load_decoder,
    load_tokenizer,
    save_adapter,
    save_model,
)
from unitymas.agents.names import unverified
from unitymas.cli import main
from unitymas.trainers.warmstart import warmstart

from ..hub_server import STRANGER, TOKEN, LocalHub, files_of, repo, serve

SIZES = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
}  # fmt: skip
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """The files of two versions of a small random model."""
    tokenizer, versions = load_tokenizer(TINY), []
    for seed in range(2):
        config = LlamaConfig(**SIZES, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
        made = save_model(from_config(config, seed), tmp_path_factory.mktemp("small") / "m", tokenizer)
        versions.append(files_of(made))
    return versions


@pytest.fixture(scope="module")
def server(small):
    """A hub with what users meet there."""
    first, second = small
    more = {
        "pytorch_model.bin": b"pickle",
        "modeling.py": b"code",
        "original/consolidated.safetensors": b"again",
        "a.md": b"",
    }
    index = {"weight_map": {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}}
    parts = {name: data for name, data in first.items() if name != WEIGHTS}
    with serve() as hub:
        hub.repos = {
            "org/small": repo(first, {**second, **more}),
            "org/gated": repo(first, gated=True),
            "org/private": repo(first, private=True),
            "org/pickled": repo({**parts, "pytorch_model.bin": b"pickle"}),
            "org/sharded": repo({**parts, **{name: name.encode() for name in index["weight_map"].values()},
                                 "model.safetensors.index.json": json.dumps(index).encode()}),
        }  # fmt: skip
        yield hub


@pytest.fixture
def hub(server: LocalHub, tmp_path, monkeypatch):
    """That hub without faults, and an empty cache."""
    server.clear()
    server.point(monkeypatch, tmp_path / "home")
    monkeypatch.chdir(tmp_path)
    return server


def same(path, files):
    return (Path(path) / WEIGHTS).read_bytes() == files[WEIGHTS]


# what is downloaded ------------------------------------------------------------------------------------


def test_a_name_is_downloaded_once_without_pickles_and_code(hub, small, capsys):
    path = model_path("org/small")
    assert same(path, small[1])
    asked = hub.files_asked()
    assert sorted(asked) == sorted(small[1]) and asked[-1] == WEIGHTS
    said = capsys.readouterr().err
    assert said.startswith(
        f"downloading hf:org/small from {hub.address}/org/small to {constants.HF_HUB_CACHE}, once\n"
    )
    assert "Fetching 1 files: 100%" in said  # the progress bar
    hub.clear()
    assert model_path("hf:org/small") == model_path("org/small@main") == path and not hub.asked


def test_a_revision_is_a_branch_a_tag_or_a_commit(hub, small):
    old = model_path("org/small@v1")
    commit = hub.repos["org/small"].refs["v1"]
    assert same(old, small[0]) and old.name == commit
    hub.clear()
    assert model_path(f"hf:org/small@{commit}") == old and not hub.asked
    assert same(model_path("org/small"), small[1])


def test_a_commit_is_found_in_an_empty_cache(hub, small):
    assert same(model_path(f"org/small@{hub.repos['org/small'].refs['v1']}"), small[0])


def test_what_is_pushed_during_a_download_does_not_mix_with_it(hub, small, monkeypatch):
    """The weights come from the commit of the other files."""
    whole, sent = hub.repos["org/small"], type(hub).files_asked
    before = dict(whole.refs)

    def push(repo_, **how):
        if sent(hub):
            whole.refs["main"] = whole.refs["v1"]
        return download(repo_, **how)

    import huggingface_hub

    download = huggingface_hub.snapshot_download
    monkeypatch.setattr(huggingface_hub, "snapshot_download", push)
    try:
        path = model_path("org/small")
    finally:
        whole.refs.update(before)
    assert same(path, small[1])


def test_shards_are_all_downloaded(hub):
    path = model_path("org/sharded")
    assert not fetch.lacks(path)
    assert hub.files_asked()[-2:] in (
        [f"model-{i}-of-2.safetensors" for i in order] for order in ((1, 2), (2, 1))
    )


def test_a_repository_without_safetensors_says_so(hub):
    with pytest.raises(
        FileNotFoundError, match="hf:org/pickled lacks model.safetensors .*the repository holds no model as"
    ):
        model_path("org/pickled")


def test_the_environment_is_heeded(hub, tmp_path):
    """Variables are read when `huggingface_hub` is imported, so in a process of its own."""
    code = "import sys\nfrom unitymas.cli import main\nfor name in sys.argv[1:]:\n    main(['models', name])"
    names = {"HF_ENDPOINT", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_TOKEN", "HF_TOKEN_PATH"}
    plain = {name: value for name, value in os.environ.items() if name not in names}

    def run(*models, **env):
        done = subprocess.run([sys.executable, "-c", code, *models], capture_output=True, text=True,
                              env={**plain, "HF_HOME": str(tmp_path / "own"), "HF_ENDPOINT": hub.address, **env})  # fmt: skip
        return done.stdout.split(), done.stderr

    (path,), _ = run("org/private", HF_TOKEN=TOKEN)
    assert path.startswith(str(tmp_path / "own" / "hub"))
    assert {token for _, asked, token, _ in hub.asked if "private" in asked} == {TOKEN}
    hub.clear()
    out, err = run("org/private", "org/small", HF_HUB_OFFLINE="1")
    assert out == [path] and not hub.asked
    assert "hf:org/small is not whole in the cache" in err and "HF_HUB_OFFLINE forbids to download it" in err


# where a model is named --------------------------------------------------------------------------------


class Parrots(Workflow):
    """Three in a row."""

    roles = (Role("first"), Role("second"), Role("third", reply=Tags("answer")))

    async def run(self, ep):
        said = [await ep.act(role.name, ep.task.question) for role in self.roles]
        return Outcome(answer=said[-1].text)


@pytest.fixture(scope="module")
def parrots():
    rows = [{"id": str(i), "question": "Say a word.", "answers": ["word"]} for i in range(4)]
    unitymas.register("hub-parrots", workflow=Parrots, reward=lambda trace, task: float(len(trace.nodes[0].text)), tasks=rows,
                      expert=lambda call: "<answer>word</answer>")  # fmt: skip
    return "hub-parrots"


@pytest.mark.parametrize("name", ["hf:org/small@v1", "org/small@v1"])
def test_a_team_plays_with_it(hub, small, parrots, name, tmp_path, capsys):
    rc = main(
        [
            "eval",
            parrots,
            "--tasks=1",
            "-k=1",
            f"--team={name}",
            f"--out={tmp_path / 'out'}",
            "--max-tokens=3",
        ]
    )
    assert rc == 0 and f"downloading {name if ':' in name else f'hf:{name}'} from" in capsys.readouterr().err
    assert sorted(hub.files_asked()) == sorted(small[0])
    again = unitymas.Team({"*": name}, max_tokens=3)
    assert unitymas.rollout(parrots, again, tasks=1)[0].ended != "error" and len(hub.files_asked()) == len(
        small[0]
    )


def test_groups_inits_and_fixed_players_take_it(hub, small, parrots, tmp_path):
    run = unitymas.train(
        parrots, directory=tmp_path / "run", steps=1, tasks_per_step=2, k=2,
        groups={"main": {"model": "org/small@v1", "slots": 2, "threads": 1, "context": 512}},
        policies={"a": {"group": "main"}, "b": {"group": "main", "init": "hf:org/small", "frozen": True}},
        map={"first": "a", "second": "b", "third": "org/small@v1"},
        players={"max_tokens": 3}, eval={"every": 0}, log={"console": "off"},
    )  # fmt: skip
    assert sorted(hub.files_asked()) == sorted([*small[0], WEIGHTS])  # what both versions share comes once
    (tmp_path / "began").write_bytes(small[0][WEIGHTS])
    began, learned = load_file(tmp_path / "began"), load_file(run.dir / "policies" / "a" / WEIGHTS)
    assert began.keys() == learned.keys() and not all(torch.equal(began[key], learned[key]) for key in began)

    hub.clear()
    again = unitymas.Team(
        f"run:{run.dir}", max_tokens=3
    )  # a policy that learned, a frozen one, and a fixed player
    trace = unitymas.rollout(parrots, again, tasks=1)[0]
    assert trace.ended != "error" and len(trace.nodes) == 3 and not hub.asked
    (run.dir / "policies" / "a").rename(tmp_path / "gone")
    with pytest.raises(FileNotFoundError, match="has no policies/ yet"):
        load_policy(f"run:{run.dir}")


def test_a_warm_start_takes_it(hub, small, parrots, tmp_path):
    out = warmstart(parrots, "org/small@v1", tmp_path / "warm", lr=1e-9)
    assert sorted(hub.files_asked()) == sorted(small[0])
    (tmp_path / "began").write_bytes(small[0][WEIGHTS])
    began, learned = load_file(tmp_path / "began"), load_file(out / WEIGHTS)
    assert all(torch.allclose(began[key], learned[key], atol=1e-6) for key in began)


def test_a_warm_start_asks_for_its_model_before_the_expert_plays(hub, parrots, tmp_path, monkeypatch):
    monkeypatch.setattr("unitymas.trainers.warmstart.expert_traces", None)
    for name, says in (("org/none", "no model at hf:org/none"), ("smolm2", "did you mean 'smollm2'"),
                       ("./nowhere", "there is no such folder")):  # fmt: skip
        with pytest.raises((OSError, ValueError), match=says):
            warmstart(parrots, name, tmp_path / "warm")
    assert not hub.files_asked()


def test_an_adapter_names_its_base_as_the_hub_does(hub, tmp_path):
    """Not by a path of this machine's cache: peft finds the base anywhere."""
    for auto in (False, True):
        decoder = load_decoder(model_path("org/small"), auto)
        decoder.add_adapter("a", 2)
        save_adapter(decoder, "a", tmp_path / f"adapter{auto}")
        config = json.loads((tmp_path / f"adapter{auto}" / "adapter_config.json").read_text())
        assert config["base_model_name_or_path"] == "org/small"


# refusals ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "token", "says"),
    [
        ("org/none", "", "no model at hf:org/none: there is no folder org/none here, and .*/org/none does not exist .*set HF_TOKEN"),
        ("org/none", TOKEN, "no model at hf:org/none: .* does not exist .or your token .* may not read it"),
        ("org/private", "", "no model at hf:org/private: .* does not exist .or is private: set HF_TOKEN"),
        ("org/private", STRANGER, "no model at hf:org/private: .*or your token .* may not read it"),
        ("org/gated", "", "hf:org/gated is gated: accept its terms at .*/org/gated, then set HF_TOKEN"),
        ("org/gated", STRANGER, "hf:org/gated is gated: accept its terms at .*/org/gated, then set HF_TOKEN"),
        ("org/small@v9", "", "hf:org/small@v9: org/small has no revision 'v9'; see .*/org/small/commits/main"),
        ("org/small", "hf_old", "hf:org/small: .* refuses your token .*Invalid credentials.*; renew it, or remove it if"),
    ],
)  # fmt: skip
def test_a_refusal_is_one_line_that_says_what_to_do(hub, name, token, says, monkeypatch):
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    for asks in (model_path, unverified):
        with pytest.raises(FileNotFoundError, match=says) as told:
            asks(name)
        assert "\n" not in str(told.value) and "network" not in str(told.value)
    assert not hub.files_asked()


def test_a_token_opens_what_it_may_read(hub, small, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    for name in ("org/gated", "org/private"):
        assert unverified(name) == "" and same(model_path(name), small[0])


def test_a_hub_that_forbids_everything_is_told_as_such(hub):
    hub.down = 403
    for asks in (model_path, unverified):
        with pytest.raises(
            FileNotFoundError, match="hf:org/small: .* forbids it: .*; set HF_TOKEN to a token that may read"
        ) as told:
            asks("org/small")
        assert "network" not in str(told.value)


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_hub_in_trouble_is_told_as_such(hub, status):
    hub.down = status
    with pytest.raises(
        FileNotFoundError, match=f"could not be downloaded: .*{status}.*Try again later"
    ) as told:
        model_path("org/small")
    assert "\n" not in str(told.value)
    assert str(status) in unverified("org/small")


def test_without_a_network_it_says_so(hub, monkeypatch):
    hub_at = LocalHub(address="http://127.0.0.1:9")
    hub_at.point(monkeypatch, Path("away"))
    with pytest.raises(
        FileNotFoundError, match="could not be downloaded: .*refused. Try again with a network, or bring"
    ) as told:
        model_path("org/small")
    assert "\n" not in str(told.value)
    assert "the hub did not answer: " in unverified("org/small")


# what breaks off ---------------------------------------------------------------------------------------


def test_a_broken_connection_is_taken_up_where_it_broke(hub, small, monkeypatch):
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1 << 12)
    hub.cuts = {WEIGHTS: 1}
    assert same(model_path("org/small"), small[1])
    (rest,) = [part for *_, part in hub.asked if part]
    assert 0 < int(rest.removeprefix("bytes=").rstrip("-")) <= len(small[1][WEIGHTS]) // 2


@pytest.mark.parametrize("name", ["config.json", WEIGHTS])
def test_a_download_that_was_cut_short_never_passes_for_a_model(hub, small, name):
    """The same command completes it, and does not ask for what came whole."""
    hub.cuts, hub.down_after_cut = {name: 1}, 501  # an answer that is not asked for again
    with pytest.raises(FileNotFoundError, match="could not be downloaded: .*501"):
        model_path("org/small")
    assert fetch.cached("org/small") is None
    hub.clear()
    assert same(model_path("org/small"), small[1])
    assert name in hub.files_asked() and len(hub.files_asked()) < len(small[1]) + (name != WEIGHTS)


@pytest.mark.parametrize("reached", [True, False])
def test_a_rest_that_another_program_left_is_completed(hub, small, reached, monkeypatch):
    """Weights and a tokenizer, but no chat template."""
    from huggingface_hub import snapshot_download

    rest = ["config.json", "tokenizer.json", WEIGHTS]
    path = Path(snapshot_download("org/small", allow_patterns=rest))
    hub.clear()
    hub.down = 0 if reached else 503
    assert model_path("org/small") == path
    assert sorted(hub.files_asked()) == (sorted({*small[1]} - {*rest}) if reached else [])


@pytest.mark.parametrize("lacking", ["no weights", "a shard short", "a broken index", "no tokenizer"])
def test_what_a_repository_lacks_is_named(lacking, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    index = tmp_path / "model.safetensors.index.json"
    if lacking == "a shard short":
        index.write_text(json.dumps({"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}))
        (tmp_path / "1.safetensors").touch()
    elif lacking == "a broken index":
        index.write_text('{"weight_map": [')
    elif lacking == "no tokenizer":
        (tmp_path / WEIGHTS).touch()
        (tmp_path / "tokenizer.json").unlink()
    wanted = {"no weights": WEIGHTS, "a shard short": "2.safetensors", "a broken index": "a readable",
              "no tokenizer": "a tokenizer"}  # fmt: skip
    assert fetch.lacks(tmp_path).startswith(wanted[lacking])


# before anything is downloaded -------------------------------------------------------------------------


def test_a_dry_run_of_a_training_asks_for_every_model_and_downloads_none(hub, monkeypatch, capsys):
    def dry_run(*words):
        rc = main(["train", "rag-nq", "--dry-run", "env.data=mini", *words])
        said = capsys.readouterr()
        assert rc or "groups:" in said.out
        assert len(said.err.splitlines()) <= 1
        return rc, said.err

    assert dry_run("--model=org/small") == dry_run("--model=org/small@v1") == (0, "")
    shared = ("--preset=shared", "groups.*.model=tiny")
    for words, says in (
        (["--model=org/none"], "groups.team.model: no model at hf:org/none: "),
        (["--model=org/small@v9"], "hf:org/small@v9: org/small has no revision 'v9'"),
        (["--model=hf:org/gated"], "hf:org/gated is gated: accept its terms at"),
        ([*shared, "policies.*.init=org/none"], "policies.team.init: no model at hf:org/none: "),
        ([*shared, "map.answerer=hf:org/none"], "map.answerer: no model at hf:org/none: "),
        ([*shared, "map.answerer=vllm:org/none"], "map.answerer: no model at hf:org/none: "),
        ([*shared, "map.answerer=run:runs/none"], "map.answerer: no model at runs/none: "),
    ):
        rc, said = dry_run(*words)
        assert rc == 1 and says in said
    for player in ("org/small", "vllm:org/small", "openai:m@http://127.0.0.1:9/v1", "scripted"):
        assert dry_run(*shared, f"map.answerer={player}") == (0, "")
    assert not hub.files_asked()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    rc, said = dry_run("--model=org/small")
    assert rc == 0 and "groups.team.model: org/small is unverified: not whole in the cache" in said
    rc, said = dry_run("--model=./nowhere")
    assert rc == 1 and "groups.team.model: no model at ./nowhere: there is no such folder or file" in said
    rc, said = dry_run("--model=./nowhere", "runtime=ray")  # it may be on the cluster
    assert rc == 0 and "./nowhere is unverified: there is no ./nowhere on this machine" in said


def test_a_dry_run_of_an_evaluation_downloads_nothing(hub, monkeypatch, capsys, tmp_path):
    def dry_run(*team):
        rc = main(
            ["eval", "rag-nq", "--data=mini", "--tasks=3", "-k=2", f"--out={tmp_path}", "--dry-run", *team]
        )
        said = capsys.readouterr()
        assert rc or "3 tasks × 2 = 6 episodes, 0 finished, 6 to play" in said.out
        assert len(said.err.splitlines()) == 1
        return rc, said.err

    monkeypatch.setattr(packaged, "_make", None)
    monkeypatch.setenv("UNITYMAS_HOME", str(tmp_path))
    assert dry_run("--team=org/small", "--temperature=0.5")[1].endswith("downloads it first\n")
    for model in ("minimind2", "answerer=vllm:org/small,*=scripted"):
        assert dry_run("--team", model)[0] == 0
    assert dry_run("--team=scripted", "--baseline=org/small")[0] == 0
    rc, said = dry_run("--team=org/none")
    assert rc == 1 and "no model at hf:org/none" in said
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    rc, said = dry_run("--team=hf:org/small")
    told = "hf:org/small is not on this machine, and playing downloads it first (not whole in the cache"
    assert rc == 0 and told in said and "HF_HUB_OFFLINE forbids to ask the hub" in said
    assert not hub.files_asked()


@pytest.mark.parametrize(
    "name", ["org/a--b", "org/-a", "org/a.git", "org/a..b", "hf:org/a.", "org/" + "a" * 97]
)
def test_a_name_that_the_hub_cannot_have_is_refused_at_once(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "rag-nq", "--dry-run", "env.data=mini", "--model", name]) == 1
    assert (
        f"groups.team.model: {name!r} is no folder here, and can be no model of the hub"
        in capsys.readouterr().err
    )
