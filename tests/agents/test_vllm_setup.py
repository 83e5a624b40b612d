"""What is checked of vLLM before it starts, where it is not installed too."""

import pytest

from unitymas.agents.basics import hints
from unitymas.agents.engines.vllm import vllm_setup
from unitymas.agents.engines.vllm.vllm_setup import base_options, check_version
from unitymas.trainers.config.resolve import resolve
from unitymas.trainers.config.schema import ConfigError

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
        ({"transfer": "nccl"}, "transfer=nccl sends from a GPU, and the policies learn on 'auto': set groups.*device=cuda"),
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


def test_truncated_sampling_is_trained_where_masks_are_told():
    policies = {"*": {"sampling": {"top_p": 0.9}}}
    with pytest.raises(ConfigError, match="engine_options.return_sampling_mask=true"):
        resolve("mask-hotpotqa", preset_name="shared", policies=policies, **VLLM)
    group = {"engine": "vllm", "engine_options": {"return_sampling_mask": True}}
    config = resolve("mask-hotpotqa", preset_name="shared", policies=policies, groups={"*": group})
    assert next(iter(config.groups.values())).engine_options == {"return_sampling_mask": True}
