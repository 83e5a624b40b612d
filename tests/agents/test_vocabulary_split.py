"""A vocabulary that several ranks share gives the log-probs, entropies and gradients of a whole one.

The ranks are threads of this process, with torch's process group for threads. Real ranks: tests/trainers/test_ranks.py.
"""

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.multi_threaded_pg import _install_threaded_pg, _uninstall_threaded_pg

from unitymas.agents.model import vocabulary_split
from unitymas.agents.model.logprobs import Support, logprobs_entropy
from unitymas.agents.model.vocabulary_split import VocabularyRanks, split_embedding, split_logprobs

RANKS, WORDS, WIDTH = 3, 20, 8
LENGTHS = (5, 0, 9)
"""Tokens of each rank: one has none."""


@pytest.fixture
def threads() -> Iterator[Callable[[Callable[[int], None]], None]]:
    """Run a function as every rank at once."""
    _install_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    store = dist.HashStore()

    def run(work: Callable[[int], None]) -> None:
        errors: list[BaseException] = []

        def rank(index: int) -> None:
            try:
                dist.init_process_group("threaded", rank=index, world_size=RANKS, store=store)
                work(index)
                dist.destroy_process_group()
            except BaseException as error:
                errors.append(error)

        workers = [threading.Thread(target=rank, args=(index,), daemon=True) for index in range(RANKS)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(60)
        assert not errors and not any(worker.is_alive() for worker in workers)

    try:
        yield run
    finally:
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        _uninstall_threaded_pg()


@pytest.mark.parametrize("at_once", [WORDS * RANKS * 2, 1 << 22])
def test_a_shared_vocabulary_computes_what_a_whole_one_does(
    at_once: int, threads: Callable[[Callable[[int], None]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With temperatures and allowed words, a few tokens at a time and all at once."""
    monkeypatch.setattr(vocabulary_split, "AT_ONCE", at_once)
    chance = torch.Generator().manual_seed(0)
    start = torch.randn(WORDS, WIDTH, generator=chance)
    ids, targets = ([torch.randint(0, WORDS, (n,), generator=chance) for n in LENGTHS] for _ in range(2))
    heat = [torch.rand(n, generator=chance).round(decimals=1) for n in LENGTHS]  # 0 counts as 1
    scales = [torch.randn(2, n, generator=chance) for n in LENGTHS]
    first, last = int(targets[0][1]), int(targets[0][4])
    supports = [
        Support.of([None, [first, 3, 19], [int(targets[0][2])], None, [*range(0, 20, 2), last]]),
        None,
        None,
    ]
    parts: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def rank(index: int) -> None:
        words = -(-WORDS // RANKS)
        ranks, mesh = VocabularyRanks(RANKS, index, words), init_device_mesh("cpu", (RANKS,))
        own = start[index * words : (index + 1) * words].clone()
        matrix = nn.Parameter(
            DTensor.from_local(
                own, mesh, [Shard(0)], run_check=False, shape=start.shape, stride=start.stride()
            )
        )
        hidden = split_embedding(ids[index], matrix, torch.float32, ranks)
        both = split_logprobs(hidden * 2, matrix, targets[index], heat[index], supports[index], ranks)
        (both[0] * scales[index][0] + both[1] * scales[index][1]).sum().backward()
        assert isinstance(matrix.grad, DTensor)
        parts[index] = both[0].detach(), both[1].detach(), matrix.grad.to_local()

    threads(rank)
    whole = start.clone().requires_grad_()
    loss = torch.zeros(())
    for index in range(RANKS):
        hidden = F.embedding(ids[index], whole) * 2
        both = logprobs_entropy(hidden, whole, targets[index], heat[index], supports[index])
        loss = loss + (both[0] * scales[index][0] + both[1] * scales[index][1]).sum()
        for mine, theirs in zip(parts[index], both, strict=False):
            torch.testing.assert_close(mine, theirs.detach(), atol=2e-5, rtol=1e-5)
    loss.backward()
    joined = torch.cat([parts[index][2] for index in range(RANKS)])
    torch.testing.assert_close(joined, whole.grad, atol=1e-4, rtol=1e-5)
