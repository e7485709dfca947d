"""`Pipeline`, a training process that can be repeated on other records, and membership scores of the trained models.

Attacks repeat the process to train shadow models.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from attacks.membership._inputs import outputs
from attacks.membership.scores import stable_logit
from distillkit._utils import check
from distillkit._utils.content import content
from distillkit._utils.display import short_repr

Scorer = Callable[[Tensor, Tensor], Tensor]
"""Function `scorer(images, labels)` that returns a score of a fitted model or set for each record, [n], higher for
members. It may return several numbers per record, [n, d], such as logits.
"""

FitFunction = Callable[[Tensor, int], Mapping[str, Scorer]]
"""Function `fit(indices, seed)` that runs the pipeline on these records, and returns scorers of the result by name."""


@dataclass(frozen=True, eq=False)
class Pipeline:
    """Process that makes a published model or set from records, as a function that can be repeated on other records.

    Attacks with shadow models only work well if the shadow models are made like the target. `fit` must therefore do
    everything that depends on the records: distillation, selection, noise, federated training, normalization, and
    initialization from real images. It is called many times on random halves of the records, possibly by several
    threads at once. It must draw random numbers from `seed` only, and must not change anything outside itself.

        def fit(indices, seed):
            condensed = distribution_matching(data[indices], networks=RandomNetworks(factory), generator=seed)
            network = train(build(factory, seed), condensed, generator=seed)
            return {"model": model_scorer(network), "set": lambda x, y: nearest(condensed.images, x)}

    Args:
        fit: function `fit(indices, seed)` that trains on some of the records. It gets their indices into `images`,
            int64 [k], and an int in [0, 2**31). It returns a dictionary of scorers: functions that map images and
            labels to one membership score per record. The names must be the same in every call.
        images: images of all candidate records, float [N, C, H, W], N at least 4, normalized as the scorers expect.
        labels: class indices of the candidate records, int [N].
        population: images [Z, C, H, W] and labels [Z] of other records from the same distribution, which `fit` never
            uses. RMIA needs them. None if there are no such records.
        tag: description of the settings of `fit`, which is stored with the shadow models. An interrupted set of shadow
            models is only continued with the same tag.

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
    """Membership scores from one run of a pipeline on some of its records.

    Attributes:
        scores: scores of all N candidate records, by scorer name: float64 [N], or [N, d] if the scorer returns d scores
            for each record.
        population: scores of the Z records in the pipeline's `population`, on which no model is trained, by scorer
            name: float64 [Z] or [Z, d]; empty if the pipeline has no population.
        seconds: duration of training and scoring.
    """

    scores: dict[str, Tensor]
    population: dict[str, Tensor]
    seconds: float


def score_run(pipeline: Pipeline, inside: Tensor, seed: int) -> RunScores:
    """Run a pipeline on some of its records, and compute the membership scores of all its records.

    Args:
        pipeline: the pipeline to run.
        inside: whether each record is passed to the pipeline's function `fit`, bool [N].
        seed: seed that is passed to `fit`.

    Raises:
        TypeError, ValueError: `fit` returned no scorers (functions that score records), scores are not finite or have
            another shape, or `fit` changed the records in place. Errors of `fit` are raised unchanged.
    """
    start = time.perf_counter()
    given = (pipeline.images, pipeline.labels, *(pipeline.population or ()))
    before = [content(tensor) for tensor in given]
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
    if [content(tensor) for tensor in given] != before:
        raise ValueError(
            "fit and its scorers must not change the pipeline's images and labels, but some were changed in place, so "
            "later runs would use other records; work on a copy: images.clone()"
        )
    return RunScores(found, others, time.perf_counter() - start)


def model_scorer(
    network: nn.Module, score: Callable[[Tensor, Tensor], Tensor] | None = stable_logit, *, chunk: int | None = None
) -> Scorer:
    """Return a function that computes membership scores of records from the logits of a trained classifier.

    Use it in the function `fit` of a `Pipeline`. The returned function takes images and labels. It evaluates the
    network in chunks and in eval mode, so that the scores depend neither on batch statistics nor on dropout. Afterwards
    the network is in its previous mode.

    Args:
        network: classifier that returns logits [n, K] for the pipeline's images [n, C, H, W].
        score: function that maps logits and labels to scores: `stable_logit`, `loss`, `margin` or your own function.
            None returns the logits as scores.
        chunk: number of images per forward pass; by default, it depends on the device and on the size of an image.

    Raises:
        TypeError: `network` is not a network, or `score` is not a function of logits and labels.
        ValueError: `chunk` is below 1.
    """
    check.instance(network, nn.Module, "network", "an nn.Module")
    if score is not None:
        check.callable_with(score, "score", ("logits", "labels"), "a function such as attacks.membership.stable_logit")
        if isinstance(score, nn.Module):
            raise TypeError("score must be a function of logits and labels, got a network")
    if chunk is not None:
        check.positive_int(chunk, "chunk")

    def scorer(images: Tensor, labels: Tensor) -> Tensor:
        logits = outputs(network, images, chunk)
        if logits.ndim != 2:
            raise ValueError(f"network must return logits [n, K], got {logits.dtype} {list(logits.shape)}")
        return logits if score is None else _checked(score(logits, labels), len(images), "score")

    return scorer


def _scored(name: str, scorer: Scorer, images: Tensor, labels: Tensor) -> Tensor:
    return _checked(scorer(images, labels), len(images), f"fit's scorer {name!r}").detach().double().cpu()


def _checked(scores: object, count: int, name: str) -> Tensor:
    found = check.float_tensor(scores, f"the result of {name}", "[n] or [n, d]")  # type: ignore[arg-type]
    if found.ndim not in (1, 2) or len(found) != count:
        raise ValueError(f"{name} must give one row per record, [{count}] or [{count}, d], got {list(found.shape)}")
    return check.finite_tensor(found, f"the result of {name}", remedy="use stable_logit in place of probabilities")
