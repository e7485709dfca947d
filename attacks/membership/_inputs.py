"""Checks of the inputs of attacks with shadow models."""

from __future__ import annotations

from torch import Tensor

from distillkit._utils import check

__all__ = ["checked_scores", "finite_scores"]


def finite_scores(scores: Tensor, name: str) -> Tensor:
    """Return scores as float64 after checking that they are finite."""
    check.float_tensor(scores, name)
    if not bool(scores.isfinite().all()):
        raise ValueError(
            f"{name} must be finite, but {int((~scores.isfinite()).sum())} of {scores.numel()} values are not; if "
            "probabilities of 0 or 1 made them infinite, use stable_logit"
        )
    return scores.detach().double()


def checked_scores(target: Tensor, inside: Tensor, shadows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return scores [n] and [S, n] as float64 and memberships [S, n], on the target's device, after checking them."""
    target, shadows = finite_scores(target, "target"), finite_scores(shadows, "shadows")
    check.bool_tensor(inside, "inside", "[S, n]")
    if target.ndim != 1 or inside.shape != shadows.shape or shadows.shape[1:] != target.shape:
        raise ValueError(
            f"target must be [n], inside and shadows [S, n], got {list(target.shape)}, {list(inside.shape)} and "
            f"{list(shadows.shape)}"
        )
    return target, inside.to(target.device), shadows.to(target.device)
