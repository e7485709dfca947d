"""VHL, naive VHL, VFA and VFTL against plain formulas, their virtual sets and invariances."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from distillkit import LabeledImages
from distillkit.augment import CropFlip
from distillkit.generate import cnn_noise, stylegan_noise, upsampled_gaussian
from distillkit.networks import split
from distillkit.normalization import Normalization
from distillkit.rng import derive
from fl import FedAvg, simulate
from fl.addons import VFA, VFTL, VHL, NaiveVHL
from fl.averaging.addon import AddOn
from fl.averaging.step import outputs
from tests.fl.federations import Tiny, federation, images, with_label_rows
from tests.fl.invariances import assert_same
from tests.fl.reference_problems import FixedBatches, assert_released, wave, waves
from tests.fl.virtual_reference import Small, assert_close, averaged, initial_network, supcon, toy, trained
from tests.refused import refused

NOISE: dict[str, Any] = {"classes": 3, "per_class": 4, "options": {"width": 8}}
VIRTUAL = toy(8, 50, labels=[0, 1, 2, 0, 1, 2, 0, 1])


def normed(outputs: int) -> Small:
    return Small(outputs, norm=True)


def run_method(*addons: AddOn, rounds: int = 2, clients: list[LabeledImages] | None = None, **options: Any) -> Any:
    method = FedAvg(*addons, **{"factory": Tiny, "lr": 0.05, "batch": 6, **options})
    return simulate(method, clients or federation(), rounds=rounds, progress=False)


@pytest.mark.golden(
    "VHL",
    "NaiveVHL",
    source="Tang et al., ICML 2022, Eq. 4; wizard1203/VHL: trainers/normal_trainer.py, the third term",
)
@pytest.mark.parametrize(
    ("addon", "weights"),
    [
        (VHL(VIRTUAL, 3, batch=8, layer="body"), (1.0, 1.0, 0.1)),
        (VHL(VIRTUAL, 3, batch=8, layer="norm", calibration=0.0, contrast=0.6), (1.0, 0.0, 0.6)),
        (VHL(VIRTUAL, 3, batch=8), (1.0, 1.0, 0.1)),
        (VHL(VIRTUAL, 3, batch=8, cross_entropy=0.0), (0.0, 1.0, 0.1)),
        (VHL(VIRTUAL[:4], 3, batch=8, temperature=0.3, empty="zero"), (1.0, 1.0, 0.1)),
        (VHL(VIRTUAL, 3, batch=8, layer="norm", cross_entropy=0.7, calibration=2.0, contrast=0.0), (0.7, 2.0, 0.0)),
        (NaiveVHL(VIRTUAL, 3, batch=8), (1.0, 0.0, 0.0)),
    ],
)
def test_rounds_follow_the_objective(addon: VHL, weights: tuple[float, float, float]) -> None:
    """Two clients, whole batches, momentum, batch statistics over real and virtual images together.

    The contrastive terms see one layer's outputs, flattened (the release's resnet_v2.py, lines 108-137, and
    proxy_align_loss in losses.py, lines 256-330: both terms take the same features).
    """
    clients, start = [toy(5, 1), toy(9, 2)], initial_network(6, norm=True)
    run = run_method(addon, clients=clients, factory=normed, initial=start, momentum=0.9, batch=9, steps=3)

    xv, yv = addon.source  # type: ignore[misc]
    how: dict[str, Any] = {"temperature": addon.temperature, "empty": addon.empty}
    net = normed(6)
    net.load_state_dict(start, strict=False)
    for _ in range(2):
        nets = []
        for x, y in clients:

            def loss(model: Any, x: Any = x, y: Any = y) -> Any:
                body = model.body(torch.cat([x, xv]).flatten(1))
                normed = model.norm(body)
                logits, n = model.classifier(torch.tanh(normed)), len(x)
                features = {None: torch.tanh(normed), "body": body, "norm": normed}[addon.layer]
                total = F.cross_entropy(logits[:n], y) + weights[0] * F.cross_entropy(logits[n:], yv + 3)
                if weights[1]:
                    both = torch.cat([features[:n], features[n:].detach()])
                    total = total + weights[1] * supcon(both, torch.cat([y, yv]), **how)
                return total + weights[2] * supcon(features[n:], yv, **how)

            nets.append(trained(net, loss, 3, 0.05, 0.9))
        net.load_state_dict(averaged(nets, [5, 9]))
    assert_close(run.server.state[FedAvg.model], net.state_dict())


@pytest.mark.parametrize(("batch", "sizes"), [(3, [3, 3, 2]), (None, [5, 3, 5]), (20, [8, 8, 8])])
def test_virtual_batches_have_the_given_size(batch: int | None, sizes: list[int]) -> None:
    """8 virtual images, the method's batch of 5; the last short batch of a pass is kept."""
    seen = []

    class Peek(AddOn):
        def after_step(self, step: Any) -> None:
            seen.append(len(step.extra["VHL"].images))

    run_method(VHL(VIRTUAL, 3, batch=batch), Peek(), clients=[toy(5, 1)], factory=Small, rounds=1, batch=5, steps=3)
    assert seen == sizes


def test_virtual_classes_follow_those_of_earlier_add_ons() -> None:
    seen = []

    class Before(AddOn):
        extra_outputs = 2
        key = "A"

        def after_training(self, local: Any, update: Any, reply: Any) -> None:
            seen.append((local.first_output(local.terms[1]), local.net.classifier.out_features))

    run_method(Before(), VHL(VIRTUAL, 3), clients=[toy(5, 1)], factory=Small, rounds=1)
    assert seen == [(5, 8)]


def test_virtual_images_are_augmented_like_real_ones_or_on_their_own() -> None:
    def times(factor: float) -> Any:
        return lambda images, generator: factor * images

    def virtual(factor: float) -> LabeledImages:
        return VIRTUAL.replace(images=factor * VIRTUAL.images)

    client = toy(9, 1)
    twice = client.replace(images=2 * client.images)
    for addon, equal in (
        (VHL(VIRTUAL, 3), VHL(virtual(2), 3)),
        (VHL(VIRTUAL, 3, augment=times(3)), VHL(virtual(3), 3)),
        (VHL(VIRTUAL, 3, augment=None), VHL(VIRTUAL, 3)),
    ):
        got = run_method(addon, clients=[client], factory=normed, augment=times(2)).server.state[FedAvg.model]
        want = run_method(equal, clients=[twice], factory=normed).server.state[FedAvg.model]
        assert_close(got, want, atol=0.0)


@pytest.mark.parametrize("own", [False, True])
def test_virtual_images_are_padded_with_black_in_their_own_space(own: bool) -> None:
    """The release pads pictures before it normalises them by .5 and .25: with -2 (generative/datasets.py, 44-54).

    A pad of 3 around 4x4 pixels leaves about four tenths of them."""
    real, virtual = Normalization((0.3,), (0.5,)), Normalization((0.5,), (0.25,))
    clients, seen = [c.replace(normalization=real) for c in federation()], []

    class Peek(AddOn):
        def loss(self, step: Any) -> None:
            seen.append(step.extra["VHL"].images)

    addon = VHL(**{**NOISE, "options": {"width": 8, "normalization": virtual}})
    crop = CropFlip(real, pad=3, flip=0.0)
    if own:
        addon, crop = replace(addon, augment=crop), None
    run = run_method(addon, Peek(), clients=clients, augment=crop)
    pixels = torch.cat(seen).flatten()
    assert set(pixels.tolist()) <= {-2.0, *run.server.state[VHL.noise].images.flatten().tolist()}
    assert 0.5 < float((pixels == -2.0).double().mean()) < 0.9
    padded = CropFlip(virtual, pad=1)
    refused(lambda: run_method(clients=clients, augment=padded), ValueError, "augment pads with black for")


def test_layer_outputs_are_recorded_before_in_place_operations() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 5), nn.ReLU(inplace=True), nn.Linear(5, 3))
    x = torch.randn(6, 1, 2, 2, generator=derive(0))
    found = outputs(split(net), x, {"1": net[1]})
    assert torch.allclose(found.inner["1"], net[1](x.flatten(1)))
    assert float(found.inner["1"].detach().min()) < 0
    assert torch.equal(found.logits, net(x))
    twice, spread = nn.Sequential(nn.Flatten(), net[1], nn.Linear(5, 4), net[1]), nn.Flatten(0)
    odd: tuple[tuple[nn.Module, nn.Module, str], ...] = (
        (net, nn.Linear(4, 5), "layer '1' did not run in a forward pass"),
        (twice, net[1], "layer '1' must run once in a forward pass .* got a second run"),
        (nn.Sequential(spread, nn.Unflatten(0, (6, 4)), net[1]), spread, r"got \[24\] for 6 images"),
    )
    for network, layer, said in odd:
        refused(lambda n=network, m=layer: outputs(split(n), x, {"1": m}), ValueError, said)
        assert not layer._forward_hooks


class GivenMeans(VFA):
    """VFA with given means."""

    def start(self, server: Any) -> None:
        server.state[VFA.means] = {"mean": (1 + wave((3, 3), 0.7)) / 2}


@pytest.mark.golden("VFA", source="wizard1203/VHL at c5aa7a1, run: loss_fn/losses.py, align_feature_loss")
def test_vfa_round_equals_the_release() -> None:
    """One client, batches of 5 and 2, two epochs, weight 1.5, std 0 (the release draws from the global generator).

    The numbers are of SGD at 0.1 on CE + 1.5 `align_feature_loss` (wizard1203/VHL at c5aa7a1, loss_fn/losses.py).
    """
    released = {
        "body.weight": [
            0.2419345578715, 0.443937907129, -0.3563324681568, -0.3521149538076, 0.8206964024843, 0.1290699667527,
            -0.8539563116743, 0.09098517150364, 1.227863898019, -0.07850973576675, -1.207632803615, 0.3897034115196,
        ],
        "body.bias": [1.104570951346, 1.583088573135, -0.2067628705294],
        "classifier.weight": [
            0.8242456736718, 0.3846100249278, -0.9957441850861, -0.186836741326, 1.020708503201, -0.05110681389963,
            -0.9572781809613, 0.3480791366175, 0.914888976775,
        ],
        "classifier.bias": [0.9548635730017, -0.0365784457687, -0.9616168966808],
    }  # fmt: skip
    client = LabeledImages(wave((7, 1, 2, 2), 0.3), torch.tensor([(2 * i) % 3 for i in range(7)]), num_classes=3)
    addons = (GivenMeans(1.5, std=0.0, empty="zero"), FixedBatches({7: [[3, 0, 6, 4, 1, 5, 2], [1, 4, 2, 6, 0, 3, 5]]}))
    method = FedAvg(*addons, factory=lambda k: Small(k).double(), initial=waves(Small(3)), lr=0.1, epochs=2, batch=5)
    assert_released(simulate(method, [client], rounds=1, progress=False), released)


@pytest.mark.parametrize("given", [{}, {"temperature": 0.2}], ids=["default", "given"])
def test_vfa_is_supcon_with_drawn_features(given: dict[str, float]) -> None:
    client, start = toy(7, 1), initial_network(3)
    addon = VFA(weight=1.5, std=0.1, per_class=2, **given)  # type: ignore[arg-type]
    run = run_method(addon, clients=[client], factory=Small, initial=start, batch=7, steps=3)
    means = torch.rand(3, 3, generator=derive(0, 0, "server", "VFA "))
    assert torch.equal(run.server.state[VFA.means]["mean"], means)
    net = Small(3)
    net.load_state_dict(start)
    for t in (1, 2):
        generator = derive(0, t, 0, "VFA", "")

        def loss(model: Any, generator: Any = generator) -> Any:
            labels = torch.tensor([0, 1, 2, 0, 1, 2])
            drawn = means[labels] + 0.1 * torch.randn(6, 3, generator=generator)
            z = torch.cat([model.features(client.images), drawn])
            return F.cross_entropy(model(client.images), client.labels) + 1.5 * supcon(
                z, torch.cat([client.labels, labels]), **given
            )

        net = trained(net, loss, 3, 0.05)
    assert_close(run.server.state[FedAvg.model], net.state_dict())


@pytest.mark.golden(
    "VFTL", source="Tang et al., ICML 2022, section 5.3: pretrain on the virtual set, then plain rounds"
)
def test_vftl_is_fedavg_from_pretrained_weights() -> None:
    start = initial_network(3)
    addon = VFTL(epochs=4, lr=0.1, momentum=0.9, batch=8, source=VIRTUAL, classes=3)
    net = Small(3)
    net.load_state_dict(start)
    x, y = VIRTUAL
    pretrained = trained(net, lambda m: F.cross_entropy(m(x), y), 4, 0.1, 0.9).state_dict()
    options: dict[str, Any] = {"clients": [toy(5, 1), toy(9, 2)], "factory": Small}
    got, want = run_method(addon, initial=start, **options), run_method(initial=pretrained, **options)
    assert_close(got.server.state[FedAvg.model], want.server.state[FedAvg.model])
    assert got.rows[0]["down"] == want.rows[0]["down"]
    assert got.rows[0]["up"] == want.rows[0]["up"]


def test_noise_is_sent_once_and_counted() -> None:
    run = run_method(VHL(**NOISE), rounds=3)
    weights = 4 * (3 * 9 + 3 + 48 * 6 + 6)
    first, *others = (row["down"] for row in run.rows)
    assert first == {
        "FedAvg.model": 5 * weights,
        "VHL.noise": 5 * 12 * 16 * 4,
        "VHL.noise:labels": 5 * 12 * 8,
        "VHL.noise:digest": 5 * 16,
    }
    assert all(down == {"FedAvg.model": 5 * weights, "VHL.noise:digest": 5 * 16} for down in others)
    assert all(row["up"] == {"FedAvg.samples": 5 * 8, "FedAvg.update": 5 * weights} for row in run.rows)
    run = run_method(VFA(), rounds=2)
    assert [row["down"].get("VFA.means", 0) for row in run.rows] == [5 * 3 * 48 * 4, 0]
    method = FedAvg(VFA(), factory=Tiny)
    run = simulate(method, federation(), rounds=2, participation=3, seed=1, progress=False)
    first, second = (set(row["drawn"]) for row in run.rows)
    assert 0 < len(second - first) < 3
    assert run.rows[1]["down"]["VFA.means"] == len(second - first) * 3 * 48 * 4


def test_sources_of_virtual_images() -> None:
    for name, make, options in (
        ("stylegan", stylegan_noise, {"width": 8}),
        ("cnn", cnn_noise, {"width": 8}),
        ("gaussian", upsampled_gaussian, {"base": 2, "normalization": Normalization((0.5,), (0.25,))}),
    ):
        run = run_method(VHL(name, 3, 4, options=options), rounds=1)
        want = make(3, 4, 4, 1, generator=derive(0, 0, "server", "VHL"), **options)
        assert torch.equal(run.server.state[VHL.noise].images, want.images)
    foreign = images(9, 5)
    rich = foreign.replace(columns={"seen": torch.arange(9)}, info={"from": "elsewhere"}).to(dtype=torch.float64)
    runs = [
        simulate(FedAvg(VHL(source, 3), factory=Tiny), federation(), rounds=1, server_data=data, progress=False)
        for source, data in ((foreign, {}), (rich, {}), ("other", {"other": foreign}))
    ]
    for run in runs[1:]:
        assert_same(run, runs[0])
    assert torch.equal(runs[0].server.state[VHL.noise].images, foreign.images)


def test_refusals() -> None:
    refused(lambda: NaiveVHL(layer="body"), ValueError, "only calibration and contrast use layer, but both are 0")
    flat: Any = lambda k: nn.Sequential(nn.Flatten(), nn.Linear(16, k))  # noqa: E731
    both = {"factory": {"a": Tiny, "b": flat}, "assign": lambda k: "ab"[k % 2]}
    for layer, known, how in (("layer1", "body, body.0, body.1", {}), ("", "body, body.0", {}), ("body", "0, 1", both)):
        unknown = f"VHL: the network has no layer '{layer}'; it has {known}"
        refused(lambda n=layer, h=how: run_method(VHL(**NOISE, layer=n), **h), ValueError, unknown)  # type: ignore[misc]
    row = [nn.Flatten(0), nn.Unflatten(0, (1, -1)), nn.Unflatten(1, (-1, 16)), nn.Flatten(0, 1)]
    single: dict[str, Any] = {"factory": lambda k: nn.Sequential(*row, nn.Linear(16, k))}
    refused(lambda: run_method(VHL(**NOISE, layer="1"), **single), ValueError, r"got \[1, 32\] for 2 images")
    said = "VHL: source must be a set or one of stylegan, gaussian, cnn, got 'gan'"
    refused(lambda: run_method(VHL("gan")), ValueError, said)
    said = "VHL: source must be a set or one of stylegan, gaussian, cnn, test, got 'gan'"
    method = FedAvg(VHL("gan"), factory=Tiny)
    refused(lambda: simulate(method, federation(), server_data={"test": images(3, 0)}, rounds=1), ValueError, said)
    said = "VHL: the virtual set has 3 classes, but classes=10: give classes=3$"
    refused(lambda: run_method(VHL(images(9, 5))), ValueError, said)
    for virtual in (images(9, 5)[:0], with_label_rows(images(9, 5))):
        for addon in (VHL(virtual, 3), VFTL(source=virtual, classes=3)):
            said = f"{addon.name}: the virtual set must hold images with class indices"
            refused(lambda a=addon: run_method(a), ValueError, said)
    foreign = images(9, 5).renormalize(Normalization((0.5,), (0.5,)))
    refused(lambda: run_method(VHL(foreign, 3)), ValueError, "convert it with `renormalize`")
    refused(lambda: run_method(VFTL()), ValueError, "VFTL: 10 virtual classes, but outputs for 3 only")
    wide = LabeledImages(torch.rand(4, 1, 2, 3), torch.tensor([0, 1, 0, 1]))
    flat = {"factory": lambda k: nn.Sequential(nn.Flatten(), nn.Linear(6, k)), "clients": [wide]}
    said = "noise images are square, but the clients' images are 2x3; give a set"
    refused(lambda: run_method(VHL(), **flat), ValueError, said)


@pytest.mark.parametrize("predict", ["real", "all"])
def test_virtual_classes_are_tested_only_on_request(predict: Any) -> None:
    """With `predict="all"`, an image may be taken for noise; the run goes on with more logits than classes."""
    method = FedAvg(
        VHL(source="gaussian", classes=3, per_class=2, augment=None), factory=Tiny, steps=1, batch=4, predict=predict
    )
    (row,) = simulate(method, federation()[:2], test=federation()[2], rounds=1, progress=False).rows
    assert row["failed"] == {}
    assert 0 <= row["accuracy"] <= 1
