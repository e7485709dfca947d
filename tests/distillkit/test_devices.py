"""The option `device`: sets and networks move once, results return, and the values are those of the CPU."""

from __future__ import annotations

import copy
import functools
import inspect
import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from attacks.inversion import Gradient, ReplayableMessage, invert_message
from attacks.membership import gradient_norm, label_only
from distillkit import LabeledImages
from distillkit.augment import DSA, CropFlip, ResizedCrop, ShufflePatches
from distillkit.condense import (
    InnerTraining,
    distribution_matching,
    fit_to_gradient,
    gradient_matching,
    herding,
    k_center,
    random_subset,
    stitch,
)
from distillkit.distributed import over_classes
from distillkit.evaluate import evaluate
from distillkit.generate import cnn_noise, invert, separability, stylegan_noise
from distillkit.labels import CutMix, Relabel, soft_labels, stored_soft_labels
from distillkit.losses import prototype_distance, supervised_contrastive
from distillkit.networks import ConvNet, FixedNetwork, KeepInit, NetworkBall, RandomNetworks, build
from distillkit.normalization import Normalization
from distillkit.privacy import (
    EmbeddingNetworks,
    Ledger,
    Passes,
    PrivacyError,
    condense_private,
    image_sgd,
    train_private,
)
from distillkit.scores import scores
from distillkit.sets import Tiles
from distillkit.sets._class_index import with_class_labels
from distillkit.sets._devices import DrawOnDevice, _moved, on_device
from distillkit.training import Protocol, accuracy, train
from tests.fl.emulated_device import DEVICE, on_second_device, second_device
from tests.refused import refused
from tests.stored import write_pixels

REAL = os.environ.get("DISTILLKIT_DEVICE", "")
"""An accelerator of this machine, on which the tests that are marked `device` run; otherwise they emulate one."""

HALF = Normalization((0.5,), (0.5,))
SHORT = Protocol(epochs=2, lr=0.05, batch=16)


def net() -> ConvNet:
    return ConvNet((1, 8, 8), 3, width=4, depth=1)


def flat() -> nn.Module:
    """Return a network whose gradients of one example the emulated device can follow."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 3))


def data(n: int = 60, seed: int = 0) -> LabeledImages:
    """Return images of three classes that a network learns at once."""
    labels = torch.arange(n) % 3
    noise = 0.1 * torch.rand(n, 1, 8, 8, generator=torch.Generator().manual_seed(seed))
    pixels = (noise + labels.view(-1, 1, 1, 1) * 0.3).clamp(0, 1)
    return LabeledImages.from_pixels(pixels, labels, num_classes=3, normalization=HALF)


def teacher() -> nn.Module:
    return copy.deepcopy(_teacher())


@functools.cache
def _teacher() -> nn.Module:
    return train(build(net, 0), data(), Protocol(epochs=20, lr=0.1, batch=16), progress=False)


def parameters(network: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in network.parameters()])


def trained(**how: Any) -> Tensor:
    network = build(net, 0)
    assert train(network, data(), SHORT, progress=False, **how) is network
    return parameters(network)


def trained_privately(**how: Any) -> Tensor:
    network = build(flat, 0)
    train_private(network, data(), size=60, sigma=0.0, rate=1.0, steps=2, progress=False, **how)
    return parameters(network)


def privately(function: Any, **how: Any) -> LabeledImages:
    networks: Any = EmbeddingNetworks(RandomNetworks(net), augment=DSA())
    return function(data(), ipc=1, networks=networks, steps=2, ledger=Ledger(), progress=False, **how)


def student(**how: Any) -> Tensor:
    protocol = Protocol(epochs=1, batch=16, augment=DSA(), relabel=Relabel(teacher()))
    network = build(net, 1)
    return parameters(train(network, data(), protocol, progress=False, **how))


WORK: dict[str, Callable[..., Any]] = {
    "distribution": lambda **how: distribution_matching(
        data(), networks=RandomNetworks(net), ipc=2, steps=3, batch_real=8, lr=None, augment=DSA(),
        progress=False, **how,
    ),
    "distribution, batch norm": lambda **how: distribution_matching(
        data(), networks=SAMPLERS["batch norm"](), match="embedding+logits", init="noise", ipc=2, steps=3,
        parametrize=Tiles(2), progress=False, **how,
    ),
    "distribution, fixed": lambda **how: distribution_matching(
        data(), networks=SAMPLERS["fixed"](), ipc=2, steps=3, progress=False, **how
    ),
    "gradient matching": lambda **how: gradient_matching(
        data(), networks=RandomNetworks(net), ipc=2, iterations=2, batch_real=8, augment=DSA(), progress=False,
        inner=InnerTraining(loops=(2, 1)), **how,
    ),
    "random": lambda **how: random_subset(data(), ipc=2, **how),
    "herding": lambda **how: herding(data(), network=build(net, 0), ipc=2, **how),
    "k-center": lambda **how: k_center(data(), network=build(net, 0), ipc=2, **how),
    "stitch": lambda **how: stitch(data(), observer=teacher(), ipc=2, pool=3, crops=2, progress=False, **how),
    "gradient": lambda **how: fit_to_gradient(
        build(net, 0), data(6), [torch.ones_like(p) for p in net().parameters()], steps=2, progress=False, **how
    ),
    "train": trained,
    "relabel": student,
    "accuracy": lambda **how: accuracy(teacher(), data(30, 1), **how),
    "evaluate": lambda **how: evaluate(
        data(9), data(30, 1), net, real=data(), num_networks=1, protocol=SHORT, progress=False, **how
    ).rows[1].accuracies,
    "scores": lambda **how: scores(
        data(9), data(30, 1), net, real=data(), protocol=replace(SHORT, augment=DSA()), num_networks=1,
        progress=False, **how,
    ).hlr,
    "soft labels": lambda **how: soft_labels(data(9), teacher(), pool=data(), **how),
    "stored labels": lambda **how: stored_soft_labels(
        data(9), Protocol(epochs=1, relabel=Relabel(teacher())), pool=data(), progress=False, **how
    ).logits,
    "invert": lambda **how: invert(
        teacher(), torch.arange(3), shape=(1, 8, 8), steps=3, parametrize=Tiles(2), progress=False, **how
    ),
    "separability": lambda **how: separability(data(), epochs=1, progress=False, **how).small_net,
    "cnn noise": lambda **how: cnn_noise(3, 2, 8, 1, progress=False, normalization=HALF, **how).to("cpu"),
    "stylegan noise": lambda **how: stylegan_noise(3, 2, 8, 1, progress=False, normalization=HALF, **how).to("cpu"),
    "condense_private": lambda **how: privately(
        partial(condense_private, epsilon=float("inf"), num_networks=1, passes=Passes(first_share=0.0)), **how
    ),
    "trained networks": lambda **how: condense_private(
        data(), epsilon=float("inf"), ipc=1, networks=RandomNetworks(net), num_networks=2, steps=2, progress=False,
        passes=Passes(train=Protocol(epochs=1)), ledger=Ledger(), **how,
    ),
    "image_sgd": lambda **how: privately(partial(image_sgd, size=60, sigma=0.0, rate=1.0), **how),
    "train_private": trained_privately,
    "message": lambda **how: invert_message(
        Gradient.of(build(net, 0), *data(2)), (1, 8, 8), 2, labels=torch.tensor([0, 1]), steps=3, **how
    ).images,
    "gradient norm": lambda **how: gradient_norm(build(flat, 0), *data(6), **how),
    "label only": lambda **how: label_only(teacher(), *data(6), **how),
}  # fmt: skip
LONG = {"trained networks", "separability"}
ROUNDED = {"train_private", "image_sgd", "condense_private", "trained networks", "gradient norm"}
"""Computed by other operators on the emulated device."""


def values(result: Any) -> list[Tensor]:
    """Return all tensors of a result."""
    if isinstance(result, LabeledImages):
        return [result.images, result.labels, *result.columns.values()]
    return [result if isinstance(result, Tensor) else torch.tensor(result, dtype=torch.float64)]


@pytest.fixture
def second(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Emulate a second device, which private functions would refuse as a mode of PyTorch."""
    if REAL:
        yield
        return
    for name in ("dispatch_modes", "function_modes"):
        monkeypatch.setattr(f"distillkit.privacy.capture._captured_function.{name}", list)
    with second_device():
        yield


@pytest.mark.device
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in LONG else n for n in WORK])
def test_every_component_computes_on_a_device_and_returns(name: str, second: None) -> None:
    """The emulated device gives the CPU's bits; a real one rounds otherwise."""
    device: Any = REAL or DEVICE
    wanted, found = WORK[name](), WORK[name](device=device)
    tolerance = 1e-2 if REAL else 1e-4 if name in ROUNDED else 0.0
    for mine, other in zip(values(found), values(wanted), strict=True):
        assert mine.device.type == "cpu"
        assert not on_second_device(mine)
        assert torch.allclose(mine.double(), other.double(), rtol=tolerance, atol=tolerance)
    if isinstance(found, LabeledImages) and "noise" not in name and name != "soft labels":
        assert wanted.info["device"] == "cpu"
        assert torch.device(found.info["device"]).type == torch.device(device).type
        assert REAL or found.info["device"] == str(DEVICE)


@on_device("images", trains="trained")
def seen(images: Any, labels: Any = None, *, trained: Any = None, options: Any = None, device: Any = None) -> Any:
    """Return the arguments of a call as the function gets them."""
    return images, labels, trained, options


def places(value: Any) -> set[bool]:
    if isinstance(value, nn.Module):
        return {on_second_device(p) for p in value.parameters()}
    return {on_second_device(t) for t in values(value)}


def test_without_a_device_the_arguments_are_the_callers_own() -> None:
    given = [data(3), None, net(), Protocol(relabel=Relabel(net()))]
    found = seen(given[0], trained=given[2], options=given[3])
    assert all(mine is own for mine, own in zip(found, given, strict=True))


def test_results_return_to_the_first_argument_and_a_trained_network_to_its_own_device() -> None:
    with second_device():
        network, far = net(), data(3).to(DEVICE)
        found = seen(far, trained=network, device="cpu")
        assert type(found) is tuple
        assert places(found[0]) == {False}  # a call that trains returns what the function returns
        assert places(with_class_labels(far.replace(labels=torch.eye(3).to(DEVICE)))) == {True}

        for first, second in ((far, data(3)), (data(3), far), (net().to(DEVICE), data(3))):
            found = on_device()(lambda one, other, device=None: other)(first, second, device="cpu")
            assert places(found) == places(first)
        found = on_device()(lambda images, device=None: (images, {"a": (images,)}))(far, device="cpu")
        assert type(found) is type(found[1]["a"]) is tuple
        assert places(found[0]) == places(found[1]["a"][0]) == {True}
        message = ReplayableMessage([far.images], lambda images, labels: [images], 3)
        assert places(on_device()(lambda message, device=None: message.observed[0])(message, device="cpu")) == {True}

        @on_device(trains="network")
        def fails(images: LabeledImages, network: nn.Module, device: Any = None) -> None:
            raise ValueError(places(network))

        for own, other, moved in (("cpu", DEVICE, True), (DEVICE, "cpu", False)):
            network.to(own)
            with pytest.raises(ValueError, match=str(moved)):
                fails(data(3), network, device=other)
            assert places(network) == {not moved}


def test_networks_are_copied_and_options_follow_their_networks() -> None:
    with second_device():
        own = net()
        protocol = Protocol(relabel=Relabel(own), augment=DSA())
        there = on_device()(lambda network, options, device=None: options)(own, protocol, device=DEVICE)
        assert places(own) == {False}
        assert places(protocol.relabel.teacher) == {False}  # type: ignore[union-attr]
        assert places(there.relabel.teacher) == {False}  # the result is back
        got: list[Any] = []
        on_device()(lambda x, options, device=None: got.append(options))(data(3), protocol, device=DEVICE)
        assert places(got[0].relabel.teacher) == {True}
        assert got[0].augment is protocol.augment


class Masked(nn.Module):
    """Classifier whose pixels have random weights, which are not trained."""

    weights: Tensor

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.last = nn.utils.skip_init(nn.Linear, 64, 3)
        for value in self.last.parameters():
            nn.init.uniform_(value, generator=generator)
        self.register_buffer("weights", torch.rand(64, generator=generator))

    def forward(self, images: Tensor) -> Tensor:
        found: Tensor = self.last(images.flatten(1) * self.weights)
        return found


@dataclass
class MaskedNetworks:
    """A user's sampler, whose networks also differ in a buffer."""

    fixed: bool = False

    def draw(self, generator: torch.Generator) -> nn.Module:
        return Masked(generator).requires_grad_(False)


SAMPLERS: dict[str, Callable[[], Any]] = {
    "random": lambda: RandomNetworks(net),
    "kept": lambda: RandomNetworks(KeepInit(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 3), nn.Linear(3, 3)))),
    "fixed": lambda: FixedNetwork(build(net, 0)),
    "ball": lambda: NetworkBall(build(net, 0), 2.0),
    "own": MaskedNetworks,
    "batch norm": lambda: RandomNetworks(lambda: ConvNet((1, 8, 8), 3, width=4, depth=1, norm="batch")),
}


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("count", [1, 9])
def test_samplers_give_networks_on_the_device_with_the_values_of_the_cpu(name: str, count: int) -> None:
    sampler = SAMPLERS[name]()
    draws = [torch.Generator().manual_seed(seed) for seed in range(count)]
    wanted = [copy.deepcopy(sampler.draw(g.clone_state()).state_dict()) for g in draws]
    with second_device():
        there: list[Any] = []
        on_device()(lambda x, networks, device=None: there.append(networks))(data(3), sampler, device=DEVICE)
        [moved] = there
        assert type(moved) is type(sampler)
        assert repr(moved) == repr(sampler)
        once = [copy.deepcopy(moved.draw(g.clone_state())) for g in draws]
        ahead = [copy.deepcopy(network) for network in moved.draw.ahead(g.clone_state() for g in draws)]
        for found in (once, ahead):
            assert len(found) == count
            for network, state in zip(found, wanted, strict=True):
                assert places(network) == {True}
                assert all(value.cpu().equal(state[n]) for n, value in network.state_dict().items())
        assert not any(p.requires_grad for p in moved.draw(draws[0]).parameters())
        assert places(sampler.draw(draws[0])) == {False}
    assert [*DrawOnDevice(lambda g: places, False, torch.device("cpu")).ahead(draws)] == [places] * count


def test_unknown_devices_and_mixtures_are_refused_by_name() -> None:
    with pytest.raises(TypeError, match="device must be a torch.device or a name such as 'auto'"):
        herding(data(9), network=net(), ipc=1, device=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="device must be one that this machine has, got 'nowhere'"):
        herding(data(9), network=net(), ipc=1, device="nowhere")
    with second_device(), pytest.raises(ValueError, match=r"pass device=, which moves both"):
        train(net().to(DEVICE), data(9), SHORT)


def test_auto_is_the_accelerator_or_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert random_subset(data(), ipc=1, device="auto").info["device"] == "cpu"
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device(DEVICE))
    with second_device():
        assert random_subset(data(), ipc=1, device="auto").info["device"] == str(DEVICE)


def test_the_device_of_the_last_condensation_is_recorded() -> None:
    with second_device():
        first = random_subset(data(), ipc=2, device=DEVICE)
        networks: Any = {"networks": RandomNetworks(net), "steps": 1, "progress": False}
        again = distribution_matching(data(), init=first, **networks)
        labelled = [soft_labels(first, teacher(), pool=data(), device=d) for d in (None, "cpu")]
        passed = on_device()(lambda images, device=None: images)(first)
        assert [one.info["device"] for one in (again, passed, *labelled)] == ["cpu", "cpu", str(DEVICE), str(DEVICE)]


def test_stored_images_are_read_to_the_device(tmp_path: Path) -> None:
    pixels = (255 * data().pixels()).round().to(torch.uint8)
    stored = write_pixels(tmp_path / "p.npy", pixels, data().labels, num_classes=3, normalization=HALF)
    how: dict[str, Any] = {"networks": RandomNetworks(net), "ipc": 2, "steps": 2, "batch_real": 8, "progress": False}
    with second_device():
        wanted, found = distribution_matching(stored, **how), distribution_matching(stored, **how, device=DEVICE)
        assert found.images.equal(wanted.images)
        read = on_device()(lambda real, network, device=None: real.read())(stored, net().to(DEVICE), device=DEVICE)
        assert places(found) == places(read) == places(stored.read()) == {False}
        there = stored._on(DEVICE)[torch.arange(4)]
        assert places(there.read()) == places(there.read([0])) == places(there[0][0]) == {True}
        assert on_second_device(there.read().labels)
        row = torch.tensor([1]).to(DEVICE)
        assert places(there._take(row)) == places(there._part(row)) == {True}
        assert accuracy(teacher(), stored, device=DEVICE) == accuracy(teacher(), stored)


def test_joined_shares_return_to_the_device_of_the_share() -> None:
    with second_device():
        found = over_classes(partial(herding, data().to(DEVICE), ipc=1), range(3))
        assert places(found) == {True}
        assert found.to("cpu").images.equal(herding(data(), ipc=1).images)


# Waiting for the device, and copies. A longer run must not have more of them.


def counted(work: Callable[[int], object], short: int, long: int) -> tuple[dict[str, int], str]:
    """Return the additional events of a longer run, and where they happened."""
    found = []
    for steps in (short, long):
        with second_device() as events:
            events.clear()
            events.places.clear()
            work(steps)
            found.append((dict(events), events.places.copy()))
    (few, there), (many, where) = found
    return {k: many.get(k, 0) - few.get(k, 0) for k in ("wait", "copy")}, str(where - there)


NOTHING = {"wait": 0, "copy": 0}


def evaluated(epochs: int, **how: Any) -> object:
    protocol = Protocol(**{"epochs": epochs, "batch": 64, "schedule": "constant", **how})
    return evaluate(data(9), data(30, 1), net, num_networks=1, protocol=protocol, progress=False, device=DEVICE)


def condensed(steps: int, networks: Any, **how: Any) -> object:
    options = {"ipc": 2, "steps": steps, "batch_real": 8, "progress": False, "device": DEVICE, **how}
    return distribution_matching(data(), networks=networks, **options)


def matched(iterations: int, loops: tuple[int, int], networks: str = "random", **how: Any) -> object:
    options = {"ipc": 2, "iterations": iterations, "batch_real": 8, "progress": False, "device": DEVICE, **how}
    return gradient_matching(data(), networks=SAMPLERS[networks](), inner=InnerTraining(loops=loops), **options)


STEPS: dict[str, tuple[Callable[[int], object], int, int]] = {
    "gradient matching": (lambda n: matched(n, (1, 0)), 3, 6),
    "gradient matching, epochs of training": (lambda n: matched(2, (2, n)), 2, 5),
    "gradient matching, callback": (lambda n: matched(n, (1, 0), callback=lambda _: None), 3, 6),
    "gradient": (
        lambda n: fit_to_gradient(
            build(net, 0), data(6), [torch.ones_like(p) for p in net().parameters()], steps=n, progress=False,
            device=DEVICE,
        ),
        3, 6,
    ),
    "herding": (lambda n: herding(data(), network=build(net, 0), ipc=n, device=DEVICE), 2, 5),
    "k-center": (lambda n: k_center(data(), network=build(net, 0), ipc=n, device=DEVICE), 2, 5),
    "distribution matching": (lambda n: condensed(n, RandomNetworks(net)), 3, 6),
    "distribution matching, DSA": (lambda n: condensed(n, SAMPLERS["ball"](), augment=DSA()), 3, 6),
    "distribution matching, batch norm": (lambda n: condensed(n, SAMPLERS["batch norm"]()), 3, 6),
    "distribution matching, fixed": (
        lambda n: condensed(n, SAMPLERS["fixed"](), match="embedding+logits", parametrize=Tiles(2)), 3, 6
    ),
    "evaluate": (evaluated, 2, 6),
    "evaluate with batches": (lambda n: evaluated(n, batch=4), 2, 6),
    "evaluate, AdamW": (lambda n: evaluated(n, optimizer="adamw"), 2, 6),
    "images": (lambda n: accuracy(net(), data(8 * n, 1), chunk=8, device=DEVICE), 2, 6),
    "invert": (
        lambda n: invert(
            teacher(), torch.arange(3), shape=(1, 8, 8), steps=n, total_variation=0.1, image_l2=0.1, progress=False,
            device=DEVICE,
        ),
        2, 6,
    ),
    "invert two networks": (
        lambda n: invert(
            nn.Sequential(nn.BatchNorm2d(1), net()), torch.arange(3), shape=(1, 8, 8), student=net(), batch_norm=1.0,
            parametrize=Tiles(2), steps=n, progress=False, device=DEVICE,
        ),
        2, 6,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STEPS)
def test_steps_wait_for_nothing_and_copy_nothing(name: str) -> None:
    more, where = counted(*STEPS[name])
    assert more == NOTHING, where


DRAWN: dict[str, tuple[Callable[[int], object], int, int]] = {
    "augmented training": (lambda n: evaluated(n, augment=DSA()), 2, 6),
    "relabelling": (lambda n: evaluated(n, relabel=Relabel(teacher().to(DEVICE))), 2, 6),
    "gradient matching, batch norm": (lambda n: matched(n, (2, 1), "batch norm"), 3, 6),
    "mixing": (lambda n: evaluated(n, mix=CutMix()), 2, 6),
    "gradient matching, DSA": (lambda n: matched(2, (n, 1), augment=DSA()), 2, 6),
    **{
        f"siamese {type(augment).__name__}": (partial(condensed, networks=RandomNetworks(net), augment=augment), 3, 6)
        for augment in (CropFlip(HALF, pad=2), ResizedCrop(), ShufflePatches(2, DSA()))
    },
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n.split()[0] in ("siamese", "mixing") else n for n in DRAWN]
)
def test_draws_and_orders_are_copied_without_waiting(name: str) -> None:
    make, short, long = DRAWN[name]
    more, where = counted(make, short, long)
    assert more["wait"] == 0, where
    assert 0 < more["copy"] <= 24 * (long - short), where  # CropFlip: 4 copies for both batches of 3 classes


def test_a_loss_is_checked_every_ten_epochs_on_an_accelerator() -> None:
    for epochs, waits in ((10, 0), (25, 2)):
        more, where = counted(evaluated, 10 if epochs > 10 else 5, epochs)
        assert (more["wait"], more["copy"]) == (waits, waits), where
    with second_device(), pytest.raises(FloatingPointError, match="in epoch 9: training diverged"):
        evaluated(100, lr=1e30)
    with second_device(), pytest.raises(FloatingPointError, match="in epoch 4: training diverged"):
        evaluated(5, lr=1e30)


# Precision.


@pytest.mark.parametrize("device", [None, pytest.param(DEVICE, marks=pytest.mark.slow)])
def test_bf16_trains_float32_weights_and_is_that_of_autocast_around_the_call(device: Any) -> None:
    protocol, found = Protocol(epochs=12, lr=0.1, batch=16), []
    with second_device() if device else nullcontext():
        for precision, around in ((None, False), ("bf16", False), (None, True)):
            network = build(net, 0)
            with torch.autocast("cpu", torch.bfloat16) if around else nullcontext():
                train(network, data(), protocol, device=device, precision=precision, progress=False)
            assert not torch.is_autocast_enabled("cpu")
            assert accuracy(network, data(30, 1)) > 0.9
            found.append(parameters(network))
    exact, half, other = found
    assert half.dtype == torch.float32
    assert 0 < float((half - exact).norm() / exact.norm()) < 0.1
    assert half.equal(other)


def test_precision_reaches_evaluation_and_labels_and_is_recorded() -> None:
    rows = {}
    for precision in (None, "bf16"):
        how: dict[str, Any] = {"num_networks": 1, "protocol": SHORT, "progress": False, "precision": precision}
        record = evaluate(data(9), data(30, 1), net, **how).record()
        assert (record["device"], record["precision"]) == ("cpu", precision)
        assert isinstance(scores(
            data(9), data(30, 1), net, real=data(), protocol=replace(SHORT, augment=DSA()), num_networks=1,
            progress=False, precision=precision,
        ).hlr, float)  # fmt: skip
        labelled = soft_labels(data(9), teacher(), pool=data(), precision=precision, device="cpu")
        assert labelled.info["soft_labels"].get("precision") == precision
        assert labelled.columns["logits"].dtype == labelled.labels.dtype == torch.float32
        assert accuracy(teacher(), data(), precision=precision) > 0.9
        protocol = Protocol(epochs=1, relabel=Relabel(teacher()))
        stored = stored_soft_labels(data(9), protocol, pool=data(), progress=False, precision=precision)
        rows[precision] = [labelled.labels, stored.logits.float()]
    for exact, half in zip(rows[None], rows["bf16"], strict=True):
        assert 0 < float((exact - half).abs().max() / exact.abs().max()) < 0.1


def test_autocast_is_that_of_the_device_that_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds: list[str] = []
    monkeypatch.setattr(torch, "autocast", lambda kind, *_, **__: nullcontext(kinds.append(kind)))
    monkeypatch.setattr("distillkit._utils.check.device", torch.device)
    call = on_device()(lambda images, precision=None, device=None: None)
    for place, device in (("cpu", None), ("cpu", "meta"), ("meta", None)):
        call(torch.zeros(1, device=place), precision="bf16", device=device)
    assert kinds == ["cpu", "meta", "meta"]


def test_weights_that_change_during_a_bf16_call_are_used() -> None:
    """Autocast would otherwise keep the first copy of the weights until the end of the call."""
    network = nn.Linear(4, 2, bias=False)

    @on_device()
    def call(images: Tensor, *, precision: Any = None) -> tuple[Tensor, Tensor]:
        return network(images), nn.init.zeros_(network.weight), network(images)  # type: ignore[return-value]

    assert [bool(one.any()) for one in call(torch.ones(1, 4), precision="bf16")] == [True, False, False]


def test_tf32_is_set_during_the_call_only() -> None:
    seen_as = []

    @on_device()
    def call(fails: bool, *, precision: Any = None, device: Any = None) -> None:
        seen_as.append(torch.get_float32_matmul_precision())
        if fails:
            raise ValueError("stop")

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        for fails in (False, True):
            with pytest.raises(ValueError, match="stop") if fails else nullcontext():
                call(fails, precision="tf32", device="cpu" if fails else None)
            assert torch.get_float32_matmul_precision() == "medium"
        call(False)
    finally:
        torch.set_float32_matmul_precision(before)
    assert seen_as == ["high", "high", "medium"]
    refused(lambda: train(net(), data(), SHORT, precision="fp16"), ValueError, "precision must be")


def test_private_sums_have_no_precision_and_refuse_autocast() -> None:
    for function in (condense_private, image_sgd, train_private):
        assert "precision" not in inspect.signature(function).parameters
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(PrivacyError, match="autocast"):
        trained_privately()
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(PrivacyError, match="autocast"):
        WORK["condense_private"]()


@pytest.mark.parametrize("form", [data(6).images, data(6).images.numpy(), torch.utils.data.TensorDataset(*data(6))])
def test_second_sets_have_no_labels_of_their_own_and_options_go_to_the_first(form: Any) -> None:
    got: list[Any] = []

    @on_device("images", "pool")
    def call(
        images: Any, labels: Any = None, *, pool: Any = None, num_classes: Any = None, normalization: Any = None,
        device: Any = None,
    ) -> None:  # fmt: skip
        got.extend([images, pool, labels, num_classes, normalization])

    marks = {} if isinstance(form, torch.utils.data.Dataset) else {"labels": [0, 1, 2, 0, 1, 2]}
    with second_device():
        pool = (data(3).images, [0, 1, 1])
        call(form, **marks, pool=pool, num_classes=5, normalization=HALF, device=DEVICE)
        assert got[2:] == [None, None, None]
        assert [(one.num_classes, one.normalization, places(one)) for one in got[:2]] == [
            (5, HALF, {True}), (2, Normalization((0.0,), (1.0,)), {True}),
        ]  # fmt: skip
        assert got[0].labels.tolist() == [0, 1, 2, 0, 1, 2]
        call(data(3), pool=None, device=DEVICE)
        words = "labels must be given, because pool is a Tensor"
        refused(lambda: call(data(3), [0, 1, 2], pool=data(3).images, device=DEVICE), TypeError, words)


@dataclass
class Holding:
    """Options with tensors, which stay where they are unless they are a result, and what is no argument."""

    rows: Tensor
    network: Any
    others: Any = ()
    own: Any = field(init=False)

    def __post_init__(self) -> None:
        self.own = self.network


def test_tensors_move_in_containers_and_in_results_but_not_in_options() -> None:
    got: list[Any] = []

    @on_device()
    def call(images: Any, group: Any, pair: Any, options: Any, *, device: Any = None) -> Any:
        rows, message = group.values()  # in their order
        got.extend([rows, pair[0], message.update, options.network, options.rows, options.others[0]])
        return {"b": [Holding(options.rows.to(DEVICE), Holding(options.rows.to(DEVICE), net()))]}

    with second_device():
        given = Holding(torch.ones(2), net(), [torch.ones(2)])
        message = SimpleNamespace(replay=print, update=torch.ones(2))
        made = call(torch.ones(1), {"b": torch.ones(2), "a": message}, (torch.ones(3), 1), given, device=DEVICE)
        assert [places(one) for one in got] == [{True}] * 4 + [{False}] * 2
        back = (made["b"][0].rows, made["b"][0].network.rows, given.network, message.update)
        assert [places(one) for one in back] == [{False}] * 4


def test_networks_are_copied_ahead_in_blocks_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    size = len(parameters(net()))
    for most, copies in ((1, 9), (size * 3, 3), (size * 100, 2)):
        monkeypatch.setattr("distillkit.sets._devices._MOST", most)
        with second_device() as events:
            there = _moved(RandomNetworks(net), DEVICE)
            events.places.clear()
            draws = (torch.Generator().manual_seed(s) for s in range(9))
            networks = [parameters(n).cpu() for n in there.draw.ahead(draws)]
            assert sum(n for where, n in events.places.items() if f", {size}] at _devices" in where) == copies
        own = RandomNetworks(net)
        wanted = [parameters(cast(nn.Module, own.draw(torch.Generator().manual_seed(s)))).clone() for s in range(9)]
        assert all(a.equal(b) for a, b in zip(networks, wanted, strict=True))
    with second_device():
        assert places(_moved(RandomNetworks(net), DEVICE).factory()) == {True}
        fixed = FixedNetwork(net())
        there, calls = _moved(fixed, DEVICE), []
        there.draw.own = lambda generator: calls.append(1) or fixed.draw(generator)
        first, second = (there.draw(torch.Generator()) for _ in range(2))
        assert first is second
        assert calls == [1]


def test_losses_of_a_condensation_are_read_every_ten_steps_and_at_the_end() -> None:
    sampler: Callable[[], Any] = SAMPLERS["ball"]
    for steps, waits in ((10, 0), (25, 2)):
        more, where = counted(lambda n: condensed(n, sampler()), 10 if steps > 10 else 5, steps)
        assert more["wait"] == 3 * waits, where  # with the smallest and the largest pixel
    for steps, step in ((100, 10), (7, 7)):
        with second_device(), pytest.raises(FloatingPointError, match=f"in step {step}: matching diverged"):
            condensed(steps, sampler(), lr=1e30)
    losses: list[float] = []
    with second_device():
        there: Any = condensed(12, sampler(), callback=lambda progress: losses.append(progress.loss))
        without: Any = condensed(12, sampler())
    here: Any = condensed(12, sampler(), device=None)
    assert there.info["loss"] == without.info["loss"] == here.info["loss"] == losses[-1]
    assert len(losses) == 12
    assert all(isinstance(loss, float) for loss in losses)


def test_samples_and_orders_ahead_are_those_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distillkit.sets._labeled._AHEAD", 4)
    wanted: Any = condensed(5, RandomNetworks(net), device=None)
    protocol, found = Protocol(epochs=24, batch=16, lr=0.05), []
    with second_device():
        there: Any = condensed(5, RandomNetworks(net))
        for device in (None, DEVICE):
            generator = torch.Generator().manual_seed(3)
            network = train(build(net, 0), data(), protocol, generator=generator, device=device, progress=False)
            found.append((parameters(network), generator.get_state()))
        assert there.images.equal(wanted.images)
        reader = data().to(DEVICE)._reader(lambda i: torch.tensor([i, i + 1]), 12)
        with reader as read:
            for i in (0, 1, 5, 2, 11):
                assert read(i).cpu().equal(data().images[i : i + 2])
    assert found[0][0].equal(found[1][0])
    assert found[0][1].equal(found[1][1])


@pytest.mark.parametrize("rows", [1, 2, 9])
@pytest.mark.parametrize("classes", [1, 3, 20])
def test_losses_without_selected_rows_are_those_of_the_cpu(rows: int, classes: int) -> None:
    """Samples without a prototype or a positive count for nothing, without a look at their number."""
    draws = torch.Generator().manual_seed(rows + classes)
    z, prototypes = torch.randn(rows, 4, generator=draws), torch.randn(classes, 4, generator=draws)
    labels = torch.randint(0, classes, (rows,), generator=draws)
    prototypes[labels[0]] = torch.nan  # it is not known
    known = torch.arange(classes) != labels[0]
    losses: list[Callable[..., Tensor]] = [
        lambda z, labels, _, __: supervised_contrastive(z, labels),
        lambda z, labels, _, __: supervised_contrastive(z, labels, empty="zero"),
        lambda z, labels, _, __: supervised_contrastive(z, labels, reduction="sum"),
        prototype_distance,
        partial(prototype_distance, reduction="sum"),
    ]
    for loss in losses:
        found = []
        for device in (torch.device("cpu"), DEVICE):
            with second_device():
                leaf, *others = (t.to(device) for t in (z, labels, prototypes, known))
                leaf = leaf.detach().clone().requires_grad_()
                value = loss(leaf, *others)
                found.append([value.detach().cpu(), torch.autograd.grad(value, leaf)[0].cpu()])
        for mine, other in zip(*found, strict=True):
            assert torch.allclose(mine, other, rtol=1e-5, atol=1e-6)
            assert bool(torch.isfinite(other).all())


def test_a_callback_on_a_device_reads_the_loss_and_changes_nothing() -> None:
    def changing(progress: Any) -> None:
        progress.images.mul_(2)

    with second_device():
        with pytest.raises(ValueError, match="callback must not change images"):
            condensed(2, RandomNetworks(net), callback=changing)
        with pytest.raises(FloatingPointError, match="in step 2: matching diverged"):
            condensed(9, SAMPLERS["ball"](), lr=1e30, callback=lambda progress: progress.loss)
        states: list[Any] = []
        condensed(3, RandomNetworks(net), callback=lambda progress: states.append(progress.state()))
        assert float(states[0]["loss"]) != float(states[1]["loss"])
        again: Any = condensed(3, RandomNetworks(net), resume=states[1])
        assert again.info["loss"] == float(states[2]["loss"])
    assert {states[0][name].dtype for name in ("images", "velocity", "loss")} == {torch.float32}  # MPS has no float64


@pytest.mark.parametrize("make", [RandomNetworks, lambda factory: NetworkBall(factory(), 2.0)])
def test_networks_on_a_device_are_drawn_without_waiting(make: Any) -> None:
    def factory() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.MultiheadAttention(8, 2), nn.Linear(8, 3)).to(DEVICE)

    with second_device() as events:
        sampler = make(factory)
        events.clear()
        events.places.clear()
        sampler.draw(torch.Generator())
        assert events["copy"] > 0
        assert events["wait"] == 0, events.places


def test_labels_that_are_nan_are_refused_on_a_device() -> None:
    broken = teacher()
    with torch.no_grad():
        next(broken.parameters()).fill_(torch.nan)
    for device in (None, DEVICE):
        with second_device(), pytest.raises(ValueError, match="teacher returns NaN|NaN"):
            soft_labels(data(9), broken, device=device)
