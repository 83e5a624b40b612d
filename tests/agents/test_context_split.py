"""A packed row over several ranks: each rank's attention is that of the whole row at its tokens."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unitymas.agents.model.attention import PackedAttention, pack
from unitymas.agents.model.context_split import ContextRanks, SplitRow
from unitymas.agents.model.logprobs import Support

CPU = torch.device("cpu")


@settings(max_examples=20)
@given(
    st.lists(st.lists(st.integers(0, 2), min_size=3, max_size=30), min_size=1, max_size=5),
    st.integers(0, 40),
    st.integers(1, 4),
)
def test_each_rank_attends_as_the_whole_row_does(tails: list[list[int]], shared: int, size: int) -> None:
    packed = pack([[1] * shared + tail for tail in tails], 4)
    torch.manual_seed(0)
    q, k, v = (torch.randn(len(packed), heads, 8) for heads in (4, 2, 2))
    want = PackedAttention(packed.segments, torch.float32, CPU)(0, q, k, v)
    if len(packed) < size:
        with pytest.raises(ValueError, match="groups.*.context_ranks"):
            SplitRow(packed, ContextRanks(None, size, 0))
        return
    rows = [SplitRow(packed, ContextRanks(None, size, index)) for index in range(size)]
    assert torch.cat([row.mine for row in rows]).sort().values.tolist() == list(range(len(packed)))
    assert max(len(row.mine) for row in rows) - min(len(row.mine) for row in rows) <= 2

    def gathered(x: torch.Tensor) -> torch.Tensor:
        """What a layer gathers: every rank's part, padded."""
        parts = [
            torch.nn.functional.pad(x[row.mine], (0, 0, 0, 0, 0, row.longest - len(row.mine))) for row in rows
        ]
        return torch.cat(parts)

    for row in rows:
        own: Any = row.attention(torch.float32, CPU)
        got = PackedAttention.__call__(own, 0, q[row.mine], gathered(k), gathered(v))
        torch.testing.assert_close(got, want[row.mine])
        everywhere = torch.arange(len(packed)).flip(0)
        among, places = row.among(everywhere)
        assert torch.equal(row.mine[places], everywhere[among])


def test_the_support_of_some_places() -> None:
    support = Support.of([[3, 1], None, [2], [5, 6, 7]])
    assert support is not None
    some = support.at(torch.tensor([3, 1, 0]))
    assert some.offsets.tolist() == [0, 3, 3, 5] and some.ids.tolist() == [5, 6, 7, 3, 1]
    none = support.at(torch.tensor([], dtype=torch.long))
    assert none.offsets.tolist() == [0] and none.ids.tolist() == []
