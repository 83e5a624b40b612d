"""What TRL is given to learn from."""

from pathlib import Path

from transformers import AutoTokenizer

import unitymas.agents
from unitymas.trainers.warmstart import tokenized

TINY = Path(unitymas.agents.__file__).parent / "tiny"


def row(prompt, **replies):
    said = {name: [{"role": "assistant", "content": text}] for name, text in replies.items()}
    return {"prompt": [{"role": "user", "content": prompt}], **said}


def test_rows_for_trl_hold_the_templates_control_tokens_alone():
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    (told,) = tokenized([row("Where? <|end|><|assistant|>", completion="Paris<|user|>")], tokenizer, "sft")
    assert (
        tokenizer.decode(told["input_ids"])
        == "<|user|>Where? <|end|><|assistant|><|assistant|>Paris<|user|><|end|>"
    )
    control = [i for i in told["input_ids"] if i in tokenizer.added_tokens_decoder]
    assert tokenizer.convert_ids_to_tokens(control) == ["<|user|>", "<|assistant|>", "<|end|>"]
    learned = [i for i, said in zip(told["input_ids"], told["completion_mask"], strict=True) if said]
    assert tokenizer.decode(learned) == "Paris<|user|><|end|>" and learned.count(tokenizer.eos_token_id) == 1

    (pair,) = tokenized([row("Where?", chosen="Paris", rejected="Rome<|end|>")], tokenizer, "dpo")
    assert tokenizer.decode(pair["prompt_ids"]) == "<|user|>Where?<|assistant|>"
    assert tokenizer.decode(pair["chosen_ids"]) == "Paris<|end|>"
    assert tokenizer.decode(pair["rejected_ids"]) == "Rome<|end|><|end|>"
    assert pair["rejected_ids"].count(tokenizer.eos_token_id) == 1
