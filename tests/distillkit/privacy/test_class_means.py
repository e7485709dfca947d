from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distillkit.augment import DSA
from distillkit.networks import build, split
from distillkit.networks.samplers import FixedNetwork, NetworkBall, RandomNetworks
from distillkit.normalization import Normalization
from distillkit.privacy import (
    Account,
    BudgetExhausted,
    EmbeddingNetworks,
    Ledger,
    Passes,
    PrivacyError,
    PublicEmbedder,
    PublicEmbedders,
    Secret,
    class_sums,
    condense_private,
    fit_to_means,
    image_sgd,
    private_histogram,
    release,
)
from distillkit.privacy._public_noise import public_noise
from distillkit.rng import derive
from distillkit.sets import LabeledImages
from tests.distillkit.privacy.faulty_network import Layer
from tests.distillkit.privacy.options import condensed
from tests.refused import refused

Factory = Callable[[], nn.Module]


def embedders_of(toy_set: LabeledImages, toy_network: Factory, count: int = 3, **options: object) -> PublicEmbedders:
    return PublicEmbedders(RandomNetworks(toy_network), count, like=toy_set, **options)  # type: ignore[arg-type]


class Blind(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.detach()


def test_centre_is_the_mean_embedding_of_public_noise(toy_set: LabeledImages, toy_network: Factory) -> None:
    embedders = embedders_of(toy_set, toy_network)
    other = toy_set.replace(images=toy_set.images * 7 + 1)
    assert torch.equal(embedders[1].center, embedders_of(other, toy_network)[1].center)
    assert not torch.allclose(embedders[0].center, embedders[1].center)
    assert embedders_of(toy_set, toy_network, centers=0)[0].center is None
    for count in (1, 3, 5):
        seeded = embedders_of(toy_set, toy_network, centers=count, seed=3)[1]
        noise = public_noise(max(count, 4), toy_set, derive(3, "centre"))[:count]
        torch.testing.assert_close(seeded.center, seeded.network.features(noise).mean(0))
    shown = toy_set.images[:5].float().double()
    around = embedders_of(toy_set, toy_network, centers=shown.float())[1]
    torch.testing.assert_close(around.center, around.network.features(shown).mean(0))
    turned = embedders_of(toy_set, toy_network, centers=shown, augment=DSA("flip_crop"), clip=math.inf)[1]
    assert not torch.allclose(turned.center, turned.network.features(shown).mean(0))
    torch.testing.assert_close(turned(shown).mean(0), torch.zeros_like(turned.center), atol=1e-9, rtol=0)
    refused(lambda: embedders_of(toy_set, toy_network, centers=shown[0]), ValueError, "centers")
    assert embedders.dim == 16
    assert embedders_of(toy_set, toy_network, match="embedding+logits").dim == 19


def test_vector_at_the_centre_is_zero_and_none_is_too_long() -> None:
    center = torch.arange(4, dtype=torch.float64)
    flat = split(nn.Sequential(nn.Flatten(), nn.Linear(4, 2)).double())
    assert PublicEmbedder(flat, center)(center.view(1, 1, 2, 2)).tolist() == [[0.0] * 4]
    vectors = torch.randn(500, 4, dtype=torch.float64, generator=derive(0))
    for clip, bound in ((None, 1.0), (0.3, 0.3)):  # not even by rounding
        assert float(PublicEmbedder(flat, center, clip=clip).bounded(vectors).norm(dim=1).max()) <= bound


@pytest.mark.parametrize("value", [1e308, math.inf, math.nan, -1e200])
@pytest.mark.parametrize("clip", [None, 0.7, math.inf])
def test_overflowing_embedding_adds_nothing(value: float, clip: float | None, toy_set: LabeledImages) -> None:
    """Neither an embedding with infinities or NaN nor one whose length overflows; other records count nevertheless."""
    net = split(nn.Sequential(nn.Flatten(), nn.Linear(16, 2))).double()  # the embedding is the image itself
    embedders = PublicEmbedders(FixedNetwork(net), 1, like=toy_set, centers=0, clip=clip)
    images, others = toy_set.images.clone(), torch.arange(12) != 4
    images[4, 0, 1, 2] = value if clip != math.inf else value * math.inf  # no length is computed
    wanted = class_sums(images[others], toy_set.labels[others], embedders, num_classes=3)
    assert torch.equal(class_sums(images, toy_set.labels, embedders, num_classes=3), wanted)
    vectors = toy_set.images[::3].flatten(1) if clip == math.inf else embedders[0](toy_set.images[::3])
    torch.testing.assert_close(wanted[0, 0], vectors.sum(0), rtol=0, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e-300, 1e-40, 1e-28, 1e-10, 1.0, 1e20, 1e150])
@pytest.mark.parametrize("clip", [None, 1e-12, 0.7, 1e30])
def test_sums_are_exact_and_no_vector_exceeds_the_clip(clip: float | None, scale: float, dtype: torch.dtype) -> None:
    """Whatever the magnitude of the embeddings, in any order and in chunks of any size."""
    net = split(nn.Sequential(nn.Flatten(), nn.Linear(16, 2))).to(dtype)  # the embedding is the image itself
    images = (torch.randn(12, 1, 4, 4, generator=derive(1), dtype=torch.float64) * scale).to(dtype)
    labels, like = torch.arange(12) % 3, LabeledImages(torch.zeros(1, 1, 4, 4, dtype=dtype), torch.zeros(1).long())
    embedders = PublicEmbedders(FixedNetwork(net), 1, like=like, clip=clip, centers=0)
    assert embedders[0].sensitivity == embedders.sensitivity == (clip or 1.0)
    unit = 2.0 ** (math.floor(math.log2(embedders.sensitivity)) - 40)
    for image in images:
        (alone,) = class_sums(image[None], labels[:1], embedders, num_classes=1)[0].tolist()
        assert sum(Fraction(v) ** 2 for v in alone) <= Fraction(embedders.sensitivity) ** 2
        assert all((v / unit).is_integer() for v in alone)
        length = math.hypot(*image.flatten().tolist())
        factor = 1 / max(length, 1e-12) if clip is None else min(1.0, clip / max(length, clip))
        wanted = [v * factor if length < math.inf else 0.0 for v in image.flatten().tolist()]
        assert alone == pytest.approx(wanted, rel=1e-7, abs=2**-38 * embedders.sensitivity)
        assert all(abs(a) <= abs(w) * (1 + 1e-7) for a, w in zip(alone, wanted))  # truncated toward zero
    together, alone = embedders[0](images), embedders[0].of_private(images)  # public and private images alike
    torch.testing.assert_close(together.double(), alone, rtol=1e-5, atol=0, equal_nan=True)
    order = torch.randperm(12, generator=derive(2))
    one = class_sums(images, labels, embedders, num_classes=3, chunk=5)
    assert torch.equal(one, class_sums(images[order], labels[order], embedders, num_classes=3))


def test_refused_release_draws_nothing() -> None:
    sums, secret, poor = torch.zeros(2, 3, 4), Secret(), Ledger(budget=0.1)
    account = Account(poor, secret=secret)
    refused(lambda: release(sums, sigma=2.0, sensitivity=1.0, ledger=account), BudgetExhausted, "0 of 2 releases")
    count = partial(private_histogram, torch.tensor([0, 1]), num_classes=2, sigma=2.0, ledger=account)
    refused(count, BudgetExhausted, "0 of 1 releases of histogram fit")
    refused(lambda: release(sums, sigma=2.0, sensitivity=math.inf, ledger=poor), PrivacyError, "bounded sensitivity")
    refused(lambda: release(sums.half(), sigma=2.0, sensitivity=1.0, ledger=poor), PrivacyError, "^sums is torch")
    refused(lambda: release(sums[0], sigma=2.0, sensitivity=1.0, ledger=poor), ValueError, r"sums must .*got \[3, 4\]")
    for sigma, sensitivity in itertools.product((1.0, 0.0), (9e-13, 1e31, 0.0)):
        call = partial(release, sums, sigma=sigma, sensitivity=sensitivity, ledger=poor)
        refused(call, ValueError, "sensitivity must be")
    assert (secret.draws, poor.events) == (0, ())


def test_code_of_the_user_does_not_run_after_the_preparation(toy_set: LabeledImages) -> None:
    """How often it runs must not depend on the records."""
    ran = []

    class Counted(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            ran.append(1)
            return super().forward(x)

    sampler = FixedNetwork(nn.Sequential(nn.Flatten(), Counted(toy_set.images[0].numel(), 3)).double())
    embedder = PublicEmbedders(sampler, 1, like=toy_set, seed=0)[0]
    embedder.prepare(toy_set.images, gradients=True)
    before = len(ran)
    rows = embedder.embed_private(toy_set.images[:2])
    embedder.pull_back(torch.zeros_like(toy_set.images), batched=False)(rows)
    assert len(ran) == before


def test_options_are_applied(toy_set: LabeledImages, toy_network: Factory) -> None:
    quick: dict[str, Any] = {"ipc": 1, "steps": 1, "passes": Passes(first_num_networks=1, first_steps=1)}
    images, options = toy_set.images.float(), {"num_classes": 3, "num_networks": 1} | quick
    tensors = condense_private(images, toy_set.labels, epsilon=2.0, **options)
    assert tensors.images.dtype == torch.float32
    ball = NetworkBall(build(toy_network, 0), 0.5)
    noise = torch.randn(6, 1, 4, 4, generator=derive(9), dtype=torch.float64)
    start = toy_set.replace(images=noise, labels=torch.tensor([2, 1, 0, 0, 1, 2]))
    private = condensed(
        toy_set, toy_network, networks=ball, init=start, augment=DSA(), clip=2.0, match="embedding+logits", steps=0,
        first_steps=0,
    )  # fmt: skip
    assert private.info["init"] == "public set"
    torch.testing.assert_close(private.images, start.images[[2, 3, 1, 4, 0, 5]])
    generator = torch.Generator().manual_seed(1)
    one, two = (condensed(toy_set, toy_network, generator=generator, steps=0) for _ in range(2))
    assert not torch.equal(one.images, two.images)
    for wrong in (start[:4], start.replace(labels=torch.tensor([2, 1, 0, 0, 1, 1]))):
        refused(lambda w=wrong: condensed(toy_set, toy_network, init=w), ValueError, "init must hold 2 images of each")
    other = start.renormalize(Normalization((0.5,), (0.5,)))
    refused(lambda: condensed(toy_set, toy_network, init=other), ValueError, "normalization")
    refused(lambda: condensed(toy_set, toy_network, ledger=Ledger(delta=1e-4)), ValueError, "delta must equal the")
    embedders = embedders_of(toy_set, toy_network)
    for shape in ([2, 3, 16], [3, 0, 16], [3, 3, 15], [3, 48], [3, 3, 16, 1]):
        words = rf"targets must be \[3 embedders, classes, F=16\], got \{shape}"
        refused(lambda s=shape: fit_to_means(start.images, embedders, torch.zeros(s)), ValueError, words)
    whole = torch.zeros(3, 3, 16).long()
    refused(lambda: fit_to_means(start.images, embedders, whole), TypeError, r"targets must be .* \[G, K, F\]")
    refused(lambda: fit_to_means(whole, embedders, whole), TypeError, r"^start must be .* \[K \* ipc, C, H, W\]")
    blind = embedders_of(toy_set, lambda: nn.Sequential(nn.Flatten(), Blind(), nn.Linear(16, 3)).double(), 1)
    refused(lambda: fit_to_means(start.images, blind, torch.zeros(1, 3, 16)), ValueError, "embedders must .*images")
    assert class_sums(*toy_set, blind, num_classes=3).any()  # needs no gradients
    embedders, odd = embedders_of(toy_set, toy_network, 5), torch.tensor(math.nan)
    targets = torch.zeros(len(embedders), 3, embedders.dim)
    for wrong, name in (((start.images, targets + odd), "targets"), ((start.images / 0, targets), "start")):
        with pytest.raises(ValueError, match=f"{name} must be finite"):
            fit_to_means(wrong[0], embedders, wrong[1])
    for call in (partial(fit_to_means, start.images, targets=targets), partial(class_sums, *toy_set, num_classes=3)):
        refused(lambda c=call: c(embedders=[*embedders]), TypeError, r"embedders must be .*PublicEmbedders\(")
    single = embedders_of(toy_set.to(dtype=torch.float32), lambda: toy_network().float(), 5)
    far = partial(fit_to_means, start.images.float(), single, targets.float() + 1e30, lr=1e37)
    refused(far, FloatingPointError, "the optimization diverged; lower lr")
    for wrong in ({"lr": 0.0}, {"momentum": 1.0}, {"steps": -1}):
        call = partial(fit_to_means, start.images, embedders, targets, **wrong)
        refused(call, ValueError, f"^{next(iter(wrong))} must")
    for count in (0, len(start) - 1):
        with pytest.raises(ValueError, match=f"start must hold ipc images for each of 3 classes, got {count} images"):
            fit_to_means(start.images[:count], embedders, targets)


@pytest.mark.parametrize("chunk", [1, 5, 100])
@pytest.mark.parametrize("augment", [None, DSA("crop_flip")])
def test_class_sums_equal_a_plain_loop(
    augment: DSA | None, chunk: int, toy_set: LabeledImages, toy_network: Factory
) -> None:
    """A siamese augmentation is drawn once for each network."""
    embedders = embedders_of(toy_set, toy_network, 4, augment=augment, seed=2)
    sums = class_sums(toy_set.images, toy_set.labels, embedders, num_classes=5, chunk=chunk)
    assert (sums.shape, sums.dtype, bool(sums[:, 3:].any())) == ((4, 5, 16), torch.float64, False)
    for k in range(4):
        shown = augment(toy_set.images, derive(2, "augment", k), siamese=True) if augment else toy_set.images
        vectors = RandomNetworks(toy_network).draw(derive(2, "network", k)).features(shown) - embedders[k].center
        vectors = vectors / vectors.norm(dim=1, keepdim=True)
        for c in range(3):
            torch.testing.assert_close(sums[k, c], vectors[toy_set.labels == c].sum(0))
    for labels, words in ((toy_set.labels, "must be below num_classes=2, got 2"), (toy_set.labels[1:], "got 11")):
        refused(lambda y=labels: class_sums(toy_set.images, y, embedders, num_classes=2), ValueError, words)
    refused(lambda: class_sums(*toy_set, embedders, num_classes=0), ValueError, "^num_classes must be at least 1")


@pytest.mark.parametrize("own", [True, False])
def test_layers_and_augmentations_may_work_in_place(own: bool, toy_set: LabeledImages) -> None:
    before = toy_set.images.clone()

    def condense(inplace: bool) -> list[Tensor]:
        layers = nn.ReLU(inplace), nn.Identity() if own else Layer(lambda m, x: x), nn.Flatten(), nn.Linear(16, 3)
        augment = None if own else (lambda x, generator, siamese: x.mul_(2) if inplace else 2 * x)
        network = build(lambda: nn.Sequential(*layers).double(), 0)
        networks = EmbeddingNetworks(FixedNetwork(network), augment=augment)
        options: dict[str, Any] = {"networks": networks, "ipc": 1, "steps": 1, "progress": False}
        accounts = [Account(Ledger(), secret=Secret(3)) for _ in range(2)]
        means = condense_private(
            toy_set, epsilon=2.0, num_networks=2, passes=Passes(first_share=0.0), ledger=accounts[0], **options
        )
        steps = image_sgd(toy_set, size=12, sigma=1.0, ledger=accounts[1], **options)
        return [means.images, steps.images, toy_set.images]

    for ours, theirs in zip(condense(inplace=True), [*condense(inplace=False)[:2], before], strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("first_share", [0.0, 0.2])
@pytest.mark.parametrize("count", [2, 3])
def test_budget_is_checked_for_all_passes_before_the_first(
    count: int, first_share: float, toy_set: LabeledImages, toy_network: Factory
) -> None:
    """All passes together cost 8: a little less is refused before anything is charged, a little more is enough."""
    options: dict[str, Any] = {"count": count, "first_share": first_share, "num_networks": 2, "steps": 1}
    poor, rich = Ledger(budget=7.99), Ledger(budget=8.01)
    with pytest.raises(BudgetExhausted):
        condensed(toy_set, toy_network, ledger=poor, **options)
    assert poor.events == ()
    condensed(toy_set, toy_network, ledger=rich, **options)
    assert rich.epsilon() == pytest.approx(8.0, rel=1e-9)
