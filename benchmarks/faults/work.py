"""Work of the runs that are killed: a team of two roles on a tiny random model, in deterministic mode."""

from __future__ import annotations

from pathlib import Path

from ...agents.roles import Choice, Role
from ...envs.core.tasks import Task
from ...envs.core.trace import Trace
from ...envs.core.workflow import Episode, Outcome, Workflow
from ...envs.registry import list_envs, register
from ...trainers.config.reader import ConfigTree

ID = "pair-under-fire"
WORDS = ("w1", "w2", "w3", "w4")


class PairUnderFire(Workflow):
    """Team of two roles, which reply with a word each. The second word is the answer."""

    roles = (Role("first", reply=Choice(*WORDS)), Role("second", reply=Choice(*WORDS)))

    async def run(self, ep: Episode) -> Outcome:
        """Ask both."""
        one = await ep.act("first", f"w9 {ep.task.question}")
        two = await ep.act("second", f"w8 {ep.task.question} {one.text}")
        return Outcome(answer=two.value)


def right(trace: Trace, task: Task) -> float:
    """Reward the answer."""
    return float((trace.outcome or {}).get("answer") in task.reference["answers"])


def register_pair() -> None:
    """Register the environment in this process."""
    if ID not in list_envs():
        rows = [{"id": f"t{i}", "question": f"w{20 + i}", "answers": [WORDS[i % 4]]} for i in range(8)]
        register(ID, workflow=PairUnderFire, reward=right, tasks=rows)


def make_model(folder: Path) -> str:
    """Write a random two-layer Llama with a tokenizer of 64 words. Return its path."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, PreTrainedTokenizerFast

    from ...agents.model.weights import from_config, save_model

    words = {word: i for i, word in enumerate(["<pad>", "<s>", "</s>", ":", *(f"w{i}" for i in range(60))])}
    inner = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<pad>"
    )
    tokenizer.chat_template = "{% for m in messages %}<s> {{ m['content'] }} </s> {% endfor %}{% if add_generation_prompt %}<s> :{% endif %}"
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2,
        pad_token_id=0, initializer_range=0.3,
    )  # fmt: skip
    return str(save_model(from_config(config, seed=1), folder, tokenizer))


def settings(model: str, kind: str, steps: int, recipe: str) -> ConfigTree:
    """Return the config of a run: two policies, one with a critic, in two groups, or for kills of ranks in one group."""
    if kind == "engine":
        return _with_vllm(steps, recipe)
    ranks = 2 if kind == "rank" else 1
    own = {"learning": {"lr": 1e-2}, "sampling": {"temperature": 5.0, "max_tokens": 2}}
    group = {"model": model, "slots": 4, "threads": 1, "ranks": ranks}
    groups = {"one": group} if ranks > 1 else {"one": group, "two": group}
    return {
        "steps": steps, "tasks_per_step": 2, "k": 4, "minibatches": 2, "starved": False, "deterministic": True,
        "recipe": recipe, "checkpoint_every": 2, "restarts": 99, "restart_pause": 0.1, "eval": {"every": 2, "tasks": 2},
        "log": {"console": "off", "traces_every": 1}, "groups": groups, "map": {"first": "a", "second": "b"},
        "runtime": "ray" if kind in ("group", "ray-controller") else "local",
        "ray": {"address": "local"},  # its own Ray, apart from others on this machine
        "policies": {"a": {"group": "one", **own}, "b": {"group": list(groups)[-1], "algorithm": {"name": "grpo"}, **own}},
    }  # fmt: skip


def _with_vllm(steps: int, recipe: str) -> ConfigTree:
    """Return the config of a run with vLLM, which does not guarantee equal bits, and the embedded tiny model."""
    options = {"enforce_eager": True}
    policy = {
        "algorithm": {"name": "grpo"},
        "learning": {"lr": 1e-4},
        "sampling": {"temperature": 2.0, "max_tokens": 4},
    }
    return {
        "steps": steps, "tasks_per_step": 2, "k": 4, "minibatches": 1, "starved": False, "recipe": recipe,
        "checkpoint_every": 2, "restarts": 99, "restart_pause": 0.1, "eval": {"every": 0, "tasks": 2},
        "log": {"console": "off", "traces_every": 1}, "policies": {"team": policy},
        "groups": {"main": {"model": "tiny", "engine": "vllm", "context": 256, "threads": 1, "engine_options": options}},
    }  # fmt: skip
