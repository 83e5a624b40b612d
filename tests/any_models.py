"""Small random models of many architectures, for the tests."""

from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

SIZES = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LAYERS = ["sliding_attention", "full_attention"]
EXPERTS = {"num_experts_per_tok": 2}
PACKED: dict[str, dict[str, Any]] = {
    "gemma3_text": {"head_dim": 16, "sliding_window": 8, "layer_types": LAYERS, "query_pre_attn_scalar": 16},
    "gemma2": {"head_dim": 16, "sliding_window": 8, "layer_types": LAYERS, "query_pre_attn_scalar": 16,
               "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "qwen3": {"head_dim": 16},
    "qwen3_moe": {"head_dim": 16, "moe_intermediate_size": 16, "num_experts": 4, **EXPERTS},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 16, "do_layer_norm_before": False},
    "phi3": {},
    "phi": {},
    "olmo2": {},
    "granite": {"attention_multiplier": 0.3, "logits_scaling": 3.0, "embedding_multiplier": 2.0, "residual_multiplier": 0.7},
    "gpt_oss": {"head_dim": 16, "num_local_experts": 4, **EXPERTS, "sliding_window": 8, "layer_types": LAYERS,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "mistral": {"sliding_window": 8},
    "llama4_text": {"head_dim": 16, "attention_chunk_size": 8, "num_local_experts": 2, "intermediate_size_mlp": 48,
                    "no_rope_layers": [1, 0], "floor_scale": 8, "attn_scale": 0.5},
    "deepseek_v3": {"num_key_value_heads": 4, "n_routed_experts": 4, **EXPERTS, "moe_intermediate_size": 16, "n_group": 1,
                    "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
                    "v_head_dim": 12, "first_k_dense_replace": 1},
    "gpt2": {"num_key_value_heads": 4, "n_positions": 128, "n_embd": 32, "n_head": 4, "n_layer": 2},
    "gemma3n_text": {"head_dim": 16, "num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": LAYERS * 2,
                     "sliding_window": 8, "intermediate_size": [48] * 4, "laurel_rank": 4, "altup_num_inputs": 2,
                     "activation_sparsity_pattern": [0.9, 0.0, 0.0, 0.0], "final_logit_softcapping": 3.0,
                     "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 97},
    "gemma4_text": {"head_dim": 8, "global_head_dim": 16, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
                    "num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": LAYERS * 2, "sliding_window": 8,
                    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 97},
}  # fmt: skip
WHOLE: dict[str, dict[str, Any]] = {
    "mamba": {"state_size": 8},
    "rwkv": {"attention_hidden_size": 32},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "mamba_d_state": 8},
    "falcon_h1": {
        "mamba_d_ssm": 64,
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_d_state": 16,
        "mamba_n_groups": 1,
        "mamba_chunk_size": 16,
        "head_dim": 8,
        "lm_head_multiplier": 0.5,
    },
    "recurrent_gemma": {
        "lru_width": 32,
        "attention_window_size": 8,
        "block_types": ["recurrent", "attention"],
    },
    "bloom": {"n_head": 4, "n_layer": 2},
    "bamba": {
        "attn_layer_indices": [1],
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_d_state": 16,
        "mamba_n_groups": 1,
        "mamba_chunk_size": 16,
    },
    "diffllama": {},
}
KINDS = {**PACKED, **WHOLE}
OTHERS: dict[str, dict[str, Any]] = {
    "falcon": {"alibi": True, "new_decoder_architecture": False},
    "afmoe": {"head_dim": 16, "num_experts": 4, **EXPERTS, "moe_intermediate_size": 16, "sliding_window": 8,
              "layer_types": LAYERS, "num_dense_layers": 1},
    "minimax": {"head_dim": 16, "layer_types": ["linear_attention", "full_attention"], "num_local_experts": 4, **EXPERTS, "block_size": 16},
}  # fmt: skip
"""Models that only some tests use."""


def network(kind: str, seed: int = 0, spread: float = 0.1, **sizes: Any) -> Any:
    """A model of transformers with random weights, biases and norms."""
    torch.manual_seed(seed)
    config = CONFIG_MAPPING[kind](**{**SIZES, **{**KINDS, **OTHERS}[kind], **sizes})
    net = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(spread * torch.randn_like(parameter))
    return net


def tokenizer_of(letter: str = "w", words: int = 60) -> Any:
    """A tokenizer whose words are w0, w1 …; with another letter or number of words, another tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    known = ["<pad>", "<s>", "</s>", ":", *(f"{letter}{i}" for i in range(words))]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(known)}, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<pad>"
    )
    tokenizer.chat_template = "{% for m in messages %}<s> {{ m['content'] }} </s> {% endfor %}{% if add_generation_prompt %}<s> :{% endif %}"
    return tokenizer


def folder(kind: str, path: Path, letter: str = "w", words: int = 60, seed: int = 0, **sizes: Any) -> str:
    """Write a model of an architecture with its tokenizer, as the hub would hold it."""
    net = network(kind, seed, 0.2, **{"vocab_size": words + 4, **sizes})
    net.save_pretrained(path)
    tokenizer_of(letter, words).save_pretrained(path)
    return str(path)
