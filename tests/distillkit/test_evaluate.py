from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distillkit import LabeledImages, Normalization
from distillkit.chunking import chunk_size, forward_chunks
from distillkit.evaluate import Evaluation, Row, evaluate
from distillkit.labels import Mixup
from distillkit.networks import ConvNet, build
from distillkit.protocols import describe_protocol
from distillkit.rng import as_generator, derive
from distillkit.robustness import FGSM, Corruption, Perturbation
from distillkit.sets import Tiles
from distillkit.sets._class_index import random_rows
from distillkit.training import Protocol, accuracy, train
from tests.distillkit.labels.toys import weights
from tests.refused import refused

SHAPE = (1, 8, 8)
SHORT = Protocol(epochs=8, lr=0.1, batch=8)


def convnet(norm: str = "instance") -> nn.Module:
    return ConvNet(SHAPE, 2, width=4, depth=1, norm=norm)


def stripes(count: int = 40, seed: int = 0, noise: float = 0.5) -> LabeledImages:
    """Return images where class 0 varies along the rows and class 1 along the columns."""
    labels = torch.arange(count) % 2
    wave = (torch.arange(8) % 2 * 2 - 1).float()
    images = torch.where(labels.view(-1, 1, 1, 1) == 0, wave.view(1, 1, 8, 1), wave.view(1, 1, 1, 8))
    images = images + noise * torch.randn(count, *SHAPE, generator=derive(seed))
    return LabeledImages(images, labels, num_classes=2)


def reference(network: nn.Module, data: LabeledImages, protocol: Protocol, generator: torch.Generator) -> nn.Module:
    """Run the protocol in plain code on whole batches."""
    lr = protocol.lr
    velocity = [torch.zeros_like(p) for p in network.parameters()]
    for epoch in range(protocol.epochs + 1):
        batches = list(torch.randperm(len(data), generator=generator).split(protocol.batch))
        if len(batches[-1]) == 1 and any(isinstance(m, nn.BatchNorm2d) for m in network.modules()):
            batches[-2:] = [torch.cat(batches[-2:])]
        for index in batches:
            images, labels = data.images[index], data.labels[index]
            if protocol.augment is not None:
                images = protocol.augment(images, generator, siamese=False)
            logs = network(images).log_softmax(1)
            loss = -(logs * labels).sum(1) if labels.ndim == 2 else -logs[range(len(labels)), labels]
            gradients = torch.autograd.grad(loss.mean(), list(network.parameters()))
            with torch.no_grad():
                for p, g, v in zip(network.parameters(), gradients, velocity, strict=True):
                    v.mul_(protocol.momentum).add_(g + protocol.weight_decay * p)
                    p.sub_(lr * v)
        if epoch == protocol.epochs // 2 + 1:
            lr *= protocol.lr_drop
            velocity = [torch.zeros_like(p) for p in network.parameters()]
    return network


def jitter(images: Tensor, generator: torch.Generator, *, siamese: bool) -> Tensor:
    assert not siamese
    return images + torch.randn(images.shape, generator=generator, dtype=images.dtype)


class Jitter(Perturbation):
    def __call__(self, pixels: Tensor, labels: Tensor, logits: Any, generator: torch.Generator) -> Tensor:
        return pixels + 0.3 * torch.stack([torch.randn(SHAPE, generator=generator) for _ in pixels])

    def __str__(self) -> str:
        return "jitter"


@pytest.mark.usefixtures("global_rng_untouched")
@pytest.mark.parametrize("norm", ["instance", "batch"])
@pytest.mark.parametrize("rows", [False, True])
def test_training_follows_the_protocol_for_any_chunk(norm: str, rows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also as on an accelerator, where orders are drawn ahead and losses are read from time to time."""
    data = stripes(21).to(dtype=torch.float64)
    if rows:
        data = data.replace(labels=torch.rand(21, 2, generator=derive(0), dtype=torch.float64).softmax(1))
    protocol = Protocol(epochs=4, lr=0.1, batch=10, momentum=0.8, weight_decay=0.1, augment=jitter if rows else None)
    slow = reference(build(lambda: convnet(norm), 0).double().train(), data, protocol, derive(7))
    for chunk in (1, 3, None):
        monkeypatch.setattr("distillkit.training.is_accelerator", lambda device, on=chunk != 3: on)
        network, seen = build(lambda: convnet(norm), 0).double().eval(), list[int]()
        assert train(network, data, protocol, generator=7, chunk=chunk, callback=seen.append) is network
        assert (network.training, seen) == (False, [1, 2, 3, 4, 5])
        assert all(p.grad is None for p in network.parameters())
        assert torch.allclose(weights(network), weights(slow), rtol=0, atol=1e-10)


def test_frozen_and_unused_parameters_are_unchanged() -> None:
    network = build(convnet, 0)
    network.unused = nn.Parameter(torch.ones(3))
    network.body.requires_grad_(False)
    before = {name: p.detach().clone() for name, p in network.named_parameters()}
    train(network, stripes(), SHORT)
    moved = {name for name, p in network.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {"classifier.weight", "classifier.bias"}


@pytest.mark.usefixtures("global_rng_untouched")
def test_dropout_is_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    made, layers = [], lambda: nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 2))
    same = stripes(2)[[0] * 8]  # in any order
    for accelerator, data, seed in ((False, stripes(), 3), (True, stripes(), 3), (True, same, 3), (True, same, 4)):
        monkeypatch.setattr("distillkit.training.is_accelerator", lambda device, on=accelerator: on)
        made.append(weights(train(build(layers, 0), data, SHORT, generator=seed)))
    assert (torch.equal(*made[:2]), torch.equal(*made[2:])) == (True, False)


def test_mixed_rows_keep_their_precision() -> None:
    rows = torch.rand(6, 2, generator=derive(0), dtype=torch.float64).softmax(1)
    sets = [stripes(6).to(dtype=torch.float64).replace(labels=labels) for labels in (rows, rows.float().double())]
    made = [weights(train(build(convnet, 0).double(), one, Protocol(epochs=1, mix=Mixup()))) for one in sets]
    assert not torch.equal(*made)
    train(build(convnet, 0), stripes(6)[[0, 2, 4]], Protocol(epochs=1, mix=Mixup()))  # images of one class


def test_divergence_raises_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for accelerator, epochs, epoch in ((True, 30, 9), (True, 3, 3), (False, 30, 1)):
        monkeypatch.setattr("distillkit.training.is_accelerator", lambda device, on=accelerator: on)
        with pytest.raises(FloatingPointError, match=f"the loss is nan in epoch {epoch}: training diverged; lower lr"):
            train(build(lambda: convnet("none"), 0), stripes(), Protocol(epochs=epochs, lr=1e20))

    class Sure(nn.Linear):
        def forward(self, images: Tensor) -> Tensor:
            return super().forward(0 * images.flatten(1)) * torch.tensor([3e38, -3e38])

    sure = Sure(64, 2)
    nn.init.ones_(sure.bias)
    with pytest.raises(FloatingPointError, match="the loss is inf in epoch 0"):
        train(sure, stripes(), Protocol(epochs=1, schedule="constant"))


def test_accuracy_counts_and_restores_the_modes() -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Dropout(0.9).eval()

        def forward(self, images: Tensor) -> Tensor:
            assert not self.training
            return images[:, 0, 0, :2]

    images = torch.zeros(7, 1, 2, 2)
    images[:3, 0, 0, 1] = 1
    data = LabeledImages(images, torch.tensor([1, 1, 0, 0, 0, 1, 0]), num_classes=2)
    network = Fixed().train()
    network.inner.eval()
    for chunk in (1, 3, None):
        assert accuracy(network, data, chunk=chunk) == 5 / 7
    assert network.training
    assert not network.inner.training
    with pytest.raises(ValueError, match=r"class indices as labels, got rows of shape \[7, 2\]$"):
        accuracy(network, data.replace(labels=torch.eye(2)[data.labels]))


SOFT = stripes(30).replace(labels=torch.rand(30, 2, generator=derive(1)).softmax(1))
SOFT = SOFT.replace(columns={"class": torch.arange(30) // 3 % 2})
WIDE = stripes(30).to(dtype=torch.float64)


class Narrow(ConvNet):
    """Network that refuses more than three images at a time."""

    def __init__(self) -> None:
        super().__init__(SHAPE, 2, width=4, depth=1)
        self.register_forward_pre_hook(self.check)

    @staticmethod
    def check(_: nn.Module, inputs: tuple[Tensor]) -> None:
        assert len(inputs[0]) <= 3


CASES: dict[str, dict[str, Any]] = {
    "two": {"factory": {"small": convnet, "none": lambda: convnet("none")}, "against": [Jitter(), FGSM(0.1)],
            "data": stripes(8)[[1, 3, 5]]},
    "soft": {"data": SOFT[[0, 1, 2, 3, 6]], "real": SOFT, "protocol": Protocol(epochs=2, lr=0.1, batch=3)},
    "tiles": {"data": Tiles(2).pack(stripes(16)[[0, 2, 4, 6, 1, 3, 5, 7]]), "num_networks": 3},
    "alone": {"data": stripes(8).to(dtype=torch.float64), "real": None, "num_networks": 1, "chunk": 3,
              "factory": Narrow, "protocol": Protocol(epochs=1), "against": [Jitter()], "precision": "tf32"},
}  # fmt: skip


@pytest.mark.usefixtures("global_rng_untouched")
@pytest.mark.parametrize("name", CASES)
def test_rows_are_those_of_single_trainings(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Networks of both kinds of data share weights and orders; random images are drawn anew for each network."""
    how = {"data": stripes(3), "real": WIDE, "factory": convnet, "protocol": Protocol(epochs=3, lr=0.1, batch=2)}
    how = {"num_networks": 2, "chunk": None, "against": [], "generator": 5, "precision": None, **how, **CASES[name]}
    data, real, factory, protocol, chunk = (how[key] for key in ("data", "real", "factory", "protocol", "chunk"))
    test = stripes(301, 1, 2.0)
    test = LabeledImages.from_pixels(
        test.images.sigmoid(), test.labels, num_classes=2, normalization=data.normalization
    )
    ticks, seed = [], int(torch.randint(2**62, (), generator=as_generator(5)))

    class Bar(contextlib.nullcontext[Any]):
        def __init__(self, total: int, *_: Any, **__: Any) -> None:
            super().__init__(SimpleNamespace(update=lambda: ticks.append(total)))

    monkeypatch.setattr("distillkit.evaluate.bar", Bar)
    found = evaluate(test=test, **how)
    test = test.to(dtype=data.images.dtype)
    assert ticks == [len(ticks)] * len(found.rows) * how["num_networks"] * protocol.num_epochs
    rows, count = iter(found.rows), how["num_networks"]
    own_classes = data.columns["class"] if name == "soft" else data.labels
    for architecture, make in factory.items() if isinstance(factory, dict) else (("", factory),):
        for kind in ("set", "random real") if real is not None else ("set",):
            networks, drawn = [], []
            for i in range(count):
                own = data
                if kind == "random real":
                    classes = {c: (real.columns.get("class", real.labels) == c).nonzero().flatten() for c in (0, 1)}
                    wanted = [int((own_classes == c).sum()) for c in (0, 1)]
                    some = {c: classes[c] for c, n in enumerate(wanted) if n}
                    index, _ = random_rows(some, [n for n in wanted if n], derive(seed, i, "random real"))
                    own = real[index].to(dtype=data.images.dtype)
                    own = own if name != "tiles" else Tiles(2).pack(own)
                    drawn.append(index.tolist())
                network = build(make, derive(seed, architecture, i, "network")).to(data.images)
                order = derive(seed, architecture, i, "train")
                networks.append(train(network, own, protocol, generator=order, chunk=chunk, progress=False))
            row = next(rows)
            assert len(set(map(tuple, drawn))) == len(drawn)
            assert row.accuracies == tuple(accuracy(network, test, chunk=chunk) for network in networks)
            for one in how["against"]:
                draws = [derive(seed, str(one), "against") for _ in networks]
                with_noise = [accuracy(n, test, against=one, generator=g, chunk=chunk) for n, g in zip(networks, draws)]
                assert row.against[str(one)] == tuple(with_noise)
            labels = "one row" if data.labels.ndim == 2 else "hard"
            told = architecture or type(networks[0]).__name__
            assert (row.data, row.architecture, row.labels) == (kind, told, labels)
    assert next(rows, None) is None
    assert found.accuracy == found.rows[0].mean
    assert (found.images, found.protocol, found.device) == (len(data), protocol, "cpu")
    assert found.precision == how["precision"]
    assert [*found.against] == [str(one) for one in how["against"]]


def test_tables_and_records_show_every_number_of_every_row() -> None:
    long = "gaussian_noise 3"
    rows = (
        Row("set", "net", (0.5, 0.6, 1.0), 1.24, "per view", {"FGSM 1/255": (0.1, 0.2, 0.6), long: (0.25, 0.5, 0.0)}),
        Row("random real", "other", (0.25,), 63.0, "hard", {"FGSM 1/255": (0.125,), long: (1.0,)}),
        Row("set", "net", (0.5, 0.5), 0.06, "hard", {"FGSM 1/255": (0.0,), long: (0.0,)}),
    )
    against = {"FGSM 1/255": FGSM(1 / 255), long: Corruption("gaussian_noise", 3)}
    found = Evaluation(rows, Protocol(epochs=7, augment=jitter), 3, against, "cuda:1", "bf16")
    assert (rows[0].mean, rows[0].std, rows[1].std) == (pytest.approx(0.7), pytest.approx(0.07**0.5), None)
    assert repr(found) == str(found)
    assert replace(found, rows=rows[1:]).accuracy == 0.25
    assert str(found).splitlines()[:4] == [
        "data         architecture     labels     accuracy %    FGSM 1/255  gaussian_noise 3  draws  seconds",
        "set          net              per view  70.0 ± 26.5   30.0 ± 26.5       25.0 ± 25.0      3      1.2",
        "random real  other            hard             25.0          12.5             100.0      1     63.0",
        "set          net              hard       50.0 ± 0.0           0.0               0.0      2      0.1",
    ]
    assert str(found).splitlines()[4:] == [f"protocol: {describe_protocol(found.protocol)}"]
    record = json.loads(json.dumps(found.record()))
    assert record.pop("protocol") == {"name": describe_protocol(found.protocol), **found.protocol.record()}
    assert record.pop("rows") == [
        {"data": row.data, "architecture": row.architecture, "accuracies": list(row.accuracies), "seconds": row.seconds,
         "labels": row.labels, "accuracy_mean": row.mean, "accuracy_std": row.std,
         "against": {name: list(each) for name, each in row.against.items()},
         "against_mean": {name: pytest.approx(sum(each) / len(each)) for name, each in row.against.items()}}
        for row in rows
    ]  # fmt: skip
    told = {name: repr(one) for name, one in against.items()}
    assert record == {"images": 3, "against": told, "device": "cuda:1", "precision": "bf16"}


def test_invalid_arguments_are_named() -> None:
    data = stripes(8)
    other = data.replace(normalization=Normalization((0.5,), (0.5,)))
    for name, test, real in (("test", other, None), ("real", data, other)):
        with pytest.raises(ValueError, match=rf"data and {name} .* with `{name}\.renormalize\(data\.normalization\)`"):
            evaluate(data, test, convnet, real=real)
    for wrong, words in (
        ({"num_networks": 0}, "num_networks must be at least 1"), ({"factory": {}}, "at least one architecture"),
        ({"protocol": Protocol}, "^protocol must be a Protocol.*got the class Protocol"),
        *(({"factory": one}, words) for one, words in (({"a": 3}, r"^factory\['a'\] "), (3, "^factory must"))),
        *(({name: 3}, f"^{name} must be") for name in ("data", "test", "real")),
        *(({name: data[:0]}, f"^{name} must hold at least one image, got an empty set$") for name in ("data", "test")),
    ):  # fmt: skip
        how = {"data": data, "test": data, "factory": convnet, **wrong}
        refused(lambda given=how: evaluate(**given), (TypeError, ValueError), words)
    empty = LabeledImages(torch.zeros(0, *SHAPE), torch.zeros(0, dtype=torch.int64), num_classes=2)
    for function in (train, accuracy):
        for wrong, words in ((empty, "^data must hold at least one image"), (3, "^data must be")):
            refused(lambda f=function, d=wrong: f(convnet(), d), (TypeError, ValueError), words)
    for options in ({"lr": 0.0}, {"lr_drop": 0.0}, {"momentum": -1.0}):
        refused(lambda o=options: Protocol(**o), ValueError, next(iter(options)))


def test_chunk_size_follows_the_image_size() -> None:
    sizes = {32: 16, 28: 16, 16: 64, 64: 4, 256: 1}
    assert {side: chunk_size(torch.empty(3, 1, side, side)) for side in sizes} == sizes
    assert chunk_size(torch.empty(3, 1, 32, 32, device="meta")) == 4096
    assert chunk_size(torch.empty(3, 1, 32, 32), 5) == 5
    assert chunk_size(torch.empty(3, 1, 16, 64)) == 16
    for wrong, error, words in ((3, TypeError, "got int"), (torch.empty(3, 8), ValueError, r"got shape \[3, 8\]")):
        with pytest.raises(error, match=rf"^images must be \[N, C, H, W\], {words}$"):
            chunk_size(wrong)  # type: ignore[arg-type]
    calls = ((3, [], 2), "function"), ((len, [3], 2), "images"), ((len, 3, 2), "images"), ((len, [], 0), "size")
    for call, name in calls:
        with pytest.raises((TypeError, ValueError), match=f"^{name} (must be|is called)"):
            list(forward_chunks(*call))  # type: ignore[arg-type]
    assert chunk_size(torch.empty(3, 1, 32, 32), chunked_stem=True) == 64
    assert chunk_size(torch.empty(3, 1, 32, 32, device="meta"), chunked_stem=True) == 4096
    parts = forward_chunks(lambda x: x * 2, torch.ones(5, 1, 2, 2, requires_grad=True), 2)
    shapes = [(len(part), part.requires_grad) for part in parts]
    assert shapes == [(2, False), (2, False), (1, False)]


def test_network_that_refuses_channels_last_gets_contiguous_images() -> None:
    def flatten(images: Tensor) -> Tensor:
        return images.view(len(images), -1)

    images = torch.randn(5, 3, 4, 4, generator=derive(0))
    assert torch.equal(torch.cat(list(forward_chunks(flatten, images, 2))), images.flatten(1))

    def broken(images: Tensor) -> Tensor:
        raise RuntimeError("its own error")

    refused(lambda: next(forward_chunks(broken, images, 2)), RuntimeError, "its own error")

    def later(images: Tensor) -> Tensor:
        if not images.is_contiguous() or len(images) == 1:
            raise RuntimeError("its own error")
        return images

    parts = forward_chunks(later, images, 2)
    assert torch.equal(torch.cat([next(parts), next(parts)]), images[:4])
    refused(lambda: next(parts), RuntimeError, "its own error")
