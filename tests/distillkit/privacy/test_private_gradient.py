"""Clipped sums: the contribution of one record is bounded for any other records."""

from __future__ import annotations

import copy
import math
import re
from fractions import Fraction
from functools import partial
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.overrides import BaseTorchFunctionMode

from distillkit.privacy import NotCapturable, PrivacyError, PrivateGradient, Secret, image_sgd, train_private
from distillkit.privacy.gradients import private_gradient
from distillkit.privacy.gradients.private_gradient import OuterProducts
from distillkit.privacy.ledger import Ledger
from distillkit.rng import derive
from distillkit.sets import LabeledImages
from tests.refused import refused


def silent(*parameters: torch.Tensor, clip: float = 1.0) -> PrivateGradient:
    return PrivateGradient(parameters, sigma=0.0, clip=clip, denominator=1.0, secret=Secret(0))


def test_neighbouring_float32_sums_differ_by_at_most_one_clip() -> None:
    """The canary lifts a float32 sum above 2^20, where 0.0624 is rounded to 0; below, it is rounded up to 2^-4."""
    total = []
    for ones in (2**20, 2**20 + 1):
        gradient = silent(torch.zeros(1, requires_grad=True), clip=2.0)
        gradient.add([torch.ones(ones, 1)])
        for _ in range(200):
            gradient.add([torch.full((1, 1), -0.0624)])
        total.append(float(gradient.take()[0]))
    assert total[1] - total[0] == pytest.approx(1.0, abs=0.07)  # the released gradient is float32 again


@given(st.integers(0, 10**6), st.floats(-320, 150), st.floats(-12, 30), st.sampled_from([torch.float32, torch.float64]))
def test_a_clipped_example_never_exceeds_the_clip(seed: int, scale: float, clip: float, dtype: torch.dtype) -> None:
    """Neither by rounding nor because squares underflow: at a clip of 1e-12, entries of any magnitude."""
    largest = 10**clip
    rows = torch.randn(3, 50, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 10**scale
    for row in rows.to(dtype):
        gradient = silent(torch.zeros(20, dtype=torch.float64), torch.zeros(30, dtype=torch.float64), clip=largest)
        gradient.add([row[None, :20], row[None, 20:]])
        taken = [Fraction(v) for v in torch.cat(gradient.take()).tolist()]
        assert sum(v * v for v in taken) <= Fraction(largest) ** 2
        if dtype == torch.float32:
            gradient = silent(torch.zeros(20, 30, dtype=torch.float64), clip=largest)
            gradient.add([OuterProducts(row[None, :20], row[None, 20:])])
            assert sum(Fraction(v) ** 2 for v in gradient.take()[0].flatten().tolist()) <= Fraction(largest) ** 2
        norm = math.hypot(*row.tolist())
        if norm < 0.99 * largest:
            assert taken == row.tolist()
        elif norm < math.inf:
            assert math.hypot(*map(float, taken)) == pytest.approx(min(largest, norm), rel=1e-7)


@pytest.mark.parametrize("clip", [0.0, -1.0, 1e-170, 9e-13, 1e31, math.nan])
def test_a_clip_whose_square_could_underflow_is_refused(clip: float) -> None:
    refused(lambda: silent(torch.zeros(2), clip=clip), ValueError, "clip must be")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_low_bit_of_the_sum_is_in_the_noised_gradient(dtype: torch.dtype) -> None:
    """The released sum is a multiple of a public unit, 2^-19 for a standard deviation of 3."""
    gradient = PrivateGradient(
        [torch.zeros(3, 50, dtype=dtype), torch.zeros(7, dtype=torch.float64)],
        sigma=2.0, clip=1.5, denominator=4.0, secret=Secret(),
    )  # fmt: skip
    for _ in range(2):
        gradient.add([torch.randn(5, 3, 50) / 9, torch.randn(5, 7) / 9])
        for part in gradient.take():
            if part.dtype == torch.float64:
                assert torch.equal(part * 2**21, (part * 2**21).round())
                assert part.any()


@pytest.mark.parametrize("block", [20, 1 << 18])
def test_step_is_the_sum_of_rows_that_are_clipped_over_all_parameters(
    block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that are not finite in some parameter add nothing; every step begins with an empty sum."""
    monkeypatch.setattr(private_gradient, "_BLOCK_CPU", block)  # also four columns at a time
    parameters = [torch.zeros(2, 3, requires_grad=True), torch.zeros(4, dtype=torch.float64, requires_grad=True)]
    secret = Secret(3)
    gradient = PrivateGradient(parameters, sigma=0.0, clip=0.8, denominator=2.5, secret=secret)
    for step in range(3):
        wanted = torch.zeros(10, dtype=torch.float64)
        for part in range(step):
            rows = torch.randn(5, 10, generator=derive(step, part))
            rows[::2] *= 0.1
            kept = [0, 1, 4]
            first, second = rows[:, :6].clone().view(5, 2, 3), rows[:, 6:].double()
            first[2, 1, 1], second[3, 0] = math.nan, math.inf
            gradient.add([first.requires_grad_(), second])
            wanted += sum(row * min(1.0, 0.8 / float(row.norm())) for row in rows[kept].double())
            left, right = second[:, :2].float() + 1, second[:, 1:].float().requires_grad_()  # NaN or Inf in row 3 alone
            left[0, 1] = math.nan
            gradient.add([OuterProducts(left, right), second])
            dense = torch.cat([(left[:, :, None] * right[:, None]).flatten(1), second], 1).detach()
            wanted += sum(row * min(1.0, 0.8 / float(row.norm())) for row in dense[[1, 2, 4]].double())
        assert not any(total.requires_grad for total in gradient._sums)
        taken = gradient.take()
        assert [(part.shape, part.dtype) for part in taken] == [(p.shape, p.dtype) for p in parameters]
        torch.testing.assert_close(torch.cat([part.double().flatten() for part in taken]), wanted / 2.5)
    more = PrivateGradient([*parameters, torch.zeros(0, 2)], sigma=0.0, clip=0.8, denominator=2.5, secret=secret)
    more.add([first, second, torch.zeros(5, 0, 2)])
    gradient.add([first, second])
    assert torch.equal(more.take()[0], gradient.take()[0])
    noised = PrivateGradient(parameters, sigma=2.0, clip=1.5, denominator=4.0, secret=Secret(7)).take()
    drawn = Secret(7).add_noise(torch.zeros(10, dtype=torch.float64), 3.0) / 4
    torch.testing.assert_close(torch.cat([part.double().flatten() for part in noised]), drawn)
    products = [OuterProducts(*parts) for parts in ((left, right), (left, right[:1]), (left, right.long()))]
    wrongs = [
        [first], [first, second[:4]], [products[1], second], [products[2], second], [second, products[0]],
        [first[0], second[0]], [first, second.long()],
    ]  # fmt: skip
    for wrong in wrongs:
        refused(lambda w=wrong: gradient.add(w), (TypeError, ValueError), "grad_samples must")
    words = re.escape("grad_samples must have [n, *shape] of the parameters, [[2, 3], [4]], got [[5, 6], [5, 4]]")
    refused(lambda: gradient.add([first.flatten(1), second]), ValueError, words)
    options = {"sigma": np.float16(0.4), "clip": np.float16(6e-8), "denominator": np.float16(1.0), "secret": secret}
    assert float(PrivateGradient([torch.zeros(500)], **options).take()[0].std()) == pytest.approx(2.4e-8, rel=0.2)
    refused(lambda: setattr(gradient, "sigma", 9.0), AttributeError, "has no attribute 'sigma'")
    own = type("Own", (torch.Tensor,), {})
    for rows in (first.as_subclass(own), OuterProducts(left, right.as_subclass(own))):
        refused(lambda r=rows: gradient.add([r, second]), NotCapturable, "grad_samples: a Own is not a plain tensor")
    with BaseTorchFunctionMode():
        with mock.patch.object(torch, "cat", side_effect=AssertionError):  # which the mode would see
            refused(gradient.take, PrivacyError, "^the sum of gradients: a torch mode of the caller is active")
        refused(
            lambda: gradient.add([first, second]), PrivacyError, "grad_samples: a torch mode of the caller is active"
        )
    for wrong_number, words in (
        ({"sigma": -1.0}, "sigma must be at least 0"), ({"denominator": 0.0}, "denominator must be greater than 0")
    ):  # fmt: skip
        numbers = {"sigma": 0.0, "clip": 1.0, "denominator": 1.0} | wrong_number
        refused(lambda n=numbers: PrivateGradient(parameters, secret=secret, **n), ValueError, words)
    for wrong in ([], torch.zeros(2)):
        call = partial(PrivateGradient, wrong, sigma=0.0, clip=1.0, denominator=1.0, secret=secret)
        refused(call, (TypeError, ValueError), "parameters must be a list")
    refused(
        lambda: PrivateGradient(parameters, sigma=1.0, clip=math.inf, denominator=1.0, secret=secret),
        PrivacyError, "clip must be finite unless sigma is 0, got sigma 1",
    )  # fmt: skip
    assert all(vars(p) == {} for p in parameters)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_refused_before_a_charge(dtype: torch.dtype) -> None:
    whole, half = torch.zeros(2), torch.zeros(2, dtype=dtype)
    for parameters in ((half,), (whole, half), (half, whole)):
        refused(lambda: silent(*parameters), PrivacyError, r"^a parameter is torch\.b?float16.*\.float\(\)")  # noqa: B023
    real = LabeledImages(torch.zeros(8, 1, 4, 4, dtype=dtype), torch.arange(8) % 2, num_classes=2)
    ledger = Ledger()
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 2)).to(dtype)
    for network in (model, copy.deepcopy(model).float()):
        with pytest.raises(PrivacyError, match=f"^the images is {dtype}: .* float32 or float64"):
            train_private(network, real, size=8, sigma=1.0, steps=1, ledger=ledger)
    with pytest.raises((PrivacyError, TypeError)):
        image_sgd(real, size=8, sigma=1.0, steps=1, ipc=1, ledger=ledger)
    assert ledger.events == ()
