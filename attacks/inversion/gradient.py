"""Images from a gradient by optimisation: look for those whose gradient is the one that was sent."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from attacks.inversion.labels import class_counts, label_of_one
from distillkit import check
from distillkit.losses import gradient_distance
from distillkit.normalization import IDENTITY, Normalization
from distillkit.rng import derive

__all__ = ["METHODS", "Attempt", "invert_gradient"]

METHODS = ("geiping", "dlg")
"""The attacks of `invert_gradient`."""


@dataclass(frozen=True)
class Attempt:
    """What an inversion came back with.

    Attributes:
        images: float [count, C, H, W], pixels in [0, 1], of the restart with the least loss.
        labels: int64 [count], those given or those read off the gradient, sorted by class in the second case.
        losses: the least loss of every restart. Only this the attacker sees: it picks the images, never the truth.
    """

    images: Tensor
    labels: Tensor
    losses: tuple[float, ...]


def invert_gradient(
    network: nn.Module,
    gradients: Sequence[Tensor],
    shape: Sequence[int],
    count: int = 1,
    *,
    labels: Tensor | None = None,
    method: str = "geiping",
    steps: int | None = None,
    total_variation: float | None = None,
    restarts: int = 1,
    normalization: Normalization = IDENTITY,
    seed: int = 0,
) -> Attempt:
    """Rebuild a batch of images from the gradient that they caused: the attack of a server on federated SGD.

    - "dlg": L-BFGS (step 1) on the squared l2 distance of the gradients, as a share of the sent one's.
      Nearly exact behind tanh and for few images; it may fail from one start and work from another: restart.
    - "geiping": the cosine distance and a weight on total variation, by Adam on the sign of the gradient (step 0.1,
      times 0.1 at 3/8, 5/8 and 7/8 of the steps), the images kept in the box of pixels. For ReLU networks.

    Every restart begins at noise N(0, 1) and keeps its best images by its own loss; one that diverges ends there.

    Args:
        network: the network whose gradient it is, with the weights and in the mode in which the client computed it. It
            is not changed. A network with dropout in training mode draws anew at each step: invert it in eval mode.
        gradients: of the mean cross-entropy, one tensor a parameter, in the order of `network.parameters()`.
        shape: (C, H, W) of an image.
        count: how many images the batch has.
        labels: class indices int [count]; None, the default, reads them off the last layer's gradient: the bias's by
            `class_counts` (with the network's predictions on noise where count > 1), or without a bias, for one
            image, `label_of_one`.
        method: "geiping" or "dlg".
        steps: at most; None for the papers' 4,800 ("geiping") and 300 ("dlg", of up to 20 evaluations each).
        total_variation: weight of the mean absolute difference of neighbours; None for 0.1 ("geiping") and 0 ("dlg").
        restarts: how many starts are tried.
        normalization: what the client did to pixels in [0, 1] before the network saw them.
        seed: of the starts.

    Returns:
        An `Attempt`. Its images stand in any order within a class: pair them with `attacks.match` before scoring.

    Raises:
        TypeError, ValueError: a network that cannot take the shape, gradients that are not its own, labels that cannot
            be read off, options out of range.

    Paper: Zhu, Liu and Han, "Deep Leakage from Gradients" (NeurIPS 2019); Geiping et al., "Inverting Gradients"
    (NeurIPS 2020), the cosine objective with total variation, and the released code's schedule. Deviation: DLG
    optimises labels beside the images; we read them off first, as iDLG does.
    """
    check.one_of(method, "method", METHODS)
    dims = tuple(check.positive_int(d, "shape") for d in check.several(shape, "shape", "sizes (C, H, W)", 3))
    count = check.positive_int(count, "count")
    steps = check.positive_int((4800 if method == "geiping" else 300) if steps is None else steps, "steps")
    if total_variation is None:
        total_variation = 0.1 if method == "geiping" else 0.0
    weight = check.real_number(total_variation, "total_variation", least=0)
    restarts, seed = check.positive_int(restarts, "restarts"), check.positive_int(seed, "seed", least=0)
    if not isinstance(normalization, Normalization):
        raise TypeError(f"normalization must be a Normalization, got {type(normalization).__name__}")
    if len(normalization.mean) not in (1, dims[0]):
        raise ValueError(f"normalization must have one value a channel of {dims}, got {len(normalization.mean)}")
    target = _own(network, gradients)
    parameters = {k: p.detach().clone().requires_grad_() for k, p in network.named_parameters()}
    metric = "cos" if method == "geiping" else "mse"
    scale = 1.0 if metric == "cos" else sum(float(g.double().square().sum()) for g in target)
    starts = [_noise((count, *dims), target[0], seed, restart) for restart in range(restarts)]
    logits = _logits(network, starts[0])
    if labels is None:
        labels = _labels(network, target, count, logits.shape[1], _noise((64, *dims), target[0], seed, -1))
    truth = check.class_labels(labels, count, logits.shape[1]).to(logits.device)

    def loss(x: Tensor) -> Tensor:
        buffers = {k: b.detach().clone() for k, b in network.named_buffers()}
        out = functional_call(network, {**parameters, **buffers}, (x,))
        sent = torch.autograd.grad(
            F.cross_entropy(out, truth), list(parameters.values()), create_graph=True, materialize_grads=True
        )
        distance = gradient_distance(sent, target, metric=metric, eps=0.0) / scale  # type: ignore[arg-type]
        return distance + weight * _variation(x) if weight else distance

    search = _signed_adam if method == "geiping" else _lbfgs
    found = [search(loss, x, steps, normalization) for x in starts]
    best, _ = min(found, key=lambda one: one[1])
    return Attempt(normalization.decode(best).clamp(0, 1), truth, tuple(value for _, value in found))


def _signed_adam(
    loss: Callable[[Tensor], Tensor], start: Tensor, steps: int, normalization: Normalization
) -> tuple[Tensor, float]:
    x = _boxed(start, normalization).requires_grad_()
    best, least = x.detach().clone(), math.inf
    optimizer = torch.optim.Adam([x], lr=0.1)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [steps * k // 8 for k in (3, 5, 7)], gamma=0.1)
    for step in range(steps + 1):
        value = loss(x)
        now = float(value.detach())
        if not math.isfinite(now):
            break
        if now < least:
            best, least = x.detach().clone(), now
        if step == steps:
            break
        (gradient,) = torch.autograd.grad(value, x)
        x.grad = gradient.sign()
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            x.copy_(_boxed(x, normalization))
    return best, least


def _lbfgs(
    loss: Callable[[Tensor], Tensor], start: Tensor, steps: int, normalization: Normalization
) -> tuple[Tensor, float]:
    x = start.clone().requires_grad_()
    best, least = x.detach().clone(), math.inf
    optimizer = torch.optim.LBFGS([x], lr=1.0, tolerance_grad=0.0, tolerance_change=0.0)

    def closure() -> float:
        nonlocal best, least
        value = loss(x)
        (x.grad,) = torch.autograd.grad(value, x)
        now = float(value.detach())
        if now < least:
            best, least = x.detach().clone(), now
        return now

    for _ in range(steps):
        before = x.detach().clone()
        if not math.isfinite(float(optimizer.step(closure))) or torch.equal(x, before):
            break  # diverged, or nothing moves any more
    return best, least


def _boxed(x: Tensor, normalization: Normalization) -> Tensor:
    return normalization.encode(normalization.decode(x.detach()).clamp(0, 1))


def _variation(x: Tensor) -> Tensor:
    """The mean absolute difference of neighbours, weighted as Geiping et al. do (`losses` has the sum)."""
    pairs = [x.diff(dim=d).abs() for d in (-1, -2) if x.shape[d] > 1]
    return torch.stack([p.mean() for p in pairs]).sum() if pairs else x.new_zeros(())


def _noise(shape: tuple[int, ...], like: Tensor, seed: int, restart: int) -> Tensor:
    return torch.randn(shape, generator=derive(seed, "inversion", restart)).to(like)


def _logits(network: nn.Module, images: Tensor) -> Tensor:
    state = {k: t.detach().clone() for k, t in (*network.named_parameters(), *network.named_buffers())}
    try:
        with torch.no_grad():
            out = functional_call(network, state, (images,))
    except Exception as error:
        first = str(error).split("\n")[0]
        raise ValueError(f"network must take images of the shape given, {list(images.shape)}: {first}") from error
    if not isinstance(out, Tensor) or out.ndim != 2 or len(out) != len(images):
        raise ValueError(f"network must give logits [N, K], got {list(getattr(out, 'shape', ()))}")
    return out


def _own(network: nn.Module, gradients: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The gradients, if they are the network's."""
    if not isinstance(network, nn.Module):
        raise TypeError(f"network must be an nn.Module, got {type(network).__name__}")
    shapes = [list(p.shape) for p in network.parameters()]
    given = check.several(gradients, "gradients", "tensors, one a parameter of the network", len(shapes))
    for one, shape in zip(given, shapes):
        if not isinstance(one, Tensor) or not one.is_floating_point():
            raise TypeError(f"gradients must be floating tensors, got {getattr(one, 'dtype', type(one).__name__)}")
        if list(one.shape) != shape:
            raise ValueError(
                f"gradients must have the shapes of network.parameters(), got {list(one.shape)}, not {shape}"
            )
        if not bool(one.isfinite().all()):
            raise ValueError("gradients must be finite, got NaN or Inf")
    if not any(bool(one.any()) for one in given):
        raise ValueError("gradients must not all be 0: they say nothing of any image")
    return tuple(one.detach() for one in given)


def _labels(network: nn.Module, target: tuple[Tensor, ...], count: int, classes: int, noise: Tensor) -> Tensor:
    """Labels read off the last layer's gradient, sorted."""
    last = target[-1]
    if last.shape == (classes,):
        predictions = _logits(network, noise).softmax(1) if count > 1 else None
        return torch.arange(classes, device=last.device).repeat_interleave(class_counts(last, count, predictions))
    if count == 1 and last.ndim == 2 and len(last) == classes > 2:
        return torch.tensor([label_of_one(last)])
    raise ValueError(
        "labels must be given: they are read off the last layer's bias, and the network's last parameter is "
        f"{list(last.shape)} for {classes} classes"
    )
