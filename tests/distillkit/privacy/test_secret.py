from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distillkit.privacy import Secret, as_secret


def test_system_noise_differs_and_seeded_noise_repeats(global_rng_untouched: None) -> None:
    assert not torch.equal(Secret().normal((8,), 1.0), Secret().normal((8,), 1.0))
    assert torch.equal(Secret(1).normal((8,), 1.0), Secret(1).normal((8,), 1.0))
    assert not torch.equal(Secret(1).normal((8,), 1.0), Secret(2).normal((8,), 1.0))
    assert not Secret().seeded
    assert Secret(0).seeded
    assert repr(Secret()) == "Secret(operating system)"
    assert repr(Secret(0)) == "Secret(seeded, no guarantee)"


@pytest.mark.parametrize("seed", [None, 5])
def test_noise_is_standard_normal(seed: int | None) -> None:
    drawn = Secret(seed).normal((200, 1000), 3.0)
    assert drawn.dtype == torch.float64
    n = drawn.numel()
    z = (drawn / 3.0).flatten().sort().values
    assert abs(float(z.mean())) < 5 / math.sqrt(n)
    assert abs(float(z.square().mean()) - 1) < 5 * math.sqrt(2 / n)
    assert abs(float(z.pow(4).mean()) - 3) < 5 * math.sqrt(96 / n)
    grid = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    assert float((torch.special.ndtr(z) - grid).abs().max()) < 2.2 / math.sqrt(n)


def test_neighbouring_noise_is_independent() -> None:
    rows = Secret(3).normal((4, 50000), 1.0)
    correlation = torch.corrcoef(rows)
    assert float((correlation - torch.eye(4)).abs().max()) < 5 / math.sqrt(50000)


def test_uniforms_never_reach_zero_or_one() -> None:
    drawn = Secret().uniform(10000)
    assert bool(((drawn > 0) & (drawn < 1)).all())
    assert Secret().uniform(0).shape == (0,)
    assert Secret().normal((0, 3), 1.0).shape == (0, 3)


@given(st.integers(0, 2**31), st.sampled_from([0.05, 0.3, 0.8]))
def test_poisson_draws_are_binomial_and_independent(seed: int, rate: float) -> None:
    secret = Secret(seed)
    counts = torch.zeros(40)
    sizes = []
    for _ in range(100):
        rows = secret.poisson(40, rate)
        counts[rows] += 1
        sizes.append(len(rows))
    spread = math.sqrt(rate * (1 - rate))
    assert abs(float(counts.mean()) / 100 - rate) < 5.5 * spread / math.sqrt(4000)
    variance = torch.tensor(sizes, dtype=torch.float64).var().item()
    assert 0.3 < variance / (40 * spread**2) < 2.2


def test_rates_zero_and_one_draw_none_and_all() -> None:
    assert Secret().poisson(5, 0.0).tolist() == []
    assert Secret().poisson(5, 1.0).tolist() == [0, 1, 2, 3, 4]
    assert Secret().poisson(0, 0.5).tolist() == []


def test_draws_are_counted_and_zero_noise_draws_nothing() -> None:
    secret = Secret(0)
    assert torch.equal(secret.normal((3,), 0.0), torch.zeros(3, dtype=torch.float64))
    assert secret.draws == 0
    secret.normal((3,), 1.0)
    assert secret.draws == 1


def test_invalid_arguments_are_refused() -> None:
    secret = Secret(0)
    assert as_secret(secret) is secret
    assert not as_secret(None).seeded
    assert as_secret(4).seeded
    with pytest.raises(TypeError, match="seed"):
        Secret("a")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="std"):
        secret.normal((2,), -1.0)
    with pytest.raises(ValueError, match="rate"):
        secret.poisson(3, 1.5)


def test_generator_state_is_derived_entirely_from_the_secret(global_rng_untouched: None) -> None:
    """Not from a 32-bit seed: all 624 words differ between two generators (each would agree with probability 2^-32)."""

    def words(secret: Secret) -> torch.Tensor:
        return secret.generator().get_state()[24:5016].view(torch.int64)

    for one, other in ((Secret(), Secret()), (Secret(1), Secret(2))):
        assert int((words(one) == words(other)).sum()) <= 1
    assert torch.equal(words(Secret(1)), words(Secret(1)))
    secret = Secret(1)
    assert not torch.equal(words(secret), words(secret))
