"""Checks of membership scores, and predictions of a classifier that returns logits or class indices."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from distillkit._utils import check
from distillkit._utils.eval_mode import eval_mode
from distillkit.chunking import chunk_size, forward_chunks

__all__ = ["checked_scores", "decisions", "finite_scores"]


def finite_scores(scores: Tensor, name: str) -> Tensor:
    """Check that scores are a finite float tensor, and return them as float64. `name` is for error messages."""
    check.float_tensor(scores, name)
    if not bool(scores.isfinite().all()):
        raise ValueError(
            f"{name} must be finite, but {int((~scores.isfinite()).sum())} of {scores.numel()} values are not; if "
            "probabilities of 0 or 1 made them infinite, use stable_logit"
        )
    return scores.detach().double()


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


def decisions(network: nn.Module | Callable[[Tensor], Tensor], images: Tensor, chunk: int | None) -> Tensor:
    """Return the class that a classifier predicts for each image, int [n].

    Args:
        network: classifier that returns logits [n, K] or class indices int [n]. A module is in eval mode during the
            call.
        images: images, float [n, C, H, W].
        chunk: number of images per forward pass; None: it depends on the device and on the size of an image.

    Raises:
        ValueError: the classifier returns neither logits nor class indices.
    """

    def decided(part: Tensor) -> Tensor:
        outputs = network(part)
        if isinstance(outputs, Tensor) and len(outputs) == len(part):
            if outputs.ndim == 2 and outputs.shape[1]:
                return outputs.argmax(1)
            if outputs.ndim == 1 and not outputs.is_floating_point() and outputs.dtype != torch.bool:
                return outputs
        came = f"{outputs.dtype} {list(outputs.shape)}" if isinstance(outputs, Tensor) else type(outputs).__name__
        raise ValueError(f"network must return logits [n, K] or class indices int [n], got {came}")

    with eval_mode(network) if isinstance(network, nn.Module) else nullcontext():
        return torch.cat(list(forward_chunks(decided, images, chunk_size(images, chunk))))
