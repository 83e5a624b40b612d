"""Files for vLLM: adapters are looked at before vLLM or a model is loaded, and weights are as precise as it needs them."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from unitymas.agents import model_path
from unitymas.agents.engines import built_in
from unitymas.agents.engines.engine import EngineOrder
from unitymas.agents.engines.vllm.vllm_engine import VLLMEngine
from unitymas.agents.engines.vllm.vllm_setup import adapter_rank
from unitymas.agents.model.weights import load_model, load_tokenizer


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


def test_a_model_is_written_for_vllm_in_the_precision_that_it_generates_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, tokenizer = load_model(model_path("tiny")), load_tokenizer(model_path("tiny"))
    kinds: set[torch.dtype] = set()

    def look(folder: str, *_: object, **__: object) -> None:
        kinds.update(tensor.dtype for tensor in load_file(Path(folder) / "model.safetensors").values())
        raise InterruptedError("seen")

    monkeypatch.setattr(built_in, "VLLMEngine", look)
    with pytest.raises(InterruptedError):
        built_in.vllm_engine(EngineOrder(model=model, tokenizer=tokenizer, precision="bfloat16"))
    assert kinds == {torch.bfloat16}
