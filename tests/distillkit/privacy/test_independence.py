"""Embedding maps, augmentations and losses are functions of one private image, whatever code they come from."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distillkit.augment import DSA, CropFlip
from distillkit.losses import KnowledgeDistillation
from distillkit.networks import ConvNet, FixedNetwork, RandomNetworks, build
from distillkit.normalization import Normalization
from distillkit.privacy import (
    BatchStatistics,
    EmbeddingNetworks,
    Ledger,
    NotCapturable,
    Passes,
    PrivacyError,
    PublicEmbedder,
    PublicEmbedders,
    class_sums,
    condense_private,
    image_gradients,
    image_sgd,
    separable,
)
from distillkit.privacy.condensation import public_embedders
from distillkit.privacy.validation._independence import is_own_augmentation, is_own_network
from distillkit.rng import derive
from distillkit.sets import LabeledImages
from tests.refused import refused


def by_place(x: Tensor, generator: torch.Generator, *, siamese: bool = False) -> Tensor:
    return x * (torch.rand(len(x), 1, 1, 1, generator=generator) + 0.5)


def shared_scale(x: Tensor, generator: torch.Generator, *, siamese: bool = False) -> Tensor:
    return x * (torch.rand(1 if siamese else len(x), 1, 1, 1, generator=generator) + 0.5)


def mixing(x: Tensor, generator: torch.Generator, *, siamese: bool = False) -> Tensor:
    return x + x.mean(0, keepdim=True)


def now_and_then(x: Tensor, generator: torch.Generator, *, siamese: bool = False) -> Tensor:
    """Mixes with a small probability, as no trial would notice."""
    mixed = torch.rand(1, generator=generator) < 0.05
    return torch.where(mixed, x - x.mean(0), x)


def doubling(x: Tensor, generator: torch.Generator, *, siamese: bool = False) -> Tensor:
    return torch.cat([x, x])


def own_draws(x: Tensor, generator: torch.Generator, *, siamese: bool = False) -> Tensor:
    return x + torch.rand(1, generator=torch.Generator())


def by_values(x: Tensor, generator: torch.Generator, *, siamese: bool = False) -> Tensor:
    return x / 255 if x.max() > 1 else x


class Function(nn.Module):
    """Network with the split whose embedding is a function of (network, images)."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.classifier, self.seen, self.count = function, nn.Linear(16, 3), [], 0

    def features(self, x: Tensor) -> Tensor:
        return self.function(self, x).flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x))


def ink(network: Any, x: Tensor) -> Tensor:
    used = (x.abs().amax((0, 1, 2)) > 0).nonzero().flatten()
    return F.adaptive_avg_pool2d(x[..., used[0] : used[-1] + 1], 4)


def remembers(network: Any, x: Tensor) -> Tensor:
    network.seen.append(x)
    return x


def counts(network: Any, x: Tensor) -> Tensor:
    network.count += 1
    return x - x.mean(0) if network.count > 3 else x


BAD_MAPS: dict[str, tuple[Callable[[Any, Tensor], Tensor], type[Exception], str]] = {
    "crop to the ink": (ink, NotCapturable, r"test_independence.py:\d+"),
    "auto range": (lambda n, x: x / 255 if x.max() > 1 else x, NotCapturable, "chooses by the values"),
    "mixes a little": (lambda n, x: x - 0.03 * x.mean(0, keepdim=True), BatchStatistics, "among other images"),
    "remembers": (remembers, BatchStatistics, "changes seen"),
    "flat batch norm": (lambda n, x: F.batch_norm(x.flatten(1), None, None, training=True), BatchStatistics, "batch"),
    "folds": (lambda n, x: torch.cat([x, x]), BatchStatistics, r"turns 1 image into shape \[2, "),
    "dropout": (lambda n, x: F.dropout(x, 0.5), NotCapturable, "draws random numbers"),
    "writes": (lambda n, x: x + n.classifier.bias.detach().add_(1)[0], BatchStatistics, r"changes classifier\.bias \("),
}


def calls(data: LabeledImages, ledger: Ledger, networks: Any) -> list[Callable[[], Any]]:
    options: dict[str, Any] = {"networks": networks, "ipc": 1, "steps": 1, "ledger": ledger}
    quick = Passes(first_num_networks=1, first_steps=1)
    return [
        lambda: condense_private(data, epsilon=1.0, num_networks=1, passes=quick, **options),
        lambda: image_sgd(data, size=12, sigma=1.0, **options),
    ]


@pytest.mark.parametrize("name", BAD_MAPS)
def test_maps_that_are_no_function_of_one_image_are_refused(name: str, toy_set: LabeledImages) -> None:
    function, kind, why = BAD_MAPS[name]
    network, ledger = build(lambda: Function(function), 0).double(), Ledger()
    for augment in (None, DSA()) if name in ("dropout", "mixes a little") else (None,):
        for call in calls(toy_set, ledger, EmbeddingNetworks(FixedNetwork(network), augment=augment)):
            refused(call, kind, f"the network Function(?s:.)*{why}")
    assert ledger.events == ()


class Sometimes:
    """Sampler whose third draw has batch norm, or mixes by a new attribute."""

    fixed = False

    def __init__(self, network: Callable[[int], nn.Module]) -> None:
        self.network, self.draws = network, 0

    def draw(self, generator: torch.Generator) -> Any:
        self.draws += 1
        return self.network(self.draws)


def test_every_draw_is_captured(toy_set: LabeledImages) -> None:
    honest, bad = (build(lambda f=f: Function(f), 0).double().eval() for f in (lambda n, x: x, ink))
    chosen = lambda k: bad if k > 3 * toy_set.images.shape[1] else honest  # noqa: E731  # the shape of records is public
    embedders = PublicEmbedders(Sometimes(chosen), 5, like=toy_set, centers=0)
    refused(lambda: class_sums(*toy_set[:0], embedders, num_classes=3), NotCapturable, "chooses by the values")
    shorter = FixedNetwork(build(lambda: Function(lambda n, x: x[:2]), 0).double())
    refused(lambda: PublicEmbedders(shorter, 1, like=toy_set), BatchStatistics, "differently among other images")
    normed = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3)).double()
    PublicEmbedder(FixedNetwork(normed.eval()).draw(derive(0)), None)
    normed[1].train()
    words = "^Sequential has batch norm .* Use norm='instance'"
    refused(lambda: PublicEmbedder(normed, None), BatchStatistics, words)  # type: ignore[arg-type]


MIXING = lambda n, x: x - 0.5 * x.mean(0), counts, lambda n, x: x / x.norm(), lambda n, x: x.roll(1, 0) + x


@pytest.mark.parametrize(
    ("function", "augment"),
    [*((function, None) for function in MIXING), *((counts, a) for a in (mixing, now_and_then, by_place, DSA()))],
)
def test_one_record_changes_class_sums_by_its_own_vector_alone(
    function: Any, augment: Any, toy_set: LabeledImages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(public_embedders, "_embeds_as_captured", lambda *_: True)  # it would refuse most of these
    network = build(lambda: Function(function), 0).double()

    def sums(data: LabeledImages) -> Tensor:
        embedders = PublicEmbedders(FixedNetwork(network), 3, like=data, centers=0, augment=augment)
        return class_sums(data.images, data.labels, embedders, num_classes=3, chunk=5)

    toy_set.images[0] *= 100
    change = sums(toy_set) - sums(toy_set[1:])
    assert bool((change.flatten(1).norm(dim=1) <= 1 + 1e-9).all())


@pytest.mark.parametrize("augment", [None, shared_scale, DSA()])
def test_captured_map_equals_the_live_one_and_its_gradients(augment: Any, toy_set: LabeledImages) -> None:
    network = build(lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3)), 0).double()
    own = next(iter(PublicEmbedders(FixedNetwork(network), 1, like=toy_set, augment=augment)))
    hooked = PublicEmbedder(own.network, own.center, augment=augment, state=own.state)
    hooked.own = False
    handle = own.network.register_forward_hook(lambda *_: None)  # type: ignore[attr-defined]
    assert not is_own_network(own.network)
    handle.remove()
    with torch.autocast("cpu"):
        refused(lambda: own.embed_private(toy_set.images), PrivacyError, r"^the network .* torch.autocast\('cpu'\) is")
    torch.testing.assert_close(hooked.of_private(toy_set.images), own(toy_set.images))
    synthetic = torch.randn(2, 1, 4, 4, generator=derive(5), dtype=torch.float64)
    cotangents = torch.randn(3, 16, generator=derive(6), dtype=torch.float64)
    leaf = synthetic.clone().requires_grad_()
    mean = own.embedding(leaf).mean(0)
    wanted = torch.stack([torch.autograd.grad(mean, leaf, row, retain_graph=True)[0] for row in cotangents])
    torch.testing.assert_close(hooked.pull_back(synthetic, batched=False)(cotangents), wanted)
    pooling = PublicEmbedder(Function(lambda n, x: F.adaptive_avg_pool2d(x, 4) / x.shape[-1]), None)
    for images in (toy_set.images, synthetic.repeat(1, 1, 2, 3), synthetic.float(), synthetic[:0]):  # captured for each
        torch.testing.assert_close(pooling.embed_private(images), pooling.embedding(images))


def test_embedders_follow_a_variable_outside_the_network(toy_set: LabeledImages) -> None:
    factors = [1.0]
    network = build(lambda: Function(lambda n, x: x * factors[0]), 0).double()
    embedders = PublicEmbedders(FixedNetwork(network), 2, like=toy_set)
    for factor in (1.0, 3.0, 2.0, 2.003):
        factors[0] = factor
        found = [embedder.embed_private(toy_set.images) for embedder, _ in zip(embedders, range(9))]
        torch.testing.assert_close(found, [factor * toy_set.images.flatten(1)] * 2)


@pytest.mark.parametrize("wrap", [lambda f: lambda *v, **options: f(*v, **options), partial, lambda f: property(f)])
@pytest.mark.parametrize(("place", "name"), [
    (F, "conv2d"), (torch, "zeros"), (Tensor, "flatten"), (nn.Conv2d, "forward"), (nn.Module, "__getattr__"),
    (ConvNet, "features"), (DSA, "__call__"),
])  # fmt: skip
def test_replaced_functions_of_pytorch_or_this_package_are_noticed(
    place: Any, name: str, wrap: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    network, original = ConvNet((1, 8, 8), 3, width=2, depth=1), getattr(place, name)
    assert (is_own_network(network), is_own_augmentation(DSA())) == (True, True)
    monkeypatch.setattr(place, name, wrap(original), raising=False)
    found = is_own_network(network), is_own_augmentation(DSA())
    assert found == (place is DSA, place in (nn.Conv2d, nn.Module, ConvNet))


def test_networks_of_this_package_are_recognised_by_exact_type() -> None:
    network = ConvNet((1, 8, 8), 3, width=2, depth=1).eval()
    assert is_own_network(network)
    network.features = lambda x: x  # type: ignore[method-assign]
    assert not is_own_network(network)
    assert not is_own_network(Function(lambda n, x: x))
    own = [nn.BatchNorm2d(2).eval(), nn.Flatten(), nn.Conv2d(1, 2, 3), nn.Identity(), nn.Linear(2, 2), nn.SiLU()]
    own += [nn.GroupNorm(1, 2), nn.LeakyReLU(), nn.Sigmoid(), nn.Tanh()]
    own += [nn.AvgPool2d(2), nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1)]
    assert all(is_own_network(nn.Sequential(layer)) for layer in own)
    others = [nn.BatchNorm2d(2), nn.BatchNorm2d(2, track_running_stats=False).eval(), nn.Flatten(0, 1), nn.Flatten(-4)]
    subclass, buffer, beside, other = nn.Linear(2, 2), nn.BatchNorm2d(2).eval(), nn.Linear(2, 2), nn.Linear(2, 2)
    vars(beside)["weight"] = beside._parameters.pop("weight")
    vars(other)["_parameters"] = type("Own", (dict,), {})(other._parameters)
    for register in ("forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"):
        others.append(nn.ReLU())
        getattr(others[-1], f"register_{register}")(lambda *_: None)
    subclass.weight = nn.Parameter(torch.zeros(2, 2).as_subclass(type("Own", (Tensor,), {})))
    buffer.running_mean = torch.zeros(2).as_subclass(type("Own", (Tensor,), {}))
    others += [KnowledgeDistillation(), nn.Dropout(), type("Own", (nn.ReLU,), {})(), subclass, buffer, beside, other]
    assert not any(is_own_network(nn.Sequential(nn.ReLU(), nn.Sequential(one))) for one in others)
    everywhere = nn.modules.module
    for register in (everywhere.register_module_forward_hook, everywhere.register_module_full_backward_hook):
        handle = register(lambda *_: None)
        assert not is_own_network(nn.ReLU())
        handle.remove()
    assert is_own_network(nn.ReLU())
    augmentations = None, DSA(), CropFlip(Normalization((0.0,), (1.0,))), type("Own", (DSA,), {})()
    assert [is_own_augmentation(augment) for augment in augmentations] == [True, True, True, False]

    class ConvNetLike(ConvNet):
        pass

    ConvNetLike.__module__, ConvNetLike.__qualname__ = ConvNet.__module__, "ConvNet"
    assert not is_own_network(ConvNetLike((1, 8, 8), 3, width=2, depth=1).eval())


@pytest.mark.parametrize(
    ("augment", "error", "why"),
    [
        (doubling, BatchStatistics, r"turns 1 image into \[2, 1, 4, 4\]"),
        (own_draws, NotCapturable, "from a generator of its own"),
        (lambda x, generator, siamese, kept=[]: kept.append(x) or x, BatchStatistics, r"keeps .* \(a default of"),
        (by_values, NotCapturable, r"augmentation by_values chooses by the values.*test_independence.py:\d+"),
    ],
)
def test_augmentation_that_is_no_function_of_one_image_is_refused(
    augment: Any, error: type[Exception], why: str, toy_set: LabeledImages, toy_network: Callable[[], nn.Module]
) -> None:
    ledger = Ledger()
    for call in calls(toy_set, ledger, EmbeddingNetworks(RandomNetworks(toy_network), augment=augment)):
        refused(call, error, why)
    assert ledger.events == ()


def test_matching_loss_meets_captured_rows_only(toy_set: LabeledImages) -> None:
    @separable
    def chooses(embedding: Tensor, means: Tensor) -> Tensor:
        rows = (embedding - means).square().sum(1)
        return rows - rows.mean() if bool((embedding.abs() > 50).any()) else rows

    @separable
    def huber(embedding: Tensor, means: Tensor) -> Tensor:
        return F.huber_loss(embedding, means, reduction="none").sum(1)

    ledger, sampler = Ledger(), RandomNetworks(lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 3)).double())
    options: dict[str, Any] = {"size": 12, "sigma": 1.0, "networks": sampler, "ipc": 1, "steps": 1, "ledger": ledger}
    with pytest.raises(NotCapturable, match="the loss chooses chooses by the values"):
        image_sgd(toy_set, loss=chooses, **options)
    assert ledger.events == ()
    with torch.no_grad():
        image_sgd(toy_set, loss=huber, **options)
    synthetic = torch.randn(3, 2, 1, 4, 4, generator=derive(1), dtype=torch.float64)
    real, labels = toy_set.images.flatten(1), toy_set.labels
    total = torch.cat(list(image_gradients(synthetic, lambda x: x.flatten(1), real, labels, loss=huber))).sum(0)
    leaf = synthetic.clone().requires_grad_()
    means = leaf.flatten(2).mean(1)
    torch.testing.assert_close(total, torch.autograd.grad(huber(real, means[labels]).sum(), leaf)[0])
    shapes = (nn.Identity(), r"\[1, 1, 4, 4\]"), (torch.sum, r"\[\]"), (lambda x: x[:, 0, 0, 0], r"\[1\]")
    for function, shape in shapes:
        refused(
            lambda f=function: next(image_gradients(synthetic, f, real, labels)),
            BatchStatistics, f"turns 1 image into shape {shape}; return one row",
        )  # fmt: skip
    for wrong, words in ((labels[1:], "got 11 for 12 images"), (labels + 1, "be below num_classes=3, got 3")):
        refused(lambda w=wrong: next(image_gradients(synthetic, nn.Flatten(), real, w)), ValueError, words)
    alone = separable(lambda embedding, means: embedding.square().sum(1))
    assert not any(rows.any() for rows in image_gradients(synthetic, lambda x: x.flatten(1), real, labels, loss=alone))
