"""Losses and their gradients against values computed by the authors' released functions on the same tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from distillkit.losses import (
    binary_distillation,
    clamped_disagreement,
    clip_logit_norm,
    deepinversion_variation,
    feature_decorrelation,
    gradient_distance,
    image_l2,
    jensen_shannon,
    knowledge_distillation,
    mean_embedding_distance,
    prototype_distance,
    proximal,
    supervised_contrastive,
    total_variation,
)

DISTILLATION = (knowledge_distillation, binary_distillation, jensen_shannon, clamped_disagreement)


def wave(shape: Sequence[int], phase: float) -> Tensor:
    """Return sin(1.7 i + phase) in float64, the input of the releases."""
    return torch.sin(1.7 * torch.arange(math.prod(shape), dtype=torch.float64) + phase).view(*shape)


SHAPES = ((2, 3, 2, 2), (2,), (3, 4))
LABELS = torch.tensor([0, 1, 0, 2, 1, 0])


def matched(metric: str) -> Callable[[Tensor], Tensor]:
    rest = [wave(shape, 0.1 * k) for k, shape in enumerate(SHAPES[1:], start=2)]
    targets = [wave(shape, phase) for shape, phase in zip(SHAPES, (0.9, 1.2, 1.5))]
    return lambda x: gradient_distance([x, *rest], targets, metric=metric)  # type: ignore[arg-type]


CASES: dict[str, tuple[Tensor, Callable[[Tensor], Tensor], float, list[float]]] = {
    # wizard1203/VHL at c5aa7a1, loss_fn/losses.py: SupConLoss on normalised features; class 2 has one image.
    "SupConLoss": (
        wave((6, 3), 0.2),
        lambda x: supervised_contrastive(x, LABELS, temperature=0.07, empty="zero"),
        *(14.909304841867083, [1.720150070544, -3.542625850469, 0.8477511822617]),
    ),
    # VICO-UoE/DatasetCondensation at 53f63a6, utils.py: match_loss with its three metrics.
    "match_loss, ours": (
        wave(SHAPES[0], 0.1), matched("row_cosine"),
        2.5051937321327986, [-0.1238200303384, -0.1012243411296, -0.1053682925582],
    ),
    "match_loss, mse": (
        wave(SHAPES[0], 0.1), matched("mse"),
        15.908164108507128, [-1.366986985961, -0.8194569389776, -1.536165486204],
    ),
    "match_loss, cos": (
        wave(SHAPES[0], 0.1), matched("cos"),
        0.4194367311533086, [-0.03820132386508, -0.03397676162068, -0.02907237615452],
    ),
    # rui-ye/FedCOG at cf34c0a, gen_utils/generate_utils.py: jensen_shanon_div, which is 1 minus ours.
    "jensen_shanon_div": (
        3 * wave((4, 3), 0.4), lambda x: 1 - clamped_disagreement(x, 2 * wave((4, 3), 1.1)),
        0.8871796760053787, [0.03361282695169, 0.01766399392521, 0.01517076154185],
    ),
    # sunnysoni97/single_image_fl at d211367, strategy/tools/clipping.py: clip_logits at 2.5, rows above and below 0.4.
    "clip_logits": (
        torch.cat([wave((2, 3), 0.4), 0.1 * wave((2, 3), 0.9)]),
        lambda x: (clip_logit_norm(x, 2.5) * wave((4, 3), 2.0)).sum(),
        *(-0.16828879270209973, [1.765224476535, 1.846953450493, 0.972007501395]),
    ),
    # bytedance/FedDecorr at 973e4af, loss.py: FedDecorrLoss.
    "FedDecorrLoss": (
        wave((5, 3), 0.2), lambda x: feature_decorrelation(x, variant="released"),
        1.037907174225129, [0.055865485395, 0.0700082062042, 0.09243909726894],
    ),
}  # fmt: skip


X, Y, PIXELS = wave((4, 3), 0.1), wave((4, 3), 0.7), wave((2, 2, 3, 3), 0.3)
TWO = torch.tensor([0, 1, 0, 2])
SMOOTH: dict[str, tuple[Tensor, Callable[[Tensor], Tensor]]] = {
    "supervised_contrastive": (X, lambda x: supervised_contrastive(x, TWO, Y, TWO.flip(0), detach_other=False)),
    "mean_embedding_distance": (X, lambda x: mean_embedding_distance(x, x[:3] ** 2, TWO, TWO[:3])),
    **{loss.__name__: (X, lambda x, loss=loss: loss(x, x.flip(0))) for loss in DISTILLATION},  # type: ignore[misc]
    **{
        f"{prior.__name__} {order}": (PIXELS, lambda x, prior=prior, order=order: prior(x, order=order))  # type: ignore[misc]
        for prior in (total_variation, deepinversion_variation)
        for order in (1, 2)
    },
    **{f"image_l2 {how}": (PIXELS, lambda x, how=how: image_l2(x, reduction=how)) for how in ("mean", "batch")},  # type: ignore[misc]
    "feature_decorrelation": (X, feature_decorrelation),
    "clip_logit_norm": (5 * X, lambda x: clip_logit_norm(x, continuous=True)),
    "prototype_distance": (X, lambda x: prototype_distance(x, TWO, x[:3] + 1, torch.tensor([True, False, True]))),
    "proximal": (X, lambda x: proximal([x, x[0]], [x.sum() * Y, x[1]], 0.3)),
}


@pytest.mark.parametrize("name", SMOOTH)
def test_gradients_equal_finite_differences(name: str) -> None:
    x, loss = SMOOTH[name]
    assert torch.autograd.gradcheck(loss, x.clone().requires_grad_())


@pytest.mark.parametrize("metric", ["row_cosine", "mse", "cos"])
def test_second_derivatives_of_gradient_distance_equal_finite_differences(metric: str) -> None:
    x = wave(SHAPES[0], 0.1).requires_grad_()
    assert torch.autograd.gradgradcheck(matched(metric), x)


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_equal_the_releases(name: str) -> None:
    """Entries 0, 4 and 7 of the gradient; to 1e-6, for the releases add 1e-7 to norms, or 1e-12 to logarithms."""
    x, loss, value, slopes = CASES[name]
    x = x.clone().requires_grad_()
    got = loss(x)
    assert got.item() == pytest.approx(value, rel=1e-6)
    gradient = torch.autograd.grad(got, x)[0]
    assert gradient.flatten()[[0, 4, 7]].tolist() == pytest.approx(slopes, rel=1e-5)
