"""What is checked of vLLM before it starts, where it is not installed too."""

import pytest

from unitymas.agents.basics import hints
from unitymas.agents.engines.sampling import SamplingParams
from unitymas.agents.engines.vllm import vllm_setup
from unitymas.agents.engines.vllm.vllm_sampling import to_vllm
from unitymas.agents.engines.vllm.vllm_setup import base_options, check_version
from unitymas.trainers.config.plan import make_arenas, placed, plan
from unitymas.trainers.config.resolve import resolve
from unitymas.trainers.config.schema import ConfigError
from unitymas.trainers.group.cluster import asked, beside, with_engine_gpus

VLLM = {"groups": {"*": {"engine": "vllm"}}}


@pytest.mark.parametrize("version", ["0.31.2", "0.9", "0.6.3.post1"])
def test_a_version_that_is_too_old_is_refused(version, monkeypatch):
    with pytest.raises(ImportError, match=rf"vLLM {version} is too old.*pip install 'vllm>=0\.32'"):
        check_version(version)
    monkeypatch.setattr(vllm_setup, "installed", lambda: version)
    monkeypatch.setattr("unitymas.trainers.config.resolve.installed", lambda: version)
    with pytest.raises(ConfigError, match=rf"groups\.\w+\.engine: vLLM {version} is too old"):
        resolve("mask-hotpotqa", preset_name="shared", **VLLM)


def test_a_newer_version_is_told_of_once(capsys):
    hints.say_once.cache_clear()
    for version in ("0.32.0", "0.32.7+cpu", "0.99.1", "0.99.1", "dev"):
        check_version(version)
    assert capsys.readouterr().err.count("vLLM 0.99.1 is newer than 0.32") == 1
    hints.say_once.cache_clear()
    with pytest.raises(ImportError, match="pip install 'unitymas\\[vllm\\]'"):
        check_version("")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"transfer": "nccl"}, "transfer=nccl sends from a GPU, and the policies learn on 'auto': set groups.*device=cuda:1"),
        ({"transfer": "ipc"}, "transfer=ipc sends from a GPU, and the policies learn on 'auto': set groups.*device=cuda, or"),
        ({"transfer": "pigeon"}, "transfer='pigeon' is none of shared, ipc, nccl, files"),
        ({"worker_extension_cls": "mine.Loader"}, "worker_extension_cls is the engine's own"),
        ({"weight_transfer_config": {"backend": "nccl"}}, "weight_transfer_config is the engine's own"),
        ({"logprobs_mode": "raw_logits"}, "logprobs_mode must stay processed_logprobs"),
        ({"dtype": "bfloat16"}, r"engine_options.dtype follows from groups.\*.precision; leave it out"),
        ({"max_num_seqs": 3}, r"engine_options.max_num_seqs follows from groups.\*.slots"),
    ],
)  # fmt: skip
def test_options_that_are_the_engines_own_are_refused_by_name(options, says):
    with pytest.raises(ConfigError, match=says):
        resolve(
            "mask-hotpotqa", preset_name="shared", groups={"*": {"engine": "vllm", "engine_options": options}}
        )
    assert base_options("shared", {"enforce_eager": True})["enable_prefix_caching"] is True


@pytest.mark.parametrize(
    ("device", "options", "says"),
    [
        ("cuda", {"transfer": "nccl"}, r"cuda:0 while vLLM takes 1 from .* set groups.\*.device=cuda:1"),
        (
            "cuda:3",
            {"transfer": "nccl", "tensor_parallel_size": 4, "data_parallel_size": 2},
            r"device=cuda:8",
        ),
        ("cuda", {"transfer": "ipc", "tensor_parallel_size": 2}, "memory of one GPU, .* vLLM takes 2 "),
        ("cuda:1", {"transfer": "ipc"}, "learn on cuda:1"),
    ],
)
def test_a_transfer_that_the_gpus_do_not_allow_is_refused(device, options, says):
    """NCCL refuses two ranks on one GPU, and a handle of another GPU's memory cannot be opened."""
    group = {"engine": "vllm", "engine_options": options, "device": device}
    with pytest.raises(ConfigError, match=says):
        resolve("mask-hotpotqa", preset_name="shared", groups={"*": group})


@pytest.mark.parametrize(
    ("device", "options"),
    [("cuda:4", {"transfer": "nccl", "tensor_parallel_size": 4}), ("cuda", {"transfer": "ipc"}), ("cuda", {"tensor_parallel_size": 2})],
)  # fmt: skip
def test_a_transfer_that_the_gpus_allow_is_taken(device, options):
    group = {"engine": "vllm", "engine_options": options, "device": device}
    assert resolve("mask-hotpotqa", preset_name="shared", groups={"*": group}).groups


def test_vllm_over_several_gpus_is_given_them_by_ray(tmp_path):
    def placed_spec(**group):
        config = resolve(
            "mask-hotpotqa", preset_name="shared", runtime="ray", env={"data": "mini"}, groups={"*": {"engine": "vllm", **group}}
        )  # fmt: skip
        (spec,) = placed(plan(config, make_arenas(config)[0]), tmp_path).values()
        return spec

    two = {"tensor_parallel_size": 2}
    spec = placed_spec(device="cuda", replicas=3, engine_options=two)
    assert spec.gpus == 2 and beside(spec) == [2, 2]
    assert asked({"team": spec}) == "team 0 CPUs, 2 GPUs and 2 more of 2 GPUs each"
    spec = placed_spec(device="cuda:2", engine_options={"transfer": "nccl", **two})
    assert spec.gpus == 3 and beside(spec) == []
    with pytest.raises(ConfigError, match=r"gpus: Ray would give .* 1, and .* take 2; set it to 2"):
        placed_spec(device="cuda", gpus=1, engine_options=two)
    with pytest.raises(ConfigError, match=r"transfer: a further replica has no GPU beside vLLM's"):
        placed_spec(device="cuda:1", replicas=2, engine_options={"transfer": "nccl"})


@pytest.mark.parametrize(
    ("group", "own", "more"),
    [
        ({}, 1, []),
        ({"replicas": 3, "engine_options": {"tensor_parallel_size": 2}}, 2, [2, 2]),
        ({"replicas": 2, "gpus": 0}, 0, []),
        ({"replicas": 2, "gpus": 1}, 1, [1]),
        ({"gpus": 0, "engine_options": {"tensor_parallel_size": 2}}, 0, []),
        ({"device": "cpu"}, 0, []),
        ({"engine": "torch"}, 0, []),
    ],
)
@pytest.mark.parametrize("there", [0, 8])
def test_vllm_on_auto_is_given_gpus_by_ray_if_there_are_any(tmp_path, monkeypatch, there, group, own, more):
    """Its policies learn on the CPU, and Ray hides all GPUs from an actor that reserves none."""
    ray = pytest.importorskip("ray")
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 4.0, **({"GPU": there} if there else {})})
    config = resolve(
        "mask-hotpotqa", preset_name="shared", runtime="ray", env={"data": "mini"}, groups={"*": {"engine": "vllm", **group}}
    )  # fmt: skip
    (spec,) = with_engine_gpus(placed(plan(config, make_arenas(config)[0]), tmp_path)).values()
    if not (there or group.get("gpus")):
        own, more = 0, []
    assert spec.device == "cpu" and (spec.gpus, beside(spec)) == (own, more)


def test_vllm_on_auto_needs_all_gpus_that_it_takes():
    group = {"engine": "vllm", "gpus": 1, "engine_options": {"tensor_parallel_size": 2}}
    with pytest.raises(ConfigError, match=r"gpus: Ray would give .* 1, and .* take 2; set it to 2"):
        resolve("mask-hotpotqa", preset_name="shared", runtime="ray", groups={"*": group})


def test_truncated_sampling_is_trained_where_masks_are_told():
    policies = {"*": {"sampling": {"top_p": 0.9}}}
    with pytest.raises(ConfigError, match="engine_options.return_sampling_mask=true"):
        resolve("mask-hotpotqa", preset_name="shared", policies=policies, **VLLM)
    group = {"engine": "vllm", "engine_options": {"return_sampling_mask": True}}
    with pytest.raises(
        ConfigError, match=r"policies.team.sampling.top_k: .*return_sampling_mask needs one.*top_k: 1000"
    ):
        resolve("mask-hotpotqa", preset_name="shared", policies=policies, groups={"*": group})
    policies["*"]["sampling"]["top_k"] = 1000
    config = resolve("mask-hotpotqa", preset_name="shared", policies=policies, groups={"*": group})
    assert next(iter(config.groups.values())).engine_options == {"return_sampling_mask": True}


def test_a_temperature_that_vllm_would_change_is_refused():
    """It raises those below 0.01, and training would compute log-probs of another distribution."""
    with pytest.raises(ValueError, match=r"temperature=0.005: vLLM would sample at 0.01"):
        to_vllm(SamplingParams(temperature=0.005), 9, (), masks=False, untracked=False)


def test_a_learned_prefix_is_refused_before_vllm_starts():
    with pytest.raises(ConfigError, match=r"adapter.tokens: vLLM serves LoRA and no learned prefixes"):
        resolve("mask-hotpotqa", preset_name="shared", policies={"*": {"adapter": {"tokens": 4}}}, **VLLM)
