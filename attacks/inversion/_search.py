"""Optimizers that search for images with a small loss: Adam on the sign of the gradient, and L-BFGS."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from distillkit.normalization import Normalization

Loss = Callable[[Tensor], Tensor]
Minimum = tuple[Tensor, float]


def signed_adam(
    losses: Sequence[Loss],
    starts: Sequence[Tensor],
    steps: int,
    lr: float,
    normalization: Normalization,
    pull: Callable[[dict[int, Tensor]], dict[int, Tensor]] | None = None,
) -> list[Minimum]:
    """Search from several starting points for images with a small loss, by Adam on the sign of the gradient.

    After each step, pixels are clamped to their valid range. All searches take their steps together, so that `pull` can
    depend on the images of all searches. A search whose loss is not finite ends.

    Args:
        losses: loss function of each search, which takes the images.
        starts: initial images of each search, float [N, C, H, W].
        steps: number of steps.
        lr: step size of Adam.
        normalization: normalization of the images, from which their range is computed.
        pull: function that takes the images of all active searches, by index, and returns terms to add to their
            gradients. The terms are not part of the losses.

    Returns:
        For each search, the images with the smallest loss, and this loss.
    """
    xs = [_boxed(x, normalization).requires_grad_() for x in starts]
    best, least = [x.detach().clone() for x in xs], [math.inf] * len(xs)
    optimizers = [torch.optim.Adam([x], lr=lr) for x in xs]
    falls = [steps * k // 8 for k in (3, 5, 7)]
    schedules = [torch.optim.lr_scheduler.MultiStepLR(one, falls, gamma=0.1) for one in optimizers]
    alive = list(range(len(xs)))
    for step in range(steps + 1):
        gradients = {}
        for r in list(alive):
            value = losses[r](xs[r])
            now = float(value.detach())
            if not math.isfinite(now):
                alive.remove(r)
                continue
            if now < least[r]:
                best[r], least[r] = xs[r].detach().clone(), now
            if step < steps:
                (gradients[r],) = torch.autograd.grad(value, xs[r])
        if pull is not None and len(gradients) > 1:
            for r, extra in pull({r: xs[r].detach() for r in gradients}).items():
                gradients[r] = gradients[r] + extra
        for r, gradient in gradients.items():
            xs[r].grad = gradient.sign()
            optimizers[r].step()
            schedules[r].step()
            with torch.no_grad():
                xs[r].copy_(_boxed(xs[r], normalization))
    return list(zip(best, least))


def lbfgs(loss: Loss, start: Tensor, steps: int) -> Minimum:
    """Minimize a loss by L-BFGS (step size 1), without limits on the pixels.

    Args:
        loss: function of images that returns the loss.
        start: initial images, float [N, C, H, W].
        steps: largest number of steps; the search ends earlier if it diverges or converges.

    Returns:
        The images with the smallest loss, and this loss.
    """
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
            break  # diverged or converged
    return best, least


def _boxed(x: Tensor, normalization: Normalization) -> Tensor:
    return normalization.encode(normalization.decode(x.detach()).clamp(0, 1))
