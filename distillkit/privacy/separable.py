"""Which matching losses a per-example guarantee can be given for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from distillkit.privacy.apart import untouched
from distillkit.privacy.errors import NotSeparable
from distillkit.rng import derive

__all__ = ["SeparableLoss", "require_separable", "separable", "squared_distance"]


class SeparableLoss(Protocol):
    """A matching loss that is a sum over real examples: l(phi(x_i), mean embedding of the example's class)."""

    def __call__(self, embedding: Tensor, means: Tensor) -> Tensor:
        """Losses [n] of embeddings [n, F] of real examples, each against the synthetic mean [n, F] of its class."""
        ...


F = TypeVar("F", bound=Callable[..., Tensor])


def separable(loss: F) -> F:
    """Flag a loss as a sum over real examples: sets `loss.separable = True`. See `SeparableLoss`."""
    loss.separable = True  # type: ignore[attr-defined]
    return loss


@separable
def squared_distance(embedding: Tensor, means: Tensor) -> Tensor:
    """||phi(x_i) - mu||^2 for each row.

    Its mean over the examples of a class differs from distribution matching's ||mean phi(x_i) - mu||^2 by the
    variance of the embeddings, which does not depend on the synthetic images: both have the same gradient.
    """
    return (embedding - means).square().sum(1)


def require_separable(loss: object) -> SeparableLoss:
    """Return `loss` if it carries the flag and treats every row by itself.

    Raises:
        NotSeparable: no flag, a flag that is False (its `loss.why`, if there is one, is quoted), or rows that depend
            on each other when it is tried on random numbers, up to 64 of them.
        PrivacyError: it draws from a global random state.
    """
    if not callable(loss) or getattr(loss, "separable", None) is not True:
        name = getattr(loss, "__name__", type(loss).__name__)
        why = getattr(loss, "why", "")
        raise NotSeparable(
            f"{name} is not flagged as a sum over real examples{f' ({why})' if why else ''}, so no example's "
            "contribution to its gradient can be bounded. Cosines of means, variances, MMD cross terms and gradient "
            "matching have a denominator over the batch: use condense_private (class means), whose matching runs after "
            "the noise. If yours is a sum over examples, write l(embedding [n, F], means [n, F]) -> [n] and flag it "
            "with @separable"
        )
    name = getattr(loss, "__name__", type(loss).__name__)
    generator = derive(0, "separable")
    embedding, means = (torch.randn(64, 3, generator=generator, dtype=torch.float64) for _ in range(2))
    with untouched(f"the loss {name}", device=embedding.device):
        alone = torch.cat([loss(embedding[i : i + 1], means[i : i + 1]).reshape(-1) for i in range(64)])
        for size in (*range(1, 17), 32, 64):
            together = loss(embedding[:size], means[:size])
            if together.shape != (size,) or not torch.allclose(together, alone[:size]):
                raise NotSeparable(
                    f"{name} is flagged separable, but must give one value for each row that depends on that row alone"
                )
    return loss
