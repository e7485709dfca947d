"""Images from any message that can be replayed, by optimisation: look for those that would have caused it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attacks.inversion._search import lbfgs, signed_adam
from attacks.inversion.observation import ObservedMessage, require_message
from attacks.inversion.priors import Prior, group_mean
from distillkit._utils import check
from distillkit._utils.display import short_repr
from distillkit.losses import gradient_distance
from distillkit.normalization import IDENTITY, Normalization
from distillkit.rng import derive

__all__ = ["METHODS", "Reconstruction", "invert_message"]

METHODS = ("geiping", "dlg")
"""The attacks of `invert_message` and `invert_gradient`."""


@dataclass(frozen=True)
class Reconstruction:
    """What an inversion came back with.

    Attributes:
        images: float [count, C, H, W], pixels in [0, 1], of the restart with the least loss.
        labels: int64 [count], those given or those read off the message, sorted by class in the second case.
        losses: the least loss of every restart. Only this the attacker sees: it picks the images, never the truth.
    """

    images: Tensor
    labels: Tensor
    losses: tuple[float, ...]

    __repr__ = short_repr


def invert_message(
    message: ObservedMessage,
    shape: Sequence[int],
    count: int = 1,
    *,
    labels: Tensor | None = None,
    method: str = "geiping",
    steps: int | None = None,
    lr: float | None = None,
    total_variation: float | None = None,
    priors: Sequence[tuple[float, Prior]] = (),
    group: float = 0.0,
    restarts: int = 1,
    normalization: Normalization = IDENTITY,
    seed: int = 0,
) -> Reconstruction:
    """Rebuild the images behind a message: the attack of a server, or of whoever reads a client's messages.

    - "dlg": L-BFGS (step 1) on the squared l2 distance of the messages, as a share of the sent one's.
      Nearly exact behind tanh and for few images; it may fail from one start and work from another: restart.
    - "geiping": the cosine distance and a weight on total variation, by Adam on the sign of the gradient (`lr`, times
      0.1 at 3/8, 5/8 and 7/8 of the steps), the images kept in the box of pixels. For ReLU networks.

    Every restart begins at noise N(0, 1) and keeps its best images by its own loss; one that diverges ends there. What
    "dlg" finds outside the box of pixels is clipped, or scaled into it where that changes the message less.

    Args:
        message: what was seen and how it is replayed: `Gradient`, `FedAvgUpdate`, `ClassMeans`, `ReplayableMessage`, or one of
            your own.
        shape: (C, H, W) of an image.
        count: how many images stand behind the message.
        labels: class indices int [count]; None, the default, reads them off the message (`message.read_labels`).
        method: "geiping" or "dlg".
        steps: at most; None for the papers' 4,800 ("geiping") and 300 ("dlg", of up to 20 evaluations each).
        lr: of "geiping", how far a pixel goes in one of the first steps, in units of the network's space; None for the
            paper's 0.1, made for thousands of steps. With a few hundred also try 0.3.
        total_variation: weight of the mean absolute difference of neighbours; None for 0.1 ("geiping") and 0 ("dlg").
            Behind instance norm 0.1 takes the contrast away, which the message does not hold: 0.03 leaves more.
        priors: pairs of a weight and a function of images (in the network's space) to a scalar, added to the loss:
            `batch_norm_prior(network)`, `distillkit.losses.image_l2` and the like.
        group: weight of GradInversion's group consistency, for "geiping" and at least two restarts, which then go on
            together: the l2 distance of a restart's images to the mean of all restarts'.
        restarts: how many starts are tried.
        normalization: what the client did to pixels in [0, 1] before the network saw them.
        seed: of the starts.

    Returns:
        An `Reconstruction`. Its images stand in any order within a class: pair them with `attacks.match` before scoring.

    Raises:
        TypeError, ValueError: a message whose replay does not fit what it has seen, labels that cannot be read off,
            options out of range.

    Papers: Zhu, Liu and Han, "Deep Leakage from Gradients" (NeurIPS 2019); Geiping et al., "Inverting Gradients"
    (NeurIPS 2020), the cosine objective with total variation, and the released code's schedule; Yin et al., "See
    through Gradients" (CVPR 2021), the group. Deviations: DLG optimises labels beside the images; we read them off
    first, as iDLG does; it has no box and no way into it. The group's mean is of pixels, images of one class paired by
    the least squared distance; the paper also registers the images to each other, and its search is another. The
    choice among restarts leaves the group's term out.
    """
    dims = tuple(check.positive_int(d, "shape") for d in check.sequence(shape, "shape", "sizes (C, H, W)", 3))
    count, restarts = check.positive_int(count, "count"), check.positive_int(restarts, "restarts")
    check.one_of(method, "method", METHODS)
    geiping = method == "geiping"
    steps = check.positive_int((4800 if geiping else 300) if steps is None else steps, "steps")
    if lr is not None and not geiping:
        raise ValueError(f"lr is of method='geiping' alone (L-BFGS steps by 1), got {lr!r} for {method!r}")
    lr = check.real_number(0.1 if lr is None else lr, "lr", above=0)
    default = 0.1 if geiping else 0.0
    variation = check.real_number(default if total_variation is None else total_variation, "total_variation", least=0)
    weighted = _priors(priors)
    group = check.real_number(group, "group", least=0)
    if group and (not geiping or restarts < 2):
        raise ValueError(f"group needs method='geiping' and at least 2 restarts, got {method!r} and {restarts}")
    seed = check.positive_int(seed, "seed", least=0)
    if not isinstance(normalization, Normalization):
        raise TypeError(f"normalization must be a Normalization, got {type(normalization).__name__}")
    if len(normalization.mean) not in (1, dims[0]):
        raise ValueError(f"normalization must have one value a channel of {dims}, got {len(normalization.mean)}")
    require_message(message, "message")
    target = message.observed
    starts = [_noise((count, *dims), target[0], seed, restart) for restart in range(restarts)]
    num_classes = message.count_classes(starts[0])
    known = labels is not None
    if labels is None:
        labels = message.read_labels(count, _noise((64, *dims), target[0], seed, -1))
    truth = check.class_labels(labels, count, num_classes).to(starts[0].device)
    dealt = [truth if known or not message.ordered else truth[_deal(count, seed, r)] for r in range(restarts)]
    _try(message, starts[0], dealt[0])
    scale = 1.0 if geiping else sum(float(g.double().square().sum()) for g in target)

    def loss_with(own: Tensor) -> Callable[[Tensor], Tensor]:
        def loss(x: Tensor) -> Tensor:
            sent = message.replay(x, own)
            value = gradient_distance(sent, target, metric="cos" if geiping else "mse", eps=0.0) / scale
            if variation:
                value = value + variation * _variation(x)
            for weight, prior in weighted:
                value = value + weight * prior(x)
            return value

        return loss

    losses = [loss_with(own) for own in dealt]
    if group:
        order = dict(enumerate(dealt))
        found = signed_adam(losses, starts, steps, lr, normalization, lambda xs: _pull(xs, order, group))
    elif geiping:
        found = [signed_adam([f], [x], steps, lr, normalization)[0] for f, x in zip(losses, starts)]
    else:
        found = [lbfgs(f, x, steps) for f, x in zip(losses, starts)]
    chosen = min(range(restarts), key=lambda r: found[r][1])
    rows = torch.arange(count, device=truth.device) if known else dealt[chosen].argsort(stable=True)
    images = _shown(found[chosen][0], losses[chosen], normalization)[rows]
    return Reconstruction(images, dealt[chosen][rows], tuple(value for _, value in found))


def _shown(x: Tensor, loss: Callable[[Tensor], Tensor], normalization: Normalization) -> Tensor:
    """Pixels in [0, 1] of what was found: clipped, or scaled or spread so that less is, whichever has the least loss.

    A search without a box (L-BFGS) leaves it where the network does not see contrast, as behind instance norm; there
    clipping takes details away that the message did give.
    """
    pixels = normalization.decode(x)
    if bool(((pixels >= 0) & (pixels <= 1)).all()):
        return pixels
    low, high = pixels.flatten(1).amin(1).clamp(max=0), pixels.flatten(1).amax(1).clamp(min=1)
    shape = (-1, 1, 1, 1)
    bound = normalization.encode((x > 0).to(x))  # of the box, on the side of each pixel
    share = torch.where(x == 0, 1, bound / x).flatten(1).amin(1).clamp(0, 1).view(shape)
    ways = [pixels, normalization.decode(share * x), (pixels - low.view(shape)) / (high - low).view(shape)]
    boxed = [way.clamp(0, 1) for way in ways]
    values = [float(loss(normalization.encode(way).requires_grad_()).detach()) for way in boxed]
    return boxed[min(range(len(boxed)), key=lambda i: values[i] if math.isfinite(values[i]) else math.inf)]


def _priors(priors: Sequence[tuple[float, Prior]]) -> list[tuple[float, Prior]]:
    wanted = "pairs (weight, function of images)"
    for pair in check.sequence(priors, "priors", wanted):
        check.sequence(pair, "priors", wanted, 2)
    return [
        (
            check.real_number(weight, "priors", least=0),
            check.callable_with(prior, "priors", ["images"], "a function of images to a scalar"),
        )
        for weight, prior in priors
    ]


def _pull(images: dict[int, Tensor], labels: dict[int, Tensor], weight: float) -> dict[int, Tensor]:
    """The gradient of weight * ||x - mean||_2 for each restart, the mean held fixed."""
    away = {r: images[r] - mean for r, mean in group_mean(images, labels).items()}
    return {r: weight * gap / gap.norm().clamp(min=torch.finfo(gap.dtype).tiny) for r, gap in away.items()}


def _try(message: ObservedMessage, images: Tensor, labels: Tensor) -> None:
    images = images.clone().requires_grad_()
    try:
        sent = message.replay(images, labels)
    except (TypeError, RuntimeError, IndexError) as error:
        first = str(error).split("\n")[0]
        raise ValueError(
            f"message must replay images {list(images.shape)} and labels {list(labels.shape)}: {first}"
        ) from error
    shapes = [[list(t.shape) for t in side] for side in (sent, message.observed)]
    if shapes[0] != shapes[1]:
        raise ValueError(f"message must replay tensors of the shapes that were seen, {shapes[1]}, got {shapes[0]}")
    if not any(t.requires_grad for t in sent):
        raise ValueError("message must replay with a graph to the images: leave out no_grad, detach and rounding")


def _variation(x: Tensor) -> Tensor:
    """The mean absolute difference of neighbours, weighted as Geiping et al. do (`losses` has the sum)."""
    pairs = [x.diff(dim=d).abs() for d in (-1, -2) if x.shape[d] > 1]
    return torch.stack([p.mean() for p in pairs]).sum() if pairs else x.new_zeros(())


def _noise(shape: tuple[int, ...], like: Tensor, seed: int, restart: int) -> Tensor:
    return torch.randn(shape, generator=derive(seed, "inversion", restart)).to(like)


def _deal(count: int, seed: int, restart: int) -> Tensor:
    """Which label stands where: a random order, turned on by one in each restart, so that few restarts differ."""
    order = torch.randperm(count, generator=derive(seed, "inversion", "labels", restart // count))
    return order.roll(restart % count)
