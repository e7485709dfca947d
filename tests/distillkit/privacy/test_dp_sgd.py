from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from distillkit.networks import ConvNet, build
from distillkit.privacy import (
    BatchStatistics,
    BudgetExhausted,
    Ledger,
    NotCapturable,
    NotSeparable,
    PrivacyError,
    Secret,
    compose,
    per_example_gradients,
    require_per_example,
    train_private,
    without_batch_norm,
)
from distillkit.privacy.gradients import dp_sgd, per_example
from distillkit.rng import derive
from distillkit.sets import LabeledImages
from tests.distillkit.privacy.faulty_network import Layer
from tests.distillkit.privacy.options import grouped
from tests.refused import refused


def convnet(norm: str = "instance") -> nn.Module:
    return build(lambda: ConvNet((1, 4, 4), 3, width=4, depth=1, norm=norm).double(), 0)


def train(model: nn.Module, data: LabeledImages, **options: object) -> Ledger:
    return train_private(model, data, **grouped(**{"size": 12, "sigma": 1.0, "rate": 0.5, "steps": 3} | options))  # type: ignore[arg-type]


def test_loss_without_parameters_has_rows_of_zeros(toy_set: LabeledImages) -> None:
    model = convnet()
    rows = per_example_gradients(model, lambda x, y: x.flatten(1).sum(1), tuple(toy_set))(*toy_set)
    assert [list(r.shape) for r in rows] == [[12, *p.shape] for p in model.parameters()]
    assert not any(bool(r.any()) for r in rows)


def test_invalid_losses_and_parameters_are_refused(toy_set: LabeledImages) -> None:
    model = convnet()

    def losses(images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model(images), labels, reduction="none")

    for shaped, got in ((torch.mean, r"shape \[\]"), (lambda z: z[None], r"shape \[1, 1\]"), (list, "list")):
        wrong = lambda x, y, shaped=shaped: shaped(losses(x, y))  # noqa: E731
        words = rf"each example \[n\], got {got} for one example; pass reduction='none'"
        refused(lambda w=wrong: per_example_gradients(model, w, tuple(toy_set)), NotSeparable, words)
    with pytest.raises(PrivacyError, match="trained names no parameter, so there are no gradients to compute"):
        per_example_gradients(model, losses, tuple(toy_set), trained={})


def test_losses_are_compared_on_labels_from_the_first_class_to_the_last(toy_set: LabeledImages) -> None:
    seen: list[list[int]] = []
    noting = lambda z, y: seen.append(y.tolist()) or F.cross_entropy(z, y, reduction="none")  # noqa: E731
    dp_sgd._check_loss(noting, toy_set, 11)
    assert [0, 2, 4, 6, 8, 10] in seen


def test_rounds_compose_and_the_model_can_be_trained_again(toy_set: LabeledImages, global_rng_untouched: None) -> None:
    model, ledger, secret = convnet(), Ledger(), Secret()
    for round in range(3):
        assert train(model, toy_set, ledger=ledger, round=round, client="a", secret=secret) is ledger
        assert all(vars(p) == {} for p in model.parameters())
        assert not any(m._forward_hooks or m._backward_hooks or hasattr(m, "activations") for m in model.modules())
    assert ledger.epsilon("a") == compose([(1.0, 0.5, 9)], 1e-5).epsilon
    assert [(e.round, e.count, e.sampling) for e in ledger.events] == [(r, 3, "poisson") for r in range(3)]
    assert secret.draws == 9
    assert model.training


def test_chunks_depend_on_public_numbers_only(toy_set: LabeledImages, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(per_example, "chunk_for", lambda *given: seen.append(given) or 5)
    for data, chunk in ((toy_set, None), (toy_set[:3], 7)):
        train(linear(), data, size=48, rate=0.25, chunk=chunk)
    assert [given[3:] for given in seen] == [(12.0, None), (12.0, 7)]
    assert all(total > largest for total, largest, *_ in seen)


def test_budget_stops_training_before_the_first_step(toy_set: LabeledImages) -> None:
    model = convnet().eval()
    before = [p.detach().clone() for p in model.parameters()]
    ledger = Ledger(budget=compose([(1.0, 0.5, 2)], 1e-5).epsilon)
    with pytest.raises(BudgetExhausted, match="2 of 3 releases of dp_sgd fit") as caught:
        train(model, toy_set, ledger=ledger)
    assert caught.value.remaining == 2
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert not model.training
    train(model, toy_set, ledger=ledger, steps=2)
    assert ledger.epsilon() == ledger.budget


def test_batch_norm_is_refused_or_converted(toy_set: LabeledImages) -> None:
    model = build(lambda: ConvNet((1, 4, 4), 3, width=4, depth=1, norm="batch").double(), 0)
    ledger = Ledger()
    refused(lambda: train(model, toy_set, ledger=ledger), BatchStatistics, r"body\.1.*without_batch_norm\(network\)")
    assert ledger.events == ()
    converted = without_batch_norm(model)
    assert isinstance(model.body[1], nn.BatchNorm2d)  # type: ignore[index, union-attr]
    assert isinstance(converted.body[1], nn.GroupNorm)  # type: ignore[index, union-attr]
    assert converted.body[1].weight.dtype == torch.float64  # type: ignore[index, union-attr]
    assert isinstance(without_batch_norm(model.eval()).body[1], nn.GroupNorm)  # type: ignore[index, union-attr]
    train(converted, toy_set, ledger=ledger)
    assert ledger.events[0].count == 3
    assert isinstance(without_batch_norm(type("Own", (nn.BatchNorm2d,), {})(4)), nn.GroupNorm)
    norm = nn.Sequential(nn.Sequential(nn.InstanceNorm2d(2, affine=True, track_running_stats=True)))
    tracked = nn.Sequential(norm, nn.Flatten(), nn.Linear(8, 2))
    refused(lambda: require_per_example(tracked), BatchStatistics, "^layers 0.0.0 of Sequential keep or use")
    require_per_example(without_batch_norm(tracked))


def test_head_of_a_pretrained_network_is_fine_tuned() -> None:
    """Batch norm in eval mode is a fixed map: its statistics stay, and the head moves by one clip a record."""
    from torchvision.models.resnet import BasicBlock, ResNet

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        start = ResNet(BasicBlock, [1, 1, 1, 1], num_classes=3).eval().requires_grad_(False)
    start.fc.requires_grad_(True)
    start.bn1.requires_grad_(True)
    start.bn1.running_mean.add_(1.0)
    record = LabeledImages(torch.randn(1, 3, 16, 16, generator=derive(0)), torch.tensor([1]), num_classes=3)
    model = copy.deepcopy(start)
    train(model, record, size=6, sigma=0.0, clip=1e-3, rate=1.0, lr=6.0, steps=1)
    assert not any(module.training for module in model.modules())
    moves = {n: (t - start.state_dict()[n]).double().norm() for n, t in model.state_dict().items()}
    assert {n for n, moved in moves.items() if moved} == {"fc.weight", "fc.bias", "bn1.weight", "bn1.bias"}
    assert float(torch.stack(list(moves.values())).norm()) == pytest.approx(1e-3, rel=1e-3)


def returning() -> nn.Module:
    """Return a linear model that returns its logits in an object of their own."""
    return Layer(lambda m, x: SimpleNamespace(logits=m.net(x)), net=linear())


def linear(outputs: int = 3) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, outputs)).double()


def normed(norm: Callable[[nn.Module], nn.Module]) -> nn.Module:
    return nn.Sequential(nn.Flatten(), norm(nn.Linear(16, 3).double())).eval()


def one_hot(logits: Tensor, labels: Tensor) -> Tensor:
    return -(F.one_hot(labels, 3) * logits.log_softmax(1)).sum(1)


def rows_of(output: Any, labels: Tensor) -> Tensor:
    return F.cross_entropy(output.logits, labels, reduction="none")


@pytest.mark.parametrize(
    ("factory", "loss"),
    [
        (lambda: torch.compile(linear()), None),
        (lambda: nn.DataParallel(linear()), None),
        (lambda: normed(nn.utils.parametrizations.weight_norm), None),
        (lambda: normed(nn.utils.parametrizations.spectral_norm), None),
        (returning, rows_of),
        (lambda: linear(5), None),  # more logits than classes
        (lambda: linear(1), lambda z, y: F.softplus(z[:, 0] * (1 - 2 * (y > 0)))),
        (lambda: linear(5), lambda z, y: torch.arange(1.0, 4.0)[y] * F.cross_entropy(z, y, reduction="none")),
        (linear, one_hot),
        (linear, nn.CrossEntropyLoss(reduction="none", weight=torch.arange(1.0, 4.0, dtype=torch.float64))),
        (linear, partial(F.cross_entropy, reduction="none")),
        (linear, lambda z, y: -torch.distributions.Categorical(logits=z).log_prob(y)),
    ],
)
def test_usual_programs_are_accepted(
    toy_set: LabeledImages, factory: Callable[[], nn.Module], loss: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = factory()
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)  # torch.compile switches it off
    before = [p.detach().clone() for p in model.parameters()]
    train(model, toy_set, loss=loss)
    assert not any(torch.equal(p, b) for p, b in zip(model.parameters(), before))
    assert torch.distributions.Distribution._validate_args


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (torch.optim.LBFGS, "LBFGS evaluates the loss"), (lambda p: None, "got a NoneType"),
        (type("Own", (torch.optim.LBFGS,), {}), "LBFGS evaluates the loss"),
        (lambda: None, "optimizer is called as"),
        (
            lambda p: torch.optim.Adam([{"params": p[:1]}, {"params": p[1:], "lr": math.inf}]),
            r"lr must be finite and at most 1.8e\+308 for these parameters, got inf",
        ),
        (lambda p: torch.optim.SGD([{"params": []}], lr=0.1), "of 0 parameters, 0 of them others"),
        (lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=math.nan), "weight_decay must be"),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=math.inf), "momentum must be"),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=-math.inf), "dampening must be"),
        (lambda p: torch.optim.Adam(p, eps=math.inf), "eps must be"),
        (lambda p: torch.optim.SGD([*p, nn.Parameter(torch.zeros(1))], lr=0.1), "of 3 parameters, 1 of them others"),
        (lambda p: torch.optim.SGD(linear().parameters(), lr=0.1), "an optimizer of the parameters that it is called"),
    ],
)  # fmt: skip
def test_optimizer_without_steps_by_a_gradient_is_refused(toy_set: LabeledImages, optimizer: Any, words: str) -> None:
    ledger = Ledger()
    refused(lambda: train(linear(), toy_set, optimizer=optimizer, ledger=ledger), (TypeError, ValueError), words)
    assert ledger.events == ()


NO_LOGITS = "returns a SimpleNamespace instead of logits; pass a loss that takes it: loss=lambda out, y"
NO_GRADIENT = "has no finite gradient for noise images, so it would learn from noise alone"
UNLEARNABLE: dict[str, tuple[Callable[[Any, Tensor], Any], str]] = {
    "detached": (lambda m, x: m.net(x).detach() + 0 * m.net(x), NO_GRADIENT),
    "infinite": (lambda m, x: m.net(x) / 0, NO_GRADIENT),
    "object": (lambda m, x: SimpleNamespace(logits=m.net(x)), NO_LOGITS),
}


@pytest.mark.parametrize(
    ("how", "gradients"),
    [("detached", "captured"), ("infinite", "captured"), ("object", "captured"), ("detached", "opacus")],
)
def test_a_network_that_cannot_learn_is_refused(toy_set: LabeledImages, how: str, gradients: str) -> None:
    ledger, (function, words) = Ledger(), UNLEARNABLE[how]
    call = partial(train, Layer(function, net=linear()), toy_set, ledger=ledger, gradients=gradients)
    refused(call, PrivacyError, f"^the network Layer {words}")
    assert ledger.events == ()


def checkpointed() -> nn.Module:
    """Return a network whose dropout would draw another mask in the backward pass."""
    body, head = nn.Linear(16, 8).double(), nn.Linear(8, 3).double()
    dropped = lambda h: F.dropout(body(h).tanh())  # noqa: E731
    return Layer(lambda m, x: head(checkpoint(dropped, x.flatten(1), use_reentrant=False)), body=body, head=head)


def written(x: Tensor) -> Tensor:
    rows = x.flatten(1).clone()
    rows.as_strided((len(x), 8), (16, 2)).mul_(2)
    return rows


def first(function: Callable[[Tensor], Tensor]) -> nn.Module:
    """Return a linear network that first applies a function."""
    head = nn.Linear(16, 3, bias=False).double()
    return Layer(lambda m, x: m.head(function(x)), head=head, unused=nn.Parameter(torch.zeros(1)))


def test_draws_in_the_backward_pass_are_refused_and_other_views_accepted(toy_set: LabeledImages) -> None:
    ledger = Ledger()
    words = r"^the network Layer or its loss draws random numbers in the backward pass \(test_dp_sgd\.py:\d+: drop"
    refused(lambda: train(checkpointed(), toy_set, ledger=ledger), NotCapturable, words)
    assert ledger.events == ()
    train(first(lambda x: torch.as_strided(x, (len(x), 16), (16, 1))), toy_set)
    train(first(torch.func.vmap(torch.flatten)), toy_set)
    train(first(written), toy_set)
    train(first(lambda x: x.flatten(1).sqrt()), toy_set)  # finite for pixels in [0, 1]


def test_unsupported_models_are_refused() -> None:
    frozen = nn.Linear(2, 2).requires_grad_(False)
    refused(lambda: require_per_example(frozen), PrivacyError, "^Linear has no parameter that requires a gradient")
    broken = nn.Sequential(frozen, nn.Linear(2, 2))
    require_per_example(broken)
    refused(lambda: require_per_example(nn.Linear(2, 2).half()), PrivacyError, "^parameter weight is torch.float16: ")
    for place, value in ((1, math.nan), (1, math.inf), (0, math.nan)):  # also of a frozen layer
        broken[place].bias.data[1] = value  # type: ignore[union-attr, operator]
        refused(lambda: require_per_example(broken), PrivacyError, f"^parameter {place}.bias holds NaN or Inf")
    for norm in (nn.BatchNorm1d(2), nn.BatchNorm1d(2, track_running_stats=False).eval(),
                 nn.InstanceNorm1d(2, track_running_stats=True)):  # fmt: skip
        network = nn.Sequential(nn.Linear(2, 2), norm, nn.ReLU(), copy.deepcopy(norm))
        refused(lambda n=network: require_per_example(n), BatchStatistics, "^layers 1, 3 of Sequential keep or use")
    refused(lambda: require_per_example(nn.BatchNorm1d(2)), BatchStatistics, "^layers BatchNorm1d of BatchNorm1d keep")
    for norm in (nn.BatchNorm1d(2).eval(), nn.InstanceNorm1d(2), nn.InstanceNorm1d(2, track_running_stats=True).eval()):
        require_per_example(nn.Sequential(nn.Linear(2, 2), norm))


def test_error_of_an_optimizer_says_that_the_steps_are_charged(toy_set: LabeledImages) -> None:
    class Failing(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            raise ZeroDivisionError("no step")

    ledger = Ledger()
    words = "the optimizer Failing failed after all steps were charged: no step"
    refused(
        lambda: train(linear(), toy_set, optimizer=lambda p: Failing(p, lr=0.1), ledger=ledger), PrivacyError, words
    )
    assert len(ledger.events) == 1
    for short in (2, 1):
        data = toy_set.replace(labels=torch.zeros(12).long(), num_classes=3)
        words = f"network must return 3 logits, one per class of the images, got {short}; build it for 3 classes"
        refused(lambda s=short, d=data: train(linear(s), d), ValueError, words)
    refused(lambda: train(linear().to("meta"), toy_set), ValueError, "its parameters are on the device 'meta'; build")
    found = LabeledImages(toy_set.images, toy_set.labels, normalization=toy_set.normalization)  # classes not given
    train(linear(2), found)
    soft = toy_set.replace(labels=F.one_hot(toy_set.labels, 3).double())
    train(linear(), soft)
    single = partial(train_private, linear(1), toy_set.images, torch.ones(12, 1).double(), size=12, sigma=1.0)
    refused(single, PrivacyError, f"^the network Sequential {NO_GRADIENT}")
    turned = lambda z, y: F.cross_entropy(z[:, :3], y, reduction="none").flip(0)  # noqa: E731
    refused(lambda: train(linear(5), soft, loss=turned), NotSeparable, "the losses of 6 examples in a batch differ")
    words = r"lr must be finite and at most 3.4e\+38 for these parameters, got 1e\+39"
    mixed = first(lambda x: x.flatten(1))  # of float32 and float64
    refused(lambda: train(mixed, toy_set, optimizer=lambda p: torch.optim.SGD(p, lr=1e39)), ValueError, words)
    largest = torch.finfo(torch.float32).max
    train(mixed, toy_set, steps=1, optimizer=lambda p: torch.optim.SGD(p[:1], lr=largest))
