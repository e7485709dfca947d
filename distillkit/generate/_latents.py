"""Check of the latent vectors that generator networks get."""

from __future__ import annotations

from torch import Tensor

from distillkit._utils import check


def require_latents(values: Tensor, length: int, name: str) -> Tensor:
    """Check that `values` are latent vectors, float [B, length], and return them.

    Args:
        values: the value to check.
        length: length of a latent vector.
        name: name of the argument, used in error messages.

    Raises:
        TypeError, ValueError: the value is not a floating-point tensor, or has another shape.
    """
    check.float_tensor(values, name, f"[B, {length}]")
    if values.ndim != 2 or values.shape[1] != length:
        raise ValueError(f"{name} must have shape [B, {length}], as latent={length}, got {list(values.shape)}")
    return values
