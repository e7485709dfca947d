"""Checks of membership scores, and predictions of a classifier that returns logits or class indices."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from distillkit._utils import check
from distillkit._utils.eval_mode import eval_mode
from distillkit.chunking import chunk_size, forward_chunks


def finite_scores(scores: Tensor, name: str) -> Tensor:
    """Check that scores are a finite float tensor, and return them as float64. `name` is for error messages."""
    remedy = "if probabilities of 0 or 1 made them infinite, use stable_logit"
    return check.finite_tensor(scores, name, remedy=remedy).detach().double()


def checked_scores(target: Tensor, inside: Tensor, shadows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Check the inputs of an attack with S shadow models on n records, and move them to the target's device.

    Args:
        target: scores of the target, [n].
        inside: whether each shadow model was trained on each record, bool [S, n].
        shadows: scores of the shadow models, [S, n].

    Returns:
        The three tensors, with the scores as float64.
    """
    target, shadows = finite_scores(target, "target"), finite_scores(shadows, "shadows")
    check.bool_tensor(inside, "inside", "[S, n]")
    if target.ndim != 1 or inside.shape != shadows.shape or shadows.shape[1:] != target.shape:
        raise ValueError(
            f"target must be [n], inside and shadows [S, n], got {list(target.shape)}, {list(inside.shape)} and "
            f"{list(shadows.shape)}"
        )
    return target, inside.to(target.device), shadows.to(target.device)


def outputs(network: nn.Module | Callable[[Tensor], Tensor], images: Tensor, chunk: int | None) -> Tensor:
    """Return the logits [n, K] or class indices int [n] of a classifier for images, checked.

    Args:
        network: classifier that returns logits [n, K] or class indices int [n]. A module is in eval mode during the
            call.
        images: images, float [n, C, H, W].
        chunk: number of images per forward pass; None: it depends on the device and on the size of an image.

    Raises:
        TypeError: the classifier is a function that makes a network.
        ValueError: the classifier does not accept the images, or returns neither logits of at least two classes nor
            class indices, or returns NaN.
    """

    def checked(part: Tensor) -> Tensor:
        try:
            found = network(part)
        except (TypeError, RuntimeError, IndexError) as error:
            first = str(error).split("\n")[0]
            raise ValueError(f"network must take images {list(part.shape)}: {first}") from error
        if isinstance(found, nn.Module):
            raise TypeError(f"network must be a network, got a function that makes a {type(found).__name__}: call it")
        shape = list(found.shape) if isinstance(found, Tensor) else []
        came = f"{found.dtype} {shape}" if isinstance(found, Tensor) else type(found).__name__
        if shape and len(found) == len(part):
            if found.is_floating_point() and len(shape) == 2 and shape[1] > 1:
                if bool(found.isnan().any()):
                    raise ValueError(f"network must not return NaN, but {int(found.isnan().sum())} logits are NaN")
                return found
            whole = not found.is_floating_point() and not found.is_complex() and found.dtype != torch.bool
            if whole and len(shape) == 1:
                if int(found.min()) < 0:
                    raise ValueError(f"network must return class indices of at least 0, got {int(found.min())}")
                return found
        raise ValueError(
            f"network must return logits [n, K] or class indices int [n], of at least 2 classes, got {came} for "
            f"{len(part)} images"
        )

    with eval_mode(network) if isinstance(network, nn.Module) else nullcontext():
        return torch.cat(list(forward_chunks(checked, images, chunk_size(images, chunk))))


def require_network(network: object, name: str = "network") -> None:
    """Check that a value is a network or a function of images, and not a class or a function without arguments."""
    if isinstance(network, type) or not callable(network):
        raise TypeError(f"{name} must be a network, or a function of images, got {type(network).__name__}")
    check.callable_with(network, name, ["images"], "a network, or a function of images (call a factory first)")


def decisions(network: nn.Module | Callable[[Tensor], Tensor], images: Tensor, chunk: int | None) -> Tensor:
    """Return the class that a classifier predicts for each image, int [n]; see `outputs`."""
    found = outputs(network, images, chunk)
    return found.argmax(1) if found.ndim == 2 else found
