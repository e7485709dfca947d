"""`match=` with a user's loss: equal to the mean distance as a special case, resumable, and checked."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distillkit.augment import DSA
from distillkit.condense import Progress, distribution_matching
from distillkit.networks import FixedNetwork, RandomNetworks
from distillkit.normalization import Normalization
from distillkit.sets import LabeledImages, Tiles


def mean_distance(real: Tensor, synthetic: Tensor) -> Tensor:
    return (real.mean(0) - synthetic.mean(0)).square().sum()


def mmd(real: Tensor, synthetic: Tensor) -> Tensor:
    def kernel(a: Tensor, b: Tensor) -> Tensor:
        return (-torch.cdist(a, b).square() / a.shape[1]).exp().mean()

    return kernel(real, real) + kernel(synthetic, synthetic) - 2 * kernel(real, synthetic)


def data() -> LabeledImages:
    draws, labels = torch.Generator().manual_seed(1), torch.tensor([0] * 9 + [2] * 5 + [3] * 12)
    return LabeledImages(torch.randn(26, 1, 8, 8, generator=draws, dtype=torch.float64), labels, num_classes=5)


def network(*, batch_statistics: bool = False) -> nn.Module:
    norm = nn.BatchNorm2d(4) if batch_statistics else nn.GroupNorm(2, 4)
    return nn.Sequential(nn.Conv2d(1, 4, 3), norm, nn.ReLU(), nn.Flatten(), nn.Linear(144, 5)).double()


def condense(**options: Any) -> LabeledImages:
    given: dict[str, Any] = {"networks": RandomNetworks(network), "ipc": 2, "steps": 4, "batch_real": 6, "lr": 0.3}
    real = options.pop("real", data())
    return distribution_matching(real, **{**given, "progress": False, **options})


@pytest.mark.parametrize("chunk", [None, 1, 3])
@pytest.mark.parametrize("batch_statistics", [False, True])
@pytest.mark.parametrize("further", [{}, {"augment": DSA("flip_crop")}, {"parametrize": Tiles(2)}])
def test_the_mean_distance_is_a_special_case(chunk: int | None, *, batch_statistics: bool, further: Any) -> None:
    options = {
        "networks": RandomNetworks(lambda: network(batch_statistics=batch_statistics)),
        "chunk": chunk,
        **further,
    }
    start = data()[[0, 1, 2, 9, 14, 15]]  # three images of class 0, one of class 2, two of class 3
    if "parametrize" not in further:
        options["init"] = start
    named, own = condense(**options), condense(match=mean_distance, **options)
    assert torch.allclose(named.images, own.images, rtol=0, atol=1e-10)
    assert named.info["loss"] == pytest.approx(own.info["loss"])


@pytest.mark.parametrize("batch_statistics", [False, True])
def test_own_loss_gets_all_embeddings_of_a_fixed_network(*, batch_statistics: bool) -> None:
    net = network(batch_statistics=batch_statistics).requires_grad_(False)
    if batch_statistics:
        net[1] = nn.BatchNorm2d(4, track_running_stats=False).double()
    fixed: dict[str, Any] = {"networks": FixedNetwork(net), "batch_real": None, "chunk": 3}
    whole, batches = condense(**fixed), condense(**fixed | {"networks": FixedNetwork(net, cache=False)})
    assert torch.allclose(condense(match=mean_distance, **fixed).images, whole.images, rtol=0, atol=1e-10)
    assert torch.allclose(batches.images, whole.images, rtol=0, atol=1e-10)


def test_another_loss_falls_and_is_recorded_by_name() -> None:
    losses: list[float] = []
    made = condense(match=mmd, steps=60, lr=3.0, batch_real=None, callback=lambda p: losses.append(p.loss))
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10])
    assert made.info["match"].endswith("test_own_objective.mmd")


def test_a_resumed_call_gives_equal_bits_and_refuses_another_loss() -> None:
    states = []

    def keep(progress: Progress) -> None:
        if progress.step == 2:
            states.append(progress.state())

    whole = condense(match=mmd, callback=keep)
    assert torch.equal(whole.images, condense(match=mmd, resume=states[0]).images)
    with pytest.raises(ValueError, match="match="):
        condense(match=mean_distance, resume=states[0])


@pytest.mark.parametrize(
    ("match", "text"),
    [
        (lambda real, synthetic: 1.0, "match must return a real scalar tensor .* got 1.0"),
        (lambda real, synthetic: synthetic.mean(0), r"got a torch.float64 tensor of shape \[144\]"),
        (lambda real, synthetic: real.sum(), "without a gradient"),
        (lambda real, synthetic: (synthetic.mean() * 1j).exp(), "got a torch.complex128 tensor"),
        (lambda real, synthetic: real.add_(1).mean() + synthetic.mean(), "must not change its arguments in place"),
        (lambda real, synthetic: synthetic.sub_(1).mean(), "match (fails|must not change)"),
        (lambda real, synthetic: (real - synthetic[:, 1:]).mean(), r"match fails on .* embeddings of shapes \[\d"),
        (lambda real: real.mean(), r"match is called as match\(real, synthetic\)"),
        (lambda real, synthetic, third: real.mean(), r"match is called as match\(real, synthetic\)"),
        ("means", "match must be one of"),
    ],
)
def test_wrong_losses_are_named(match: Any, text: str) -> None:
    with pytest.raises((ValueError, TypeError), match=text):
        condense(match=match, **({"steps": 0} if match == "means" else {}))


def test_a_loss_that_is_not_finite_stops() -> None:
    with pytest.raises(FloatingPointError, match="the loss is nan in step 1"):
        condense(match=lambda real, synthetic: synthetic.sum() * torch.nan)
    wide: dict[str, Any] = {
        "real": data().to(dtype=torch.float32),
        "networks": RandomNetworks(lambda: network().float()),
    }
    with pytest.raises(FloatingPointError, match="NaN or Inf in the optimized images: .* lower lr, or the lr of inner"):
        condense(match=lambda real, synthetic: 1e6 * synthetic.sum(), steps=1, lr=1e37, **wide)
    slope, states = [1e-37], list[Any]()
    grown: dict[str, Any] = {**wide, "match": lambda real, synthetic: slope[0] * synthetic.sum(), "lr": 1e37}
    condense(steps=1, callback=lambda p: states.append(p.state()), **grown)
    slope[0] = 1e6
    with pytest.raises(FloatingPointError, match="NaN or Inf in the optimized images"):
        condense(steps=2, resume=states[0], **grown)


@pytest.mark.parametrize(
    ("lr", "std", "steps", "far"),
    [(1e-3, 1.0, 25, False), (1e3, 1.0, 25, True), (1e3, 1.0, 3, True), (10.0, 0.01, 25, False)],
)
@pytest.mark.parametrize("sign", [-1, 1])
def test_pixels_far_outside_their_range_are_named_once(
    lr: float, std: float, steps: int, sign: int, *, far: bool
) -> None:
    real = data().replace(normalization=Normalization((0.0,), (std,)))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        condense(match=lambda real, synthetic: sign * synthetic.sum(), steps=steps, lr=lr, real=real)
    found = [str(w.message) for w in said if "pixels range" in str(w.message)]
    assert len(found) == far
    words = f"distribution matching: after step {min(10, steps)}, "
    assert all(words in text and "Lower lr=1000" in text for text in found)


def test_a_batch_of_the_size_of_the_smallest_class_is_that_class_in_order() -> None:
    def first(real: Tensor, synthetic: Tensor) -> Tensor:
        return (real[0] - synthetic.mean(0)).square().sum()

    whole = data()[data().labels == 2]
    exact, all_of_it = (condense(real=whole, match=first, batch_real=n).images for n in (5, None))
    assert torch.equal(exact, all_of_it)
    assert not torch.equal(exact, condense(real=whole, match=first, batch_real=4).images)


@pytest.mark.parametrize("match", [mean_distance, "embedding"])
def test_a_class_alone_gives_its_share_of_the_whole(match: Any) -> None:
    whole = condense(match=match, batch_real=3)
    for c in (0, 2, 3):
        alone = condense(match=match, batch_real=3, classes=[c])
        assert torch.allclose(alone.images, whole[whole.labels == c].images, rtol=0, atol=1e-9)
