"""Validation of a teacher network: a test on labeled images before it labels other images."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from distillkit._sanity_checks import require_numbers
from distillkit._utils.devices import is_accelerator
from distillkit._utils.eval_mode import eval_mode
from distillkit._utils.user_warnings import warn
from distillkit.chunking import chunk_size, forward_chunks
from distillkit.fingerprint import tensor_fingerprint
from distillkit.networks._base import require_network
from distillkit.networks._validation import check_network
from distillkit.sets._class_index import class_labels
from distillkit.sets._stored import RealImages, images_of, read_batches

_MAX_IMAGES = 2000
_FEW = 50
"""Below this number of images, a teacher at the level of chance causes a warning instead of an error."""

_LEVEL = 0.01
"""Largest accepted probability that random guessing reaches the teacher's accuracy."""


def teacher_logits(
    teacher: nn.Module, images: Tensor | Iterable[Tensor], chunk: int | None = None, *, step: bool = False
) -> Tensor:
    """Compute a teacher's logits [N, K] for images, in eval mode and without gradients.

    Args:
        teacher: the network.
        images: float [N, C, H, W], or an iterable of such tensors.
        chunk: number of images per forward pass; the default depends on device and image size. Pass it with an
            iterable.
        step: whether the call is a step of a loop that checks its loss. On an accelerator, NaN is then not noticed.

    Raises:
        ValueError: a logit is NaN.
    """
    with eval_mode(teacher):
        size = chunk_size(images, chunk) if isinstance(images, Tensor) else chunk or 1
        logits = torch.cat(list(forward_chunks(teacher, images, size)))
    if not (step and is_accelerator(logits.device)):
        require_numbers(logits, "teacher", "images")
    return logits.float() if torch.is_autocast_enabled(logits.device.type) else logits


def try_teacher(teacher: nn.Module, pool: RealImages, name: str, role: str = "teacher") -> float:
    """Refuse a teacher whose accuracy on labeled images is not clearly above chance, and return the accuracy.

    The teacher classifies at most 2,000 images, which are evenly spaced in the set. Its number of correct predictions
    is compared with random guessing in a one-sided binomial test. If the p-value is above 1 per cent, the teacher is
    refused; if there are fewer than 50 images, it is accepted with a warning instead.

    Args:
        teacher: the network.
        pool: labeled images, preferably the real training images.
        name: name of the argument `pool` in messages.
        role: name of the argument `teacher` in messages.

    Raises:
        TypeError, ValueError: the teacher does not accept the images, or its accuracy is not clearly above chance.
    """
    from scipy.special import bdtrc

    if not len(pool):
        raise ValueError(f"{name} must hold at least one image to try the {role} on, got an empty set")
    some = pool[torch.arange(0, len(pool), max(1, math.ceil(len(pool) / _MAX_IMAGES)))]
    network, empty = require_network(teacher, role), some._empty
    like = next(network.parameters(), empty.images)
    empty = empty.to(like.device, like.dtype)
    check_network(network, empty.images, classes=some.num_classes, probabilities="refuse", name=role)
    size = chunk_size(empty.images)
    parts = read_batches(images_of(some), torch.arange(len(some)).split(size))
    logits = teacher_logits(teacher, (part.to(like.device, like.dtype) for part in parts), size)
    if len(some) >= _FEW and bool(((logits >= 0) & (logits <= 1)).all()):
        warn(
            f"all outputs of {role} lie in [0, 1], as after a sigmoid, but logits are expected: soft labels are then "
            "nearly uniform. Remove its last activation"
        )
    guesses, labels = logits.argmax(1).cpu(), class_labels(some).cpu()
    hits, count, classes = int((guesses == labels).sum()), len(labels), some.num_classes
    if classes > 1 and bdtrc(hits - 1, count, 1 / classes) > _LEVEL:
        words = (
            f"{role} is right on {hits} of {count} images of {name}, which is not clearly better than chance "
            f"({count / classes:.0f})"
        )
        if count < _FEW:
            warn(f"{words}; there are too few images to decide; pass real training images to try the {role} on")
        else:
            raise ValueError(f"{words}. {_cause(guesses, labels, classes, name, role)}")
    return hits / count


def describe_teacher(teacher: nn.Module) -> dict[str, str]:
    """Return the name of a teacher's Python class, and a fingerprint of its parameters and buffers, as JSON values.

    Args:
        teacher: the network.
    """
    parts = [part for name, value in teacher.state_dict().items() for part in (name, value)]
    return {"class": type(teacher).__name__, "fingerprint": tensor_fingerprint(parts)}


def _cause(guesses: Tensor, labels: Tensor, classes: int, name: str, role: str) -> str:
    confusion = torch.bincount(labels * classes + guesses, minlength=classes**2).view(classes, classes)
    present = confusion.sum(1) > 0
    most, said = confusion.max(1)
    if float(most.sum()) > 0.5 * len(labels) and len(set(said[present].tolist())) == int(present.sum()):
        wrong = [(c, int(said[c])) for c in range(classes) if present[c] and said[c] != c]
        listed = ", ".join(f"{c} is its {other}" for c, other in wrong[:3]) + (", ..." if len(wrong) > 3 else "")
        return (
            f"Its classes have another order: with its outputs reordered it would be right on {int(most.sum())} images "
            f"(class {listed}). Reorder the labels or the {role}'s outputs"
        )
    return (
        f"Is its class order that of {name}, and was it trained with {name}'s normalization? Where synthetic images "
        f"are not recognized, pass real training images to try the {role} on"
    )
