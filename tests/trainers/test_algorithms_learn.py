"""Every algorithm, from table to gradient, teaches a team of two tabular agents to write the right bits.

No engine and no model: an agent is a table of logits, a decision two binary tokens, the critic a table of values. What
is tested is that the pieces fit: signs, chains, tails, whitening, denominators.
"""

from typing import Any

import pytest
import torch

from unitymas.trainers.algorithms import list_algorithms, make_algorithm
from unitymas.trainers.controller.statistics.gae import local_advantages, summarise, token_advantages
from unitymas.trainers.controller.statistics.table import Decision, Table
from unitymas.trainers.group.learning.batch import Batch, Thin, tokens_per_unit

AGENTS, TURNS, TOKENS = ("planner", "worker"), 2, 2
RIGHT = torch.tensor([[1, 0], [0, 1]])  # the bits that each agent should write
CONFIG: dict[str, dict[str, Any]] = {"at_grpo": {"tree": 0}, "gspo": {"clip_low": 0.2, "clip_high": 0.2}}
CASES = [(name, CONFIG.get(name, {})) for name in list_algorithms()] + [
    ("ppo", {"level": "turn"}),
    ("ppo", {"horizon": "act", "lam": 0.9}),
    ("reinforce_pp", {"kl_reward": 0.01, "baseline": True}),
    ("grpo", {"task_wise": True, "kl_loss": 0.01}),
]


class Team:
    """Two agents that speak twice in turn; whoever writes right bits earns their share, at once."""

    def __init__(self, seed: int) -> None:
        self.chance = torch.Generator().manual_seed(seed)
        self.logits = torch.zeros(len(AGENTS), TOKENS, 2, dtype=torch.float64, requires_grad=True)
        self.values = torch.zeros(len(AGENTS), TOKENS + 1, dtype=torch.float64, requires_grad=True)
        self.optimiser = torch.optim.Adam([self.logits, self.values], lr=0.1)

    def play(self, episodes: int) -> tuple[list[Decision], torch.Tensor]:
        """Decisions of all episodes, and the bits they wrote: (decisions, tokens)."""
        rows, written = [], []
        for episode in range(episodes):
            for turn in range(TURNS):
                for number, agent in enumerate(AGENTS):
                    bits = torch.multinomial(
                        self.logits[number].detach().softmax(-1), 1, generator=self.chance
                    )[:, 0]
                    written.append(bits)
                    rows.append(
                        Decision(
                            id=f"{episode:03}/{turn}.{number}",
                            task=f"t{episode % 2}",
                            episode=f"{episode:03}",
                            node=f"{turn}.{number}",
                            role=agent,
                            agent=agent,
                            chain=f"{episode:03}/{agent}",
                            turn=turn,
                            order=turn,
                            policy="team",
                            n_tokens=TOKENS,
                            anchor=f"turn {turn}",
                            credit={"right": float((bits == RIGHT[number]).double().mean())},
                            ended="terminal" if turn == TURNS - 1 else "no",
                        )
                    )
        return rows, torch.stack(written)


def update(team: Team, algorithm: Any) -> None:
    """One step of learning, as the trainer does it, in one piece."""
    rows, written = team.play(16)
    who = torch.tensor([AGENTS.index(row.agent) for row in rows])
    chosen = written.reshape(-1, 1)
    logp = team.logits.log_softmax(-1)[who].reshape(-1, 2).gather(1, chosen)[:, 0]
    reference = torch.full_like(logp, 0.5).log()
    needs, lengths = algorithm.needs, [TOKENS] * len(rows)
    values = team.values[who]
    judged = values.detach() if needs.values else torch.zeros_like(values)
    kl = (-needs.kl_reward * (logp.detach() - reference)).numpy()
    before, after = judged[:, :-1].reshape(-1).numpy(), judged[:, -1].numpy()
    if needs.summaries:
        for row, value in zip(
            rows, summarise(before, lengths, after, needs.gamma, needs.lam, kl), strict=True
        ):
            row.value = value
    table = Table(rows)
    signals = {signal.id: signal for signal in algorithm.advantages(table, table.mine("team"), {})}
    mine = [signals[row.id] for row in rows]

    def per_token(numbers: list[float]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.float64).repeat_interleave(TOKENS)

    if mine[0].advantage is None:
        local = local_advantages(before, lengths, needs.gamma, needs.lam, kl)
        tails = [signal.tail or 0.0 for signal in mine]
        advantage = torch.from_numpy(token_advantages(local, lengths, tails, needs.gamma, needs.lam))
        returns = advantage + torch.from_numpy(before)
    else:
        advantage = per_token([signal.advantage or 0.0 for signal in mine])
        returns = per_token([signal.target or 0.0 for signal in mine])
    thin = [Thin(s.id, TOKENS, s.unit, s.weight) for s in mine]
    units = tokens_per_unit(thin)
    batch = Batch(
        logp=logp,
        behaviour=logp.detach(),
        proximal=logp.detach(),
        advantage=(advantage - per_token([s.shift for s in mine])) * per_token([s.scale for s in mine]),
        weight=per_token([s.weight for s in mine]),
        sequence=torch.arange(len(rows)).repeat_interleave(TOKENS),
        n_sequences=len(rows),
        unit_tokens=per_token([float(units[s.unit or s.id]) for s in mine]),
        reference=reference,
        values=values[:, :-1].reshape(-1) if needs.values else None,
        old_values=torch.from_numpy(before) if needs.values else None,
        returns=returns if needs.values else None,
    )
    loss, _ = algorithm.loss(batch, algorithm.denominators(thin))
    team.optimiser.zero_grad()
    loss.backward()
    team.optimiser.step()


def chance_of_right_bits(team: Team) -> float:
    return float(team.logits.detach().softmax(-1).gather(2, RIGHT[..., None]).mean())


@pytest.mark.parametrize(("name", "config"), CASES, ids=lambda case: str(case))
def test_it_learns(name: str, config: dict[str, Any]) -> None:
    team, algorithm = Team(seed=0), make_algorithm(name, **config)
    assert chance_of_right_bits(team) == 0.5
    for _ in range(30):
        update(team, algorithm)
    found = chance_of_right_bits(team)
    if name == "matpo":  # its worker is credited with the planner's success: half of the bits teach nothing
        found = float(team.logits.detach().softmax(-1)[0].gather(1, RIGHT[0][:, None]).mean())
    assert found > 0.8
