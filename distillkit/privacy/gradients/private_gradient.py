"""Noised gradients for DP-SGD, from per-example gradients that are clipped, summed and noised."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from distillkit._utils import check
from distillkit.privacy._sealed import Sealed
from distillkit.privacy.accounting._ranges import check_clip
from distillkit.privacy.capture._captured_function import require_no_own_code
from distillkit.privacy.errors import PrivacyError
from distillkit.privacy.secret import Secret
from distillkit.privacy.validation._arguments import refuse_half_precision

# A float64 sum of squares over P numbers is off by at most P 2^-53 of itself: this covers P up to 10^8.
_MARGIN = 1 - 2.0**-26

_BLOCK_CPU, _BLOCK_ACCELERATOR = 1 << 18, 1 << 26


class OuterProducts(NamedTuple):
    """Gradients of n examples for a matrix [rows, columns], each the outer product of two vectors, in their factors.

    Attributes:
        left: float32 [n, rows]. Squares of its values neither underflow nor overflow in float64.
        right: float32 [n, columns].
    """

    left: Tensor
    right: Tensor

    @property
    def shape(self) -> torch.Size:
        """Shape of the gradients, [n, rows, columns]."""
        return torch.Size([*self.left.shape, self.right.shape[1]])

    def dense(self) -> Tensor:
        """Return the gradients, float32 [n, rows, columns]."""
        return self.left[:, :, None] * self.right[:, None]


class PrivateGradient(Sealed):
    """Accumulator that replaces the per-example gradients of each step by their noised mean.

    A step returns (sum of clipped gradients + N(0, (sigma clip)^2)) / denominator, as in DP-SGD (Abadi et al., CCS
    2016, algorithm 1). The noised sum is rounded to a public grid (`Secret.add_noise`) before anything else sees it, so
    no low bits of the sum reach a parameter. You may call `add` several times per step, so that not all gradients of a
    batch need to be in memory together. `take` ends the step and returns the result. If a batch is empty, do not call
    `add`; the result then consists of noise alone. This class charges no ledger: charge the steps yourself before the
    first `take`, with `Ledger.spend`.

    Norms, clipping and sums are in float64, whatever the type of the parameters. In float32, one more record can change
    the rounding of all terms, and so change the sum by several times the clip. In float64, the rounding error of a sum
    over n records is at most n^2 2^-53 times the clip (1e-6 for 100,000 records in a step), and no clipped norm exceeds
    the clip.

    Args:
        parameters: trained parameters: leaf tensors that require gradients, float32 or float64. An example's gradients
            with respect to all parameters are clipped as one vector.
        sigma: noise standard deviation / clip; 0 adds no noise.
        clip: largest l2 norm of one example's gradient, in [1e-12, 1e30]; longer gradients are scaled down to this
            norm. Infinity is allowed only if sigma is 0.
        denominator: *public* expected batch size, rate * number of records; never the size of the drawn batch.
        secret: `Secret` from which the noise is drawn.

    Raises:
        PrivacyError: a parameter is in half precision, or sigma is positive without a finite clip.
        TypeError, ValueError: an argument has the wrong type or is out of range.
    """

    __slots__ = ("_clip", "_denominator", "_parameters", "_secret", "_sigma", "_sums")

    def __init__(
        self, parameters: Sequence[Tensor], *, sigma: float, clip: float, denominator: float, secret: Secret
    ) -> None:
        self._secret = check.instance(secret, Secret, "secret", "a Secret")
        self._sigma = check.real_number(sigma, "sigma", least=0.0)
        self._denominator = check.real_number(denominator, "denominator", above=0.0)
        self._clip = check_clip(clip, infinite=True)  # as a float: half precision would round the noise
        if sigma and self._clip == math.inf:
            raise PrivacyError(
                f"clip must be finite unless sigma is 0, got sigma {sigma:g}: without a clip no noise is large enough"
            )
        self._parameters = list(check.sequence(parameters, "parameters", "tensors"))
        if isinstance(parameters, Tensor) or not self._parameters:
            raise ValueError("parameters must be a list of one or more tensors; give [tensor] for one")
        for parameter in self._parameters:
            check.float_tensor(parameter, "parameters")
            refuse_half_precision(parameter, "a parameter")
        self._sums = [torch.zeros(p.numel(), dtype=torch.float64, device=p.device) for p in self._parameters]

    @torch.no_grad()
    def add(self, grad_samples: Sequence[Tensor | OuterProducts]) -> None:
        """Clip the gradient of each example and add it to the step's sum.

        An example whose gradient is not finite adds zero without a warning, because the number of such examples is
        private.

        Args:
            grad_samples: gradients of n examples: one tensor [n, *parameter.shape] per parameter, in the order of
                `parameters`; or their factors.

        Raises:
            PrivacyError: a tensor is of a subclass, or a torch mode is active, so code of yours would see the sum.
            TypeError, ValueError: the tensors do not have these shapes.
        """
        self._require_shapes(grad_samples)
        norm = torch.cat([_norms(g) for g in grad_samples]).norm(dim=0)
        finite = torch.isfinite(norm)
        factors = torch.where(finite, (self._clip * _MARGIN / norm).clamp(max=1.0), 0.0)
        for total, rows in zip(self._sums, grad_samples, strict=True):
            if isinstance(rows, OuterProducts):
                left, right = (part.double().where(finite[:, None], 0.0) for part in rows)
                total.view(rows.shape[1:]).addmm_((factors[:, None] * left).T, right)
                continue
            flat = rows.reshape(len(rows), len(total))
            if not bool(finite.all()):
                flat = flat.where(finite[:, None], 0.0)
            for place, block in _in_blocks(flat):
                total[place] += factors @ block

    def _require_shapes(self, grad_samples: Sequence[Tensor | OuterProducts]) -> None:
        own = [list(p.shape) for p in self._parameters]
        given = check.sequence(grad_samples, "grad_samples", "tensors, one per parameter", len(own))
        parts = [part for rows in given for part in (rows if isinstance(rows, OuterProducts) else [rows])]
        for part in parts:
            check.float_tensor(part, "grad_samples")
        require_no_own_code(parts, "grad_samples")
        shapes = [list(rows.shape) for rows in given]
        if [shape[1:] for shape in shapes] != own or len({tuple(part.shape[:1]) for part in parts}) > 1:
            raise ValueError(f"grad_samples must have [n, *shape] of the parameters, {own}, got {shapes}")

    def take(self) -> list[Tensor]:
        """Return the private gradient of the step: (sum of the clipped gradients + noise) / `denominator`.

        The sum is then reset to zero for the next step. The result has one tensor per parameter, with the parameter's
        shape and dtype.

        Raises:
            PrivacyError: a torch mode is active, so code of yours would see the sum.
        """
        require_no_own_code(self._sums, "the sum of gradients")
        std = self._sigma * self._clip if self._sigma else 0.0
        noised = self._secret.add_noise(torch.cat(self._sums), std).div_(self._denominator)
        parts = noised.split([len(s) for s in self._sums])
        for total in self._sums:
            total.zero_()
        return [part.view(p.shape).to(p.dtype) for p, part in zip(self._parameters, parts)]


def _norms(rows: Tensor | OuterProducts) -> Tensor:
    """Return the norms of blocks of the gradients of n examples, float64 [blocks, n]."""
    if isinstance(rows, OuterProducts):
        return rows.left.double().norm(dim=1, keepdim=True).T * rows.right.double().norm(dim=1)
    flat = rows.reshape(len(rows), math.prod(rows.shape[1:]))
    return torch.stack([torch.linalg.vector_norm(block, dim=1) for _, block in _in_blocks(flat)])


def _in_blocks(rows: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield a few columns of `rows` at a time, converted to float64, with the slice of their indices.

    The blocks are small enough to fit in the processor's cache.
    """
    width = max(1, (_BLOCK_CPU if rows.device.type == "cpu" else _BLOCK_ACCELERATOR) // max(1, len(rows)))
    for start in range(0, max(1, rows.shape[1]), width):  # a parameter may be empty
        place = slice(start, start + width)
        yield place, rows[:, place].double()
