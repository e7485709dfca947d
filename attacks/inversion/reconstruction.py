"""Reconstruction of images from a message, by a search for images that would have caused the same message."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attacks.inversion._inputs import require_message
from attacks.inversion._search import lbfgs, signed_adam
from attacks.inversion.observation import ObservedMessage
from attacks.inversion.priors import Prior, group_mean
from distillkit._utils import check
from distillkit._utils.content import content
from distillkit._utils.display import short_repr
from distillkit._utils.user_warnings import warn
from distillkit.losses import gradient_distance
from distillkit.normalization import IDENTITY, Normalization
from distillkit.rng import derive
from distillkit.sets._devices import on_device

_FAILED = {"geiping": 0.8, "dlg": 0.05}
"""Loss above which a search has failed."""
METHODS = ("geiping", "dlg")
"""Methods of `invert_message`."""


@dataclass(frozen=True)
class Reconstruction:
    """Result of an inversion.

    Attributes:
        images: reconstructed images, float [count, C, H, W], pixels in [0, 1], from the restart with the smallest loss.
        labels: labels of the images, int64 [count]. They are given by the user, or are inferred from the message and
            then sorted by class.
        losses: smallest loss of each restart. The images are chosen by this loss, and not by comparison with the
            private images.
    """

    images: Tensor
    labels: Tensor
    losses: tuple[float, ...]

    __repr__ = short_repr


@on_device()
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
    scale: float = 1.0,
    normalization: Normalization = IDENTITY,
    seed: int = 0,
    device: torch.device | str | None = None,
) -> Reconstruction:
    """Reconstruct the images from which a message was computed, as a server or an eavesdropper could.

    The attack searches for images whose message is close to the observed one. There are two methods:

    - "dlg": L-BFGS (step size 1) on the squared l2 distance between both messages, relative to the observed message's
      squared norm. It is nearly exact for networks with tanh and few images. It may fail from one start and succeed
      from another, so use restarts.
    - "geiping": Adam with the sign of the gradient. The loss is the cosine distance between both messages, plus the
      weighted total variation. `lr` is multiplied by 0.1 at 3/8, 5/8 and 7/8 of the steps. The images stay in the range
      of pixels. Use this method for ReLU networks.

    Every restart begins with noise from N(0, 1) and keeps the images with its smallest loss. A restart that diverges is
    stopped. Images that "dlg" finds outside the range of pixels are clipped, or rescaled into the range if this changes
    the message less.

    Args:
        message: observed message, which can recompute itself from candidate images: `Gradient`, `FedAvgUpdate`,
            `ClassMeans`, `ReplayableMessage`, or your own `ObservedMessage`.
        shape: (C, H, W) of an image.
        count: number of images from which the message was computed.
        labels: class indices int [count]; None infers them from the message (`message.read_labels`).
        method: name of the method, "geiping" or "dlg".
        steps: largest number of steps; None for the papers' 4,800 ("geiping") and 300 ("dlg", with up to 20 evaluations
            each).
        lr: step size of "geiping": the distance that a pixel moves in each of the first steps, in normalized units.
            None for the paper's 0.1, which suits thousands of steps; with a few hundred steps, also try 0.3.
        total_variation: weight of the mean absolute difference between neighboring pixels; None for 0.001 ("geiping")
            and 0 ("dlg"). Mean PSNR after 240 steps on 10 images, 2 untrained networks and 2 seeds: 21.8 dB with 0,
            22.7 with 0.001, 21.2 with 0.01 and 19.5 with 0.1. With instance norm, after as few steps, larger weights
            give more of the content (0.1), but less of the contrast, which the message does not determine then.
        priors: pairs of a weight and a function that maps images (normalized for the network) to a scalar, such as
            `batch_norm_prior(network)` or `distillkit.losses.image_l2`. Weight times scalar is added to the loss.
        group: weight of GradInversion's group consistency, the l2 distance of a restart's images from the mean over all
            restarts. This term needs "geiping" and at least two restarts, which then run together.
        restarts: number of searches, each from different initial noise.
        scale: number by which the client multiplied the message before sending it, for example its share in an average;
            negative if the sign is reversed. "dlg" fails with a wrong number. "geiping" needs only the sign.
        normalization: the client's normalization of pixels in [0, 1].
        seed: seed of the initial noise.
        device: device that computes, or "auto"; results return to the device of `message`. Default: nothing moves.

    Returns:
        The reconstructed images and labels. The order of images within a class is arbitrary, so pair them with
        `attacks.match` before you score them.

    Raises:
        TypeError, ValueError: `message.replay` returns tensors that do not fit the observed ones, the labels cannot be
            inferred, or an option is out of range.

    Papers: Zhu, Liu and Han, "Deep Leakage from Gradients" (NeurIPS 2019); Geiping et al., "Inverting Gradients"
    (NeurIPS 2020), for the cosine objective with total variation, with the schedule of the authors' code; Yin et al.,
    "See through Gradients" (CVPR 2021), for group consistency. Deviations: DLG optimizes labels together with the
    images; we infer them first, as iDLG does. DLG does not restrict images to the range of pixels. The weight of the
    total variation in Geiping et al. is 0.1. For group consistency, the images of each restart are paired with images
    of the same class from a reference restart, so that the sum of squared distances is smallest. Paired images are then
    averaged pixel by pixel. The paper also aligns paired images by registration, and uses another optimizer. The choice
    among restarts ignores the group term.
    """
    dims = tuple(check.positive_int(d, "shape") for d in check.sequence(shape, "shape", "sizes (C, H, W)", 3))
    count, restarts = check.positive_int(count, "count"), check.positive_int(restarts, "restarts")
    check.one_of(method, "method", METHODS)
    geiping = method == "geiping"
    steps = check.positive_int((4800 if geiping else 300) if steps is None else steps, "steps")
    if lr is not None and not geiping:
        raise ValueError(f"lr applies to method='geiping' only (L-BFGS uses step size 1), got {lr!r} for {method!r}")
    lr = check.learning_rate(0.1 if lr is None else lr)
    default = 0.001 if geiping else 0.0
    variation = check.real_number(default if total_variation is None else total_variation, "total_variation", least=0)
    weighted = _priors(priors)
    group = check.real_number(group, "group", least=0)
    if group and (not geiping or restarts < 2):
        raise ValueError(f"group needs method='geiping' and at least 2 restarts, got {method!r} and {restarts}")
    seed = check.positive_int(seed, "seed", least=0)
    check.instance(normalization, Normalization, "normalization", "a Normalization")
    if len(normalization.mean) not in (1, dims[0]):
        raise ValueError(f"normalization must have one value per channel of {dims}, got {len(normalization.mean)}")
    if not check.real_number(scale, "scale"):
        raise ValueError("scale must not be 0, which would hide the message, got 0")
    require_message(message, "message")
    if scale != 1:
        message = copy.copy(message)
        message.observed = tuple(t / scale for t in message.observed)  # labels are inferred from it, too
    target = message.observed
    starts = [_noise((count, *dims), target[0], seed, restart) for restart in range(restarts)]
    num_classes = message.count_classes(starts[0])
    known = labels is not None
    if labels is None:
        labels = message.read_labels(count, _noise((64, *dims), target[0], seed, -1))
    if isinstance(labels, Tensor) and labels.ndim == 2:
        raise ValueError(
            f"labels must be class indices, int [{count}], got rows {list(labels.shape)}; pass labels.argmax(1) if "
            "each row has one class"
        )
    truth = check.class_labels(labels, count, num_classes).to(starts[0].device).clone()  # no inference tensor
    permuted = [
        truth if known or not message.ordered else truth[_permute_labels(count, seed, r)] for r in range(restarts)
    ]
    _check_replay(message, starts[0], permuted[0])
    for number, (_, prior) in enumerate(weighted):
        trial = starts[0].clone().requires_grad_()
        value = prior(trial)
        if content(trial) != content(starts[0]):
            raise ValueError(f"priors[{number}] must not change its images: change a clone")
        if not isinstance(value, Tensor) or value.numel() != 1 or not bool(value.isfinite()):
            got = (
                f"{list(value.shape)}, {value.detach().flatten()[:1].tolist()}"
                if isinstance(value, Tensor)
                else type(value).__name__
            )
            raise ValueError(f"priors[{number}] must return one finite number as a tensor, got {got}")
    power = 1.0 if geiping else sum(float(g.double().square().sum()) for g in target)

    def loss_with(own: Tensor) -> Callable[[Tensor], Tensor]:
        def loss(x: Tensor) -> Tensor:
            sent = message.replay(x, own)
            value = gradient_distance(sent, target, metric="cos" if geiping else "mse", eps=0.0) / power
            if variation:
                value = value + variation * _variation(x)
            for weight, prior in weighted:
                value = value + weight * prior(x)
            return value

        return loss

    losses = [loss_with(own) for own in permuted]
    if group:
        order = dict(enumerate(permuted))
        found = signed_adam(losses, starts, steps, lr, normalization, lambda xs: _pull(xs, order, group))
    elif geiping:
        found = [signed_adam([f], [x], steps, lr, normalization)[0] for f, x in zip(losses, starts)]
    else:
        found = [lbfgs(f, x, steps) for f, x in zip(losses, starts)]
    chosen = min(range(restarts), key=lambda r: found[r][1])
    if (failed := found[chosen][1]) > _FAILED[method]:
        warn(
            f"no images were found whose message is similar to the observed one (loss {failed:.2g}). Apart from a bad "
            "start (restarts) or a defence, the message may be scaled or have the opposite sign (scale), or the "
            "client's network was in the other mode (training or eval) or had other weights"
        )
    rows = torch.arange(count, device=truth.device) if known else permuted[chosen].argsort(stable=True)
    images = _to_pixels(found[chosen][0], losses[chosen], normalization)[rows]
    return Reconstruction(images, permuted[chosen][rows], tuple(value for _, value in found))


def _to_pixels(x: Tensor, loss: Callable[[Tensor], Tensor], normalization: Normalization) -> Tensor:
    """Convert the images that a search found to pixels in [0, 1].

    The search may find values outside this range, and clipping them may remove details. Three conversions are therefore
    tried: clip the pixels, scale the normalized values towards 0, or map the range of the pixels linearly to [0, 1].
    The images with the lowest loss are returned.
    """
    pixels = normalization.decode(x)
    if bool(((pixels >= 0) & (pixels <= 1)).all()):
        return pixels
    low, high = pixels.flatten(1).amin(1).clamp(max=0), pixels.flatten(1).amax(1).clamp(min=1)
    shape = (-1, 1, 1, 1)
    bound = normalization.encode((x > 0).to(x))  # of the box, on the side of each pixel
    share = torch.where(x == 0, 1, bound / x).flatten(1).amin(1).clamp(0, 1).view(shape)
    candidates = [pixels, normalization.decode(share * x), (pixels - low.view(shape)) / (high - low).view(shape)]
    boxed = [one.clamp(0, 1) for one in candidates]
    values = [float(loss(normalization.encode(one).requires_grad_()).detach()) for one in boxed]
    return boxed[min(range(len(boxed)), key=lambda i: values[i] if math.isfinite(values[i]) else math.inf)]


def _priors(priors: Sequence[tuple[float, Prior]]) -> list[tuple[float, Prior]]:
    wanted = "pairs (weight, function of images)"
    for pair in check.sequence(priors, "priors", wanted):
        check.sequence(pair, "priors", wanted, 2)
        check.callable_with(pair[1], "priors", ["images"], "a function of images to a scalar")
    return [(check.real_number(weight, "priors", least=0), prior) for weight, prior in priors]


def _pull(images: dict[int, Tensor], labels: dict[int, Tensor], weight: float) -> dict[int, Tensor]:
    """Return the gradient of the group consistency term with respect to the images, for each restart.

    The term is weight * ||x - mean||_2, where x are the images of the restart. The mean over all restarts is treated as
    a constant.
    """
    away = {r: images[r] - mean for r, mean in group_mean(images, labels).items()}
    return {r: weight * gap / gap.norm().clamp(min=torch.finfo(gap.dtype).tiny) for r, gap in away.items()}


def _check_replay(message: ObservedMessage, images: Tensor, labels: Tensor) -> None:
    if not torch.is_grad_enabled():
        raise ValueError("an inversion of a message needs gradients: leave torch.no_grad and torch.inference_mode")
    images, before = images.clone().requires_grad_(), content(images)
    try:
        sent = message.replay(images, labels)
    except (TypeError, RuntimeError, IndexError) as error:
        first = str(error).split("\n")[0]
        raise ValueError(
            f"message must replay images {list(images.shape)} and labels {list(labels.shape)}: {first}"
        ) from error
    for number, one in enumerate(check.sequence(sent, "the message's replay", "tensors, like the observed ones")):
        check.finite_tensor(one, f"tensor {number} of the message's replay")
    shapes = [[list(t.shape) for t in side] for side in (sent, message.observed)]
    if shapes[0] != shapes[1]:
        raise ValueError(f"message must replay tensors of the observed shapes, {shapes[1]}, got {shapes[0]}")
    if content(images) != before:
        raise ValueError("the message's replay must not change its images: change a clone")
    if not any(t.requires_grad for t in sent):
        raise ValueError("message must be replayed differentiably: remove no_grad, detach and rounding")


def _variation(x: Tensor) -> Tensor:
    """Return the total variation as in Geiping et al.: the mean absolute difference between neighboring pixels.

    The means over horizontal and vertical neighbors are added.
    """
    pairs = [x.diff(dim=d).abs() for d in (-1, -2) if x.shape[d] > 1]
    return torch.stack([p.mean() for p in pairs]).sum() if pairs else x.new_zeros(())


def _noise(shape: tuple[int, ...], like: Tensor, seed: int, restart: int) -> Tensor:
    return torch.randn(shape, generator=derive(seed, "inversion", restart)).to(like)


def _permute_labels(count: int, seed: int, restart: int) -> Tensor:
    """Return the order of the labels in search number `restart`: a permutation of 0 to count - 1, int64 [count].

    One random permutation is drawn for every `count` consecutive restarts. From one restart to the next, it is rotated
    by one position.
    """
    order = torch.randperm(count, generator=derive(seed, "inversion", "labels", restart // count))
    return order.roll(restart % count)
