"""Private programs that mix records, keep them or fail by their values, in six kinds; a test gives the verdicts.

A program is a function of (module, images) that a small network applies before its classifier, unless its name is in
one of the tables of losses, augmentations, embedding maps or whole networks.
"""

from __future__ import annotations

import collections
import copy
import io
import itertools
import random
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distillkit.normalization import Normalization
from distillkit.privacy import BatchStatistics, NotCapturable, PrivacyError
from distillkit.rng import derive
from distillkit.sets import LabeledImages

Function = Callable[[Any, Tensor], Tensor]

SPACE = Normalization((0.5,), (0.25,))
CANARY = 3
"""The record that the other world lacks."""


def records(count: int = 10, side: int = 4, scale: float = 1.0, dtype: torch.dtype = torch.float64) -> LabeledImages:
    """Return noise images of three classes, with a bright canary."""
    images = scale * torch.randn(count, 1, side, side, generator=derive(0), dtype=torch.float64)
    images[CANARY] = 3.0 * scale
    return LabeledImages(images.to(dtype), torch.arange(count) % 3, num_classes=3, normalization=SPACE)


DATA = records()
KEPT: list[Any] = []
"""What programs keep outside their module."""


def forget() -> None:
    """Empty everything that programs keep."""
    for kept in (KEPT, SEEN, CACHE, LATEST):
        kept.clear()


def palettes(count: int = 20) -> LabeledImages:
    """Return images of eight colours; the canary's colours lie outside its palette."""
    images = torch.randint(0, 8, (count, 1, 4, 4), generator=derive(1)).double()
    images[CANARY] = (8.0 * torch.arange(1, 17)).view(1, 4, 4)
    return LabeledImages(images, torch.arange(count) % 3, num_classes=3, normalization=SPACE)


def raw_pixels(count: int, *, fails: bool) -> LabeledImages:
    """Return images of 16 bits in float32; for the canary an operator fails if `fails`."""
    data = records(count, 28, 6e4, torch.float32)
    data.images[:, :, 0, 0] = 0
    data.images[CANARY, :, 0, 0] = 1e7 if fails else 0
    return data


class Alone(nn.Module):
    """Linear classifier of 4x4 images that first applies a function of (module, images)."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function, self.classifier, self.inner = function, nn.Linear(16, 3), nn.Linear(16, 16)
        self.count, self.calls = itertools.count(), 0
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("var", torch.ones(3))
        self.register_buffer("queue", torch.zeros(16, 4))

    def features(self, x: Tensor) -> Tensor:
        return self.function(self, x).flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x))


class Palette(nn.Module):
    """Looks every pixel up in a palette that is computed from the image itself."""

    def __init__(self) -> None:
        super().__init__()
        self.palette, self.classifier = nn.Linear(16, 8 * 4), nn.Linear(64, 3)

    def features(self, x: Tensor) -> Tensor:
        tables = self.palette(x.flatten(1).clamp(0, 1)).view(-1, 8, 4)
        found = [F.embedding(pixels, table) for pixels, table in zip(x.abs().flatten(1).long(), tables)]
        return torch.stack(found).flatten(1) * x.abs().amax((1, 2, 3)).clamp(min=1)[:, None]

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x))


class Waves(nn.Module):
    """Periodic features of raw pixels, with a table that holds four gains."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.classifier, self.gains = nn.Linear(784, 32), nn.Linear(32, 3), nn.Embedding(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        gain = self.gains((x[:, 0, 0, 0] / 1e6).long())
        return self.classifier(torch.sin(30 * self.body(x.flatten(1))) + gain)


# 1. Mixing by value.


def attention(module: Any, x: Tensor) -> Tensor:
    rows = x.flatten(1)
    return (rows @ rows.T).softmax(1) @ rows


def whitening(module: Any, x: Tensor) -> Tensor:
    rows = x.flatten(1)
    return rows @ torch.linalg.inv(torch.linalg.cholesky(rows.T @ rows / len(rows) + torch.eye(16).to(rows)))


def over_records(module: Any, x: Tensor) -> Tensor:
    return F.conv1d(x.flatten(1).T[:, None], x.new_ones(1, 1, 3), padding=1)[:, 0].T


def balanced(module: Any, x: Tensor) -> Tensor:
    """Sinkhorn's balancing of rows and columns."""
    rows = x.flatten(1).exp()
    for _ in range(3):
        rows = rows / rows.sum(0)
        rows = rows / rows.sum(1, keepdim=True)
    return rows


def ghost(module: Any, x: Tensor) -> Tensor:
    groups = x.unflatten(0, (-1, 1))
    return ((groups - groups.mean((0, 1))) / (groups.var((0, 1), unbiased=False) + 1e-5).sqrt()).flatten(0, 1)


VALUE: dict[str, Any] = {
    "attention over the batch": attention,
    "sorted over the batch": lambda m, x: x.sort(0)[0],
    "ranks in the batch": lambda m, x: x + x.argsort(0),
    "range of the batch": lambda m, x: (x - x.min()) / (x.max() - x.min()),
    "running sum": lambda m, x: x.cumsum(0),
    "running maximum": lambda m, x: x.cummax(0)[0],
    "whitening": whitening,
    "balanced": balanced,
    "spectrum over the batch": lambda m, x: torch.fft.fft(x, dim=0).real,
    "ghost batch norm": ghost,
    "convolution over the batch": over_records,
    "distances": lambda m, x: x * (1 + torch.cdist(x.flatten(1), x.flatten(1)).sum(1)).view(-1, 1, 1, 1),
    "without outliers": lambda m, x: x[x.flatten(1).norm(dim=1) < 9],
    "batch norm as an operator": lambda m, x: torch.ops.aten.batch_norm(x, *[None] * 4, True, 0.1, 1e-5, False),
    "quantile": lambda m, x: x.clamp(max=x.quantile(0.9).item()),
    "palette": Palette,
}  # fmt: skip

# 2. Mixing by size.


def micro(module: Any, x: Tensor) -> Tensor:
    return x.view(len(x) // 4, 4, 16).flatten(0, 1)


def padded(module: Any, x: Tensor) -> Tensor:
    full = torch.cat([x, x[:1].expand(7, -1, -1, -1)])
    return (full - full.mean(0))[: len(x)] + x


def waves_of_place(module: Any, x: Tensor) -> Tensor:
    place = torch.arange(len(x), dtype=x.dtype).view(-1, 1, 1, 1)
    return x + torch.sin(place / len(x))


SIZE: dict[str, Any] = {
    "times the batch size": lambda m, x: x * len(x),
    "divided by the number of values": lambda m, x: x * 16 / x.numel(),
    "other branch for one record": lambda m, x: x - x.mean(0) if len(x) > 1 else x,
    "even and odd sizes": lambda m, x: x.flip(0) if x.size(0) % 2 == 0 else x,
    "place in the batch": waves_of_place,
    "micro batches": micro,
    "padded batch": padded,
    "copies of the batch": lambda m, x: x.repeat(8, 1, 1, 1),
    "without the last odd record": lambda m, x: x[: len(x) // 2 * 2],
    "first half": lambda m, x: x.chunk(2)[0],
    "zoom by the size": lambda m, x: F.interpolate(x, scale_factor=len(x))[..., :4, :4],
    "groups by the size": lambda m, x: F.group_norm(x.view(1, -1, 4, 4), len(x)).view_as(x),
    "shared over the batch": lambda m, x: x.mean(0, keepdim=True).expand(len(x), -1, -1, -1),
    "rounding in a chunk of one": Waves,
    "rounding after a failure": Waves,
}  # fmt: skip

# 3. Mixing by time.

CACHE: dict[str, Tensor] = {}
LATEST: collections.deque[Tensor] = collections.deque(maxlen=2)


def cached(module: Any, x: Tensor) -> Tensor:
    before = CACHE.get("latest", torch.zeros_like(x))
    CACHE["latest"] = x.detach()
    return x + 0.5 * before.mean(0) if type(before) is Tensor else x


def moco(module: Any, x: Tensor) -> Tensor:
    module.queue[:, module.calls] = x.flatten(1).mean(0)
    return x + module.queue.mean(1).view(1, 1, 4, 4)


def teacher(module: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        module.inner.weight.lerp_(module.classifier.weight.mean(0).expand(16, 16) + x.mean(), 0.1)
    return x


def lazy(module: Any, x: Tensor) -> Tensor:
    if not hasattr(module, "late"):
        module.late = nn.Linear(16, 16).to(x.dtype)
    return module.late(x.flatten(1))


def unbound(module: Any, x: Tensor) -> Tensor:
    module.mean.unbind()[0].add_(x.detach().sum())
    return x + module.mean[0]


def halved(module: Any, x: Tensor) -> Tensor:
    module.mean.split(1)[1].lerp_(x.detach().mean(), 0.5)
    return x + module.mean[1]


def own_statistics(module: Any, x: Tensor) -> Tensor:
    wide = x.expand(-1, 3, -1, -1)
    return torch.native_batch_norm(wide, None, None, module.mean, module.var, True, 0.1, 1e-5)[0].mean(1)


def statistics_by_operator(module: Any, x: Tensor) -> Tensor:
    wide = x.expand(-1, 3, -1, -1)
    return torch.ops.aten.batch_norm(wide, None, None, module.mean, module.var, True, 0.1, 1e-5, False).mean(1)


def reshaped_state(module: Any, x: Tensor) -> Tensor:
    torch.ops.aten._unsafe_view(module.mean, [3, 1]).add_(x.detach().sum())
    return x + module.mean[0]


def becomes_other(module: Any, x: Tensor) -> Tensor:
    module.function = lambda m, z: z - z.mean(0)
    return x


def hooked(module: Any, x: Tensor) -> Tensor:
    def remember(_: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        before = LATEST[-1] if LATEST else inputs[0]
        LATEST.append(inputs[0])
        return (inputs[0] + 0.5 * before.mean(0),)

    handle = module.inner.register_forward_pre_hook(remember)
    try:
        return module.inner(x.flatten(1))
    finally:
        handle.remove()


def schedule(module: Any, x: Tensor) -> Tensor:
    module.calls += 1
    return x * (1 + 1 / module.calls) - (x.mean(0) if next(module.count) > 5 else 0)


def threshold(module: Any, x: Tensor) -> Tensor:
    module.calls = max(module.calls, float(x.abs().max()))
    return x / module.calls


def row_by_row(module: Any, x: Tensor) -> Tensor:
    for row in module.queue:
        row.mul_(0.9).add_(x.detach().mean())
    return x


def rewritten(module: Any, x: Tensor) -> Tensor:
    """Standardises its own weights by the last batch."""
    module.classifier.weight.data.split(1)[0].add_(x.detach().sum())
    return x


def several_parts(module: Any, x: Tensor) -> Tensor:
    torch._foreach_add_(list(module.mean.chunk(3)), [x.detach().mean()[None]] * 3)
    return x


def gate(module: Any, x: Tensor) -> Tensor:
    """Changes nothing before the sum of what it has seen is large."""
    module.mean.unbind()[0].add_(x.detach().abs().sum())
    return x * torch.where(module.mean[0] > 300, -1.0, 1.0)


class Spectral(nn.Sequential):
    """Spectral norm, whose power iteration moves a vector in every forward pass."""

    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.utils.parametrizations.spectral_norm(nn.Linear(16, 3)))


TIME: dict[str, Any] = {
    "cache of the last batch": cached,
    "queue in a buffer": moco,
    "moving teacher": teacher,
    "layer made at the first call": lazy,
    "running norm": lambda m, x: F.instance_norm(x, m.mean[:1], m.var[:1], use_input_stats=True),
    "lerp of a buffer": lambda m, x: x - m.mean.lerp_(x.mean(), 0.1)[0],
    "buffer through unbind": unbound,
    "buffer through split": halved,
    "buffer row by row": row_by_row,
    "buffer in several parts": several_parts,
    "weights through split": rewritten,
    "buffer through an unsafe view": reshaped_state,
    "native batch norm": own_statistics,
    "running batch norm as an operator": statistics_by_operator,
    "becomes another function": becomes_other,
    "hook that remembers": hooked,
    "schedule": schedule,
    "largest value so far": threshold,
    "draw of random": lambda m, x: x * random.random(),
    "spectral norm": Spectral,
    "buffer that opens a gate": gate,
}

# 4. State and kept records.

_EXTENSION = torch.library.Library("aten", "FRAGMENT")
_EXTENSION.define("distillkit_tests_keep(Tensor x) -> Tensor")
SEEN: list[Tensor] = []


@torch.library.impl(_EXTENSION, "distillkit_tests_keep", "CPU")
def _keep(x: Tensor) -> Tensor:
    SEEN.append(x.detach().clone())
    return x + torch.stack([s.mean() for s in SEEN]).sum()


torch.library.impl(_EXTENSION, "distillkit_tests_keep", "Meta")(lambda x: torch.empty_like(x))


@torch.library.custom_op("distillkit_tests::note", mutates_args=("kept",))
def note(x: Tensor, kept: Tensor) -> Tensor:
    kept.copy_(x.flatten()[:3])
    return x.clone()


@note.register_fake
def _(x: Tensor, kept: Tensor) -> Tensor:
    return torch.empty_like(x)


class Doubling(torch.autograd.Function):
    """Function of the new style that keeps what it sees, and has its own rule for vmap."""

    generate_vmap_rule = False

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        KEPT.append(x)
        return x * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)
        KEPT.append(ctx)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2 + 0 * ctx.saved_tensors[0]

    @staticmethod
    def vmap(info: Any, dims: Any, x: Tensor) -> tuple[Tensor, int]:
        KEPT.append(x)
        return x * 2 - x.mean(dims[0]), 0


def keeping(how: str) -> Function:
    def function(module: Any, x: Tensor) -> Tensor:
        if how == "class":
            type(module).latest = x
        elif how == "global":
            KEPT.append((x, x.detach(), x.clone()))
        elif how == "object":
            module.holder = types.SimpleNamespace(batch=x.detach())
        elif how == "closure of a layer":
            module.inner.get = lambda: x
        elif how == "deep copy":
            module.copy = copy.deepcopy(x.detach())
        elif how == "buffer":
            module.register_buffer("seen", x.detach())
        elif how == "parameter":
            module.seen = nn.Parameter(x.detach())
        elif how == "set":
            module.queue.set_(x.detach().flatten())
        elif how == "resize":
            module.queue.resize_(4, 4).copy_(x.detach().view(4, 4))
        elif how == "out":
            torch.mul(x.detach().view(4, 4).repeat(4, 1), 1.0, out=module.queue)
        elif how == "foreach":
            torch._foreach_add_([torch.zeros(3).to(x), module.mean], [x.detach().flatten()[:3]] * 2)
        elif how == "list":
            KEPT.append(x.tolist())
        elif how == "storage":
            KEPT.append(bytes(x.untyped_storage()))
        elif how == "file":
            torch.save(x, io.BytesIO())
        elif how == "in place":
            x.mul_(2).clamp_(-1, 1)
        elif how == "gradient":
            x = x * module.inner.weight.sum()
            x.register_hook(KEPT.append)
        elif how == "print":
            print("batch", x)
        elif how == "backward":
            (module.classifier(x.flatten(1)).sum() * x.sum()).backward()
        elif how == "optimizer":
            torch.optim.SGD(module.parameters(), 0.1).step(lambda: module.classifier(x.flatten(1)).sum())
        return x

    return function


STATE: dict[str, Function] = {
    "operator in PyTorch's namespace": lambda m, x: torch.ops.aten.distillkit_tests_keep(x),
    "operator that writes": lambda m, x: note(x, m.mean),
    "function of the new style": lambda m, x: Doubling.apply(x),
    **{
        f"keeps by {how}": keeping(how)
        for how in ("class", "global", "object", "closure of a layer", "deep copy", "buffer", "parameter", "set",
                    "resize", "out", "foreach", "list", "storage", "file", "in place", "gradient", "print",
                    "backward", "optimizer")
    },
}  # fmt: skip

# 6. Failures.


def endless(module: Any, x: Tensor) -> Tensor:
    while x.abs().max() > 1:
        x = x / 2
    return x


def warned(module: Any, x: Tensor) -> Tensor:
    if x.isnan().any():
        warnings.warn("NaN", stacklevel=1)
    return x


def asserted(module: Any, x: Tensor) -> Tensor:
    assert x.max() < 2, f"pixel out of range: {float(x.max())}"
    return x


def singular(module: Any, x: Tensor) -> Tensor:
    return torch.linalg.inv(x)  # the canary's matrix has rank one


def tried(module: Any, x: Tensor) -> Tensor:
    try:
        return x / float(x.max())
    except Exception:
        return x


FAILURE: dict[str, Function] = {
    "halves until it is small": endless,
    "warns": warned,
    "asserts": asserted,
    "asserts without waiting": lambda m, x: (torch._assert_async((x < 2).all()), x)[1],
    "singular matrix": singular,
    "singular system": lambda m, x: torch.linalg.solve(x, x.flip(-1)),
    "no Cholesky factor": lambda m, x: torch.linalg.cholesky(x + x.mT),
    "eigenvalues": lambda m, x: x * torch.linalg.eigvalsh(x + x.mT)[..., None, :],
    "square root below zero": lambda m, x: (2 - x).sqrt(),
    "overflow": lambda m, x: (400 * x).exp(),
    "division by zero": lambda m, x: x / (x - 3),
    "index out of range": lambda m, x: x * m.var[(x.flatten()[:1].abs() / 2).long()],
    "catches its own failure": tried,
}


NETWORKS = VALUE | SIZE | TIME | STATE | FAILURE
READS, CHOOSES, CANNOT = "keep values in tensors", "torch.where", "cannot be captured"
REFUSED: dict[str, tuple[type[Exception], str]] = {
    "overflow": (PrivacyError, "no finite gradient for noise images"),
    "without outliers": (NotCapturable, READS),
    "quantile": (NotCapturable, READS),
    "micro batches": (NotCapturable, CANNOT),
    "copies of the batch": (NotCapturable, CANNOT),
    "without the last odd record": (NotCapturable, CANNOT),
    "queue in a buffer": (BatchStatistics, "changes queue"),
    "moving teacher": (BatchStatistics, "changes inner.weight"),
    "layer made at the first call": (NotCapturable, CANNOT),
    "running norm": (BatchStatistics, "changes running statistics"),
    "lerp of a buffer": (BatchStatistics, "changes mean"),
    "largest value so far": (NotCapturable, CHOOSES),
    "draw of random": (NotCapturable, "global random state"),
    "spectral norm": (BatchStatistics, "changes"),
    "operator that writes": (NotCapturable, "none of PyTorch's"),
    "keeps by deep copy": (NotCapturable, CANNOT),
    "keeps by buffer": (BatchStatistics, "changes seen"),
    "keeps by parameter": (BatchStatistics, "changes seen"),
    "keeps by set": (BatchStatistics, "changes queue"),
    "keeps by resize": (BatchStatistics, "changes queue"),
    "keeps by out": (BatchStatistics, "changes queue"),
    "keeps by foreach": (BatchStatistics, "changes mean"),
    "keeps by list": (NotCapturable, READS),
    "keeps by storage": (NotCapturable, CANNOT),
    "keeps by file": (NotCapturable, CANNOT),
    "halves until it is small": (NotCapturable, CHOOSES),
    "warns": (NotCapturable, CHOOSES),
    "asserts": (NotCapturable, CHOOSES),
    "no Cholesky factor": (NotCapturable, "fails on a noise record"),
    "catches its own failure": (NotCapturable, READS),
    "buffer through unbind": (BatchStatistics, "changes"),
    "buffer through split": (BatchStatistics, "changes"),
    "buffer row by row": (BatchStatistics, "changes"),
    "buffer in several parts": (BatchStatistics, "changes"),
    "weights through split": (BatchStatistics, "changes"),
    "buffer through an unsafe view": (BatchStatistics, "writes to a tensor that it did not create"),
    "native batch norm": (BatchStatistics, "changes running statistics"),
    "running batch norm as an operator": (BatchStatistics, "changes running statistics"),
    "buffer that opens a gate": (BatchStatistics, "changes"),
    "operator in PyTorch's namespace": (NotCapturable, "none of PyTorch's"),
}
"""Refused networks -> class and words of the error."""
