from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distillkit.privacy import Account, Event, Ledger, NotCapturable, PublicEmbedder, PublicEmbedders, Secret, as_secret
from tests.refused import refused


def noise(secret: Secret, shape: Sequence[int], std: float) -> torch.Tensor:
    return secret.add_noise(torch.zeros(*shape), std)


def test_system_noise_differs_and_seeded_noise_repeats(global_rng_untouched: None) -> None:
    assert not torch.equal(noise(Secret(), (8,), 1.0), noise(Secret(), (8,), 1.0))
    assert torch.equal(noise(Secret(1), (8,), 1.0), noise(Secret(1), (8,), 1.0))
    for other in (2, -1):
        assert not torch.equal(noise(Secret(1), (8,), 1.0), noise(Secret(other), (8,), 1.0))
    assert not Secret().seeded
    assert Secret(0).seeded
    assert repr(Secret()) == "Secret(operating system)"
    assert repr(Secret(0)) == "Secret(seeded, no guarantee)"


@pytest.mark.parametrize(("seed", "discrete"), [(None, False), (5, False), (None, True)])
def test_noise_is_standard_normal(seed: int | None, discrete: bool) -> None:
    if discrete:
        pytest.importorskip("opendp")
        assert bool((Secret._integers(9, 2.0**48) % 2).any())  # with all bits
    drawn = noise(Secret(seed, discrete=discrete), (20, 200 if discrete else 10_000), 3.0)
    assert drawn.dtype == torch.float64
    n = drawn.numel()
    z = (drawn / 3.0).flatten().sort().values
    assert abs(float(z.mean())) < 5 / math.sqrt(n)
    assert abs(float(z.square().mean()) - 1) < 5 * math.sqrt(2 / n)
    assert abs(float(z.pow(4).mean()) - 3) < 5 * math.sqrt(96 / n)
    grid = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    assert float((torch.special.ndtr(z) - grid).abs().max()) < 2.2 / math.sqrt(n)


@pytest.mark.parametrize("seed", [None, 5])
def test_uniforms_have_53_random_bits_and_decide_who_takes_part(seed: int | None) -> None:
    drawn = Secret(seed).uniform(4000)
    whole = (drawn * 2**53).floor()
    assert torch.equal(drawn, (whole + 0.5) * 2.0**-53)  # never 0
    bits = (whole.long()[:, None] >> torch.arange(53)) & 1
    bits[:, 0] = torch.where(bits[:, 52] == 0, bits[:, 0], torch.arange(4000) % 2)  # it is rounded in larger numbers
    assert float((bits.double().mean(0) - 0.5).abs().max()) < 5.5 * 0.5 / math.sqrt(4000)
    assert Secret(seed).uniform(0).shape == (0,)
    assert noise(Secret(seed), (0, 3), 1.0).shape == (0, 3)
    for rate in (0.0, 0.3, 1.0):
        rows = Secret(seed).poisson(4000, rate)
        assert abs(len(rows) - 4000 * rate) <= 5.5 * math.sqrt(4000 * rate * (1 - rate))
        if seed is not None:
            assert rows.tolist() == [i for i, u in enumerate(drawn.tolist()) if u < rate]


@pytest.mark.parametrize("std", [3.0, 0.7])
def test_seeded_noise_is_half_the_sum_of_four_box_muller_draws(std: float) -> None:
    secret, same = Secret(7), Secret(7)
    values = torch.randn(3, 5, generator=torch.Generator().manual_seed(1)).requires_grad_()
    assert torch.equal(secret.add_noise(values, 0.0), values.detach().double())
    assert secret.add_noise(double := values.detach().double(), 0.0).data_ptr() != double.data_ptr()
    assert (secret.draws, secret.drawn) == (0, {})
    for number in (1, 2):
        radius = (-2 * same.uniform(30).log()).sqrt()
        turn = 2 * math.pi * same.uniform(30)
        four = torch.stack([radius * turn.cos(), radius * turn.sin()]).view(4, 3, 5)
        found = secret.add_noise(values, std)
        unit = 2.0 ** (math.floor(math.log2(std)) - 20)
        assert float((found - values.detach() - std * four.sum(0) / 2).abs().max()) <= unit / 2 * (1 + 1e-9)
        assert (found.dtype, found.requires_grad) == (torch.float64, False)
        assert (secret.draws, secret.drawn) == (number, {std: 15 * number})


@given(st.integers(0, 2**31), st.floats(-30, 30), st.floats(-12, 12))
def test_noised_values_are_rounded_once_on_a_public_grid(seed: int, log_std: float, log_size: float) -> None:
    """round(values + noise): the same noise for all values, and no bit below the unit, whatever the values."""
    std = 10**log_std
    unit = 2.0 ** (math.floor(math.log2(std)) - 20)
    values = torch.randn(2, 25, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * std * 10**log_size
    alone, noised = (Secret(seed).add_noise(v, std) / unit for v in (0 * values, values))
    assert torch.equal(alone, alone.round())
    assert torch.equal(noised, noised.round())
    assert 2**20 / 5 < float(alone.abs().mean()) < 2**21 * 2
    for got, k, value in zip(noised.flatten().tolist(), alone.flatten().tolist(), values.flatten().tolist()):
        exact = Fraction(value) / Fraction(unit) + Fraction(k)
        assert abs(Fraction(got) - exact) <= 1 + abs(exact) / 2**53
    whole = (values / unit).round() * unit
    assert torch.equal(Secret(seed).add_noise(whole, std), whole + alone * unit)


def test_discrete_noise_has_no_seed_and_names_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in (0, 7):
        refused(lambda s=seed: Secret(s, discrete=True), ValueError, f"no seed, got seed={seed}: ")
    with monkeypatch.context() as without_noise:  # values are rounded to the fine grid first
        without_noise.setattr(Secret, "_integers", lambda self, count, std: torch.zeros(count, dtype=torch.float64))
        without_noise.setattr("importlib.util.find_spec", lambda name: True)
        values = torch.tensor([1.5 - 2.0**-30, 1.5 - 2.0**-20], dtype=torch.float64)
        assert Secret(discrete=True).add_noise(values * 2.0**-20, 1.5).tolist() == [2.0**-19, 2.0**-20]
        assert repr(Secret(discrete=True)) == "Secret(operating system, discrete)"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "opendp" else name)
    refused(lambda: Secret(discrete=True), ImportError, r"distillkit\[opendp\]")


def test_invalid_arguments_are_refused() -> None:
    secret = Secret(0)
    assert as_secret(secret) is secret
    assert not as_secret(None).seeded
    assert as_secret(0).seeded
    for wrong in ("a", True):
        refused(lambda w=wrong: Secret(w), TypeError, f"seed must be an int, .* got {type(wrong).__name__}$")
    refused(lambda: Secret(discrete=1), TypeError, "discrete must be True or False")  # type: ignore[arg-type]
    refused(lambda: noise(secret, (2,), -1.0), ValueError, "std")
    for rate in (1.5, -0.1):
        refused(lambda r=rate: secret.poisson(3, r), ValueError, "rate")
    refused(lambda: secret.add_noise(torch.zeros(2, dtype=torch.complex64), 1.0), TypeError, "^values .* got torch.c")
    tiny = np.float16(6e-8)  # its half is 0
    assert float(secret.add_noise(torch.zeros(500), tiny).std()) == pytest.approx(float(tiny), rel=0.2)
    own = torch.zeros(2).as_subclass(type("Own", (torch.Tensor,), {}))
    for std in (0.0, 1.0):
        refused(lambda s=std: secret.add_noise(own, s), NotCapturable, "^values: a Own is not a plain tensor")  # type: ignore[misc]
    refused(lambda: as_secret(0.0), TypeError, "secret must be a Secret.* got float$")  # type: ignore[arg-type]


@pytest.mark.parametrize(("kind", "method"), [(Secret, "add_noise"), (Ledger, "spend"), (Account, "event")])
def test_methods_that_an_epsilon_relies_on_are_final(kind: type, method: str) -> None:
    for bases in ((kind,), (type("Duck", (), {}), kind)):
        refused(
            lambda b=bases: type("Own", b, {method: lambda *_: None, "__module__": "distillkit.own"}),  # type: ignore[misc]
            TypeError,
            f"Own must not be a subclass of {kind.__name__}: .*; use {kind.__name__} itself",
        )
    made = Account(Ledger()) if kind is Account else kind()
    refused(lambda: setattr(made, method, lambda *_: None), AttributeError, f"{kind.__name__}.{method} cannot be")
    refused(lambda: vars(made), TypeError, "__dict__")
    for part in {"ledger", "secret"} & set(dir(kind)):
        refused(lambda p=part: setattr(made, p, None), AttributeError, f"Account.{part} cannot be")  # type: ignore[misc]
    for base in (Event, PublicEmbedder, PublicEmbedders):
        refused(lambda b=base: type("Cheap", (b,), {"sigma": 9.0}), TypeError, "must not be a subclass of")  # type: ignore[misc]


def test_generator_state_is_derived_entirely_from_the_secret(global_rng_untouched: None) -> None:
    """Not from a 32-bit seed: all 624 words differ between two generators (each would agree with probability 2^-32)."""

    def words(secret: Secret) -> torch.Tensor:
        return secret.generator().get_state()[24:5016].view(torch.int64)

    for one, other in ((Secret(), Secret()), (Secret(1), Secret(2))):
        assert int((words(one) == words(other)).sum()) <= 1
    assert torch.equal(words(Secret(1)), words(Secret(1)))
    for secret in (Secret(), Secret(1)):
        assert not torch.equal(words(secret), words(secret))
        assert len(words(secret).unique()) > 600
        assert len(torch.cat([words(secret) for _ in range(9)]).view(torch.uint8).unique()) == 256
