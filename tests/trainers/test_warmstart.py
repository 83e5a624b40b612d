"""The warm start: what is learned, token by token, what comes of it, and how a run of it begins."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

import unitymas.agents
from unitymas.agents.model.weights import load_model, save_model
from unitymas.agents.names import prompts_of
from unitymas.agents.roles import Role
from unitymas.agents.team import Team
from unitymas.cli import main
from unitymas.cli.training import train_main
from unitymas.envs.core.workflow import Outcome, Workflow
from unitymas.envs.registry import make_arena, register, unregister
from unitymas.trainers.config.group_settings import has_bfloat16
from unitymas.trainers.config.presets import origin_of, small_settings
from unitymas.trainers.config.resolve import resolve
from unitymas.trainers.group.learning.parameters import Parameters
from unitymas.trainers.warmstart import WarmStart, expert_traces, fine_tune, samples_of, tokenized, warmstart

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


def nll(folder, samples):
    """Mean negative log-likelihood of the tokens of the replies, by transformers' own model."""
    model, total = AutoModelForCausalLM.from_pretrained(folder).float(), 0.0
    for sample in samples:
        ids = torch.tensor([*sample.prompt.tolist(), *sample.reply.tolist()])
        with torch.no_grad():
            logp = torch.log_softmax(model(ids[None]).logits[0, len(sample.prompt) - 1 : -1], -1)
        total -= logp.gather(1, ids[len(sample.prompt) :, None]).sum().item()
    return total / sum(s.n_tokens for s in samples)


def test_a_sample_ends_with_the_token_that_ends_a_turn():
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    traces = expert_traces("rag-nq", 3, "mini", prompts="short")
    samples = samples_of(traces, tokenizer)
    acts = [act for trace in traces for act in trace.acts()]
    assert [s.role for s in samples] == [a.role for a in acts] and len({s.id for s in samples}) == len(
        samples
    )
    for sample, act in zip(samples, acts, strict=True):
        *words, last = sample.reply.tolist()
        assert tokenizer.decode(words) == act.text and last == tokenizer.eos_token_id
    second = samples[0].reply[1]
    (cut, *_) = samples_of(
        traces, tokenizer, {int(second)}
    )  # a template may end a turn with another token than eos
    assert cut.reply.tolist() == samples[0].reply[:2].tolist()


@pytest.mark.parametrize("rank", [0, 4])
def test_the_loss_is_the_likelihood_of_replies_and_falls(rank, tmp_path):
    """The first step's loss, before anything has changed, is what the plain forward pass says; an adapter is merged."""
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    samples = samples_of(expert_traces("math-deepscaler", 12, "mini", prompts="short"), tokenizer)[:16]
    before = nll(TINY, samples)
    how = WarmStart(epochs=6, batch=len(samples), lora=rank, precision="float32")
    learned, losses = fine_tune(load_model(TINY), samples, how, lambda *_: None)
    assert len(losses) == 6 and losses[0] == pytest.approx(before, abs=1e-4)
    assert nll(save_model(learned, tmp_path), samples) < losses[-1] < before
    assert not any(".adapters." in name for name, _ in learned.named_parameters())


@pytest.mark.parametrize("rank", [0, 4])
def test_a_large_model_computes_activations_again_and_no_bit_changes(rank, monkeypatch):
    samples = samples_of(
        expert_traces("rag-nq", 4, "mini", prompts="short"), AutoTokenizer.from_pretrained(TINY)
    )
    how = WarmStart(epochs=2, batch=4, lora=rank, precision="bfloat16")
    asked, logprobs = [], Parameters.logprobs

    def noted(self, rows, dtype, checkpointing=False):
        asked.append(checkpointing)
        return logprobs(self, rows, dtype, checkpointing)

    monkeypatch.setattr(Parameters, "logprobs", noted)
    plain, losses = fine_tune(load_model(TINY), samples, how, lambda *_: None)
    assert not any(asked)
    monkeypatch.setattr("unitymas.agents.basics.machine.SMALL", 0)
    again, same = fine_tune(load_model(TINY), samples, how, lambda *_: None)
    assert any(asked) and same == losses
    for mine, own in zip(plain.parameters(), again.parameters(), strict=True):
        assert torch.equal(mine, own)


def test_the_same_seed_gives_the_same_model_and_parts_of_a_pass_count():
    samples = samples_of(
        expert_traces("rag-nq", 8, "mini", prompts="short"), AutoTokenizer.from_pretrained(TINY)
    )
    how = WarmStart(epochs=0.5, batch=4, precision="float32", seed=3)
    one, two = (fine_tune(load_model(TINY), samples, how, lambda *_: None) for _ in range(2))
    assert len(one[1]) == len(samples) // 8 and one[1] == two[1]
    other = fine_tune(
        load_model(TINY),
        samples,
        WarmStart(epochs=0.5, batch=4, precision="float32", seed=4),
        lambda *_: None,
    )
    assert other[1] != one[1]
    how = WarmStart(epochs=9, draws=9, batch=4, precision="float32")  # 9 replies, in batches of 4
    assert len(fine_tune(load_model(TINY), samples, how, lambda *_: None)[1]) == 3


def test_teams_and_runs_of_it_choose_the_prompts_that_it_learned(tmp_path):
    out = warmstart(
        "rag-nq",
        "tiny",
        tmp_path / "warm",
        tasks=4,
        data="mini",
        prompts="full",
        args={"top_k": 1},
        precision="float32",
    )
    told = json.loads((out / "warmstart.json").read_text())
    assert (told["env"], told["model"], told["traces"], told["replies"], len(told["losses"])) == (
        "rag-nq",
        "tiny",
        4,
        8,
        1,
    )
    assert prompts_of(str(out)) == Team(str(out)).prompts == "full"
    (out / "prompts.yaml").write_text(yaml.safe_dump({"prompts": "short"}))
    assert prompts_of(str(out)) == Team(str(out)).prompts == "short"
    config = resolve("rag-nq", preset_name="shared", overrides=[f"groups.*.model={out}", "env.data=mini"])
    assert config.env.prompts == "short" and origin_of(str(out)) == "tiny"
    mixed = ["env.data=mini", f"groups.decomposer.model={out}", "groups.answerer.model=./nowhere"]
    assert resolve("rag-nq", preset_name="separate", overrides=mixed).env.prompts == "short"


def test_prompts_of_ones_own_travel_with_the_model(tmp_path):
    (tmp_path / "mine.yaml").write_text("base: short\nanswerer:\n  system: Be brief.\n")
    settings = {"tasks": 2, "data": "mini", "precision": "float32"}
    out = warmstart("rag-nq", "tiny", tmp_path / "warm", prompts=str(tmp_path / "mine.yaml"), **settings)
    (tmp_path / "mine.yaml").unlink()
    config = resolve("rag-nq", preset_name="shared", overrides=[f"groups.*.model={out}", "env.data=mini"])
    arena = make_arena("rag-nq", data="mini", prompts=config.env.prompts)
    assert arena.roles["answerer"].system == "Be brief."
    (out / "prompts.yaml").write_text("prompts: [")
    with pytest.raises(
        ValueError, match="prompts.yaml: says which prompts the model learned, and cannot be read"
    ):
        prompts_of(str(out))


def test_a_workflow_whose_roles_say_themselves_what_they_are_told(tmp_path):
    class Echo(Workflow):
        roles = (Role("speaker", system="Repeat."),)

        async def run(self, ep):
            return Outcome(answer=(await ep.act("speaker", ep.task.question)).value)

    rows = [{"id": str(n), "question": f"{n}?", "answers": [f"{n}?"]} for n in range(3)]
    register("warm-echo", workflow=Echo, tasks=rows, reward="unitymas.rewards.outcome:AnswerF1", headline="f1",
             expert=lambda call: call.task.view["question"])  # fmt: skip
    try:
        out = warmstart("warm-echo", "tiny", tmp_path / "warm", precision="float32")
    finally:
        unregister("warm-echo")
    assert json.loads((out / "warmstart.json").read_text())["replies"] == 3
    assert not (out / "prompts.yaml").exists() and prompts_of(str(out)) == "full"


def test_a_warm_started_small_model_learns_with_the_settings_of_small_models(tmp_path):
    (tmp_path / "warmstart.json").write_text(json.dumps({"model": "minimind2"}))
    for model in ("minimind2", str(tmp_path)):
        config = resolve(
            "rag-nq", preset_name="shared", overrides=[f"groups.*.model={model}", "env.data=mini"]
        )
        assert (
            config.tasks_per_step == small_settings()["tasks_per_step"]
            and config.policies["team"].algorithm == {"name": "rloo", "kl_loss": 0.1}
            and config.policies["team"].reference
            and config.groups["team"].precision == ("bfloat16" if has_bfloat16() else "float32")
        )
    plain = resolve("rag-nq", preset_name="shared", overrides=["groups.*.model=./elsewhere", "env.data=mini"])
    assert plain.tasks_per_step != config.tasks_per_step
    lora = resolve("rag-nq", preset_name="lora", overrides=["groups.*.model=smollm2", "env.data=mini"])
    assert {p.learning.lr for p in lora.policies.values()} == {2e-4}
    assert (lora.steps, lora.tasks_per_step) == (20, 12)


def test_an_environment_whose_expert_solves_nothing_is_told(monkeypatch):
    with pytest.raises(ValueError, match="the scripted expert solved none of these tasks"):
        expert_traces("rag-nq", 2, "mini", budget={"requests": 1})


def test_train_names_its_model_and_warms_it_first(tmp_path, capsys):
    run, own = tmp_path / "run", ["rag-nq", "env.data=mini", "env.args.top_k=1", "env.size=8", "eval.tasks=2"]
    size = ["steps=1", "tasks_per_step=1", "k=2", "starved=false", "log.console=off"]
    assert train_main([*own, *size, "--model", "tiny", "--warm", "0.01", "--dir", str(run)]) == 0
    told = json.loads((run / "warm-start" / "warmstart.json").read_text())
    assert (told["epochs"], told["traces"], len(told["losses"])) == (0.01, 8, 1)
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert (
        config["groups"]["team"]["model"] == str(run / "warm-start") and config["env"]["prompts"] == "short"
    )
    with pytest.raises(SystemExit):
        train_main([*own, "--model", "tiny", "--warm", "-1"])
    assert main(["train", *own, "--model", "minimnd2", "--dry-run"]) == 1
    assert (
        "groups.team.model: no model is called 'minimnd2'; did you mean 'minimind2'"
        in capsys.readouterr().err
    )
    separate = ["--preset", "separate", "groups.answerer.model=minimind2"]
    assert main(["train", *own, *separate, "--warm", "1", "--dir", str(tmp_path / "two")]) == 1
    assert "--warm: fine-tunes one model, and this run has minimind2, tiny" in capsys.readouterr().err
    assert not (tmp_path / "two").exists()


def test_a_folder_that_cannot_be_written_is_refused_before_the_wait(tmp_path, monkeypatch):
    monkeypatch.setattr("unitymas.trainers.warmstart.expert_traces", lambda *a, **k: pytest.fail("it began"))
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(OSError, match="file"):
            warmstart("mask-hotpotqa", "tiny", out, data="mini")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
