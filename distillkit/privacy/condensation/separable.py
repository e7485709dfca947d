"""Separable matching losses: sums over real examples, whose per-example gradients can be clipped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from distillkit.privacy.errors import NotSeparable
from distillkit.privacy.validation._side_effects import forbid_side_effects
from distillkit.rng import derive

__all__ = ["SeparableLoss", "require_separable", "separable", "squared_distance"]


class SeparableLoss(Protocol):
    """A matching loss that is a sum over real examples: l(phi(x_i), mean embedding of the example's class).

    Write it as a function and decorate it with `@separable`; `image_sgd` takes it as `loss`.
    """

    def __call__(self, embedding: Tensor, means: Tensor) -> Tensor:
        """Return the loss of every real example.

        Args:
            embedding: of n real examples, float [n, F].
            means: the synthetic mean of each example's class, float [n, F].

        Returns:
            Float [n]; row i depends only on row i of both arguments.
        """
        ...


F = TypeVar("F", bound=Callable[..., Tensor])


def separable(loss: F) -> F:
    """Declare that a matching loss is a sum over real examples, so that `image_sgd` accepts it; a decorator.

    Args:
        loss: a `SeparableLoss`. It gets the attribute `separable = True` and is returned.
    """
    loss.separable = True  # type: ignore[attr-defined]
    return loss


@separable
def squared_distance(embedding: Tensor, means: Tensor) -> Tensor:
    """Compute the distribution-matching loss of each real example, ||phi(x_i) - mu||^2.

    Its mean over a class differs from ||mean phi(x_i) - mu||^2 by the variance of the embeddings. The variance does not
    depend on the synthetic images, so both have the same gradient.

    Args:
        embedding: phi(x_i) of n real examples, float [n, F].
        means: mu, the synthetic mean of each example's class, float [n, F].

    Returns:
        Float [n].
    """
    return (embedding - means).square().sum(1)


def require_separable(loss: object) -> SeparableLoss:
    """Return `loss` if it is declared `separable` and treats every row independently; otherwise refuse it.

    Args:
        loss: the user's matching loss.

    Raises:
        NotSeparable: it is not declared separable (`loss.why`, if there is one, is quoted), or its rows depend on each
            other for up to 64 rows of random numbers.
        PrivacyError: it draws from a global random state.
    """
    if not callable(loss) or getattr(loss, "separable", None) is not True:
        name = getattr(loss, "__name__", type(loss).__name__)
        why = getattr(loss, "why", "")
        raise NotSeparable(
            f"{name} is not declared as a sum over real examples{f' ({why})' if why else ''}, so no example's "
            "contribution to its gradient can be bounded. Cosines of means, variances, MMD cross terms and gradient "
            "matching have a denominator over the batch: use condense_private (class means), whose matching runs after "
            "the noise. If yours is a sum over examples, write l(embedding [n, F], means [n, F]) -> [n] and decorate "
            "it with @separable"
        )
    name = getattr(loss, "__name__", type(loss).__name__)
    generator = derive(0, "separable")
    embedding, means = (torch.randn(64, 3, generator=generator, dtype=torch.float64) for _ in range(2))
    with forbid_side_effects(f"the loss {name}", device=embedding.device):
        alone = torch.cat([loss(embedding[i : i + 1], means[i : i + 1]).reshape(-1) for i in range(64)])
        for size in (*range(1, 17), 32, 64):
            together = loss(embedding[:size], means[:size])
            if together.shape != (size,) or not torch.allclose(together, alone[:size]):
                raise NotSeparable(
                    f"{name} is declared separable, but must return one value per row that depends on that row alone"
                )
    return loss
