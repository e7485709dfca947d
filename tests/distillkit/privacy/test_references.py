"""Whole private calls, compared with slow references that draw the same secret numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distillkit.augment import DSA
from distillkit.networks import build
from distillkit.networks.samplers import RandomNetworks
from distillkit.normalization import Normalization
from distillkit.privacy import (
    ASSUMPTIONS,
    Account,
    BudgetExhausted,
    EmbeddingNetworks,
    Ledger,
    NotCapturable,
    Passes,
    PublicEmbedders,
    Secret,
    TrainedNetworks,
    class_sums,
    condense_private,
    fit_to_means,
    gaussian_sigma,
    image_sgd,
    plan_noise,
    private_histogram,
    release,
    squared_distance,
    train_private,
)
from distillkit.privacy._public_noise import public_noise, public_test_images
from distillkit.privacy.validation._arguments import NEW_LEDGER_REMARK
from distillkit.rng import derive
from distillkit.sets import LabeledImages, TiledImages, Tiles
from distillkit.training import Protocol
from tests.distillkit.privacy.options import embedded_sizes
from tests.refused import refused

Factory = Callable[[], nn.Module]


@pytest.fixture
def skewed(toy_set: LabeledImages) -> LabeledImages:
    """Return 4, 2, 1 and 0 images of four classes, oblong."""
    images = torch.cat([toy_set.images, 1 - toy_set.images[..., :2]], 3)
    chosen = toy_set.replace(images=images)[[0, 1, 2, 3, 4, 6, 9]]
    return chosen.replace(num_classes=4, class_names=("a", "b", "c", "d"))


@pytest.fixture
def oblong_network() -> Factory:
    body = lambda: [nn.Conv2d(1, 3, 3, padding=1), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten()]  # noqa: E731
    return lambda: nn.Sequential(*body(), nn.Linear(18, 4)).double()


def doubled(network: nn.Module, generator: torch.Generator) -> None:
    """User-defined redraw."""
    for parameter in network.parameters():
        parameter.mul_(2)


SHORT = Protocol(epochs=2, batch=6, lr=0.1)
CASES: dict[str, dict[str, Any]] = {
    "three passes": {"passes": Passes(3, 0.2, 0.3, 2, 3), "num_networks": 3, "ipc": 2, "lr": 2.0, "momentum": 0.3},
    "public sizes and tiles": {
        "passes": Passes(2, first_share=0.0), "size": torch.tensor([5.0, 2.0, 1.0, 3.0]), "clip": 0.7, "ipc": 2,
        "parametrize": Tiles(2), "match": "embedding+logits", "num_networks": 2, "lr": 3.0, "momentum": 0.0,
    },
    "trained": {"passes": Passes(3, 0.1, 0.2, 1, 2, SHORT), "size": 9, "num_networks": 2, "ipc": 1, "lr": 2.0,
                "momentum": 0.5},
    "no noise": {"passes": Passes(2, 0.3, 0.2, 1, 2), "epsilon": math.inf, "num_networks": 1, "ipc": 1, "lr": 2.0,
                 "momentum": 0.5},
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("global_rng_untouched")
def test_condensation_equals_its_reference(
    case: str, skewed: LabeledImages, oblong_network: Factory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The releases of each pass, what they are divided by and fitted from, their charges, and the result's `info`."""
    options = {"epsilon": 8.0, "clip": None, "match": None, "parametrize": None, "size": None} | CASES[case]
    augment = DSA("flip_crop") if case == "trained" else None
    passes, count, ipc, size = options["passes"], options["num_networks"], options["ipc"], options["size"]
    tiles, account = options["parametrize"] or Tiles(1), Account(Ledger(), client="c", round=2, secret=Secret(4))
    classes, match = torch.arange(4).repeat_interleave(ipc * tiles.count), options["match"] or "embedding"
    seed, first_seed, *more = torch.randint(2**62, (passes.count,), generator=derive(3)).tolist()
    images = torch.randn(4 * ipc, 1, 4, 6, generator=derive(seed, "start"), dtype=torch.float64)
    budget = 0.0 if options["epsilon"] == math.inf else gaussian_sigma(8.0, 1e-5) ** -2

    def sigma_of(share: float, releases: int = 1) -> float:
        return math.sqrt(releases / (share * budget)) if budget else 0.0

    account.ledger.assume("condense_private")
    histogram_share = 0.0 if isinstance(size, Tensor) else passes.histogram_share
    if histogram_share:
        noised = private_histogram(skewed.labels, num_classes=4, sigma=sigma_of(histogram_share), ledger=account)
        size_of = torch.tensor([max(n, 1.0, 2 * sigma_of(histogram_share)) for n in noised.tolist()])
    else:
        size_of = size
    share = (1 - histogram_share - passes.first_share) / (passes.count - 1)
    plan = [(first_seed, passes.first_num_networks, passes.first_share, passes.first_steps)] * (passes.first_share > 0)
    for number, (own, networks, part, steps) in enumerate([*plan, *((s, count, share, 5) for s in (seed, *more))]):
        sampler: Any = RandomNetworks(oblong_network, doubled)
        given = {}
        if number:
            shown = tiles.decode(images) if tiles.count > 1 else images
            given = {"centers": shown}
            if passes.train is not None:
                released = skewed.replace(images=shown, labels=classes, columns={}, info={})
                sampler = TrainedNetworks(oblong_network, released, passes.train, redraw=doubled, progress=False)
        how = {"like": skewed, "seed": own, "clip": options["clip"], "match": match, "augment": augment} | given
        embedders = PublicEmbedders(sampler, networks, **how)
        sums = class_sums(*skewed, embedders, num_classes=4)
        sigma = sigma_of(part, networks)
        noised = release(sums, sigma=sigma, sensitivity=options["clip"] or 1.0, ledger=account)
        how = {"steps": steps, "lr": options["lr"], "momentum": options["momentum"]}
        how |= {"parametrize": options["parametrize"], "progress": False}
        images = fit_to_means(images, embedders, noised / size_of.view(1, 4, 1), **how)

    ledger, private, public = Ledger(), *(embedded_sizes(name, monkeypatch) for name in ("of_private", "__call__"))
    sampler, match = RandomNetworks(oblong_network, doubled), options.pop("match")
    networks = EmbeddingNetworks(sampler, match=match, augment=augment, chunk=3)
    with torch.no_grad():
        found = condense_private(
            skewed, networks=networks, steps=5, generator=3, progress=False,
            ledger=Account(ledger, client="c", round=2, secret=Secret(4)), **options,
        )  # fmt: skip
    assert max(private) == 3
    assert max(public) == max(ipc * tiles.count, 3 // ipc * ipc)  # a class is never split
    stored = found.stored if isinstance(found, TiledImages) else found.images
    torch.testing.assert_close(stored, images, rtol=1e-6, atol=1e-6)
    for ours, theirs in zip(ledger.events, account.ledger.events, strict=True):
        assert vars(ours) == {**vars(theirs), "sigma": pytest.approx(theirs.sigma, rel=1e-9)}
    wanted = account.guarantee().info() | {
        "method": "class_means", "derived": "class_means", "size": size if isinstance(size, int) else None,
        "sigma": pytest.approx(sigma, rel=1e-9), "draws": count, "first_share": passes.first_share,
        "passes": passes.count, "trained": passes.train is not None, "match": match or "embedding", "ipc": ipc,
        "init": "noise", "steps": 5, "device": "cpu",
    }  # fmt: skip
    wanted |= {} if options["parametrize"] is None else {"parametrize": "Tiles(factor=2)", "ipc_decoded": ipc * 4}
    wanted["nominal_epsilon"] = pytest.approx(8.0, rel=1e-9) if budget else None
    assert {k: v for k, v in found.info.items() if k != "created"} == wanted
    assert found.labels.tolist() == classes.tolist()
    assert (found.num_classes, found.class_names) == (4, skewed.class_names)
    assert found.normalization == skewed.normalization
    loaded = LabeledImages.load(found.save(tmp_path / "set.safetensors"))
    assert loaded.info == found.info
    assert torch.equal(loaded.images, found.images)
    assert type(loaded) is type(found) is (TiledImages if tiles.count > 1 else LabeledImages)


def test_own_ledger_states_the_target_and_system_noise_is_fresh(skewed: LabeledImages, oblong_network: Factory) -> None:
    ledger = Ledger(budget=8.0, delta=1e-4)
    options: dict[str, Any] = {"networks": RandomNetworks(oblong_network), "num_networks": 2, "ipc": 1, "steps": 1}
    options |= {"epsilon": 8.0, "passes": Passes(first_num_networks=1, first_steps=1), "progress": False}
    options["delta"] = 1e-4
    first, second = (condense_private(skewed, ledger=own, **options) for own in (None, ledger))
    assert not torch.equal(first.images, second.images)
    for made in (first, second):
        assert (made.info["epsilon"], made.info["relation"]) == (pytest.approx(8.0), "add or remove one record")
        assert (made.info["delta"], made.info["accountant"]) == (1e-4, "exact")
    assert (first.info["remarks"], "remarks" in second.info) == ([NEW_LEDGER_REMARK], False)
    with pytest.raises(BudgetExhausted, match="histogram and class_means and class_means for everyone"):
        condense_private(skewed, ledger=ledger, **options)


def clipped(rows: list[Tensor], clip: float) -> Tensor:
    return torch.stack([row * min(1.0, clip / float(row.norm())) for row in rows]).sum(0) if rows else torch.tensor(0.0)


@pytest.mark.parametrize(("clip", "sigma", "rate"), [(0.4, 1.5, 0.6), (math.inf, 0.0, 1.0), (None, None, 0.3)])
@pytest.mark.parametrize("records", [7, 0])
def test_steps_on_images_equal_their_reference(
    clip: float | None,
    sigma: float | None,
    rate: float,
    records: int,
    skewed: LabeledImages,
    oblong_network: Factory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """FedDM's gradient of each drawn record by autograd, clipped, summed and noised; then SGD with momentum."""
    data, size, secret, seed = skewed[:records], 5, Secret(4), int(torch.randint(2**62, (), generator=derive(0)))
    budget, augment = {"epsilon": 3.0} if sigma is None else {"sigma": sigma}, DSA("flip_scale") if rate < 1 else None
    sigma = plan_noise(3.0, 1e-4, count=4, rate=rate).sigma if sigma is None else sigma
    images = torch.randn(4, 2, 1, 4, 6, generator=derive(seed, "start"), dtype=torch.float64)
    velocity, wanted = torch.zeros_like(images), []

    def gradients(step: int, real: Tensor, labels: Tensor) -> list[Tensor]:
        network, rows = RandomNetworks(oblong_network).draw(derive(seed, "network", step)), []
        shown = lambda x: augment(x, derive(seed, "augment", step), siamese=True) if augment else x  # noqa: E731
        for image, label in zip(real, labels):
            leaf = images.clone().requires_grad_()
            one, own = (
                (network.features(x), network.classifier(network.features(x)))
                for x in (shown(image[None]), shown(leaf[label]))
            )
            loss = sum((a[0] - b.mean(0)).square().sum() for a, b in zip(one, own))
            rows.append(torch.autograd.grad(loss, leaf)[0])
        return rows

    noise = public_noise(32, data, derive(seed, "clip"))
    norms = [float(row.norm()) for row in gradients(0, noise, torch.arange(32) % 4)]
    used = sorted(norms)[15] if clip is None else clip
    for step in range(4):
        drawn = secret.poisson(len(data), rate)
        total = clipped(gradients(step, data.images[drawn], data.labels[drawn]), used) + torch.zeros_like(images)
        wanted.append(secret.add_noise(total, sigma * used if sigma else 0.0) / (rate * size / 4))
        velocity = 0.3 * velocity + wanted[-1]
        images = images - 0.2 * velocity
    seen: list[Tensor] = []
    ledger, own = Ledger(delta=1e-4), Secret(4)
    sizes, shown = (embedded_sizes(name, monkeypatch) for name in ("embed_private", "embedding"))

    def look(step: int, gradient: Tensor) -> None:
        assert step == len(seen)
        seen.append(gradient.clone())
        gradient.zero_()  # a copy

    found = image_sgd(
        data, size=size, **budget, delta=1e-4, clip=clip, rate=rate, steps=4, ipc=2, lr=0.2, momentum=0.3,
        networks=EmbeddingNetworks(RandomNetworks(oblong_network), augment=augment, chunk=2), progress=False,
        callback=look, ledger=Account(ledger, client=2, round=1, secret=own),
    )  # fmt: skip
    assert {*sizes} <= {1, 2, 6, 32}  # for the preparation, of a chunk, for a trial and for the clip
    assert shown.count(2) - sizes.count(2) == 2 * 4 * (1 + 4)  # each class, also without records, in each step
    scale = 1e-5 * max(float(g.abs().max()) for g in wanted)
    for ours, theirs in zip(seen, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=scale)
    torch.testing.assert_close(found.images, images.flatten(0, 1), rtol=1e-5, atol=4 * scale)
    (event,) = ledger.events
    stated = (event.mechanism, event.sigma, event.rate, event.count, event.client, event.round, event.sampling)
    assert stated == ("image_sgd", sigma, rate, 4, "2", 1, "poisson" if rate < 1 else "everything")
    assert own.draws == (4 if sigma else 0)
    assert ledger.guarantee(2).assumptions == {"image_sgd": ASSUMPTIONS["image_sgd"]}
    info = ledger.guarantee(2).info() | {
        "method": "image_sgd", "derived": "image_sgd", "sigma": sigma, "clip": pytest.approx(used, rel=1e-6),
        "rate": rate, "steps": 4, "match": "embedding+logits", "ipc": 2, "init": "noise", "device": "cpu",
    }  # fmt: skip
    assert {k: v for k, v in found.info.items() if k != "created"} == info
    assert found.labels.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert (found.num_classes, found.class_names) == (4, skewed.class_names)
    assert (found.normalization, found.images.requires_grad) == (skewed.normalization, False)


@pytest.mark.parametrize("gradients", ["captured", "opacus", "opacus-ghost"])
@pytest.mark.parametrize(
    ("clip", "epsilon", "rate", "records"), [(0.4, 3.0, 0.6, 7), (math.inf, None, 1.0, 7), (0.3, 2.0, 0.2, 0)]
)
def test_training_equals_its_reference(
    clip: float, epsilon: float | None, rate: float, records: int, gradients: str, skewed: LabeledImages
) -> None:
    """The gradient of each drawn record by autograd, clipped over all parameters, summed and noised; then SGD."""
    data, chunk = skewed[:records], 2 if epsilon else None

    def factory() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(24, 5), nn.Tanh(), nn.Linear(5, 4)).double()

    sigma = 0.0 if epsilon is None else plan_noise(epsilon, 1e-4, count=5, rate=rate).sigma
    losses = partial(F.cross_entropy, reduction="none", label_smoothing=0.1 if epsilon else 0.0)
    model, reference, secret, size = build(factory, 0), build(factory, 0), Secret(5), 5
    reference[3].bias.requires_grad_(False)  # type: ignore[index]
    model[3].bias.requires_grad_(False)  # type: ignore[index]
    parameters = [p for p in reference.parameters() if p.requires_grad]
    secret.generator()
    for _ in range(5):
        drawn, rows = secret.poisson(len(data), rate), []
        for image, label in zip(data.images[drawn], data.labels[drawn]):
            loss = losses(reference(image[None]), label[None])
            rows.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)]))
        total = clipped(rows, clip) + torch.zeros(sum(p.numel() for p in parameters), dtype=torch.float64)
        step = secret.add_noise(total, sigma * clip if sigma else 0.0) / (rate * size)
        for p, part in zip(parameters, step.split([p.numel() for p in parameters])):
            p.data -= 0.2 * part.view_as(p)
    ledger = Ledger(delta=1e-4)
    with torch.no_grad():
        train_private(
            model, *((data,) if records else data), size=size, epsilon=epsilon, sigma=None if epsilon else 0.0,
            delta=1e-4, clip=clip, rate=rate, steps=5, lr=0.2, chunk=chunk, gradients=gradients, progress=False,
            loss=losses if epsilon else None, ledger=Account(ledger, client=1, round=3, secret=Secret(5)),
            optimizer=(lambda p: torch.optim.SGD(p[::-1], lr=0.2)) if epsilon else None,
        )  # fmt: skip
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    assert all(p.grad is None for p in model.parameters())
    (event,) = ledger.events
    assert (event.mechanism, event.sigma, event.rate, event.count) == ("dp_sgd", sigma, rate, 5)
    assert (event.client, event.round, event.seeded) == ("1", 3, True)
    assert ledger.guarantee(1).assumptions == {"train_private": ASSUMPTIONS["train_private"]}


def test_released_sums_and_counts_are_the_exact_ones_plus_the_secret_noise(skewed: LabeledImages) -> None:
    sums = torch.randn(2, 4, 5, generator=derive(1), dtype=torch.float64)
    ledger, secret, same = Ledger(), Secret(6), Secret(6)
    account = Account(ledger, client=3, round=7, secret=secret)
    counts = private_histogram(skewed.labels, num_classes=6, sigma=2.0, ledger=account)
    assert torch.equal(counts, same.add_noise(torch.tensor([4, 2, 1, 0, 0, 0]), 2.0))
    noised = release(sums, sigma=3.0, sensitivity=0.5, ledger=account)
    assert torch.equal(noised, same.add_noise(sums, 1.5))
    assert torch.equal(release(sums, sigma=0.0, sensitivity=math.inf, ledger=account), sums)
    stated = [(e.mechanism, e.sigma, e.rate, e.count, e.client, e.round, e.seeded) for e in ledger.events]
    assert stated == [(*one, "3", 7, True) for one in (("histogram", 2.0, 1.0, 1), ("class_means", 3.0, 1.0, 2),
                                                       ("class_means", 0.0, 1.0, 2))]  # fmt: skip
    assert ledger.guarantee(3).assumptions == {name: ASSUMPTIONS[name] for name in ("private_histogram", "release")}
    for labels, count, words in (([3], 3, "labels must be below num_classes=3"), ([], 0, "num_classes must be at")):
        count_all = partial(private_histogram, torch.tensor(labels).long(), num_classes=count, sigma=1.0, ledger=ledger)
        refused(count_all, ValueError, words)
    half = release(torch.zeros(1, 1, 500), sigma=np.float16(0.45), sensitivity=np.float16(6e-8), ledger=Ledger())
    assert float(half.std()) == pytest.approx(2.7e-8, rel=0.2)
    own = torch.arange(3).as_subclass(type("Own", (Tensor,), {}))
    refused(lambda: private_histogram(own, num_classes=3, sigma=1.0, ledger=ledger), NotCapturable, "a Own is not a pl")
    assert len(ledger.events) == 3
    empty = private_histogram(skewed.labels[:0], num_classes=1, sigma=0.0, ledger=Ledger())
    assert empty.tolist() == [0.0]


@pytest.mark.parametrize(
    ("coarse", "dtype"), [(1, torch.float64), (2, torch.float64), (2, torch.float32), (3, torch.float64)]
)
def test_public_noise_is_enlarged_bilinearly_and_clamped(
    coarse: int, dtype: torch.dtype, skewed: LabeledImages
) -> None:
    """With the mean and standard deviation of the normalization's constants; no image of the set is used."""
    space = Normalization((0.5, 0.2), (0.25, 0.4))
    like = skewed.replace(images=torch.zeros(7, 2, 5, 8, dtype=dtype), normalization=space)
    small = [max(2, side // coarse) for side in (5, 8)]
    drawn = torch.randn(40, 2, *small, generator=derive(2), dtype=dtype)

    def weights(many: int, few: int) -> Tensor:
        rows = torch.zeros(many, few, dtype=dtype)
        for place in range(many):
            at = min(max((place + 0.5) * few / many - 0.5, 0.0), few - 1.0)
            left = min(int(at), few - 2)
            rows[place, left], rows[place, left + 1] = 1 - (at - left), at - left
        return rows

    smooth = weights(5, small[0]) @ drawn @ weights(8, small[1]).T
    mean, std = (torch.tensor(numbers, dtype=dtype).view(2, 1, 1) for numbers in (space.mean, space.std))
    wanted = ((mean + std * smooth).clamp(0, 1) - mean) / std
    torch.testing.assert_close(public_noise(40, like, derive(2), coarse=coarse), wanted)
    point = like.replace(images=torch.zeros(7, 2, 1, 1, dtype=dtype))
    drawn = torch.randn(9, 2, 1, 1, generator=derive(4), dtype=dtype)
    wanted = ((mean + std * drawn).clamp(0, 1) - mean) / std
    torch.testing.assert_close(public_noise(9, point, derive(4), coarse=coarse), wanted)
    generator = derive(3)
    white = torch.randn(6, 2, 5, 8, generator=generator, dtype=dtype)
    wanted = public_noise(6, like, generator) + 0.3 * white
    torch.testing.assert_close(public_test_images(6, like, derive(3)), wanted)


def test_squared_distance_is_that_of_each_row() -> None:
    assert squared_distance.separable is True  # type: ignore[attr-defined]
    rows = squared_distance(torch.tensor([[1.0, 2.0], [0.0, 3.0]]), torch.tensor([[0.0, 0.0], [1.0, 1.0]]))
    assert rows.tolist() == [5.0, 5.0]
