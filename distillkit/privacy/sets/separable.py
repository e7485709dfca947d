"""Which matching losses a per-example guarantee can be given for: those that are a sum over real examples."""

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

    Write it as a function and flag it with `@separable`; `image_sgd` takes it as `loss`.
    """

    def __call__(self, embedding: Tensor, means: Tensor) -> Tensor:
        """The loss of every real example by itself.

        Args:
            embedding: of n real examples, float [n, F].
            means: for each of them the synthetic mean of its class, float [n, F].

        Returns:
            Float [n]; row i depends on row i of both alone.
        """
        ...


F = TypeVar("F", bound=Callable[..., Tensor])


def separable(loss: F) -> F:
    """Flag a matching loss of your own as a sum over real examples, so that `image_sgd` takes it; a decorator.

    Args:
        loss: a `SeparableLoss`. It gets the attribute `separable = True` and is returned.
    """
    loss.separable = True  # type: ignore[attr-defined]
    return loss


@separable
def squared_distance(embedding: Tensor, means: Tensor) -> Tensor:
    """Distribution matching's loss as a sum over real examples: ||phi(x_i) - mu||^2 for each of them.

    Its mean over the examples of a class differs from distribution matching's ||mean phi(x_i) - mu||^2 by the
    variance of the embeddings, which does not depend on the synthetic images: both have the same gradient.

    Args:
        embedding: phi(x_i) of n real examples, float [n, F].
        means: mu, the synthetic mean of the class of each, float [n, F].

    Returns:
        Float [n].
    """
    return (embedding - means).square().sum(1)


def require_separable(loss: object) -> SeparableLoss:
    """Return `loss` if it carries the flag of `separable` and treats every row by itself; else refuse it.

    Args:
        loss: what a user gave as a matching loss.

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
    with forbid_side_effects(f"the loss {name}", device=embedding.device):
        alone = torch.cat([loss(embedding[i : i + 1], means[i : i + 1]).reshape(-1) for i in range(64)])
        for size in (*range(1, 17), 32, 64):
            together = loss(embedding[:size], means[:size])
            if together.shape != (size,) or not torch.allclose(together, alone[:size]):
                raise NotSeparable(
                    f"{name} is flagged separable, but must give one value for each row that depends on that row alone"
                )
    return loss
