"""Pipeline from records to a published result, as one callable, and the scores of one run of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from attacks.membership.scores import stable_logit
from distillkit._utils import check
from distillkit._utils.display import short_repr
from distillkit._utils.eval_mode import eval_mode
from distillkit.chunking import chunk_size, forward_chunks

__all__ = ["Pipeline", "Scorer", "model_scorer"]

Scorer = Callable[[Tensor, Tensor], Tensor]
"""Function `scorer(images, labels)` that returns a score of a fitted model or set for each record, [n], higher for
members. It may return several numbers per record, [n, d], such as logits.
"""

FitFunction = Callable[[Tensor, int], Mapping[str, Scorer]]
"""Function `fit(indices, seed)` that runs the pipeline on these records, and returns scorers of the result by name."""


@dataclass(frozen=True, eq=False)
class Pipeline:
    """Process from records to a published result, as a function that shadow models repeat.

    Attacks with shadow models only work well if the shadows are made like the target. `fit` must therefore include more
    than the final training: distillation, selection, noise, federated training, normalization, and initialization from
    real images. It is called many times on random halves of the records, possibly by several threads at once. It must
    draw from `seed` only, and must not change anything outside itself.

        def fit(indices, seed):
            condensed = distribution_matching(data[indices], networks=RandomNetworks(factory), generator=seed)
            network = train(build(factory, seed), condensed, generator=seed)
            return {"model": model_scorer(network), "set": lambda x, y: nearest(condensed.images, x)}

    Args:
        fit: function `fit(indices, seed)` of int64 [k] indices into `images` and an int in [0, 2**31) that returns a
            dictionary of scorers, with the same names in every call.
        images: images of all candidates, float [N, C, H, W], N at least 4, in the space that the scorers expect.
        labels: class indices of the candidates, int [N].
        population: pair of images [Z, C, H, W] and labels [Z] from the same distribution that `fit` never uses, for
            RMIA. None if there are no such records.
        tag: description of the settings of `fit`, stored with the shadows. Shadows with another tag are not continued.

    Attributes:
        fit, images, labels, population, tag: arguments of the constructor.
    """

    fit: FitFunction
    images: Tensor
    labels: Tensor
    population: tuple[Tensor, Tensor] | None = None
    tag: str = ""

    def __post_init__(self) -> None:
        check.callable_with(self.fit, "fit", ("indices", "seed"), "a function that runs the pipeline on those records")
        if isinstance(self.fit, nn.Module):
            raise TypeError("fit must be a function of indices and seed that trains a network, got a network")
        check.batch_of_images(self.images)
        check.class_labels(self.labels, len(self.images), None)
        if len(self.images) < 4:
            raise ValueError(f"images must be at least 4 to be split in halves, got {len(self.images)}")
        if self.population is not None:
            images, labels = check.sequence(self.population, "population", "tensors, images and labels", 2)
            check.batch_of_images(images, "population (its images)")
            check.class_labels(labels, len(images), None, "population (its labels)")
        check.instance(self.tag, str, "tag", "a string")

    __repr__ = short_repr


@dataclass(frozen=True, eq=False)
class RunScores:
    """Scores of one run of a pipeline.

    Attributes:
        scores: scores of all candidates, float64 [N] or [N, d], by scorer name.
        population: scores of the population, float64 [Z] or [Z, d], by scorer name; empty without a population.
        seconds: duration of fitting and scoring.
    """

    scores: dict[str, Tensor]
    population: dict[str, Tensor]
    seconds: float


def score_run(pipeline: Pipeline, inside: Tensor, seed: int) -> RunScores:
    """Run a pipeline on some records and score all of them.

    Args:
        pipeline: the pipeline to run.
        inside: whether each record is passed to `fit`, bool [N].
        seed: seed passed to `fit`.

    Raises:
        TypeError, ValueError: `fit` returned no scorers, or scores are not finite or have another shape. Errors of
            `fit` are raised unchanged.
    """
    start = time.perf_counter()
    scorers = pipeline.fit(inside.nonzero().flatten(), seed)
    if not isinstance(scorers, Mapping) or not scorers:
        raise TypeError(
            "fit must return scorers by name, such as {'model': model_scorer(network)}, got "
            f"{'an empty mapping' if isinstance(scorers, Mapping) else type(scorers).__name__}"
        )
    found: dict[str, Tensor] = {}
    others: dict[str, Tensor] = {}
    for name, scorer in scorers.items():
        if not isinstance(name, str) or not callable(scorer):
            raise TypeError(f"fit must map names to functions of images and labels, got {name!r}: {scorer!r:.60}")
        found[name] = _scored(name, scorer, pipeline.images, pipeline.labels)
        if pipeline.population is not None:
            others[name] = _scored(name, scorer, *pipeline.population)
    return RunScores(found, others, time.perf_counter() - start)


def model_scorer(
    network: nn.Module, score: Callable[[Tensor, Tensor], Tensor] | None = stable_logit, *, chunk: int | None = None
) -> Scorer:
    """Return a scorer of a trained classifier, in eval mode and in chunks, for `fit` to return.

    In training mode, batch statistics and dropout would reveal or hide membership by accident. The network is therefore
    in eval mode during each call, and in its own mode afterwards.

    Args:
        network: classifier that returns logits [n, K] for the pipeline's images [n, C, H, W].
        score: function of logits and labels that returns scores: `stable_logit`, `loss`, `margin` or your own function.
            None returns the logits.
        chunk: number of images processed at once; by default chosen by device and size.

    Raises:
        TypeError: `network` is not a network, or `score` is not a function of logits and labels.
        ValueError: `chunk` is below 1.
    """
    check.instance(network, nn.Module, "network", "an nn.Module")
    if score is not None:
        check.callable_with(score, "score", ("logits", "labels"), "such as attacks.membership.stable_logit")
        if isinstance(score, nn.Module):
            raise TypeError("score must be a function of logits and labels, got a network")
    if chunk is not None:
        check.positive_int(chunk, "chunk")

    def scorer(images: Tensor, labels: Tensor) -> Tensor:
        with eval_mode(network):
            logits = torch.cat(list(forward_chunks(network, images, chunk_size(images, chunk))))
        return logits if score is None else score(logits, labels)

    return scorer


def _scored(name: str, scorer: Scorer, images: Tensor, labels: Tensor) -> Tensor:
    scores = scorer(images, labels)
    if not isinstance(scores, Tensor) or not scores.is_floating_point():
        raise TypeError(
            f"fit's scorer {name!r} must give a floating-point tensor [n] or [n, d], got "
            f"{getattr(scores, 'dtype', type(scores).__name__)}"
        )
    if scores.ndim not in (1, 2) or len(scores) != len(images):
        raise ValueError(
            f"fit's scorer {name!r} must give one row per record, [{len(images)}] or [{len(images)}, d], got "
            f"{list(scores.shape)}"
        )
    if not bool(scores.isfinite().all()):
        raise ValueError(
            f"fit's scorer {name!r} must give finite scores, but {int((~scores.isfinite()).sum())} of "
            f"{scores.numel()} are not; use stable_logit in place of probabilities"
        )
    return scores.detach().double().cpu()
