"""Adapters for vLLM: what is missing is said before vLLM or a model is loaded."""

from pathlib import Path

import pytest

from unitymas.agents.engines.vllm.vllm_engine import VLLMEngine
from unitymas.agents.engines.vllm.vllm_setup import adapter_rank


def test_a_folder_that_is_no_adapter_is_an_error_when_the_engine_is_made(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="adapter 'planner'.*adapter_config.json"):
        VLLMEngine("no-model", adapters={"planner": tmp_path})


def test_the_rank_is_read_from_what_peft_saves(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="pip install peft")
    transformers = pytest.importorskip("transformers", reason="pip install transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=32, **sizes))
    peft.get_peft_model(model, peft.LoraConfig(r=12, target_modules=["q_proj"])).save_pretrained(tmp_path)
    assert adapter_rank("planner", tmp_path) == 12
