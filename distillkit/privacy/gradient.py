"""Clip per-example gradients, sum them, add noise: Opacus' DPOptimizer, with our source of noise."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from distillkit import check
from distillkit.privacy.errors import PrivacyError
from distillkit.privacy.noise import Secret

__all__ = ["PrivateGradient"]


class PrivateGradient:
    """The noised gradient of one step after another: sum of clipped examples + N(0, (sigma clip)^2), / denominator.

    `add` may be called any number of times a step, so that the gradients of a batch never have to exist together,
    or not at all (an empty batch is pure noise). `take` ends the step. Charge a ledger before the first `take`.

    Args:
        parameters: leaf tensors that require gradients; together they are clipped as one vector.
        sigma: noise standard deviation / clip; 0 draws no noise.
        clip: largest l2 norm of one example's gradient; infinity only with sigma 0.
        denominator: a *public* number, rate * records, never the size of the batch that was drawn.
        secret: where the noise comes from.

    The clip factor is Opacus' min(1, clip / (norm + 1e-6)).
    """

    def __init__(
        self, parameters: Sequence[Tensor], *, sigma: float, clip: float, denominator: float, secret: Secret
    ) -> None:
        check.real_number(sigma, "sigma", least=0.0)
        check.real_number(denominator, "denominator", above=0.0)
        if clip != math.inf:
            check.real_number(clip, "clip", above=0.0)
        elif sigma:
            raise PrivacyError("clip must be finite, or sigma 0: without a clip no noise is large enough")
        self._parameters = list(parameters)
        self._optimizer = _optimizer_class()(
            torch.optim.SGD(self._parameters, lr=0.0),
            noise_multiplier=sigma,
            max_grad_norm=clip,
            expected_batch_size=denominator,
        )
        self._optimizer.secret = secret

    def add(self, grad_samples: Sequence[Tensor]) -> None:
        """Clip and add the gradients of some examples: for each parameter a tensor [n, *parameter.shape].

        An example whose gradient is not finite adds zero, silently: how many there are is private.
        """
        finite = torch.stack([torch.isfinite(g.flatten(1).sum(1)) for g in grad_samples]).all(0)
        if not bool(finite.all()):
            grad_samples = [torch.where(finite.view(-1, *[1] * (g.ndim - 1)), g, 0.0) for g in grad_samples]
        self._accumulate(grad_samples)
        self._set_samples([None] * len(self._parameters))

    @torch.no_grad()
    def take(self) -> list[Tensor]:
        """The noised gradient of every parameter; the next `add` begins a new step."""
        self._accumulate([p.new_zeros((0, *p.shape)) for p in self._parameters])
        self._optimizer.add_noise()
        self._optimizer.scale_grad()
        noised = [p.grad for p in self._parameters]
        self._optimizer.zero_grad(set_to_none=True)
        return [g for g in noised if g is not None]

    def _accumulate(self, grad_samples: Sequence[Tensor]) -> None:
        self._set_samples(grad_samples)
        self._optimizer.clip_and_accumulate()

    def _set_samples(self, grad_samples: Sequence[Tensor | None]) -> None:
        for parameter, grads in zip(self._parameters, grad_samples, strict=True):
            parameter.grad_sample = grads  # type: ignore[attr-defined]

    def close(self) -> None:
        """Remove what Opacus put on the parameters."""
        for parameter in self._parameters:
            for name in ("grad_sample", "summed_grad"):
                if hasattr(parameter, name):
                    delattr(parameter, name)


@functools.cache
def _optimizer_class() -> Any:
    from opacus.optimizers import DPOptimizer

    class SecretOptimizer(DPOptimizer):  # type: ignore[misc]
        """DPOptimizer whose noise comes from `self.secret`: one draw a step for all parameters together."""

        secret: Secret

        def add_noise(self) -> None:
            std = self.noise_multiplier * self.max_grad_norm if self.noise_multiplier else 0.0
            sums = [p.summed_grad for p in self.params]
            noise = self.secret.normal((sum(s.numel() for s in sums),), std).split([s.numel() for s in sums])
            for p, s, own in zip(self.params, sums, noise):
                p.grad = (s.double() + own.view(s.shape).to(s.device)).to(p.dtype).view_as(p)

    return SecretOptimizer
