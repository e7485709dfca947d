"""Captured functions: exact for single records, unaffected by other records, and free of user code on records."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._device import DeviceContext

from distillkit import networks
from distillkit.augment import DSA
from distillkit.networks import FixedNetwork, KeepInit, build
from distillkit.networks._dropout import _drop, seed_dropout
from distillkit.normalization import Normalization
from distillkit.privacy import (
    BatchStatistics,
    Ledger,
    NotCapturable,
    NotSeparable,
    PrivacyError,
    PrivateGradient,
    PrivateStatistics,
    PublicEmbedders,
    Secret,
    class_sums,
    per_example_gradients,
    train_private,
)
from distillkit.privacy.capture._captured_function import capture, captured_augmentation
from distillkit.privacy.gradients.opacus_gradients import GRADIENTS, clipped_gradients
from distillkit.privacy.gradients.per_example import chunk_for
from distillkit.rng import derive
from distillkit.sets import LabeledImages
from tests.distillkit.privacy import unsound_programs as programs
from tests.distillkit.privacy.faulty_network import FaultyNetwork, Layer
from tests.distillkit.privacy.options import grouped
from tests.refused import refused

DATA = LabeledImages(torch.randn(24, 1, 4, 4, generator=derive(0)), torch.arange(24) % 3, num_classes=3)


def train(model: nn.Module, data: LabeledImages = DATA, **options: Any) -> Ledger:
    return train_private(model, data, **grouped(**{"size": 24, "sigma": 1.0, "rate": 0.5, "steps": 2} | options))


class Custom(torch.autograd.Function):
    """Keeps the types of what passes through it."""

    seen: ClassVar[list[type]] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        Custom.seen.append(type(x))
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        Custom.seen.append(type(g))
        return g * 2


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", programs.REFUSED)
def test_unsound_network_is_refused_before_the_charge(name: str) -> None:
    program, (kind, words), ledger = programs.NETWORKS[name], programs.REFUSED[name], Ledger()
    programs.forget()
    model = build(KeepInit(lambda: (program() if isinstance(program, type) else programs.Alone(program)).double()), 0)
    with pytest.raises(PrivacyError, match=words) as caught:
        train(model, programs.DATA, ledger=ledger)
    assert type(caught.value) is kind
    assert ledger.events == ()


def test_neither_autograd_functions_nor_hooks_run_on_records() -> None:
    hooked: list[type] = []
    model = build(lambda: programs.Alone(lambda m, x: Custom.apply(x)), 0)
    look = lambda module, inputs, output: hooked.extend(type(t) for t in inputs)  # noqa: E731
    model.register_forward_hook(look)
    Custom.seen.clear()
    with nn.modules.module.register_module_forward_hook(look):
        train(model)
    for seen in (Custom.seen, hooked):
        assert seen
        assert not {Tensor, nn.Parameter} & {*seen}


def test_function_that_reads_its_examples_in_another_way_is_refused() -> None:
    model = build(lambda: FaultyNetwork(3), 0)
    for read in (lambda: DATA.images[2:].mean(), lambda: torch.sum(input=DATA.labels), lambda: DATA.images.shape[0],
                 lambda: torch.cat((DATA.images, DATA.images)).mean()):  # fmt: skip
        with pytest.raises(NotCapturable, match="the network FaultyNetwork or its loss uses the records themselves"):
            per_example_gradients(model, lambda x, y, read=read: dropped_losses(model)(x, y) * read(), tuple(DATA))
    model.register_buffer("bank", DATA.images)
    with pytest.raises(NotCapturable, match=r"uses the records themselves .*\(bank shares their memory\)"):
        per_example_gradients(model, dropped_losses(model), tuple(DATA))


def test_values_beside_the_arguments_are_those_of_the_capture() -> None:
    held, images = torch.ones(4), torch.rand(2, 4, generator=derive(0))
    captured = capture(lambda shared, x: [x + held], [], [images], function_name="it")
    held.fill_(9)
    assert torch.equal(captured([], images)[0], images + 1)


def rows(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, reduction="none")


@pytest.mark.parametrize(
    "loss",
    [
        lambda z, y: rows(z, y) * rows(z, y).detach().softmax(0) * len(y),
        lambda z, y: F.cross_entropy(F.normalize(z) @ F.normalize(z).T, torch.arange(len(z)), reduction="none"),
        lambda z, y: F.cross_entropy(z, y),
        lambda z, y: rows(z, y) * (1 + (y[:, None] != y).double().sum(1)),
        lambda z, y: F.cross_entropy(z - z.mean(0), y, torch.ones(5), reduction="none"),  # weights of five outputs
    ],
)  # fmt: skip
def test_loss_that_reads_the_batch_is_refused(loss: Any) -> None:
    ledger = Ledger()
    with pytest.raises(NotSeparable, match="one value for each example|differ from their losses one by one"):
        train(build(lambda: FaultyNetwork(5), 0), loss=loss, ledger=ledger)
    assert ledger.events == ()


@pytest.mark.parametrize("outputs", [3, 5])
@pytest.mark.parametrize(
    "loss",
    [
        lambda z, y: rows(z, y) * (0 if (y == 7).any() else 1),
        lambda z, y: rows(z, y) * (1 if rows(z, y).isfinite().all() else 0),
    ],
)  # fmt: skip
def test_loss_that_chooses_by_values_is_refused(loss: Any, outputs: int) -> None:
    ledger = Ledger()
    with pytest.raises(NotCapturable, match=r"or its loss chooses by the values.*test_capture.py:\d+"):
        train(build(lambda: FaultyNetwork(outputs), 0), loss=loss, ledger=ledger)
    assert ledger.events == ()


def test_measured_normalization_is_refused_unless_public() -> None:
    measured = DATA.replace(normalization=Normalization.of(DATA.images))
    refused(lambda: train(FaultyNetwork(3), measured), PrivateStatistics, "train_private")
    train(FaultyNetwork(3), DATA.replace(normalization=Normalization.of(DATA.images, public=True)))


def dropping() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(16, 3), nn.Unflatten(1, (3, 1, 1)), nn.Dropout2d(0.2),
                         nn.Flatten())  # fmt: skip


def test_dropout_uses_only_the_secret_generator(global_rng_untouched: None) -> None:
    def trained(secret: int, seed: int) -> Tensor:
        model = build(dropping, 0)
        seed_dropout(model, torch.Generator().manual_seed(seed))  # a public seed of the user's own
        train(model, sigma=0.0, secret=Secret(secret), rate=1.0)
        assert model[1].forward.func is _drop  # the user's draws are back
        return model[2].weight.detach()  # type: ignore[union-attr]

    assert torch.equal(trained(1, 5), trained(1, 6))
    assert not torch.equal(trained(1, 5), trained(2, 5))
    images, labels = DATA.images[[0, 0]], DATA.labels[[0, 0]]
    rows = per_example_gradients(model := build(dropping, 0), dropped_losses(model), (images, labels))
    one, other = rows(images, labels, generator=derive(0))[0]
    assert not torch.equal(one, other)


def dropped_losses(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, y: rows(model(x), y)


@pytest.mark.parametrize("sides", [(5, 5), (5, 4, 5)])
def test_a_grid_reads_the_centre_where_it_is_not_finite_and_images_keep_theirs(sides: tuple[int, ...]) -> None:
    images = torch.rand(4, 1, *sides, generator=derive(0))
    grids = torch.rand(4, *[3] * len(sides), len(sides), generator=derive(1)) - 0.5
    images[2, 0, 2, 2] = grids[2, 1] = grids[0, 0, 0, 0] = grids[1, 2, 2, 1] = torch.nan
    grids[3, 1], grids[3, 2] = torch.inf, -torch.inf

    def both(shared: Any, image: Tensor, grid: Tensor) -> list[Tensor]:
        leaf = image.detach().requires_grad_()
        with torch.enable_grad():
            found = F.grid_sample(leaf[None], grid[None], align_corners=False)
            return [found[0].detach(), torch.autograd.grad(found.nansum(), leaf)[0]]

    rows = capture(both, [], [images, grids], function_name="it")([], images, grids, generator=derive(0))
    finite = grids.nan_to_num(0.0, 0.0, 0.0)
    for column, wanted in zip(rows, zip(*(both([], x, g) for x, g in zip(images, finite)))):
        torch.testing.assert_close(column, torch.stack(wanted), equal_nan=True)
    assert bool(rows[0].isnan().any())


def written(x: Tensor) -> Tensor:
    columns = x.view(3, 2, 2).permute(2, 0, 1).clone()
    columns.as_strided((2, 2), (5, 2), 1).pow_(3)
    return columns


STRIDED: dict[str, Callable[[Tensor], Tensor]] = {
    "offset": lambda x: x.as_strided((2, 3), (4, 1), 5),
    "offset of a slice": lambda x: x[1:].as_strided((2, 3), (4, 1)),
    "offset of a slice, given": lambda x: x[1:].as_strided((2, 4), (4, 1), 4),
    "later in a slice": lambda x: x[1:].as_strided((2, 2), (4, 1), 6),
    "transposed": lambda x: x.t().as_strided((4, 3), (1, 4)),
    "other order": lambda x: x.t().as_strided((3, 4), (4, 1)),
    "other shape": lambda x: x.as_strided((2, 6), (6, 1)),
    "of three dimensions": lambda x: x.view(3, 2, 2).as_strided((2, 2, 3), (2, 1, 4)),
    "columns first": lambda x: x.as_strided((2, 6), (1, 2)),
    "after an odd stride": lambda x: x.as_strided((1, 3, 4), (100, 4, 1)).as_strided((4, 3), (3, 1)),
    "overlapping": lambda x: x.as_strided((5, 4), (2, 1)),
    "written": written,
    "written whole": lambda x: torch.as_strided_scatter(x, x.t() ** 3, (4, 3), (3, 1)),
    "written in another order": lambda x: torch.as_strided_scatter(x, x.reshape(2, 6) ** 3, (2, 6), (1, 2)),
}


@pytest.mark.parametrize("name", STRIDED)
def test_strides_are_those_of_a_record_alone(name: str) -> None:
    """In the values and in their gradient, for records that lie at any place in memory."""
    function = STRIDED[name]

    def both(shared: Any, x: Tensor) -> list[Tensor]:
        leaf = x.detach().requires_grad_()
        with torch.enable_grad():
            found = function(leaf * 2)
            return [found, torch.autograd.grad(found.square().sum(), leaf)[0]]

    images = torch.randn(6, 3, 4, generator=derive(2), dtype=torch.float64)
    captured = capture(both, [], [images], function_name="it")
    for records in (images, images[1:], images.expand(2, -1, -1, -1).flatten(0, 1).mT.contiguous().mT):
        for column, row in zip(
            captured([], records), zip(*(both([], x.clone(memory_format=torch.contiguous_format)) for x in records))
        ):
            torch.testing.assert_close(column, torch.stack([r.detach() for r in row]))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x[1:].as_strided((2, 4), (4, 1), 0), lambda x: x.as_strided((3, 4), (4, 1), 1),
        lambda x: x[:1].as_strided((2, 4), (4, 1)), lambda x: x[:, ::2].as_strided((3, 2), (2, 1)),
        lambda x: torch.as_strided_scatter(x, x[:2], (2, 4), (2, 1)),
    ],
)  # fmt: skip
def test_strides_that_leave_a_tensor_or_write_twice_are_refused(function: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(NotCapturable, match="it uses as_strided to read memory outside a tensor, or to write twice"):
        capture(lambda shared, x: [function(x)], [], [torch.zeros(2, 3, 4)], function_name="it")


class Dispatch(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def precision(backend: Any, value: str) -> Iterator[None]:
    before, backend.fp32_precision = backend.fp32_precision, value
    try:
        yield
    finally:
        backend.fp32_precision = before


BACKENDS: Any = torch.backends
MODE = "a torch mode of the caller is active, which would see private records"
REDUCED = "is active, whose rounding errors can exceed the clip"
AMBIENT: dict[str, tuple[Callable[[], Any], str]] = {
    "autocast": (lambda: torch.autocast("cpu"), rf"torch.autocast\('cpu'\) {REDUCED}"),
    "inference": (torch.inference_mode, "inference mode is active, in which gradients are zero"),
    "function": (lambda: type("Own", (DeviceContext,), {})("cpu"), MODE),
    "dispatch": (Dispatch, MODE),
    "products": (lambda: precision(BACKENDS.mkldnn.matmul, "bf16"), rf"torch.backends.mkldnn.matmul.fp\w+ {REDUCED}"),
    "convolutions": (lambda: precision(BACKENDS.mkldnn.conv, "bf16"), rf"torch.backends.mkldnn.conv.fp\w+ {REDUCED}"),
    "CUDA": (lambda: precision(BACKENDS.cuda.matmul, "tf32"), rf"torch.backends.cuda.matmul.fp\w+ {REDUCED}"),
}


@pytest.mark.parametrize("state", AMBIENT)
def test_ambient_states_that_change_the_arithmetic_or_see_records_are_refused(state: str) -> None:
    """At every call, as an optimizer may change them between two steps; a default device changes no arithmetic."""
    model, own = build(lambda: FaultyNetwork(3), 0), DATA.labels.as_subclass(type("Own", (Tensor,), {}))
    private = PrivateGradient(list(model.parameters()), sigma=0.0, clip=1.0, denominator=1.0, secret=Secret())
    make = lambda kind, labels: clipped_gradients(kind, model, lambda n, x, y: rows(n(x), y), (DATA.images, labels))  # noqa: E731
    with torch.device("cpu"), precision(BACKENDS.mkldnn.matmul, "ieee"):
        embedders = PublicEmbedders(FixedNetwork(model), 1, like=DATA)
        sources = [make(kind, DATA.labels) for kind in GRADIENTS]
        for source in sources:
            source.add_to(private, *DATA)
    enter, words = AMBIENT[state]
    calls = [lambda labels, k=kind: make(k, labels) for kind in GRADIENTS]
    calls += [lambda labels, s=source: s.add_to(private, DATA.images, labels) for source in sources]
    for call in (*calls, lambda shared: capture(lambda shared, x: [x], [shared], [DATA.images], function_name="it")):
        with enter():
            refused(lambda: call(DATA.labels), PrivacyError, f"^(the network FaultyNetwork.*|it): {words}")  # noqa: B023
        refused(lambda: call(own), NotCapturable, ": a Own is not a plain tensor and may run code")  # noqa: B023
    sums = partial(class_sums, *DATA, embedders, num_classes=3)
    with enter():
        refused(sums, PrivacyError, f"^the network FaultyNetwork: {words}")


def vit(size: int = 8) -> nn.Module:
    from torchvision.models import VisionTransformer

    model = VisionTransformer(
        image_size=size, patch_size=4, num_layers=2, num_heads=2, hidden_dim=8, mlp_dim=16, num_classes=3
    )
    nn.init.normal_(model.heads.head.weight)  # type: ignore[union-attr, arg-type]
    return model


def recurrent(module: Any, x: Tensor) -> Tensor:
    """Run over two rows of an image, which neither hooks nor vmap support."""
    return module.classifier(module.rnn(x.mean(1)[:, ::4])[0][:, -1])


def tied(module: Any, x: Tensor) -> Tensor:
    """Use a weight in its layer and outside it."""
    return module.classifier(F.linear(torch.tanh(module.body(x.flatten(1))), module.body.weight))


def writing(module: Any, x: Tensor) -> Tensor:
    """Work in place, on the input too."""
    x *= 2
    x[:, 0].add_(1)
    h = torch.zeros(len(x), 192)
    h[:, :96] = x.flatten(1)[:, 96:]
    return module.classifier(h.relu_())


def views(module: Any, x: Tensor) -> Tensor:
    """Run layers once on three parts of each image, as on a batch."""
    parts = x[..., :6].reshape(-1, 3, 8, 3, 2).movedim(3, 1)
    return module.classifier(module.body(parts.flatten(0, 1)[..., :4, :]).view(len(x), -1))


def twice(first: nn.Linear, second: nn.Linear | None = None) -> nn.Module:
    if second is not None:
        second.weight = first.weight
    return nn.Sequential(nn.Flatten(), first, nn.Tanh(), second or first, nn.Linear(192, 3))


def frozen(layer: nn.Conv2d) -> nn.Module:
    layer.weight.requires_grad_(False)
    return layer


def small(layer: nn.Module) -> nn.Module:
    """Return a network whose layer has at most 16 pixels, as many as 4x3."""
    channels = layer(torch.zeros(1, 3, 4, 3)).shape[1]
    tail = [nn.GroupNorm(channels // 2, channels), nn.Tanh(), nn.AdaptiveAvgPool2d((1, 2)), nn.Flatten()]
    return nn.Sequential(nn.AdaptiveAvgPool2d((4, 3)), layer, *tail, nn.Linear(2 * channels, 3))


def resnet18() -> nn.Module:
    from torchvision.models import resnet18

    return resnet18(num_classes=3, norm_layer=lambda channels: nn.GroupNorm(8, channels))


def convnext() -> nn.Module:
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    return ConvNeXt([CNBlockConfig(8, 16, 1), CNBlockConfig(16, None, 1)], stochastic_depth_prob=0.0, num_classes=3)


def swin() -> nn.Module:
    from torchvision.models import SwinTransformer

    return SwinTransformer([2, 2], 8, [1, 1], [2, 2], [2, 2], stochastic_depth_prob=0.0, num_classes=3)


SHAPE = (3, 8, 8)
ACCEPTED: dict[str, Callable[[], nn.Module]] = {
    **{
        f"ConvNet {norm}": lambda norm=norm: networks.ConvNet(SHAPE, 3, width=4, depth=2, norm=norm)
        for norm in ("instance", "group", "layer", "none")
    },
    "LeNet": lambda: networks.LeNet((3, 32, 32), 3),
    "SimpleCNN": lambda: networks.SimpleCNN((3, 32, 32), 3),
    "FedCOGCNN": lambda: networks.FedCOGCNN((3, 32, 32), 3),
    "ResNet": lambda: networks.ResNet(SHAPE, 3, width=2, norm="group"),
    "CifarResNet": lambda: networks.CifarResNet(SHAPE, 3, depth=8, norm="group"),
    "WideResNet": lambda: networks.WideResNet(SHAPE, 3, depth=10, width=1, norm="group"),
    "torchvision's ResNet-18": resnet18,
    "torchvision's ViT": vit,
    "torchvision's ConvNeXt": convnext,
    "torchvision's Swin": swin,
    "attention": lambda: nn.Sequential(
        nn.Flatten(2), nn.TransformerEncoderLayer(64, 2, 8, 0.0, batch_first=True), nn.Flatten(), nn.Linear(192, 3)
    ),
    "LSTM": lambda: Layer(recurrent, rnn=nn.LSTM(8, 4, batch_first=True), classifier=nn.Linear(4, 3)),
    "GRU": lambda: Layer(recurrent, rnn=nn.GRU(8, 4, batch_first=True), classifier=nn.Linear(4, 3)),
    "GRU in a sequence": lambda: Layer(
        recurrent, rnn=nn.Sequential(nn.GRU(8, 4, batch_first=True)), classifier=nn.Linear(4, 3)
    ),
    "tied weights": lambda: Layer(tied, body=nn.Linear(192, 192), classifier=nn.Linear(192, 3)),
    "in place": lambda: Layer(writing, classifier=nn.Linear(192, 3)),
    "views": lambda: Layer(
        views,
        classifier=nn.Linear(96, 3),
        body=nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Tanh()),
    ),
    "layer twice": lambda: twice(nn.Linear(192, 192)),
    "weight twice": lambda: twice(nn.Linear(192, 192), nn.Linear(192, 192)),
    "conv": lambda: small(nn.Conv2d(3, 4, (3, 2), (2, 1), (1, 2), (1, 2))),
    "conv without bias": lambda: small(nn.Conv2d(3, 4, 3, bias=False)),
    "grouped conv": lambda: small(nn.Conv2d(3, 6, 3, padding=1, groups=3)),
    "transposed conv": lambda: small(nn.ConvTranspose2d(3, 4, (1, 2), bias=False)),
    "conv of one dimension": lambda: nn.Sequential(nn.Flatten(2), nn.Conv1d(3, 2, 61), nn.Flatten(), nn.Linear(8, 3)),
    "conv of three": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 3)), nn.Conv3d(1, 2, (2, 7, 6)), nn.Flatten(), nn.Linear(24, 3)
    ),
    "frozen conv": lambda: small(frozen(nn.Conv2d(3, 4, 3))),
    "indices of one dimension": lambda: Layer(
        lambda m, x: m.classifier(m.table(x[:, 0, 0, 0].abs().long().clamp(max=2))),
        table=nn.Embedding(3, 4),
        classifier=nn.Linear(4, 3),
    ),
    "PyTorch's instance norm": lambda: nn.Sequential(nn.InstanceNorm2d(3), nn.Flatten(), nn.Linear(192, 3)),
}


LARGE = ("torchvision's ResNet-18", "torchvision's Swin")


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in LARGE else n for n in ACCEPTED])
def test_accepted_networks_have_exact_rows_that_other_records_cannot_change(name: str) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = ACCEPTED[name]().train()
    shape = (3, 32, 32) if name in ("LeNet", "SimpleCNN", "FedCOGCNN") else SHAPE
    images, labels = torch.randn(4, *shape, generator=derive(1)), torch.tensor([0, 1, 2, 1])
    losses = dropped_losses(model)
    with torch.backends.mkldnn.flags(enabled=name != "attention"):  # whose fused operator is switched off by itself
        gradients = per_example_gradients(model, losses, (images, labels))
        assert torch.backends.mkldnn.enabled == (name != "attention")
    for part in (m for m in model.modules() if isinstance(m, nn.RNNBase)):
        assert all(a is b for a, b in zip(part._flat_weights, part.parameters(), strict=True))
    rows = gradients(images, labels)
    assert gradients.captured.batched
    for i in range(4):
        one = images[i : i + 1].clone()
        loss, parameters = losses(one, labels[i : i + 1]).sum(), [*gradients.trained.values()]
        wanted = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
        scale = torch.cat([g.flatten() for g in wanted]).norm()
        error = torch.cat([(row[i] - g).flatten() for row, g in zip(rows, wanted, strict=True)]).norm()
        assert float(error) <= 1e-5 * float(scale)
    for bad in (float("nan"), float("inf"), 1e30, 0.0):
        others = images.clone()
        others[1::2] = bad
        mixed = gradients(others, labels)
        assert all(torch.equal(a[::2], b[::2]) for a, b in zip(rows, mixed, strict=True))
    assert all(len(r) == 0 for r in gradients(images[:0], labels[:0]))
    assert set(vars(model)) == set(vars(ACCEPTED[name]()))
    for part in (m for m in model.modules() if isinstance(m, nn.RNNBase)):
        assert all(a is b for a, b in zip(part._flat_weights, part.parameters(), strict=True))


@pytest.mark.parametrize(("expected", "chunk", "wanted"), [(0.01, None, 1), (0.5, None, 3), (5, 100, 12), (64, 5, 5)])
def test_chunk_size_depends_only_on_public_numbers(expected: float, chunk: int | None, wanted: int) -> None:
    model = build(lambda: FaultyNetwork(3), 0)
    gradients = per_example_gradients(model, dropped_losses(model), (DATA.images, DATA.labels))
    assert gradients.chunk_size(expected, chunk) == wanted


@pytest.mark.parametrize(
    ("device", "values", "largest", "wanted"),
    [
        ("cpu", 1, 1, 64), ("cpu", 1, 1 << 17, 16), ("cpu", 1, 1 << 22, 8), ("cpu", 1 << 26, 1, 4),
        ("cpu", 1 << 30, 1, 1), ("cuda", 1 << 24, 1, 128), ("cuda", 1 << 24, 1 << 30, 128), ("cuda", 1 << 40, 1, 1),
    ],
)  # fmt: skip
def test_a_chunk_fits_in_the_memory_of_its_device(device: str, values: int, largest: int, wanted: int) -> None:
    assert chunk_for(values, largest, torch.device(device), 1e9, None) == wanted


@pytest.mark.parametrize("siamese", [False, True])
def test_siamese_augmentation_has_one_draw_for_all_records(siamese: bool) -> None:
    """Otherwise a private image would be embedded under another draw than the synthetic ones that are fitted to it."""

    def shifted(images: Tensor, generator: torch.Generator, *, siamese: bool = False) -> Tensor:
        return images + 10 * siamese + torch.rand(1 if siamese else len(images), 1, 1, 1, generator=generator)

    augment = captured_augmentation(shifted, torch.zeros(1, 1, 2, 2), siamese=siamese)
    seen = augment(torch.zeros(5, 1, 2, 2), derive(3))
    assert len(seen.flatten(1).unique(dim=0)) == (1 if siamese else 5)
    assert bool((seen >= 10).all()) == siamese
    assert torch.equal(seen, augment(torch.zeros(5, 1, 2, 2), derive(3)))
    assert not torch.equal(seen, augment(torch.zeros(5, 1, 2, 2), derive(4)))
    assert all(len(image.unique()) == 1 for image in seen)
    own, images = DSA("flip_scale"), torch.rand(5, 1, 4, 4)
    kept = captured_augmentation(own, images[0], siamese=siamese)(images, derive(3))
    assert torch.equal(kept, own(images, derive(3), siamese=siamese))
    for wrong, came in ((lambda x, g: (x,), "tuple"), (lambda x, g: x[..., :1], r"\[1, 1, 4, 1\]")):
        words = f"^the augmentation <lambda> turns 1 image into {came}; return one image of the same shape for each$"
        refused(lambda w=wrong: captured_augmentation(w, images), BatchStatistics, words)
