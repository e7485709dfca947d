"""Separable matching losses, which are sums over real examples, so that per-example gradients can be clipped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from distillkit._utils import check
from distillkit.privacy.errors import NotSeparable
from distillkit.rng import derive


class SeparableLoss(Protocol):
    """Matching loss that is a sum over real examples, with one term per example.

    The term of an example x_i is l(phi(x_i), mu), where phi(x_i) is its embedding, and mu is the mean embedding of the
    synthetic images of its class. Write l as a function of the embeddings and means of several examples, decorate it
    with `@separable` and pass it to `image_sgd` as `loss`.
    """

    def __call__(self, embedding: Tensor, means: Tensor) -> Tensor:
        """Return the loss of every real example.

        Args:
            embedding: embeddings of n real examples, float [n, F].
            means: synthetic mean embedding of each example's class, float [n, F].

        Returns:
            Losses, float [n]; entry i depends only on row i of both arguments.
        """
        ...


F = TypeVar("F", bound=Callable[..., Tensor])


def separable(loss: F) -> F:
    """Decorate a matching loss to declare that it is a sum over real examples, so that `image_sgd` accepts it.

    Args:
        loss: matching loss, a function as described in `SeparableLoss`. Its attribute `separable` is set to True, and
            the loss is returned.

    Raises:
        TypeError: `loss` is not a function.
    """
    check.callable_with(loss, "loss", ["embedding", "means"], "a function that returns one value per row")
    loss.separable = True  # type: ignore[attr-defined]
    return loss


@separable
def squared_distance(embedding: Tensor, means: Tensor) -> Tensor:
    """Compute the distribution-matching loss of each real example, ||phi(x_i) - mu||^2.

    The mean of these losses over a class differs from ||mean phi(x_i) - mu||^2 by the variance of the embeddings. The
    variance does not depend on the synthetic images, so both expressions have the same gradient with respect to them.

    Args:
        embedding: embeddings phi(x_i) of n real examples, float [n, F].
        means: synthetic mean embedding mu of each example's class, float [n, F].

    Returns:
        Losses, float [n].

    Raises:
        ValueError: the embeddings and the means have different shapes.
    """
    if embedding.shape != means.shape:
        raise ValueError(f"means must have the shape of embedding, {list(embedding.shape)}, got {list(means.shape)}")
    return (embedding - means).square().sum(1)


def require_separable(loss: object) -> SeparableLoss:
    """Return `loss` if it is declared `separable` and computes each example's term independently; otherwise refuse it.

    Args:
        loss: the user's matching loss.

    Raises:
        NotSeparable: the loss is not declared separable; or, in a test with up to 64 random examples, the term of one
            example depended on other examples.
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
    with torch.random.fork_rng(devices=[]):
        if not isinstance(one := loss(embedding[:1], means[:1]), Tensor):
            raise NotSeparable(f"{name} must return one value per row as a tensor, got {type(one).__name__}")
        alone = torch.cat([loss(embedding[i : i + 1], means[i : i + 1]).reshape(-1) for i in range(64)])
        for size in (*range(1, 17), 32, 64):
            together = loss(embedding[:size], means[:size])
            if together.shape != (size,) or not torch.allclose(together, alone[:size]):
                raise NotSeparable(
                    f"{name} is declared separable, but must return one value per row that depends on that row alone"
                )
    return loss
