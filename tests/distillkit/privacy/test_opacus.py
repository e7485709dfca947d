"""Opacus as the engine of DP-SGD: equal to captured gradients, and what it refuses."""

from __future__ import annotations

import contextlib
import copy
import math
import re
import warnings
from collections.abc import Callable, Iterable
from functools import partial, partialmethod
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from opacus.grad_sample import GradSampleModule
from torch import Tensor, nn

from distillkit.networks import build
from distillkit.networks._dropout import seed_dropout
from distillkit.privacy import (
    ASSUMPTIONS,
    Account,
    BatchStatistics,
    Event,
    Ledger,
    NotCapturable,
    NotSeparable,
    PrivacyError,
    PrivateGradient,
    Secret,
    compose,
    train_private,
)
from distillkit.privacy.gradients import opacus_gradients
from distillkit.privacy.gradients.opacus_gradients import GRADIENTS, clipped_gradients
from distillkit.privacy.gradients.private_gradient import OuterProducts
from distillkit.privacy.validation._private_records import apart_from_records
from distillkit.rng import derive
from distillkit.sets import LabeledImages
from tests.distillkit.privacy.faulty_network import Layer
from tests.refused import refused

OPACUS = ["opacus", "opacus-ghost"]


def scaled(scale: Tensor, **buffers: Tensor) -> nn.Module:
    """Return a layer with a parameter of its own, for which Opacus has no special rule."""
    return Layer(lambda m, x: x * m.scale, scale=nn.Parameter(scale), **buffers)


def in_rows() -> nn.Module:
    """Return a network that applies a linear layer to each row of an image."""
    return Layer(
        lambda m, x: m.out(torch.tanh(m.norm(m.embed(x[:, 0]))).mean(1)),
        embed=nn.Linear(4, 6), norm=nn.LayerNorm(6), out=nn.Linear(6, 3), unused=nn.Linear(2, 2),
    )  # fmt: skip


def flat(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(20, 6), *layers, nn.Linear(6, 3))


def lstm(inputs: int, outputs: int) -> nn.Module:
    return nn.LSTM(inputs, outputs, batch_first=True)


def tied() -> list[nn.Linear]:
    """Return two linear layers with one weight."""
    first, second = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
    second.weight = first.weight
    return [first, second]


def convolutions() -> nn.Module:
    first = [nn.Conv2d(1, 4, 2, bias=False), nn.GroupNorm(2, 4), nn.ReLU(inplace=True)]
    return nn.Sequential(*first, nn.Conv2d(4, 4, 2, groups=2, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(80, 3))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: flat(nn.Sequential(nn.ReLU(inplace=True))),
    "convolutions": convolutions,
    "rows": in_rows,
    "own": lambda: flat(scaled(torch.linspace(1, 3, 6))),
    "frozen": lambda: nn.Sequential(nn.Flatten(), nn.Linear(20, 6).requires_grad_(False), nn.Tanh(), nn.Linear(6, 3)),
    "temperature": lambda: flat(scaled(torch.tensor(2.0))),
    "frozen batch norm": lambda: flat(nn.ReLU(inplace=True).eval(), nn.BatchNorm1d(6).requires_grad_(False).eval()),
    "tied": lambda: flat(nn.Tanh(), *tied()),
    "twice": lambda: flat(*[nn.Linear(6, 6)] * 2),
    "unused": lambda: Layer(lambda m, x: m.out(x.flatten(1)), out=nn.Linear(20, 3), unused=nn.Linear(4, 5)),
    "dropout off": lambda: flat(nn.Dropout(0.0)),
}


def losses(network: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(network(images), labels, reduction="none")


def silent(parameters: Iterable[Tensor], clip: float = math.inf) -> PrivateGradient:
    return PrivateGradient([*parameters], sigma=0.0, clip=clip, denominator=1.0, secret=Secret())


def summed(kind: str, network: nn.Module, images: Tensor, labels: Tensor, *, clip: float) -> Tensor:
    """Return the clipped sum over three batches, one of them empty, as one vector; the last has new parameters."""
    source = clipped_gradients(kind, network, losses, (images, labels))
    parameters = [p for p in network.parameters() if p.requires_grad]
    private = silent(parameters, clip)
    before = [p.data for p in parameters]
    for part in (slice(0, 3), slice(3, 3), slice(3, 9)):
        source.add_to(private, images[part], labels[part], generator=derive(0))
        for p in parameters:
            p.data = 1.1 * p.data  # as an optimizer may do
    for p, value in zip(parameters, before):
        p.data = value
    return torch.cat([g.flatten() for g in private.take()])


@pytest.mark.parametrize("kind", GRADIENTS)
def test_only_the_given_parameters_are_trained_on_all_columns(kind: str) -> None:
    def weighted(network: nn.Module, images: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        warnings.warn("of the loss", stacklevel=1)
        return weights * losses(network, images, labels)

    both = lambda m, x: m.flat(x) + m.rnn(x[:, 0])[0][:, -1]  # noqa: E731
    network = build(lambda: Layer(both, flat=flat(nn.Tanh()), rnn=lstm(4, 3)).double(), 0)
    images = torch.randn(9, 1, 5, 4, generator=derive(1), dtype=torch.float64)
    columns = images, torch.arange(9) % 3, torch.arange(9).double()
    trained = {name: network.get_parameter(name) for name in ("flat.3.bias", "flat.1.weight")}
    private = silent(trained.values())
    with pytest.warns(UserWarning, match="^of the loss$"):
        source = clipped_gradients(kind, network, weighted, columns, trained=trained)
    source.add_to(private, images.requires_grad_(), *columns[1:])
    assert images.grad is None
    rest = columns[1:]
    for wrong, got in (
        ((images.detach().float(), *rest), "[9, 9, 9] records of torch.float32 [1, 5, 4], torch.int64 [], torch"),
        ((images[:, :, 1:], *rest), "[9, 9, 9] records of torch.float64 [1, 4, 4]"), ((images,), "[9] records of "),
        ((images[:1], *rest), "[1, 9, 9] records of torch.float64 [1, 5, 4]"),
    ):  # fmt: skip
        words = " takes equal numbers of records of torch.float64 [1, 5, 4], torch.int64 [], torch.float64 [], got "
        refused(partial(source.add_to, private, *wrong), ValueError, f"^the network Layer.*{re.escape(words + got)}")
    wanted = torch.autograd.grad((columns[2] * losses(network, *columns[:2])).sum(), [*trained.values()])
    torch.testing.assert_close(private.take(), [*wanted])
    trained["flat.1.weight"].data = trained["flat.1.weight"].float()
    words = r"was captured with a parameter or buffer of torch\.float64 \[.*\] that is torch\.float32 \[.*\] now"
    refused(partial(source.add_to, private, *columns), ValueError, words)
    network.float()
    refused(partial(source.add_to, private, *columns), ValueError, words)


def gradient_norms(network: nn.Module, images: Tensor, labels: Tensor) -> list[float]:
    """Return the norms of the records' gradients, ascending, without those that are NaN."""
    parameters = [p for p in network.parameters() if p.requires_grad]
    one_by_one = (losses(network, x[None], y[None]).sum() for x, y in zip(images, labels))
    rows = [torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True) for loss in one_by_one]
    norms = [float(torch.cat([g.double().flatten() for g in row]).norm()) for row in rows]
    return sorted(norm for norm in norms if not math.isnan(norm))


@pytest.mark.parametrize("kind", OPACUS)
@pytest.mark.parametrize("name", NETWORKS)
def test_sums_equal_those_of_captured_gradients(kind: str, name: str) -> None:
    dtype = torch.float32 if kind == "opacus-ghost" else torch.float64  # as outer products, and as rows
    network = build(lambda: NETWORKS[name]().to(dtype), 0)
    images = torch.randn(9, 1, 5, 4, generator=derive(1), dtype=dtype)
    images *= torch.logspace(-1, 1, 9).view(-1, 1, 1, 1)
    images[5] = torch.nan
    labels, before = torch.arange(9) % 3, copy.deepcopy(network.state_dict())
    norms = gradient_norms(network, images, labels)
    clip = norms[4]
    assert norms[0] < 0.99 * clip
    assert clip < 0.99 * norms[-1]
    wanted = summed("captured", network, images, labels, clip=clip)
    found = summed(kind, network, images, labels, clip=clip)
    assert float(wanted.norm()) > 0.1
    torch.testing.assert_close(found, wanted, rtol=1e-5 if dtype == torch.float32 else 1e-6, atol=1e-6)
    assert all(torch.equal(value, before[key]) for key, value in network.state_dict().items())
    assert all(not vars(p) for p in network.parameters())
    assert not any(m._forward_hooks or m._backward_hooks or hasattr(m, "activations") for m in network.modules())
    assert all(m.inplace for m in network.modules() if isinstance(m, nn.ReLU))


@pytest.mark.parametrize("kind", OPACUS)
def test_a_gradient_beyond_float32_squares_is_clipped_not_dropped(kind: str) -> None:
    network = build(lambda: flat(), 0)
    images, labels = torch.ones(9, 1, 5, 4), torch.arange(9) % 3
    images[4], images[7] = 1e25, -1e22
    assert gradient_norms(network, images, labels)[-1] > 1e24
    wanted = summed("captured", network, images, labels, clip=1.0)
    torch.testing.assert_close(summed(kind, network, images, labels, clip=1.0), wanted, rtol=1e-5, atol=1e-6)
    source = clipped_gradients(kind, network, losses, (images, labels))
    for image in torch.rand(20, 1, 5, 4, generator=derive(1)):  # rounding in float32 lengthens none of them
        private = silent(network.parameters(), 1e-3)
        source.add_to(private, image[None], labels[:1])
        assert float(torch.cat(private._sums).norm()) == pytest.approx(1e-3, rel=1e-6)
        assert float(torch.cat(private._sums).norm()) <= 1e-3


@pytest.mark.parametrize("kind", OPACUS)
def test_gradients_have_full_precision_in_any_surroundings(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Autocast is refused before, and switched off once more where gradients are computed."""
    network = build(lambda: flat(nn.Tanh()), 0)
    images, labels = torch.rand(9, 1, 5, 4, generator=derive(1)), torch.arange(9) % 3
    wanted = summed(kind, network, images, labels, clip=0.5)
    monkeypatch.setattr(opacus_gradients, "require_plain", lambda *_: None)
    with torch.autocast("cpu"), torch.no_grad():
        assert torch.equal(summed(kind, network, images, labels, clip=0.5), wanted)


@pytest.mark.parametrize("kind", GRADIENTS)
@pytest.mark.parametrize("place", ["images", "labels", "age"])
def test_network_that_shares_records_is_refused_where_only_memory_is_compared(kind: str, place: str) -> None:
    """As on the clients of a federated run."""
    data = LabeledImages(torch.rand(6, 1, 5, 4), torch.arange(6) % 3, num_classes=3, columns={"age": torch.rand(6)})
    network, ledger = flat(Layer(lambda m, x: x, bank=data.columns.get(place, getattr(data, place, None)))), Ledger()
    with pytest.raises(NotCapturable, match=r"^the network Sequential uses the records themselves .*\(2\.bank shares"):
        apart_from_records(content=False)(train_private)(
            network, data, size=6, sigma=1.0, gradients=kind, ledger=ledger
        )
    assert ledger.events == ()


@pytest.mark.parametrize("kind", OPACUS)
def test_a_record_for_which_the_code_fails_counts_as_zero(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(layer: nn.Linear, activations: Any, backprops: Tensor) -> Any:
        """Fail for NaN at the second use of a layer, in the backward pass."""
        if hasattr(layer.weight, "_current_grad_sample") and backprops.isnan().any():
            raise ValueError
        return real(layer, activations, backprops)

    real = GradSampleModule.GRAD_SAMPLERS[nn.Linear]
    monkeypatch.setitem(GradSampleModule.GRAD_SAMPLERS, nn.Linear, failing)
    network = build(lambda: NETWORKS["twice"]().double(), 0)
    images, labels = torch.randn(9, 1, 5, 4, generator=derive(1), dtype=torch.float64), torch.arange(9) % 3
    source = clipped_gradients(kind, network, losses, (images, labels))

    def taken(labels: Tensor, kept: Tensor) -> Tensor:
        private = silent(network.parameters(), 0.5)
        source.add_to(private, images[kept], labels[kept])
        return torch.cat([g.flatten() for g in private.take()])

    others = torch.tensor([0, 1, 2, 3, 5, 6, 7, 8])
    wrong = labels.clone()
    wrong[4] = 99
    torch.testing.assert_close(taken(wrong, torch.arange(9)), taken(labels, others))
    images[4] = torch.nan
    torch.testing.assert_close(taken(labels, torch.arange(9)), taken(labels, others))
    assert all(p.grad is None and p.grad_sample is None for p in source._own)  # type: ignore[union-attr]
    kept = {name for module in source._twin.modules() for name in vars(module)}  # type: ignore[union-attr]
    assert not kept & {"activations", "max_batch_len"}
    assert {name for p in source._own for name in vars(p)} == {"grad_sample", "_forward_counter"}  # type: ignore[union-attr]


@pytest.mark.filterwarnings("error:Full backward hook")
@pytest.mark.parametrize("kind", OPACUS)
def test_training_equals_captured_training_and_says_what_it_assumes(kind: str, toy_set: LabeledImages) -> None:
    def trained(gradients: str) -> tuple[nn.Module, Ledger]:
        network = build(lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 3)).double(), 0).eval()
        ledger = train_private(
            network, toy_set, size=12, sigma=0.5, clip=0.3, rate=0.4, steps=8, gradients=gradients, progress=False,
            chunk=3, ledger=Account(Ledger(), secret=5), optimizer=lambda p: torch.optim.Adam(p, lr=0.1),
        )  # fmt: skip
        assert not network.training
        return network, ledger

    (wanted, plain), (found, ledger) = trained("captured"), trained(kind)
    for a, b in zip(found.parameters(), wanted.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    assert ledger.guarantee().nominal == plain.guarantee().nominal
    (remark,) = set(ledger.guarantee().remarks) - set(plain.guarantee().remarks)
    assert remark.startswith(f"gradients='{kind}' ran the network and its loss on batches")


DROPPING: dict[str, Callable[[], list[nn.Module]]] = {
    "layer": lambda: [nn.Dropout(0.5), nn.Linear(16, 3)],
    "frozen layer": lambda: [
        Layer(
            lambda m, x: m.out(m.rnn(x[:, None])[0][:, 0]),
            out=nn.Linear(16, 3),
            rnn=nn.LSTM(16, 16, 2, dropout=0.5, batch_first=True).requires_grad_(False),
        ),
    ],
    "function": lambda: [Layer(lambda m, x: m.out(F.dropout(x, training=m.training)), out=nn.Linear(16, 3))],
}


@pytest.mark.parametrize("kind", OPACUS)
@pytest.mark.parametrize("layers", DROPPING)
def test_dropout_draws_from_the_secret_only(
    kind: str, layers: str, toy_set: LabeledImages, global_rng_untouched: None
) -> None:
    def trained(secret: int) -> Tensor:
        network = build(lambda: nn.Sequential(nn.Flatten(), *DROPPING[layers]()).double(), 0)
        train_private(
            network, toy_set, size=12, sigma=0.0, clip=math.inf, rate=1.0, steps=3, gradients=kind, progress=False,
            ledger=Account(Ledger(), secret=secret),
        )  # fmt: skip
        return torch.cat([p.detach().flatten() for p in network.parameters()])

    assert torch.equal(trained(1), trained(1))
    assert not torch.equal(trained(1), trained(2))
    network = build(lambda: nn.Sequential(nn.Flatten(), *DROPPING[layers]()).double(), 0)
    generator, parameters = derive(0), [p for p in network.parameters() if p.requires_grad]
    seeded = seed_dropout(network, derive(9))  # as on a client of a federated run
    source = clipped_gradients(kind, network, losses, tuple(toy_set))
    for layer in seeded:
        del vars(layer)["forward"]
    sums = silent(parameters)
    with pytest.raises(ValueError, match=r"^Sequential draws random numbers: pass generator=secret\.generator\(\)$"):
        source.add_to(sums, *toy_set)
    source.add_to(sums, *toy_set, generator=generator)
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(derive(0).get_state())
        wanted = torch.autograd.grad(losses(network, *toy_set).sum(), parameters)
        assert torch.equal(generator.get_state(), torch.get_rng_state())  # the next masks differ
    torch.testing.assert_close(sums.take(), [*wanted])
    assert all(module.training for module in network.modules())


def mixing(module: Any, x: Tensor) -> Tensor:
    """Subtract the mean of the batch, in training mode only."""
    return x - 0.03 * x.mean(0) if module.training else x


def chosen(mix: Callable[[Tensor], Tensor]) -> nn.Module:
    """Return a network that mixes the records if all values of the batch are in [0, 1]."""
    return nn.Sequential(Layer(lambda m, x: mix(x) if x.min() >= 0 and x.max() <= 1 else x), flat())


def where(mixes: Callable[[Tensor], Any]) -> nn.Module:
    """Return a network that mixes the records if some or all of them have negative pixels."""
    return nn.Sequential(Layer(lambda m, x: x - x.mean(0) if mixes(x.flatten(1).amin(1) < 0) else x), flat())


def pair(module: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return logits and embeddings."""
    embedded = module.embed(x.flatten(1))
    return module.out(embedded), embedded[:, None]


def repelling(outputs: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
    """Cross-entropy, plus a term for pairs of records of different classes."""
    logits, embedded = outputs
    others = (labels[:, None] != labels).float()
    return F.cross_entropy(logits, labels, reduction="none") - (
        others * torch.cdist(embedded[:, 0], embedded[:, 0])
    ).sum(1)


def counting(module: Any, x: Tensor) -> Tensor:
    """Keep a mean of the records, and their number."""
    module.mean += x.detach().mean(0)
    module.number += len(x)
    return x


def growing(module: Any, x: Tensor) -> Tensor:
    module.register_buffer("latest", x.detach().mean(0))
    return x


def recurrent(module: Any, x: Tensor) -> Tensor:
    return module.out(module.second(module.first(module.frozen(x[:, 0])[0])[0])[0][:, -1])


def uncopyable(error: Exception) -> nn.Module:
    """Return a network whose copy fails with the error."""

    def fail(memo: Any) -> Any:
        raise error

    return Layer(lambda m, x: m.out(x.flatten(1)), out=nn.Linear(20, 3), __deepcopy__=fail)


REFUSED: dict[str, tuple[Callable[[], nn.Module], type[PrivacyError], str]] = {
    **{kind.__name__: (
        lambda kind=kind: Layer(lambda m, x: m.table(x.flatten(1).long()), table=kind(2, 3, max_norm=1e9)),  # type: ignore[misc]
        NotCapturable, rf"^table \({kind.__name__}\) with max_norm changes its weights, .*\. Leave out max_norm$",
    ) for kind in (nn.Embedding, nn.EmbeddingBag)},
    "root": (lambda: lstm(4, 4), NotCapturable, r"^Opacus does not support LSTM \(LSTM\): We .*\. Freeze"),
    "buffered": (
        lambda: flat(scaled(torch.ones(6), used=torch.zeros(2))), NotCapturable,
        r"^Opacus has no per-sample gradients for Sequential: .*buffers.*2:Layer\(\).*\. Use gradients='captured', or",
    ),
    "growing": (lambda: flat(Layer(growing)), BatchStatistics, r"^Sequential writes to the buffer 2\.latest during a"),
    "single": (
        lambda: uncopyable(RuntimeError("only one\nof them")), NotCapturable,
        r"^Layer cannot be copied for Opacus: only one\. Use gradients='captured', or",
    ),
    "silent": (
        lambda: uncopyable(TypeError()), NotCapturable, r"^Layer cannot be copied for Opacus: TypeError\. Use",
    ),
    "batch norm": (lambda: flat(nn.BatchNorm1d(6)), BatchStatistics, r"layers 2 of .*without_batch_norm"),
    "mixing": (lambda: flat(Layer(mixing)), BatchStatistics, r"\(parameter 1\.weight\)\. A .* mixes the records"),
    "images": (lambda: chosen(lambda x: x - x.mean(0)), BatchStatistics, "mixes the records"),
    "range": (lambda: chosen(lambda x: x * 255), BatchStatistics, "mixes the records"),
    "negative images": (lambda: where(lambda dark: dark.all()), BatchStatistics, "mixes the records"),
    "some negative images": (lambda: where(lambda dark: dark.any() and not dark.all()), BatchStatistics, "mixes"),
    "classes": (lambda: Layer(pair, embed=nn.Linear(20, 6), out=nn.Linear(6, 3)), BatchStatistics, "mixes the records"),
    "counting": (
        lambda: flat(Layer(counting, mean=torch.zeros(6), number=torch.zeros(()))), BatchStatistics,
        r"^Sequential writes to the buffer 2\.mean during",
    ),
    "borrowed": (
        lambda: Layer(
            lambda m, x: F.linear(m.first(x.flatten(1)), m.layer.weight),
            unused=nn.Linear(2, 2), first=nn.Linear(20, 9), layer=nn.Linear(9, 3),
        ),
        PrivacyError, r"parameter layer\.weight",
    ),
    "recurrent": (
        lambda: Layer(recurrent, frozen=lstm(4, 4).requires_grad_(False), first=lstm(4, 6), second=lstm(6, 6),
                      out=nn.Linear(6, 3), norm=nn.InstanceNorm1d(6, affine=True), heads=nn.MultiheadAttention(4, 2),
                      free=nn.InstanceNorm1d(6, track_running_stats=True).eval()),
        NotCapturable,
        r"^Opacus does not support first \(LSTM\), second \(LSTM\), heads \(M\w+\): We .* nn.LSTM .*\. Freeze",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", OPACUS)
@pytest.mark.parametrize("name", REFUSED)
def test_networks_that_opacus_cannot_train_are_refused_before_the_charge(kind: str, name: str) -> None:
    factory, error, why = REFUSED[name]
    network, ledger = build(factory, 0), Ledger()
    before: dict[str, Any] = copy.deepcopy(network.state_dict())
    images, labels = torch.zeros(4, 1, 5, 4), torch.tensor([0, 1, 2, 0])
    loss = repelling if name == "classes" else None
    with pytest.raises(error, match=why):
        train_private(
            network, images, labels, size=4, sigma=1.0, gradients=kind, ledger=ledger, loss=loss, progress=False
        )
    assert ledger.events == ()
    assert ledger.guarantee().remarks == ()
    assert all(torch.equal(value, before[key]) for key, value in network.state_dict().items() if key != "2.latest")


@pytest.mark.parametrize("kind", OPACUS)
@pytest.mark.parametrize("change", ["function", "gradient", "saved", "rows"])
def test_sums_are_clipped_whatever_layers_compute(kind: str, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if other code replaced a function of PyTorch, or changes what a backward pass computes."""
    network, columns = build(lambda: flat(nn.Tanh()), 0), (torch.ones(1, 1, 5, 4), torch.tensor([0]))
    source: Any = clipped_gradients(kind, network, lambda n, x, y: n(x)[:, 0], columns)
    private = silent(network.parameters(), 1e-3)
    real, surroundings = F.linear, contextlib.nullcontext()  # type: ignore[var-annotated]
    if change == "function":
        monkeypatch.setattr(F, "linear", lambda *given: 1e3 * real(*given))
    elif change == "gradient":
        source._twin[3].register_full_backward_hook(lambda m, before, after: (1e3 * before[0],))
    elif change == "rows":
        source._losses = lambda n, x, y: n(torch.cat([x, x]))[:1, 0]
    else:
        surroundings = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: 1e3 * t)  # type: ignore[assignment]
    with surroundings:
        source.add_to(private, *columns)
    assert (0.0 if change == "rows" else 0.9e-3) <= float(torch.cat(private._sums).norm()) <= 1e-3 * (change != "rows")


def rooted(below: float, *, mixes: bool = False, outputs: int = 3) -> nn.Module:
    """Return a network that takes the square root of pixels, and may mix the records of a batch."""
    roots = lambda x: (x.flatten(1) - below).sqrt()  # noqa: E731
    return Layer(lambda m, x: m.linear(roots(x) + mixes * roots(x).mean(0)), linear=nn.Linear(20, outputs))


@pytest.mark.parametrize("kind", OPACUS)
def test_networks_and_losses_are_tried_on_pixels_and_other_noise(kind: str) -> None:
    """NaN for negative pixels is no mixing of records, and NaN for pixels in [0, 1] is named."""
    like = torch.rand(2, 1, 4, 5), torch.tensor([0, 1])
    clipped_gradients(kind, nn.Sequential(nn.Flatten(), nn.Linear(20, 1)).eval(), losses, like)  # a single class
    clipped_gradients(kind, rooted(0.0), losses, like)

    def refuse(network: nn.Module, loss: Callable[..., Tensor], error: type[PrivacyError], words: str) -> None:
        refused(lambda: clipped_gradients(kind, network, loss, like), error, words)

    unequal = lambda n, x, y: losses(n, x, y) * (1 + y.double().var(correction=0))  # noqa: E731
    refuse(rooted(0.0, outputs=2), unequal, BatchStatistics, "mixes the records")
    refuse(rooted(0.0, mixes=True), losses, BatchStatistics, "mixes the records")
    signed = Layer(lambda m, x: m.out(x.flatten(1)) * (1 if len(x) == 1 else -1), out=nn.Linear(20, 3))
    refuse(signed, lambda n, x, y: n(x).sum(1), BatchStatistics, r"single records \(parameter out\.weight\)")
    partly = lambda m, x: m.linear(x.flatten(1)) + 0 * (x.flatten(1) @ m.zero).sqrt()  # noqa: E731
    steep = Layer(partly, linear=nn.Linear(20, 3), zero=nn.Parameter(torch.zeros(20, 3)))
    words = r": the gradient of a single record is not finite for noise images in \[0, 1\]"
    for network in (steep, rooted(0.5, outputs=1)):
        refuse(network, losses, NotCapturable, f"^Layer{words}")
    refuse(flat(), lambda n, x, y: losses(n, x, y) / (1 - y), NotCapturable, f"^Sequential{words}")
    for shaped, got in ((torch.sum, r"shape \[\]"), (lambda z: z[:, None], r"shape \[3, 1\]")):
        wrong = lambda n, x, y, shaped=shaped: shaped(losses(n, x, y))  # noqa: E731
        refuse(flat(), wrong, NotSeparable, rf"^the loss must give one value for each example \[n\], got {got}$")
    words = r"^gradients have shapes \[\[6, 6, 20\], \[6, 6\], .*\], not \[\(3, 6, 20\), \(3, 6\), "
    refuse(flat(), lambda n, x, y: n(torch.cat([x, x]))[: len(x), 0], NotSeparable, words)
    words = r"on 3 records of noise \(IndexError: Target 9 is out of bounds\.\)\. Use"
    refuse(flat(), lambda n, x, y: losses(n, x, y + 9), NotCapturable, words)
    own = torch.ones(6).as_subclass(type("Own", (Tensor,), {}))
    refuse(flat(scaled(own)), losses, NotCapturable, "^the network Sequential: a Own is not a plain tensor")
    for half in (torch.float16, torch.bfloat16, torch.float8_e5m2):
        rounded = lambda n, x, y, half=half: losses(n, x, y).to(half).float()  # noqa: E731
        refuse(flat(), rounded, PrivacyError, f"^a value that Sequential or its loss computes is {half}: ")


@pytest.mark.parametrize("kind", OPACUS)
def test_gradients_may_differ_by_a_thousandth(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    network, like = flat(nn.Tanh()), (torch.rand(2, 1, 5, 4), torch.tensor([0, 1]))
    real = opacus_gradients.OpacusGradients._rows
    words = r"^Sequential: the gradients of 3 noise .* differ from those of single records \(parameter 1\.weight\)\. A"

    def changed(source: Any, given: Any, excess: float) -> Any:
        """Change the rows of one parameter by as much as a part of all rows."""
        rows = [g.dense() if isinstance(g, OuterProducts) else g for g in real(source, given)]
        length = torch.cat([part.flatten() for part in rows]).norm()
        return [rows[0] * (1 + excess * length / rows[0].norm()), *rows[1:]]

    for excess in (0.9e-3, 1.1e-3, math.nan):
        monkeypatch.setattr(opacus_gradients.OpacusGradients, "_rows", partialmethod(changed, excess=excess))
        with contextlib.nullcontext() if excess < 1e-3 else pytest.raises(BatchStatistics, match=words):
            clipped_gradients(kind, network, losses, like)


def test_noise_is_of_both_kinds_with_labels_of_two_classes() -> None:
    like = torch.zeros(9, 2, 8, dtype=torch.float64), torch.zeros(9).long(), torch.zeros(9, 2).int()
    trials = opacus_gradients._trials(like)
    assert all([(t.shape, t.dtype) for t in trial] == [((3, *e.shape[1:]), e.dtype) for e in like] for trial in trials)
    normal, both, uniform, pixels, last = (trial[0] for trial in trials)
    assert (normal.flatten(1) < 0).any(1).all()
    assert torch.equal(both, torch.stack([normal[0], uniform[0], normal[1] / 4]))
    assert 0 <= uniform.min() < 0.1 < 0.9 < uniform.max() <= 1
    assert torch.equal(pixels, uniform)
    assert torch.equal(last, both)
    assert [trial[1].tolist() for trial in trials] == [[0] * 3] * 3 + [[0, 1, 0]] * 2
    assert [trial[2].tolist() for trial in trials[2:]] == [[[0, 0]] * 3] + [[[0, 0], [1, 1], [0, 0]]] * 2


@pytest.mark.parametrize("kind", OPACUS)
def test_memory_is_estimated_from_values_of_one_record(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 50 layers with 20 values each, and of the rows of gradients, which ghost clipping does not compute."""
    network = nn.Sequential(nn.Flatten(), *[nn.Tanh() for _ in range(50)], nn.Linear(20, 4), nn.Linear(4, 3))
    source = clipped_gradients(kind, network, losses, (torch.rand(2, 1, 5, 4), torch.tensor([0, 1])))
    refused(lambda: source.chunk_size(12.5, 0), ValueError, "chunk must be")
    given: list[Any] = []
    monkeypatch.setattr(opacus_gradients, "chunk_for", lambda *numbers: given.append(numbers) or 7)
    assert source.chunk_size(12.5, 6) == 7
    ((values, largest, device, expected, chunk),) = given
    assert largest == (4 if kind == "opacus-ghost" else 80)
    assert 1000 <= values - (4 + 3 if kind == "opacus-ghost" else 80 + 4 + 12 + 3) <= 1200
    assert (device, expected, chunk) == (torch.device("cpu"), 12.5, 6)
    source = clipped_gradients(kind, network.double(), losses, (torch.rand(2, 1, 5, 4).double(), torch.tensor([0, 1])))
    assert source._sizes == [80, 4, 12, 3]  # type: ignore[union-attr]  # squares of float64 factors may underflow


@pytest.mark.parametrize("kind", OPACUS)
def test_lack_of_memory_is_an_error(kind: str) -> None:
    network, like = flat(nn.Tanh()), (torch.rand(2, 1, 5, 4), torch.tensor([0, 1]))
    source: Any = clipped_gradients(kind, network, losses, like)
    assert all(p.grad is None and p.grad_sample is None for p in source._own)
    private = silent(network.parameters())

    def full(*given: Any) -> Any:
        raise torch.OutOfMemoryError("no memory")

    source._losses = full
    with pytest.raises(torch.OutOfMemoryError, match="no memory"):
        source.add_to(private, *like)
    assert not any(part.any() for part in private.take())


@pytest.mark.parametrize("name", ["RDPAccountant", "PRVAccountant"])
def test_history_of_an_accountant_is_charged(name: str) -> None:
    from opacus import accountants

    accountant = getattr(accountants, name)()
    for sigma, rate, steps in ((1.1, 0.05, 30), (0.9, 0.02, 10)):
        for _ in range(steps):
            accountant.step(noise_multiplier=sigma, sample_rate=rate)
    ledger = Ledger(delta=1e-5, budget=0.1)
    ledger.charge_history(accountant, client="a")
    guarantee = ledger.guarantee("a")
    assert ledger.events == (Event("opacus", 1.1, 0.05, 30, "a"), Event("opacus", 0.9, 0.02, 10, "a"))
    assert guarantee.epsilon == compose([(1.1, 0.05, 30), (0.9, 0.02, 10)], 1e-5).epsilon
    theirs = accountants.PRVAccountant()
    theirs.history = accountant.history
    assert guarantee.epsilon == pytest.approx(theirs.get_epsilon(1e-5), rel=0.03)
    assert guarantee.budget is None
    assert "poisson_sampling=True" in str(guarantee)
    assert guarantee.assumptions["charge_history"] == ASSUMPTIONS["train_private"]


def test_history_without_noise_or_of_another_object() -> None:
    from opacus.accountants import RDPAccountant

    ledger, accountant = Ledger(), RDPAccountant()
    for wrong in (None, [(1.0, 0.1, 3)], SimpleNamespace(history=[1.0]), SimpleNamespace(history=[(1.0, 0.1)])):
        words = rf", got {type(wrong).__name__}; pass privacy_engine\.accountant"
        refused(lambda w=wrong: ledger.charge_history(w), TypeError, words)
    refused(lambda: ledger.charge_history(SimpleNamespace(history=[(1.0, 2.0, 3)])), ValueError, "^rate must")
    assert ledger.guarantee() == Ledger().guarantee()  # without remarks
    ledger.charge_history(accountant)
    assert ledger.events == ()
    assert "that all its steps are in the history" in str(ledger.guarantee().remarks)  # perhaps the wrong accountant
    ledger.charge_history(SimpleNamespace(history=[[1.0, 0.1, 3]]))  # as JSON returns it
    accountant.step(noise_multiplier=0.0, sample_rate=0.1)
    ledger.charge_history(accountant)
    assert ledger.epsilon() is None
