"""The check of per-example gradients: networks and losses that mix examples are refused before any charge."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distillkit.networks import (
    CifarResNet,
    ConvNet,
    FedCOGCNN,
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
    NotSeparable,
    PrivacyError,
    PrivateStatistics,
    Secret,
    per_example_gradients,
    train_private,
)
from distillkit.privacy.validation._gradient_check import choose_batch_sizes
from distillkit.rng import derive
from distillkit.sets import LabeledImages
from tests.distillkit.privacy.faulty_network import FAULTS, OCCASIONS, FaultyNetwork
from tests.distillkit.privacy.options import grouped

DRAWN = 7
DATA = LabeledImages(torch.randn(24, 1, 4, 4, generator=derive(0)), torch.arange(24) % 3, num_classes=3)


def train(model: nn.Module, data: LabeledImages = DATA, **options: Any) -> Ledger:
    """Train on at most seven of twelve drawn examples at once."""
    return train_private(
        model, data, **grouped(**{"size": 24, "sigma": 1.0, "rate": 0.5, "steps": 2, "chunk": DRAWN} | options)
    )


def state(model: nn.Module) -> dict[str, Any]:
    held = {n: t.clone() for n, t in model.state_dict().items()}
    return held | {n: (p.requires_grad, p.grad, vars(p)) for n, p in model.named_parameters()}


@pytest.mark.parametrize("free", [False, True])
@pytest.mark.parametrize("occasion", OCCASIONS)
@pytest.mark.parametrize("way", FAULTS)
def test_every_violation_in_any_phase_is_refused_before_a_charge(
    way: str, occasion: str, free: bool, global_rng_untouched: None
) -> None:
    model = build(lambda: FaultyNetwork(3, way, occasion, size=DRAWN, free=free), 0)
    if occasion == "in one phase":
        model.classifier.requires_grad_(False)  # type: ignore[union-attr]
    elif occasion == "in train mode":
        model.eval()
    before, mode, ledger = state(model), model.training, Ledger()
    if way == "folds rows" and free and occasion != "at the drawn size":
        train(model, ledger=ledger)  # by torch.func, which takes whole examples
        assert len(ledger.events) == 1
        return
    why = WHY["mixes examples"] if (way, occasion) == ("folds rows", "at the drawn size") else WHY[way]
    with pytest.raises(PrivacyError, match=why):
        train(model, ledger=ledger)
    assert ledger.events == ()
    assert model.training == mode
    assert all(torch.equal(b, before[n]) for n, b in model.named_buffers())
    for name, parameter in model.named_parameters():
        assert (parameter.requires_grad, parameter.grad, vars(parameter)) == before[name]
    assert not any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in model.modules())


WHY = {
    "folds rows": r"body.weight gets (2 rows for 1|\d+ rows for \d+) examples.*gradients='func'",
    "mixes examples": "treats an example differently in a batch",
    "draws globally": "draws from the global random state",
    "counts the batch": "treats an example differently in a batch",
    "moves a buffer": "a forward pass changes moved",
}


@pytest.mark.parametrize("free", [False, True])
def test_network_without_a_violation_is_trained(free: bool) -> None:
    model = build(lambda: FaultyNetwork(3, free=free), 0)
    before = [p.detach().clone() for p in model.parameters()]
    assert len(train(model).events) == 1
    assert all(not torch.equal(p, q) for p, q in zip(model.parameters(), before))


def test_folded_rows_are_exact_for_whole_examples() -> None:
    """The gradient of two views' mean is clipped once: the release changes by one clip, where hooks would add two."""
    moved = []
    for count in (1, 0):
        model = build(lambda: FaultyNetwork(3, "folds rows"), 0).double()
        data = DATA[:count].replace(images=DATA.images[:count].double())
        train(model, data, sigma=0.0, clip=0.01, rate=1.0, steps=1, size=1, lr=1.0, gradients="func")
        moved.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert float((moved[0] - moved[1]).norm()) == pytest.approx(0.01, rel=1e-6)


class Normed(nn.Module):
    """Normalizes by the batch without a layer for it."""

    def __init__(self) -> None:
        super().__init__()
        self.classifier = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(F.batch_norm(x.flatten(1), None, None, training=True) if len(x) > 1 else x.flatten(1))


class Patches(nn.Module):
    """Bag of patches, the published form of the error: logits of each patch by one layer, averaged."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.patch(x.reshape(-1, 4)).view(len(x), 4, 3).mean(1)


class Alone(nn.Module):
    """Module that applies a function to its input."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.classifier = function, nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.function(x.flatten(1)))


class Remembering(Alone):
    def forward(self, x: Tensor) -> Tensor:
        self.last = getattr(self, "last", 0.0) * 0.5 + x.detach().mean()
        return super().forward(x)


def same_noise(x: Tensor) -> Tensor:
    return x + torch.rand(x.shape, generator=torch.Generator().manual_seed(0))


def forked(x: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        return x * torch.rand(x.shape[1])


OTHERS: dict[str, tuple[Callable[[], nn.Module], type[Exception], str]] = {
    "patches": (Patches, PrivacyError, "gets 4 rows for 1 examples"),
    "a normalisation by the batch": (
        Normed, BatchStatistics, "batch",
    ),
    "alpha dropout": (lambda: Alone(nn.AlphaDropout(0.5)), PrivacyError, "global random state.*alpha dropout"),
    "dropout in forward": (lambda: Alone(lambda x: F.dropout(x, 0.5)), PrivacyError, "global random state"),
    "public noise by place": (lambda: Alone(same_noise), BatchStatistics, "treats an example differently"),
    "the global seed, put back": (lambda: Alone(forked), BatchStatistics, "treats an example differently"),
    "weak mixing": (lambda: Alone(lambda x: x + 1e-5 * x.mean(0)), BatchStatistics, "treats an example differently"),
    "a neighbour": (lambda: Alone(lambda x: x + x.roll(1, 0)), BatchStatistics, "treats an example differently"),
    "an attribute": (lambda: Remembering(nn.Identity()), BatchStatistics, "changes last"),
    "batch norm": (lambda: nn.Sequential(nn.Flatten(), nn.BatchNorm1d(16)), BatchStatistics, "^layers 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_unsupported_networks_are_refused_by_name(name: str, global_rng_untouched: None) -> None:
    factory, kind, why = OTHERS[name]
    ledger = Ledger()
    with torch.random.fork_rng():
        model = factory()
    with pytest.raises(kind, match=why):
        train(model, ledger=ledger)
    assert ledger.events == ()


class Casts(nn.Module):
    """Network that runs only in float32, or mixes examples only there."""

    def __init__(self, mixes: str = "") -> None:
        super().__init__()
        self.mixes, self.classifier = mixes, nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        if self.mixes == "float32 alone" and x.dtype == torch.float32:
            x = x - x.mean(0)
        if self.mixes == "always":
            x = x.float() - x.float().mean(0)
        return self.classifier(x if self.mixes == "float32 alone" else x.float())


def test_network_for_one_dtype_is_checked_in_that_dtype() -> None:
    model = build(Casts, 0)
    assert len(train(model).events) == 1
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    for mixes in ("always", "float32 alone"):
        ledger = Ledger()
        with pytest.raises(BatchStatistics, match="treats an example differently|in torch.float32 are not those"):
            train(build(lambda mixes=mixes: Casts(mixes), 0), ledger=ledger)
        assert ledger.events == ()


def weighted(logits: Tensor, labels: Tensor) -> Tensor:
    losses = F.cross_entropy(logits, labels, reduction="none")
    return losses * losses.detach().softmax(0) * len(losses)


def contrastive(logits: Tensor, labels: Tensor) -> Tensor:
    z = F.normalize(logits, dim=1)
    return F.cross_entropy(z @ z.T, torch.arange(len(z)), reduction="none")


@pytest.mark.parametrize("loss", [weighted, contrastive, lambda z, y: F.cross_entropy(z, y)])
def test_loss_that_reads_the_batch_is_refused(loss: Any) -> None:
    ledger = Ledger()
    with pytest.raises(NotSeparable, match="one value for each example|differ from their losses one by one"):
        train(FaultyNetwork(3), loss=loss, ledger=ledger)
    with pytest.raises(PrivacyError):  # a loss that mixes where it is used only
        train(
            FaultyNetwork(3),
            loss=lambda z, y: weighted(z, y) if len(y) == DRAWN else F.cross_entropy(z, y, reduction="none"),
        )
    assert ledger.events == ()


def test_measured_normalization_is_refused_unless_public() -> None:
    measured = DATA.replace(normalization=Normalization.of(DATA.images))
    with pytest.raises(PrivateStatistics, match="train_private"):
        train(FaultyNetwork(3), measured)
    train(FaultyNetwork(3), DATA.replace(normalization=Normalization.of(DATA.images, public=True)))


def dropping() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(16, 3), nn.Unflatten(1, (3, 1, 1)), nn.Dropout2d(0.2),
                         nn.Flatten())  # fmt: skip


@pytest.mark.parametrize("gradients", ["hooks", "func"])
def test_dropout_uses_only_the_secret_generator(gradients: str, global_rng_untouched: None) -> None:
    def trained(secret: int, seed: int) -> Tensor:
        model = build(dropping, 0)
        seed_dropout(model, torch.Generator().manual_seed(seed))  # a public seed of the user's own
        train(model, sigma=0.0, secret=Secret(secret), gradients=gradients, rate=1.0)
        own = model[1].forward
        assert own.func is not None  # the user's draws are back
        return model[2].weight.detach()  # type: ignore[union-attr]

    assert torch.equal(trained(1, 5), trained(1, 6))
    assert not torch.equal(trained(1, 5), trained(2, 5))


def test_masks_of_torch_func_differ_between_examples() -> None:
    model = build(dropping, 0).double()
    seed_dropout(model, torch.Generator().manual_seed(0))
    images = DATA.images[:1].double().expand(6, 1, 4, 4)

    def losses(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y, reduction="none")

    public = DATA.images[:6].double(), DATA.labels[:6]
    with per_example_gradients(model, losses, public=public, chunk=6, mode="func") as gradients:
        rows = gradients(images, torch.zeros(6, dtype=torch.int64))
        assert gradients.engine == "vmap"
    assert len({tuple(r.flatten().tolist()) for r in rows[0]}) == 6


def vit(size: int = 8) -> nn.Module:
    from torchvision.models import VisionTransformer

    model = VisionTransformer(
        image_size=size, patch_size=4, num_layers=2, num_heads=2, hidden_dim=8, mlp_dim=16, num_classes=3
    )
    nn.init.normal_(model.heads.head.weight)  # type: ignore[union-attr, arg-type]
    return model


class Recurrent(nn.Module):
    """An LSTM over the rows of an image, which neither hooks nor vmap support."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.classifier = nn.LSTM(8, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.lstm(x.mean(1))[0][:, -1])


class Tied(nn.Module):
    """Network with a weight that is used in its layer and outside it."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.classifier = nn.Linear(192, 192), nn.Linear(192, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.body(x.flatten(1)))
        return self.classifier(F.linear(h, self.body.weight))


def resnet18() -> nn.Module:
    from torchvision.models import resnet18

    return resnet18(num_classes=3, norm_layer=lambda channels: nn.GroupNorm(8, channels))


SHAPE = (3, 8, 8)
ACCEPTED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    **{
        f"ConvNet {norm}": (lambda norm=norm: ConvNet(SHAPE, 3, width=4, depth=2, norm=norm), "hooks")
        for norm in ("instance", "group", "layer", "none")
    },
    "LeNet": (lambda: LeNet((3, 32, 32), 3), "hooks"),
    "SimpleCNN": (lambda: SimpleCNN((3, 32, 32), 3), "hooks"),
    "FedCOGCNN": (lambda: FedCOGCNN((3, 32, 32), 3), "hooks"),
    "ResNet": (lambda: ResNet(SHAPE, 3, width=2, norm="group"), "hooks"),
    "CifarResNet": (lambda: CifarResNet(SHAPE, 3, depth=8, norm="group"), "hooks"),
    "WideResNet": (lambda: WideResNet(SHAPE, 3, depth=10, width=1, norm="group"), "hooks"),
    "torchvision's ResNet-18": (resnet18, "vmap"),
    "torchvision's ViT": (vit, "vmap"),
    "attention": (lambda: nn.Sequential(nn.Flatten(2), nn.TransformerEncoderLayer(64, 2, 8, 0.0, batch_first=True),
                                        nn.Flatten(), nn.Linear(192, 3)), "vmap"),
    "LSTM": (Recurrent, "loop"),
    "tied weights": (Tied, "vmap"),
}  # fmt: skip


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted_networks_have_exact_rows(name: str) -> None:
    factory, engine = ACCEPTED[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = factory()
    shape = getattr(getattr(model, "shape", None), "__iter__", lambda: iter(SHAPE))
    shape = (3, 32, 32) if name in ("LeNet", "SimpleCNN", "FedCOGCNN") else tuple(shape())
    images, labels = torch.randn(3, *shape, generator=derive(1)), torch.tensor([0, 1, 2])

    def losses(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y, reduction="none")

    with per_example_gradients(model, losses, public=(torch.randn(2, *shape, generator=derive(2)), labels[:2]),
                               chunk=3) as gradients:  # fmt: skip
        assert gradients.engine == engine
        rows = gradients(images, labels)
        some = gradients(images[1:2], labels[1:2])
    for i in range(3):
        alone = torch.autograd.grad(losses(images[i : i + 1], labels[i : i + 1]).sum(), list(model.parameters()))
        scale = torch.cat([g.flatten() for g in alone]).norm()
        for row, wanted in zip(rows, alone, strict=True):
            assert float((row[i] - wanted).norm()) <= 2e-4 * float(scale)
    assert all(s.shape[0] == 1 and torch.allclose(s[0], r[1], atol=1e-4 * float(scale)) for s, r in zip(some, rows))


def test_vit_is_trained_privately() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = vit()
    data = LabeledImages(torch.randn(12, 3, 8, 8, generator=derive(3)), torch.arange(12) % 3, num_classes=3)
    before = [p.detach().clone() for p in model.parameters()]
    ledger = train(model, data, size=12)
    assert len(ledger.events) == 1
    assert all(not torch.equal(p, q) for p, q in zip(model.parameters(), before))


def test_hooks_can_be_required() -> None:
    with pytest.raises(PrivacyError, match="no per-example gradient of parameter shift.*gradients='auto'"):
        train(FaultyNetwork(3, free=True), gradients="hooks")
    with pytest.raises(ValueError, match="mode must be one of"):
        train(FaultyNetwork(3), gradients="both")


def test_every_forward_pass_has_the_checked_size() -> None:
    sizes: list[int] = []

    class Marked(Ledger):
        def spend(self, *events: Any) -> None:
            sizes.append(0)
            super().spend(*events)

    model = build(lambda: FaultyNetwork(3), 0)
    model.body.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))  # type: ignore[union-attr]
    train(model, steps=20, ledger=Marked())
    tried, used = sizes[: sizes.index(0)], sizes[sizes.index(0) + 1 :]
    assert set(used) == {DRAWN}
    assert {1, DRAWN} < set(tried)


@pytest.mark.parametrize(("expected", "chunk", "wanted"), [(0.5, None, 3), (5, None, 8), (100, None, 16), (64, 5, 5)])
def test_chunk_size_depends_only_on_public_numbers(expected: float, chunk: int | None, wanted: int) -> None:
    at_once, sizes = choose_batch_sizes(torch.zeros(0, 3, 32, 32), expected, chunk)
    assert at_once == wanted
    assert all(size > 1 and size != at_once for size in sizes)
