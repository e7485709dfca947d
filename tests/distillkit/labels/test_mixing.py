"""CutMix and Mixup against their formulas and laws."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from distillkit.labels import CutMix, Mixup, mixing
from distillkit.labels._views import ViewOptions, mixed_batches
from distillkit.rng import derive
from tests.refused import refused


def images(count: int, height: int = 9, width: int = 6) -> torch.Tensor:
    """Return images whose pixels all have the value of the image's index."""
    return torch.arange(count, dtype=torch.float64).view(-1, 1, 1, 1).expand(count, 2, height, width).contiguous()


@pytest.mark.parametrize(("size", "kept", "box"), [
    ((32, 32), 0.75, (16, 16)), ((32, 20), 0.0, (32, 20)), ((15, 9), 0.75, (6, 4)), ((9, 32), 0.75, (4, 16)),
    ((32, 32), 1.0, (0, 0)), ((8, 7), 0.5, (4, 4)),
])  # fmt: skip
def test_box_of_a_drawn_share_is_that_of_the_papers_code(
    monkeypatch: pytest.MonkeyPatch, size: tuple[int, int], kept: float, box: tuple[int, int]
) -> None:
    told: list[Any] = []
    monkeypatch.setattr(mixing, "_draw", lambda x, g, *how: told.append(how) or (kept, torch.tensor([1, 0])))
    for seed in range(40):
        mixed, _, share = CutMix(0.7, 0.4)(x := images(2, *size), seed)
        assert torch.equal(x, images(2, *size))
        foreign, draws = torch.zeros(size, dtype=torch.bool), derive(seed)
        (top, bottom), (left, right) = (
            (max(0, at - length // 2), at + length // 2)
            for at, length in [(int(torch.randint(side, (), generator=draws)), n) for side, n in zip(size, box)]
        )
        foreign[top:bottom, left:right] = True
        assert torch.equal(mixed[0, 1] == 1, foreign)
        assert torch.equal(mixed[1, 0] == 0, foreign), "one box for the whole batch"
        assert share == pytest.approx(1 - float(foreign.double().mean()))
    assert set(told) == {(0.7, 0.4)}


@pytest.mark.parametrize("mix", [None, Mixup(1.0), CutMix(1.0)])
@pytest.mark.parametrize(("batch", "sizes"), [(4, [4, 4, 2]), (3, [3, 3, 4]), (99, [10])])
def test_views_of_an_epoch_cover_each_image_once_with_its_label(mix: Any, batch: int, sizes: list[int]) -> None:
    """An image's pixels and its label row hold its index; a single last image joins the batch before it."""
    x, rows = images(10), torch.arange(10.0).view(10, 1).expand(10, 3).double()
    orders = []
    for epoch in (0, 1):
        made = list(mixed_batches(x, rows, ViewOptions(batch, None, mix), 5, epoch))
        assert [len(seen) for seen, _ in made] == sizes
        for seen, labels in made:
            torch.testing.assert_close(seen.mean((1, 2, 3)), labels[:, 0])
        torch.testing.assert_close(sum(labels[:, 0].sum() for _, labels in made), torch.tensor(45.0).double())
        orders.append(torch.cat([labels[:, 0] for _, labels in made]))
    if mix is None:
        assert sorted(orders[0].tolist()) == list(range(10))
        assert not torch.equal(*orders)


@pytest.mark.parametrize("alpha", [0.5, 1.0, 4.0])
def test_kept_share_has_the_beta_law(alpha: float) -> None:
    generator = derive(1)
    drawn = torch.tensor([mixing._draw(images(1), generator, alpha, 1.0)[0] for _ in range(3000)])
    variance = 1 / (4 * (2 * alpha + 1))
    assert abs(float(drawn.mean()) - 0.5) < 4.5 * (variance / 3000) ** 0.5
    assert float(drawn.var()) == pytest.approx(variance, rel=0.12)


def test_probability_is_the_share_of_mixed_batches() -> None:
    x, generator = torch.randn(4, 1, 6, 6, generator=derive(0)), derive(2)
    unmixed = 0
    for _ in range(1000):
        mixed, _, share = Mixup(probability=0.3)(x, generator)
        assert share != 1 or torch.equal(mixed, x)
        unmixed += share == 1
    assert abs(unmixed - 700) < 4.5 * (1000 * 0.3 * 0.7) ** 0.5
    for never in (CutMix(probability=0.0), Mixup(probability=0.0)):
        assert torch.equal(never(x, 3).images, x)
        assert never(x, 3).share == 1


@pytest.mark.usefixtures("global_rng_untouched")
def test_mixup_averages_and_draws_from_the_generator_only() -> None:
    x = torch.randn(5, 1, 6, 6, generator=derive(0), dtype=torch.float64)
    assert (CutMix(), Mixup()) == (CutMix(1.0, 1.0), Mixup(0.8, 1.0))  # the defaults of SRe2L
    mixed, partner, share = Mixup()(x, 3)
    assert torch.allclose(mixed, share * x + (1 - share) * x[partner], atol=1e-12)
    a, b = torch._standard_gamma(torch.full((2,), 0.3, dtype=torch.float64), generator=(draws := derive(3))).tolist()
    _, again, share = Mixup(0.3, 0.9)(x + 1, 3)
    assert share == a / (a + b) < 1
    assert again.tolist() == partner.tolist() == torch.randperm(5, generator=draws).tolist()


@pytest.mark.parametrize("mix", [CutMix, Mixup])
def test_invalid_options_are_named(mix: Any) -> None:
    for options in ({"alpha": 0.0}, {"probability": 1.5}):
        with pytest.raises(ValueError, match=next(iter(options))):
            mix(**options)
    refused(lambda: mix()(torch.zeros(3, 4), 0), (TypeError, ValueError), "images")
