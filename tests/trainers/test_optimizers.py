"""Optimizers that need less memory: close to AdamW, in the mean right, and the same again after a checkpoint."""

from typing import Any

import pytest
import torch
from torch import nn

from unitymas.trainers.config.group_settings import Adapter, Learning, PolicySpec
from unitymas.trainers.group.optimizers.adam import CompactAdam, check_moments, make_optimizer
from unitymas.trainers.group.optimizers.moments_8bit import FIRST, SECOND
from unitymas.trainers.group.optimizers.stochastic_rounding import bits, to_bfloat16

EIGHT = Learning(lr=3e-3, moments="8bit", weight_decay=0.01)
BOTH = Learning(lr=3e-3, moments="8bit", parameters="bfloat16", precision="bfloat16")


def problem(seed: int = 0) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """A regression that a small network can learn; its weights are large enough for 8 bits, but for one bias."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(80, 90), nn.Tanh(), nn.Linear(90, 50))
        inputs = torch.randn(256, 80)
        return net, inputs, torch.tanh(inputs @ torch.randn(80, 50) / 9)


def train(settings: Learning, steps: int, optimizer: Any = None) -> tuple[list[float], nn.Module, Any]:
    net, inputs, targets = problem()
    if settings.parameters == "bfloat16":
        net, inputs = net.bfloat16(), inputs.bfloat16()
    optimizer = (optimizer or make_optimizer)(list(net.parameters()), settings, "test")
    losses = []
    for _ in range(steps):
        loss = (net(inputs).float() - targets).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, net, optimizer


def flat(net: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().float().flatten() for p in net.parameters()])


def test_without_eight_bits_the_steps_are_those_of_adamw() -> None:
    settings = Learning(lr=3e-3, weight_decay=0.01)
    _, want, _ = train(settings, 12)
    _, got, _ = train(
        settings, 12, lambda own, s, key: CompactAdam(own, eight_bit=False, lr=s.lr, betas=s.betas, eps=s.eps, weight_decay=s.weight_decay)
    )  # fmt: skip
    torch.testing.assert_close(flat(got), flat(want), atol=1e-6, rtol=1e-5)


def test_eight_bit_moments_learn_as_adam_does_in_a_quarter_of_the_memory() -> None:
    want, plain, adam = train(Learning(lr=3e-3, weight_decay=0.01), 150)
    got, small, compact = train(EIGHT, 150)
    first = flat(problem()[0])
    assert want[-1] < 0.02 * want[0]
    assert got[-1] < 1.2 * want[-1]
    moved = (flat(plain) - first).norm()
    assert (
        flat(small) - flat(plain)
    ).norm() < 0.12 * moved  # 150 steps of rounding are far from the way that was gone

    def held(optimizer: Any) -> int:
        return sum(t.nbytes for state in optimizer.state.values() for t in state.values())

    assert held(compact) < 0.28 * held(adam)


def test_bfloat16_learns_where_plain_rounding_stalls() -> None:
    def pull(optimizer: Any, parameter: nn.Parameter) -> torch.Tensor:
        for _ in range(200):
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        return parameter.detach().float()

    plain = nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
    assert torch.equal(pull(torch.optim.AdamW([plain], lr=1e-4, weight_decay=0), plain), torch.ones(64, 64))
    own = nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
    learning = Learning(lr=1e-4, parameters="bfloat16", precision="bfloat16")
    end = pull(make_optimizer([own], learning, "test"), own)
    assert end.mean().item() == pytest.approx(1 - 200 * 1e-4, abs=5e-4)

    losses, _, _ = train(BOTH, 150)
    exact, _, _ = train(Learning(lr=3e-3), 150)
    assert losses[-1] < 2 * exact[-1] + 1e-3 < 0.1 * losses[0]


def test_rounding_is_right_in_the_mean() -> None:
    numbers = torch.tensor([1.0 + 2**-9, -3.1415926, 1e-20, 7.0, 12345.678])
    many = numbers.repeat(40_000, 1)
    random = bits(7, 0, many.numel(), many.device).view_as(many)
    rounded = to_bfloat16(many, random).float()
    torch.testing.assert_close(rounded.mean(0), numbers, rtol=6e-5, atol=0)
    assert (rounded[:, 3] == 7.0).all()  # what bfloat16 holds stays
    assert ((rounded - numbers).abs() <= numbers.abs() * 2**-7).all()


@pytest.mark.parametrize("code", [FIRST, SECOND])
def test_codes_are_right_in_the_mean_and_rarely_zero(code: Any) -> None:
    torch.manual_seed(0)
    numbers = 10 ** (-4 * torch.rand(300)) * (torch.randn(300).sign() if code is FIRST else 1.0)
    many = numbers.repeat(4000, 1)
    codes, scale = code.write(many, torch.rand(many.shape))
    back = code.read(codes, scale)
    assert codes.dtype == torch.uint8 and scale.shape == (4000, 2)
    torch.testing.assert_close(back.mean(0), numbers, rtol=0.03, atol=2e-6)
    assert (code.read(*code.write(torch.zeros(3, 300), torch.rand(3, 300))) == 0).all()
    assert code is FIRST or (back > 0).all()


def test_random_bits_are_even_and_follow_from_the_place() -> None:
    device = torch.device("cpu")
    whole = bits(5, 0, 100_000, device)
    assert torch.equal(bits(5, 30_000, 100, device), whole[30_000:30_100])
    assert not torch.equal(bits(6, 0, 100, device), whole[:100])
    for bit in range(32):
        ones = ((whole >> bit) & 1).float()
        assert abs(ones.mean().item() - 0.5) < 0.01
        assert abs((ones[1:] * ones[:-1]).mean().item() - 0.25) < 0.01


@pytest.mark.parametrize("settings", [EIGHT, BOTH], ids=["8bit", "bfloat16"])
def test_a_resumed_optimizer_takes_the_same_steps(settings: Learning) -> None:
    _, whole, _ = train(settings, 8)
    _, half, optimizer = train(settings, 4)
    kept = {name: tensor.clone() for name, tensor in half.state_dict().items()}

    def resumed(own: Any, settings: Learning, key: str) -> Any:
        again = make_optimizer(own, settings, key)
        with torch.no_grad():
            for parameter, name in zip(own, kept, strict=True):
                parameter.copy_(kept[name])
        again.load_state_dict(optimizer.state_dict())
        return again

    _, rest, _ = train(settings, 4, resumed)
    assert torch.equal(flat(rest), flat(whole))
    adam = train(Learning(), 1)[2]
    check_moments(adam, adam.state_dict()["state"])
    check_moments(optimizer, optimizer.state_dict()["state"])
    for mine, theirs in ((adam, optimizer), (optimizer, adam)):
        with pytest.raises(
            ValueError, match=r"moments of another precision: set policies.\*.learning.moments"
        ):
            check_moments(mine, theirs.state_dict()["state"])


def test_settings_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="learning.parameters=bfloat16 needs learning.precision=bfloat16"):
        Learning(parameters="bfloat16")
    with pytest.raises(ValueError, match="for policies without adapters"):
        PolicySpec(learning=BOTH, adapter=Adapter())
