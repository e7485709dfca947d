from __future__ import annotations

import json
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distillkit import LabeledImages, Normalization
from distillkit.chunking import chunk_size, forward_chunks
from distillkit.evaluate import Evaluation, Row, evaluate
from distillkit.networks import ConvNet, build
from distillkit.rng import derive
from distillkit.training import Protocol, accuracy, train

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


def weights(network: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in network.parameters()])


def reference(network: nn.Module, data: LabeledImages, protocol: Protocol, generator: torch.Generator) -> nn.Module:
    """Run the protocol in plain code on whole batches."""
    lr = protocol.lr
    velocity = [torch.zeros_like(p) for p in network.parameters()]
    for epoch in range(protocol.epochs + 1):
        for index in torch.randperm(len(data), generator=generator).split(protocol.batch):
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


@pytest.mark.usefixtures("global_rng_untouched")
@pytest.mark.parametrize("norm", ["instance", "batch"])
@pytest.mark.parametrize("rows", [False, True])
def test_training_follows_the_protocol_for_any_chunk(norm: str, rows: bool) -> None:
    data = stripes(21).to(dtype=torch.float64)
    if rows:
        data = data.replace(labels=torch.rand(21, 2, generator=derive(0), dtype=torch.float64).softmax(1))
    protocol = Protocol(epochs=4, lr=0.1, batch=8, weight_decay=0.1, augment=jitter)
    slow = reference(build(lambda: convnet(norm), 0).double().train(), data, protocol, derive(7))
    for chunk in (1, 3, None):
        network = build(lambda: convnet(norm), 0).double()
        assert train(network, data, protocol, generator=7, chunk=chunk) is network
        assert not network.training
        assert torch.allclose(weights(network), weights(slow), rtol=0, atol=1e-10)
        for name, buffer in network.named_buffers():
            assert torch.allclose(buffer, slow.get_buffer(name)), name


def test_training_learns_and_shuffles_with_the_generator() -> None:
    networks = [build(convnet, 0) for _ in range(3)]
    for network, seed in zip(networks, (1, 1, 2), strict=True):
        train(network, stripes(), SHORT, generator=seed)
    assert torch.equal(weights(networks[0]), weights(networks[1]))
    assert not torch.equal(weights(networks[0]), weights(networks[2]))
    assert accuracy(networks[0], stripes(seed=5)) > 0.95


def test_frozen_and_unused_parameters_are_unchanged() -> None:
    network = build(convnet, 0)
    network.unused = nn.Parameter(torch.ones(3))
    network.body.requires_grad_(False)
    before = {name: p.detach().clone() for name, p in network.named_parameters()}
    train(network, stripes(), SHORT)
    moved = {name for name, p in network.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {"classifier.weight", "classifier.bias"}


@pytest.mark.usefixtures("global_rng_untouched")
def test_dropout_is_seeded() -> None:
    def factory() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 2))

    one, two = (train(build(factory, 0), stripes(), SHORT, generator=3) for _ in range(2))
    assert torch.equal(weights(one), weights(two))


def test_divergence_raises_an_error() -> None:
    with pytest.raises(FloatingPointError, match="training diverged; lower lr"):
        train(build(lambda: convnet("none"), 0), stripes(), Protocol(epochs=30, lr=1e20))

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

    images = torch.zeros(4, 1, 2, 2)
    images[:3, 0, 0, 1] = 1
    data = LabeledImages(images, torch.tensor([1, 1, 0, 0]), num_classes=2)
    network = Fixed().train()
    network.inner.eval()
    for chunk in (1, 3, None):
        assert accuracy(network, data, chunk=chunk) == 0.75
    assert network.training
    assert not network.inner.training
    with pytest.raises(ValueError, match="class indices"):
        accuracy(network, data.replace(labels=torch.eye(2)[data.labels]))


def test_evaluation_has_a_random_baseline_for_each_architecture() -> None:
    real, test = stripes(200, noise=30.0), stripes(100, seed=1)
    factories = {"small": convnet, "none": lambda: convnet("none")}
    begun = time.perf_counter()
    result = evaluate(stripes(), test, factories, num_networks=2, protocol=SHORT, real=real)
    assert sum(row.seconds for row in result.rows) <= time.perf_counter() - begun
    assert [(r.data, r.architecture) for r in result.rows] == [
        ("set", "small"), ("random real", "small"), ("set", "none"), ("random real", "none"),
    ]  # fmt: skip
    assert all(len(r.accuracies) == 2 and r.seconds > 0 for r in result.rows)
    assert result.rows[0].mean > 0.95
    assert result.rows[1].mean < 0.85
    assert result.accuracy == result.rows[0].mean
    assert result.images == 40
    assert evaluate(stripes(8), test, convnet, num_networks=1, protocol=SHORT).rows[0].architecture == "ConvNet"
    record = json.loads(json.dumps(result.record()))
    assert record["protocol"]["epochs"] == SHORT.epochs
    assert (record["images"], record["device"], record["precision"], record["against"]) == (40, "cpu", None, {})
    for told, row in zip(record["rows"], result.rows, strict=True):
        assert told["accuracies"] == list(row.accuracies)
        assert (told["accuracy_mean"], told["accuracy_std"]) == (row.mean, row.std)
    lines = str(result).splitlines()
    assert len(lines) == 6
    assert [line.split()[-2:] for line in lines[1:5]] == [["2", f"{row.seconds:.1f}"] for row in result.rows]
    assert f"{100 * result.rows[1].mean:.1f} ± {100 * result.rows[1].std:.1f}" in lines[2]


@pytest.mark.usefixtures("global_rng_untouched")
def test_evaluation_depends_only_on_its_seed() -> None:
    def run(seed: int) -> list[tuple[float, ...]]:
        data, test = stripes(8, noise=1.0), stripes(301, seed=1, noise=2.0)
        protocol = Protocol(epochs=1, lr=0.05)
        rows = evaluate(data, test, convnet, num_networks=2, protocol=protocol, real=test, generator=seed).rows
        return [row.accuracies for row in rows]

    assert run(0) == run(0)
    assert run(0) != run(1)


def test_random_baseline_draws_equally_many_images_of_each_class(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[LabeledImages] = []

    def spy(network: nn.Module, data: LabeledImages, *args: Any, **options: Any) -> nn.Module:
        seen.append(data)
        return network

    monkeypatch.setattr("distillkit.evaluate.train", spy)
    real = stripes(30)
    uneven = stripes(4)[torch.tensor([0, 1, 2])]
    evaluate(uneven, real, convnet, num_networks=2, real=real)
    assert [data.counts().tolist() for data in seen] == [[2, 1]] * 4
    assert seen[0] is seen[1] is uneven
    assert not torch.equal(seen[2].images, seen[3].images)
    assert all(any(torch.equal(image, own) for own in real.images) for image in seen[2].images)
    soft = uneven.replace(labels=torch.tensor([[0.6, 0.4], [0.1, 0.9], [0.2, 0.8]]))
    rows = torch.eye(2)[real.labels] * 0.8 + 0.1
    labelled = real.replace(labels=rows, columns={"class": real.labels})
    found = evaluate(soft, real, convnet, num_networks=1, real=labelled)
    assert [row.labels for row in found.rows] == ["one row", "one row"]
    assert seen[-1].counts().tolist() == [1, 2]
    assert all(
        any(torch.equal(x, other) and torch.equal(y, row) for other, row in zip(real.images, rows))
        for x, y in zip(*seen[-1])
    )


def test_means_and_deviations_are_those_of_the_runs() -> None:
    row = Row("set", "net", (0.5, 0.7, 0.9), 1.0)
    assert row.mean == pytest.approx(0.7)
    assert row.std == pytest.approx(0.2)
    assert Row("set", "net", (0.5,), 1.0).std is None
    assert Evaluation((row,), Protocol(), 3).record()["protocol"]["augment"] is None
    assert "augment" in Evaluation((row,), Protocol(augment=jitter), 3).record()["protocol"]


def test_invalid_arguments_are_named() -> None:
    data = stripes(8)
    other = data.replace(normalization=Normalization((0.5,), (0.5,)))
    for name, test, real in (("test", other, None), ("real", data, other)):
        with pytest.raises(ValueError, match=rf"data and {name} .* with `{name}\.renormalize\(data\.normalization\)`"):
            evaluate(data, test, convnet, real=real)
    with pytest.raises(ValueError, match="at least one architecture"):
        evaluate(data, data, {})
    with pytest.raises(ValueError, match="must be probabilities"):
        train(convnet(), data.replace(labels=torch.ones(8, 2)), SHORT)
    empty = LabeledImages(torch.zeros(0, *SHAPE), torch.zeros(0, dtype=torch.int64), num_classes=2)
    for function in (train, accuracy):
        with pytest.raises(ValueError, match="at least one image"):
            function(convnet(), empty)
    for options in ({"lr": 0.0}, {"lr_drop": 0.0}, {"momentum": -1.0}):
        with pytest.raises(ValueError, match=next(iter(options))):
            Protocol(**options)  # type: ignore[arg-type]


def test_chunk_size_follows_the_image_size() -> None:
    sizes = {32: 16, 28: 16, 16: 64, 64: 4, 256: 1}
    assert {side: chunk_size(torch.empty(3, 1, side, side)) for side in sizes} == sizes
    assert chunk_size(torch.empty(3, 1, 32, 32, device="meta")) == 4096
    assert chunk_size(torch.empty(3, 1, 32, 32), 5) == 5
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

    with pytest.raises(RuntimeError, match="its own error"):
        next(forward_chunks(broken, images, 2))

    def later(images: Tensor) -> Tensor:
        if not images.is_contiguous() or len(images) == 1:
            raise RuntimeError("its own error")
        return images

    parts = forward_chunks(later, images, 2)
    assert torch.equal(torch.cat([next(parts), next(parts)]), images[:4])
    with pytest.raises(RuntimeError, match="its own error"):
        next(parts)
