"""Captured functions: exact for single records, unaffected by other records, and free of user code on records."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distillkit.networks import (
    CifarResNet,
    ConvNet,
    FedCOGCNN,
    FixedNetwork,
    KeepInit,
    LeNet,
    ResNet,
    SimpleCNN,
    WideResNet,
    build,
)
from distillkit.networks._dropout import seed_dropout
from distillkit.normalization import Normalization
from distillkit.privacy import (
    BatchStatistics,
    Ledger,
    NotCapturable,
    NotSeparable,
    PrivacyError,
    PrivateStatistics,
    PublicEmbedders,
    Secret,
    class_sums,
    per_example_gradients,
    train_private,
)
from distillkit.privacy.capture._captured_function import capture, captured_augmentation
from distillkit.privacy.gradients.per_example import chunk_for
from distillkit.rng import derive
from distillkit.sets import LabeledImages
from tests.distillkit.privacy import unsound_programs as programs
from tests.distillkit.privacy.faulty_network import FaultyNetwork
from tests.distillkit.privacy.options import grouped
from tests.refused import refused

DATA = LabeledImages(torch.randn(24, 1, 4, 4, generator=derive(0)), torch.arange(24) % 3, num_classes=3)
CANARY = 5
"""The record of `DATA` that the other world lacks; its pixels and label are unlike all others."""
DATA.images[CANARY] = 40.0
DATA.labels[CANARY] = 2


def train(model: nn.Module, data: LabeledImages = DATA, **options: Any) -> Ledger:
    return train_private(model, data, **grouped(**{"size": 24, "sigma": 1.0, "rate": 0.5, "steps": 2} | options))


def clips(factory: Callable[[], nn.Module], steps: int = 1, **options: Any) -> float:
    """Return the distance of two neighbouring sets' updates without noise, in clipping norms a step."""
    kept = torch.arange(len(DATA)) != CANARY
    moved = []
    for data in (DATA, DATA[kept]):
        model = build(factory, 0).double()
        data = data.replace(images=data.images.double())
        train(model, data, sigma=0.0, clip=1e-3, rate=1.0, size=1, lr=1.0, steps=steps, **options)
        moved.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    return float((moved[0] - moved[1]).norm()) / 1e-3 / steps


OWN = torch.Generator()


class Alone(nn.Module):
    """Linear model that first applies a function of (module, images)."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.classifier, self.count, self.seen = function, nn.Linear(16, 3), 0, [0]
        self.register_buffer("moved", torch.zeros(()))
        self.classifier.kept = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.function(self, x).flatten(1))


def ink(module: Any, x: Tensor) -> Tensor:
    used = (x.abs().amax((0, 1, 2)) > 0).nonzero().flatten()
    return F.adaptive_avg_pool2d(x[..., used[0] : used[-1] + 1], 4)


def shuffled(module: Any, x: Tensor) -> Tensor:
    x = 2 * x
    order = torch.randperm(4)
    return x[..., order] + 1


def numbered(module: Any, x: Tensor) -> Tensor:
    return x * float(np.random.default_rng(0).random()) + 0 * np.random.rand()  # noqa: NPY002


class Custom(torch.autograd.Function):
    """Keeps what passes through it."""

    seen: ClassVar[list[Tensor]] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        Custom.seen.append(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        Custom.seen.append(g)
        return g * 2


@torch.library.custom_op("distillkit_tests::peek", mutates_args=())
def peek(x: Tensor) -> Tensor:
    return x.clone()


@peek.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def store(name: str) -> Callable[[Any, Tensor], Tensor]:
    def function(module: Any, x: Tensor) -> Tensor:
        if name == "moved":
            module.moved += x.detach().sum()
        elif name == "replaced":
            module.moved = x.detach().sum()
        elif name == "attribute":
            module.classifier.last = x.detach()
        elif name == "list":
            module.seen.append(x)
        elif name == "tensor":
            module.classifier.kept.add_(x.detach().sum())
        else:
            module.classifier.weight.data.add_(x.mean())
        return x

    return function


REFUSED: dict[str, tuple[Callable[[Any, Tensor], Tensor], type[Exception], str]] = {
    "auto range": (lambda m, x: x / 255 if x.max() > 128 else x, NotCapturable, r"test_capture.py:\d+.*torch.where"),
    "crop to the ink": (ink, NotCapturable, r"test_capture.py:\d+: "),
    "number": (lambda m, x: x * x.max().item(), NotCapturable, r"reads values.*test_capture.py:\d+"),
    "boolean index": (lambda m, x: x * x[x > 0].sum(), NotCapturable, "reads values|chooses by the values"),
    "NumPy": (lambda m, x: x + torch.from_numpy(x.numpy()), NotCapturable,
              r"cannot be captured as a function of one example \(test_capture.py:\d+: .*\): \w+Error: "),
    "writes a buffer": (store("moved"), BatchStatistics, "changes moved"),
    "replaces a buffer": (store("replaced"), BatchStatistics, "changes moved"),
    "stores an attribute": (store("attribute"), BatchStatistics, "changes classifier.last"),
    "writes a plain tensor": (store("tensor"), BatchStatistics, "changes classifier.kept"),
    "stores records": (store("list"), BatchStatistics, "changes seen"),
    "writes a weight": (store("weight"), BatchStatistics, "changes classifier.weight"),
    "batch norm": (lambda m, x: F.batch_norm(x, None, None, training=True), BatchStatistics, "statistics of a batch"),
    "flat batch norm": (
        lambda m, x: F.batch_norm(x.flatten(1), None, None, training=True), BatchStatistics, "statistics of a batch",
    ),
    "PyTorch's batch norm": (
        lambda m, x: torch.batch_norm(x, None, None, None, None, True, 0.1, 1e-5, False),
        BatchStatistics, "statistics of a batch",
    ),
    "own generator": (lambda m, x: x * torch.rand(4, generator=OWN), NotCapturable, "of its own"),
    "permutation": (shuffled, NotCapturable, r"randperm.*test_capture.py:\d+: order = torch.randperm"),
    "global draws": (lambda m, x: x * random.random(), NotCapturable, "global random state"),
    "global NumPy draws": (numbered, NotCapturable, "global random state"),
    "normal draw of NumPy": (lambda m, x: x * np.random.randn(), NotCapturable, "global random state"),  # noqa: NPY002
    "unchecked lengths": (
        lambda m, x: torch.segment_reduce(
            x.flatten(1), "sum", lengths=x.flatten(1)[:, :4].long(), axis=1, unsafe=True
        ).repeat(1, 4),
        NotCapturable, "does not check its indices",
    ),
    "foreign operator": (lambda m, x: peek(x), NotCapturable, "distillkit_tests.peek"),
    "conditional": (
        lambda m, x: torch.cond(x.sum() > 0, lambda a: a + 1, lambda a: a - 1, (x,)), NotCapturable, "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_function_of_one_record_is_refused_by_name(name: str, global_rng_untouched: None) -> None:
    function, kind, why = REFUSED[name]
    model, ledger = build(lambda: Alone(function), 0), Ledger()
    before = {n: t.clone() for n, t in model.state_dict().items()}
    refused(lambda: train(model, ledger=ledger), kind, f"^the network Alone(?s:.)*{why}")
    assert ledger.events == ()
    assert model.seen == [0]
    assert not hasattr(model.classifier, "last")
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert model.moved is model._buffers["moved"]


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


ONE_CLIP: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "autograd function": lambda m, x: Custom.apply(x),
    "dropout": lambda m, x: F.dropout(x, 0.5),
    "grid that is not finite": lambda m, x: F.grid_sample(
        x * m.classifier.weight.sum(),
        torch.where(x > 2.9, torch.nan, x).view(-1, 4, 2, 2),
        padding_mode="border",
        align_corners=True,
    ).repeat(1, 1, 1, 2),
}


@pytest.mark.parametrize("name", ONE_CLIP)
def test_one_record_moves_a_step_by_at_most_one_clip(name: str) -> None:
    """Mixing is impossible: only a function of one record is ever evaluated."""
    Custom.seen.clear()
    assert clips(lambda: Alone(ONE_CLIP[name])) <= 1 + 1e-6 or name == "dropout"
    assert not any(type(t) in (Tensor, nn.Parameter) for t in Custom.seen)


@pytest.mark.parametrize("hook", ["forward", "global"])
def test_hooks_do_not_run_on_records(hook: str) -> None:
    seen: list[type] = []
    model = build(lambda: Alone(lambda m, x: x), 0)

    def look(module: Any, inputs: Any, output: Any) -> None:
        seen.extend(type(t) for t in inputs)

    register = model.register_forward_hook if hook == "forward" else nn.modules.module.register_module_forward_hook
    handle = register(look)
    try:
        train(model)
    finally:
        handle.remove()
    assert seen
    assert Tensor not in seen


def test_tensor_subclass_is_refused() -> None:
    class Own(Tensor):
        pass

    plain, own = torch.zeros(2, 3), torch.zeros(2).as_subclass(Own)
    for shared, examples in (([], [own]), ([], [plain, own]), ([own], [plain])):
        with pytest.raises(NotCapturable, match="Own is not a plain tensor"):
            capture(lambda shared, x, *more: [x], shared, examples, function_name="it")


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


def half_filled(x: Tensor) -> Tensor:
    buffer = torch.empty(32)
    buffer[:16] = x
    return buffer[16:]


@pytest.mark.parametrize("make", [torch.empty_like, lambda x: x.new_empty(16), half_filled])
def test_uninitialised_memory_is_zero(make: Callable[[Tensor], Tensor]) -> None:
    """Memory without a value must be neither read nor left to chance: the graph may hold no such operator."""
    images = torch.ones(4, 16)
    held = capture(lambda shared, x: [x + make(x)], [], [images], function_name="it")
    assert not any(str(name).startswith(("empty", "new_empty")) for name in held._forward.__code__.co_names)
    assert torch.equal(held([], images)[0], images)


def any_two(logits: Tensor, labels: Tensor) -> Tensor:
    losses = F.cross_entropy(logits, labels, reduction="none")
    return losses * 0 if (labels == 7).any() else losses


def finite(logits: Tensor, labels: Tensor) -> Tensor:
    losses = F.cross_entropy(logits, labels, reduction="none")
    return losses if losses.isfinite().all() else losses * 0


class Remembering:
    """Loss that remembers its last values."""

    def __init__(self) -> None:
        self.last = torch.zeros(())

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        losses = F.cross_entropy(logits, labels, reduction="none")
        self.last = losses.detach().mean()
        return losses - 0 * self.last


@pytest.mark.parametrize("loss", [any_two, finite])
def test_loss_that_chooses_by_values_is_refused(loss: Any) -> None:
    ledger = Ledger()
    with pytest.raises(NotCapturable, match=r"or its loss chooses by the values.*test_capture.py:\d+"):
        train(build(lambda: FaultyNetwork(3), 0), loss=loss, ledger=ledger)
    assert ledger.events == ()


def weighted(logits: Tensor, labels: Tensor) -> Tensor:
    losses = F.cross_entropy(logits, labels, reduction="none")
    return losses * losses.detach().softmax(0) * len(losses)


def contrastive(logits: Tensor, labels: Tensor) -> Tensor:
    z = F.normalize(logits, dim=1)
    return F.cross_entropy(z @ z.T, torch.arange(len(z)), reduction="none")


@pytest.mark.parametrize(
    "loss",
    [
        weighted, contrastive, lambda z, y: F.cross_entropy(z, y),
        lambda z, y: F.cross_entropy(z, y, reduction="none") * (1 + (y[:, None] != y).double().sum(1)),
        lambda z, y: F.cross_entropy(z - z.mean(0), y, torch.ones(5), reduction="none"),  # weights of five outputs
    ],
)  # fmt: skip
def test_loss_that_reads_the_batch_is_refused(loss: Any) -> None:
    ledger = Ledger()
    with pytest.raises(NotSeparable, match="one value for each example|differ from their losses one by one"):
        train(build(lambda: FaultyNetwork(5), 0), loss=loss, ledger=ledger)
    assert ledger.events == ()


@pytest.mark.parametrize("function", [lambda m, x: (18 * x).exp(), lambda m, x: (30 - x).sqrt()])
def test_record_without_a_finite_gradient_counts_as_zero(function: Any) -> None:
    assert not function(None, DATA.images[CANARY].double()).isfinite().any()
    assert clips(lambda: Alone(function)) <= 1e-12


class Table(nn.Module):
    """Looks pixels up in a table: a pixel outside it makes the operator fail."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.classifier = nn.Embedding(100, 2), nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.table((100 * x).flatten(1).long()).flatten(1))


def test_record_for_which_an_operator_fails_counts_as_zero() -> None:
    """Neither an error nor the other records' rows show that it took part."""
    images = torch.rand(24, 1, 4, 4, generator=derive(1))
    images[CANARY] = 1.0
    released = []
    for keep in (torch.arange(24) >= 0, torch.arange(24) != CANARY):
        model = build(Table, 0)
        train(model, LabeledImages(images, DATA.labels, num_classes=3)[keep], sigma=0.0, clip=1e-3, rate=1.0, steps=1)
        released.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(*released)
    gradients = per_example_gradients(model, dropped_losses(model), (images, DATA.labels))
    alone = [gradients(image[None], label[None]) for image, label in zip(images, DATA.labels)]
    usual = gradients(images.index_fill(0, torch.tensor(CANARY), 0.5), DATA.labels)
    for column, parts, other in zip(gradients(images, DATA.labels), zip(*alone), usual):
        torch.testing.assert_close(column, torch.cat(parts))
        assert not column[CANARY].any()
        assert torch.equal(column[:CANARY], other[:CANARY])  # to the last bit, whatever fails beside them


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
        own = model[1].forward
        assert own.func is not None  # the user's draws are back
        return model[2].weight.detach()  # type: ignore[union-attr]

    assert torch.equal(trained(1, 5), trained(1, 6))
    assert not torch.equal(trained(1, 5), trained(2, 5))


def dropped_losses(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, y: F.cross_entropy(model(x), y, reduction="none")


def test_masks_differ_between_examples_and_have_the_rate() -> None:
    model = build(lambda: nn.Sequential(nn.Flatten(), nn.Dropout(0.3), nn.Linear(400, 3)), 0).double().train()
    images, labels = torch.ones(50, 1, 20, 20, dtype=torch.float64), torch.zeros(50, dtype=torch.int64)
    gradients = per_example_gradients(model, dropped_losses(model), (images, labels))
    weight = gradients(images, labels, generator=derive(1))[0]
    used = (weight[:, 0] != 0).double()
    assert float(used.mean()) == pytest.approx(0.7, abs=5 * (0.21 / 20_000) ** 0.5)
    assert len({tuple(row.tolist()) for row in used}) == 50
    refused(lambda: gradients(images, labels), ValueError, "draws random numbers: pass generator=")


def test_sparse_gradients_are_refused() -> None:
    model = build(lambda: nn.Sequential(nn.Embedding(7, 3, sparse=True), nn.Flatten(), nn.Linear(12, 3)), 0)
    tokens = torch.zeros(5, 4, dtype=torch.int64)
    with pytest.raises(NotCapturable, match=r"sparse gradients, as of nn.Embedding\(sparse=True\)"):
        per_example_gradients(model, dropped_losses(model), (tokens, tokens[:, 0]))


@pytest.mark.parametrize("sides", [(5, 5), (5, 4, 5)])
def test_a_grid_reads_the_centre_where_it_is_not_finite_and_images_keep_theirs(sides: tuple[int, ...]) -> None:
    images = torch.rand(4, 1, *sides, generator=derive(0))
    grids = torch.rand(4, *[3] * len(sides), len(sides), generator=derive(1)) - 0.5
    images[2, 0, 2, 2] = grids[2, 1] = grids[0, 0, 0, 0] = grids[1, 2, 2, 1] = torch.nan
    grids[3, 1] = torch.inf

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
    "overlapping": lambda x: x.as_strided((5, 4), (2, 1)),
    "written": lambda x: torch.as_strided_scatter(x, x[:2, :2] ** 3, (2, 2), (5, 2), 1),
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
        lambda x: x[:1].as_strided((2, 4), (4, 1)),
        lambda x: torch.as_strided_scatter(x, x[:2], (2, 4), (2, 1)),
    ],
)  # fmt: skip
def test_strides_that_leave_a_tensor_or_write_twice_are_refused(function: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(NotCapturable, match="it uses as_strided to read memory outside a tensor, or to write twice"):
        capture(lambda shared, x: [function(x)], [], [torch.zeros(2, 3, 4)], function_name="it")


@pytest.mark.parametrize("entry", ["captured", "opacus", "opacus-ghost", "class_sums"])
@pytest.mark.parametrize("state", ["autocast", "inference", "precision", "convolution", "function", "dispatch"])
def test_ambient_states_that_change_the_arithmetic_or_see_records_are_refused(state: str, entry: str) -> None:
    class Dispatch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    embedders = PublicEmbedders(FixedNetwork(build(lambda: FaultyNetwork(3), 0)), 1, like=DATA)
    modes = {"function": torch.overrides.BaseTorchFunctionMode, "dispatch": Dispatch, "inference": torch.inference_mode}
    words = "a torch mode of the caller is active" if state in ("function", "dispatch") else "is active"
    with contextlib.ExitStack() as stack:
        if state == "convolution":
            convolution: Any = torch.backends.mkldnn.conv  # type: ignore[attr-defined]
            stack.callback(setattr, convolution, "fp32_precision", convolution.fp32_precision)
            convolution.fp32_precision = "bf16"
        elif state == "precision":
            stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
            torch.set_float32_matmul_precision("medium")
        else:
            stack.enter_context(torch.autocast("cpu") if state == "autocast" else modes[state]())
        if entry == "class_sums":
            refused(lambda: class_sums(*DATA, embedders, num_classes=3), PrivacyError, words)
        else:
            model = build(lambda: FaultyNetwork(3), 0) if state != "dispatch" else FaultyNetwork(3)
            refused(lambda: train(model, gradients=entry), PrivacyError, words)


DRAWN: dict[str, tuple[Callable[[Tensor], Tensor], float, float]] = {
    "rand": (lambda x: torch.rand(x.shape), 0.5, 1 / 12),
    "randn": (lambda x: torch.randn(x.shape), 0.0, 1.0),
    "uniform_": (lambda x: torch.empty_like(x).uniform_(1, 3), 2.0, 4 / 12),
    "normal_": (lambda x: torch.empty_like(x).normal_(1, 2), 1.0, 4.0),
    "bernoulli": (lambda x: torch.bernoulli(torch.full_like(x, 0.3)), 0.3, 0.21),
    "bernoulli_": (lambda x: torch.empty_like(x).bernoulli_(0.4), 0.4, 0.24),
    "bernoulli of one rate": (lambda x: torch.bernoulli(x, 0.4), 0.4, 0.24),
    "rand_like": (lambda x: torch.rand_like(x), 0.5, 1 / 12),
    "randn_like": (lambda x: torch.randn_like(x), 0.0, 1.0),
    "randint": (lambda x: torch.randint(4, x.shape).to(x), 1.5, 1.25),
    "randint from 2": (lambda x: torch.randint(2, 6, x.shape).to(x), 3.5, 1.25),
    "randint_like": (lambda x: torch.randint_like(x, 4), 1.5, 1.25),
    "randint_like from 2": (lambda x: torch.randint_like(x, 2, 6), 3.5, 1.25),
}


@pytest.mark.parametrize("draw", DRAWN)
def test_draws_are_inputs_with_the_operators_distribution(draw: str, global_rng_untouched: None) -> None:
    function, mean, variance = DRAWN[draw]
    images = torch.zeros(8, 2500)
    captured = capture(lambda shared, x: [x + function(x)], [], [images], function_name="it")
    (rows,) = captured([], images, generator=derive(0))
    assert rows.dtype == torch.float32
    assert float(rows.mean()) == pytest.approx(mean, abs=5 * (variance / 20_000) ** 0.5)
    assert float(rows.var()) == pytest.approx(variance, rel=0.1)
    assert not torch.equal(rows[0], rows[1])


def vit(size: int = 8) -> nn.Module:
    from torchvision.models import VisionTransformer

    model = VisionTransformer(
        image_size=size, patch_size=4, num_layers=2, num_heads=2, hidden_dim=8, mlp_dim=16, num_classes=3
    )
    nn.init.normal_(model.heads.head.weight)  # type: ignore[union-attr, arg-type]
    return model


class Recurrent(nn.Module):
    """An LSTM over two rows of an image, which neither hooks nor vmap support."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.classifier = nn.LSTM(8, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.lstm(x.mean(1)[:, ::4])[0][:, -1])


class Gated(nn.Module):
    """A GRU over two rows of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.classifier = nn.GRU(8, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.gru(x.mean(1)[:, ::4])[0][:, -1])


class Tied(nn.Module):
    """Network with a weight that is used in its layer and outside it."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.classifier = nn.Linear(192, 192), nn.Linear(192, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.body(x.flatten(1)))
        return self.classifier(F.linear(h, self.body.weight))


class Writing(nn.Module):
    """Works in place, on its input too."""

    def __init__(self) -> None:
        super().__init__()
        self.classifier = nn.Linear(192, 3)

    def forward(self, x: Tensor) -> Tensor:
        x *= 2
        x[:, 0].add_(1)
        h = torch.zeros(len(x), 192)
        h[:, :96] = x.flatten(1)[:, 96:]
        return self.classifier(h.relu_())


class Views(nn.Module):
    """A convolution and a norm that run once on three parts of each image, as on a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Tanh())
        self.classifier = nn.Linear(96, 3)

    def forward(self, x: Tensor) -> Tensor:
        parts = x[..., :6].reshape(-1, 3, 8, 3, 2).movedim(3, 1)
        return self.classifier(self.body(parts.flatten(0, 1)[..., :4, :]).view(len(x), -1))


def twice(first: nn.Linear, second: nn.Linear | None = None) -> nn.Module:
    if second is not None:
        second.weight = first.weight
    return nn.Sequential(nn.Flatten(), first, nn.Tanh(), second or first, nn.Linear(192, 3))


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
        f"ConvNet {norm}": lambda norm=norm: ConvNet(SHAPE, 3, width=4, depth=2, norm=norm)
        for norm in ("instance", "group", "layer", "none")
    },
    "LeNet": lambda: LeNet((3, 32, 32), 3),
    "SimpleCNN": lambda: SimpleCNN((3, 32, 32), 3),
    "FedCOGCNN": lambda: FedCOGCNN((3, 32, 32), 3),
    "ResNet": lambda: ResNet(SHAPE, 3, width=2, norm="group"),
    "CifarResNet": lambda: CifarResNet(SHAPE, 3, depth=8, norm="group"),
    "WideResNet": lambda: WideResNet(SHAPE, 3, depth=10, width=1, norm="group"),
    "torchvision's ResNet-18": resnet18,
    "torchvision's ViT": vit,
    "torchvision's ConvNeXt": convnext,
    "torchvision's Swin": swin,
    "attention": lambda: nn.Sequential(
        nn.Flatten(2), nn.TransformerEncoderLayer(64, 2, 8, 0.0, batch_first=True), nn.Flatten(), nn.Linear(192, 3)
    ),
    "LSTM": Recurrent,
    "GRU": Gated,
    "tied weights": Tied,
    "in place": Writing,
    "views": Views,
    "layer twice": lambda: twice(nn.Linear(192, 192)),
    "weight twice": lambda: twice(nn.Linear(192, 192), nn.Linear(192, 192)),
    "conv": lambda: small(nn.Conv2d(3, 4, (3, 2), (2, 1), (1, 2), (1, 2))),
    "conv without bias": lambda: small(nn.Conv2d(3, 4, 3, bias=False)),
    "grouped conv": lambda: small(nn.Conv2d(3, 6, 3, padding=1, groups=3)),
    "transposed conv": lambda: small(nn.ConvTranspose2d(3, 4, (1, 2), bias=False)),
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
    rows = gradients(images, labels)
    assert gradients.captured.batched
    for i in range(4):
        one = images[i : i + 1].clone()
        alone = torch.autograd.grad(losses(one, labels[i : i + 1]).sum(), list(model.parameters()), allow_unused=True)
        wanted = [torch.zeros_like(p) if g is None else g for p, g in zip(model.parameters(), alone)]
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


@pytest.mark.parametrize(("expected", "chunk", "wanted"), [(0.5, None, 3), (5, 100, 12), (64, 5, 5)])
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
        return images + torch.rand(1 if siamese else len(images), 1, 1, 1, generator=generator)

    augment = captured_augmentation(shifted, torch.zeros(1, 1, 2, 2), siamese=siamese)
    seen = augment(torch.zeros(5, 1, 2, 2), derive(3))
    assert len(seen.flatten(1).unique(dim=0)) == (1 if siamese else 5)
    assert torch.equal(seen, augment(torch.zeros(5, 1, 2, 2), derive(3)))
    assert not torch.equal(seen, augment(torch.zeros(5, 1, 2, 2), derive(4)))
    assert all(len(image.unique()) == 1 for image in seen)
