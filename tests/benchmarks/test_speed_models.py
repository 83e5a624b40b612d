"""The benchmarks of speed take a model by its name, and hold both sides to the same weights and the same work."""

import sys
from collections.abc import Callable, Iterator

import pytest
import torch

from unitymas.benchmarks.speed.clock import Seconds
from unitymas.benchmarks.speed.controller import collect
from unitymas.benchmarks.speed.models import engine, update
from unitymas.benchmarks.speed.models.beside import trl_trainers
from unitymas.cli.evaluation import parser


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_both_sides_of_the_engine_have_the_named_models_weights() -> None:
    ours, theirs = engine.models(torch.float32, "tiny")
    assert torch.equal(ours.embed, theirs.get_input_embeddings().weight)
    assert ours.shape.vocab == theirs.config.vocab_size != engine.VOCAB
    kinds = engine.requests(ours.shape.vocab, 16)
    assert {name: len(asked) for name, asked in kinds.items()} == {
        "alike": 16,
        "uneven": 16,
        "samples": 16,
        "team": 20,
    }
    assert max(max(prompt) for asked in kinds.values() for prompt, _ in asked) < ours.shape.vocab
    plain = engine.requests()
    assert [len(asked) for asked in plain.values()] == [256, 256, 256, 320]


@pytest.mark.parametrize(
    ("part", "words", "says"),
    [
        (engine, ["--requests", "8", "--repeat", "1", "--batch", "8"], "tiny, bfloat16, batch and slots 8"),
        (collect, ["--episodes", "8", "--rounds", "1", "--slots", "8"], "8 episodes, "),
    ],
)
def test_a_benchmark_of_a_named_model_runs(
    part: object,
    words: list[str],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", "--model", "tiny", "--threads", "1", *words])
    part.main()  # type: ignore[attr-defined]
    assert says in capsys.readouterr().out


def test_each_side_of_the_engine_runs_before_it_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first kernels of a process take longer, on the side that comes first."""
    order: list[str] = []
    real = engine.stopwatch

    def stopwatch(work: Callable[[], None]) -> Seconds:
        order.append("timed")
        return real(work)

    monkeypatch.setattr(engine, "stopwatch", stopwatch)
    for side in ("generate", "serve"):
        monkeypatch.setattr(engine, side, lambda *_, side=side, **__: order.append(side))
    monkeypatch.setattr(
        sys, "argv", ["bench", "--model", "tiny", "--threads", "1", "--requests", "8", "--repeat", "1"]
    )
    engine.main()
    assert order[:2] == ["generate", "serve"] and order.count("timed") == 8


def test_the_update_of_a_named_model() -> None:
    model = update.start_of("tiny", 64)
    samples = update.draw(model.shape.vocab, 8)
    step = update.ours(samples, model.shape.vocab, "float32", 4096, "tiny")
    assert step().processor > 0


def test_torch_takes_the_place_of_the_kernel_of_trl() -> None:
    """A prompt of 5 tokens, its two replies of 3, and a sequence of 4 by itself, each as ordinary causal attention gives them."""
    torch.manual_seed(0)
    heads, kv_heads, dim = 4, 2, 8
    rows = [
        range(5),
        [*range(5), 5, 6, 7],
        [*range(5), 8, 9, 10],
        range(11, 15),
    ]  # what each segment's last token sees
    own = [5, 3, 3, 4]
    query = torch.randn(15, heads, dim)
    key, value = torch.randn(15, kv_heads, dim), torch.randn(15, kv_heads, dim)
    index = torch.tensor([i for row in rows for i in row])
    ends_q = torch.tensor([0, *own]).cumsum(0)
    ends_k = torch.tensor([0, *map(len, rows)]).cumsum(0)
    mine = trl_trainers.segments(query, key[index], value[index], ends_q, ends_k, 5, 8, dim**-0.5)
    expected = []
    for row, n in zip(rows, own, strict=True):
        seen = list(row)
        k, v = (t[seen].repeat_interleave(2, 1).transpose(0, 1) for t in (key, value))
        for place in range(len(seen) - n, len(seen)):
            q = query[seen[place]][:, None]
            scores = (q @ k[:, : place + 1].transpose(1, 2)) * dim**-0.5
            expected.append((scores.softmax(-1) @ v[:, : place + 1]).squeeze(1))
    assert torch.allclose(mine, torch.stack(expected), atol=1e-6)


def test_eval_takes_a_model_by_either_name() -> None:
    assert parser().parse_args(["rag-nq", "--model", "smollm2"]).team == "smollm2"
    assert parser().parse_args(["rag-nq", "--team", "smollm2"]).team == "smollm2"


@pytest.mark.parametrize(
    ("threads", "load", "processors", "told"),
    [(2, 0.3, 2, False), (2, 6.1, 2, True), (1, 6.1, 2, False), (2, 6.1, 16, False), (8, 9.0, 16, True)],
)
def test_an_update_is_not_timed_beside_other_work_in_silence(
    threads: int, load: float, processors: int, told: bool
) -> None:
    assert ("give --threads 1" in update.crowded(threads, load, processors)) == told
