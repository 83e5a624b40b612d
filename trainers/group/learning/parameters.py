"""The parameters of one policy or critic: a model of its own, or an adapter on its group's base.

A critic has a value head: one number per token, the value of the state, in place of the next token. The head starts
at zero, so a fresh critic gives 0 everywhere.

Samples and losses are on the CPU, whatever device the model is on. Only a few numbers per token cross to the CPU, and
their gradients cross back.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn

from ....agents.model.context_split import ContextRanks, SplitRow
from ....agents.model.decoder import Decoder, Route
from ....agents.model.logprobs import Support
from .packing import Rows


class Parameters:
    """The parameters that one policy's learner may change, and the forward passes that learning needs."""

    def __init__(
        self,
        model: Decoder,
        adapter: str | None = None,
        critic: bool = False,
        roles: Collection[str] = (),
    ) -> None:
        self.model, self.adapter = model, adapter
        self.roles = frozenset(roles)
        """Roles that have an adapter with their name on these parameters."""
        self.context: ContextRanks | None = None
        """Ranks that share every row. None: this process computes whole rows."""
        self.head: nn.Linear | None = None
        if critic:
            self.head = nn.utils.skip_init(nn.Linear, model.shape.d, 1, device=self.device)
            nn.init.zeros_(self.head.weight)
            nn.init.zeros_(self.head.bias)

    @property
    def device(self) -> torch.device:
        return self.model.embed.device

    @property
    def is_critic(self) -> bool:
        return self.head is not None

    def named(self) -> dict[str, nn.Parameter]:
        """Return the trainable parameters by name. The names are a checkpoint's keys, their order is the
        optimizer's.
        """
        trainable = self.model.learnable(self.adapter, self.is_critic)
        for role in sorted(self.roles):
            trainable |= self.model.learnable(role)
        if self.head is not None:
            own = {
                id(parameter) for parameter in self.head.parameters()
            }  # sharded, the model holds its heads
            trainable = {name: p for name, p in trainable.items() if id(p) not in own}
            trainable |= {f"value_head.{name}": p for name, p in self.head.named_parameters()}
        return trainable

    def state_dict(self) -> dict[str, Tensor]:
        return {name: parameter.detach().to("cpu", copy=True) for name, parameter in self.named().items()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        mine = self.named()
        if state.keys() != mine.keys():
            odd = sorted(state.keys() ^ mine.keys())
            raise ValueError(
                f"these parameters belong to another policy: {len(odd)} names differ, for example {odd[0]!r}"
            )
        for name, parameter in mine.items():
            parameter.copy_(state[name])

    def logprobs(self, rows: Rows, dtype: torch.dtype, checkpointing: bool = False) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies of the trained tokens, each (T,), at the temperature and support of
        sampling.
        """
        if self.context is not None:
            return self._split_logprobs(rows, SplitRow(rows.packed, self.context), dtype, checkpointing)
        hidden = self._hidden(rows, rows.places, dtype, checkpointing)
        logp, entropy = self._scores(hidden, rows.targets, rows.temperature, rows.support)
        self._rest()
        return logp.cpu(), entropy.cpu()

    def _scores(
        self, hidden: Tensor, targets: Tensor, heat: Tensor, support: Support | None
    ) -> tuple[Tensor, Tensor]:
        support = support.to(self.device) if support is not None else None
        return self.model.logprobs(hidden, targets.to(self.device), heat.to(self.device), support)

    def values(self, rows: Rows, dtype: torch.dtype, checkpointing: bool = False) -> tuple[Tensor, Tensor]:
        """Values before each trained token (T,), and after each reply (S,). The latter are empty unless laid
        with `whole`.
        """
        if self.head is None:
            raise ValueError("this policy has no value head: it is not a critic")
        places = torch.cat((rows.places, rows.after))
        if self.context is None:
            hidden = self._hidden(rows, places, dtype, checkpointing)
            scores = self.head(hidden.float()).squeeze(-1)
        else:
            row = SplitRow(rows.packed, self.context)
            _, hidden = self._split_hidden(rows, row, places, dtype, checkpointing)
            scores = row.joined(places, self.head(hidden.float())).squeeze(-1)
        self._rest()
        before, after = scores.cpu().split((len(rows.places), len(rows.after)))
        return before, after

    def _rest(self) -> None:
        """Free what a sharded model gathered, if there is no backward pass."""
        if not torch.is_grad_enabled() and (reshard := getattr(self.model, "reshard", None)):
            reshard()

    def _hidden(self, rows: Rows, keep: Tensor, dtype: torch.dtype, checkpointing: bool) -> Tensor:
        return self.model.forward_packed(
            rows.packed,
            dtype=dtype,
            adapter=self._adapter(rows),
            checkpointing=checkpointing,
            keep=keep.to(self.device),
        )

    def _adapter(self, rows: Rows) -> str | None:
        """Return the adapter for rows: that of their role, if it has one."""
        return rows.role if rows.role in self.roles else self.adapter

    # -- rows that several ranks share ----------------------------------------------------------------------------

    def _split_logprobs(
        self, rows: Rows, row: SplitRow, dtype: torch.dtype, checkpointing: bool
    ) -> tuple[Tensor, Tensor]:
        own, hidden = self._split_hidden(rows, row, rows.places, dtype, checkpointing)
        support = rows.support.at(own) if rows.support is not None else None
        both = self._scores(hidden, rows.targets[own], rows.temperature[own], support)
        logp, entropy = row.joined(rows.places, torch.stack(both, 1)).unbind(1)
        self._rest()
        return logp.cpu(), entropy.cpu()

    def _split_hidden(
        self, rows: Rows, row: SplitRow, places: Tensor, dtype: torch.dtype, checkpointing: bool
    ) -> tuple[Tensor, Tensor]:
        """Return the places that belong to this rank, and their states."""
        self.model.check_length(rows.packed)
        own, keep = row.among(places)
        adapter = self._adapter(rows)
        route: Route = () if adapter is None else ((adapter, None),)
        hidden: Tensor = self.model(
            rows.packed.ids[row.mine].to(self.device),
            rows.packed.position[row.mine].to(self.device),
            row.attention(dtype, self.device),
            dtype=dtype,
            route=route,
            checkpointing=checkpointing,
            keep=keep.to(self.device),
        )
        return own, hidden
