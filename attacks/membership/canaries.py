"""Canary attack: test whether models that learn from a teacher repeat wrong labels that the teacher memorized."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from attacks.membership._inputs import decisions, require_network
from attacks.statistics import Rate
from distillkit._utils import check
from distillkit._utils.content import content
from distillkit.rng import as_generator
from distillkit.sets import Images, LabeledImages, as_set

Observed = nn.Module | Callable[[Tensor], Tensor]


def plant_canaries(records: Images, count: int, generator: int | torch.Generator = 0) -> tuple[LabeledImages, Tensor]:
    """Give some records random wrong labels. These records are called canaries.

    Such a label cannot be guessed from the image. If a model predicts it more often than by chance, information about
    the label has reached the model.

    Args:
        records: real images with class indices.
        count: number of canaries, at most the number of records.
        generator: an int seed, or a CPU generator, which is advanced.

    Returns:
        A pair: all records, where the canaries have new labels; and the canaries' indices, int64 [count], in random
        order. Every wrong class is equally likely.

    Raises:
        TypeError, ValueError: the labels are not class indices of at least two classes, or `count` is out of range.
    """
    records = as_set(records, name="records")
    classes = records.num_classes
    labels = check.class_labels(records.labels, len(records), classes, "records.labels")
    if classes < 2:
        raise ValueError(f"records must have at least 2 classes, because a canary needs a wrong label; got {classes}")
    count = check.positive_int(count, "count", most=len(records))
    generator = as_generator(generator)
    chosen = torch.randperm(len(records), generator=generator)[:count]
    shift = torch.randint(1, classes, (count,), generator=generator).to(labels.device)
    planted = labels.clone()
    planted[chosen] = (labels[chosen] + shift) % classes
    return records.replace(labels=planted), chosen


@dataclass(frozen=True)
class CanaryAttack:
    """Result of `canary_attack`, which tests whether wrong labels reach a model through its teacher.

    A canary is a record that got a random wrong label in the training set of one of two teachers. From each teacher, a
    model is made, for example a student. Print the result to see `taught`, `control`, and the p-value for the
    hypothesis that the labels do not leak.

    Attributes:
        taught: share of the canaries whose wrong label is predicted by the model whose teacher was trained on them.
        control: share of the same canaries whose wrong label is predicted by the model whose teacher was not trained on
            them. It shows how often the label is predicted by chance.
        only_taught: number of canaries whose wrong label is predicted only by the model whose teacher was trained on
            them.
        only_control: number of canaries whose wrong label is predicted only by the model whose teacher was not trained
            on them.
    """

    taught: Rate
    control: Rate
    only_taught: int
    only_control: int

    @property
    def p_value(self) -> float:
        """P-value of McNemar's exact one-sided test, whose null hypothesis is that the labels do not leak.

        For each canary, two models are compared: one whose teacher was trained on the canary's wrong label, and one
        whose teacher was not. The test uses only canaries whose wrong label is predicted by exactly one of the two.
        `only_taught` counts those where this is the first model, and `only_control` the others. Under the null
        hypothesis, both cases are equally likely. The p-value is the probability that `only_taught` is then at least as
        large as observed.
        """
        from scipy.stats import binom

        discordant = self.only_taught + self.only_control
        return float(binom.sf(self.only_taught - 1, discordant, 0.5)) if discordant else 1.0

    def __str__(self) -> str:
        return (
            f"planted labels repeated: {self.taught} if the teacher saw the canary, {self.control} if it did not; "
            f"p = {self.p_value:.2g}"
        )

    __repr__ = __str__


def canary_attack(
    records: Images,
    train: Callable[[LabeledImages, int], nn.Module],
    publish: Callable[[nn.Module, int], Observed] | None = None,
    *,
    canaries: int = 100,
    generator: int | torch.Generator = 0,
    chunk: int | None = None,
) -> CanaryAttack:
    """Measure how often a model predicts random wrong labels that were put into the training data of its teacher.

    Use it before you publish a set with a teacher's labels, or a student network that was trained with such labels.
    Soft labels can reveal a record even if no published image resembles it. The function trains two teachers. Each is
    trained on one half of the records, in which some records (canaries) get random wrong labels. From each teacher,
    `publish` makes the model that an attacker observes. Every canary is then tested on both observed models. The model
    whose teacher was not trained on the canary is the control. The two teachers have the same number of wrong labels.
    If the control predicts the wrong labels less often than the other model, the difference therefore comes from
    memorized labels.

    Args:
        records: real records with class indices, at least 2 * `canaries`.
        train: function that takes a labeled set and a seed, and returns the trained teacher.
        publish: function that takes a teacher and a seed, and returns the observed model, for example a student trained
            on other images with the teacher's labels. The observed model is a network, or a function that maps images
            to logits or class indices. `publish` must not use `records`. Default: the teacher itself is observed.
        canaries: number of canaries of each teacher.
        generator: an int seed, or a CPU generator, which is advanced.
        chunk: number of images per forward pass; by default, it depends on the device and on the size of an image.

    Returns:
        The share of predicted wrong labels, over all 2 * `canaries` canaries, for the control and for the other model.
        Their confidence intervals cover the random choice of canaries, but not the variation between trainings of the
        teachers, so repeat the attack with several seeds.

    Raises:
        TypeError, ValueError: an argument is invalid, or the observed model is not a network or returns neither
            logits nor class indices. This is checked after the first teacher is trained.

    Sources: canaries as in Carlini et al., "The Secret Sharer" (USENIX Security 2019); leaks of teachers through soft
    labels in Jagielski et al., "Students Parrot Their Teachers" (NeurIPS 2023).
    """
    records = as_set(records, name="records")
    for name, function, arguments in (("train", train, ["records", "seed"]), ("publish", publish, ["teacher", "seed"])):
        if name == "publish" and function is None:
            continue
        if isinstance(function, nn.Module):
            raise TypeError(f"{name} must be a function that returns a network, got a {type(function).__name__} itself")
        check.callable_with(function, name, arguments, "a function that returns a network")
    canaries = check.positive_int(canaries, "canaries", most=len(records) // 2)
    generator = as_generator(generator)
    halves = torch.randperm(len(records), generator=generator).split(-(-len(records) // 2))
    planted = [plant_canaries(records[half], canaries, generator) for half in halves]
    seeds = torch.randint(2**62, (2, 2), generator=generator).tolist()
    observed = []
    for (half, _), (teacher_seed, seed) in zip(planted, seeds, strict=True):
        before = content(half.images), content(half.labels)
        teacher = train(half, teacher_seed)
        if (content(half.images), content(half.labels)) != before:
            raise ValueError("train must not change its records: the canaries are tested on them; change a clone")
        _require_result(teacher, "train")
        observed.append(teacher if publish is None else publish(teacher, seed))
        _require_result(observed[-1], "publish" if publish else "train")
        decisions(observed[-1], records.images[:1], chunk)  # fails before the second teacher is trained
    taught, control = (
        torch.cat([_repeats(network, *own, chunk) for network, own in zip(order, planted, strict=True)])
        for order in (observed, observed[::-1])
    )
    taught_rate, control_rate = (Rate.of(int(hits.sum()), len(hits)) for hits in (taught, control))
    return CanaryAttack(taught_rate, control_rate, int((taught & ~control).sum()), int((control & ~taught).sum()))


def _require_result(network: object, name: str) -> None:
    try:
        require_network(network, f"the result of {name}")
    except TypeError as error:
        missing = "; does it end with a return?" if network is None else ""
        raise TypeError(f"{error}{missing}") from error


def _repeats(observed: Observed, records: LabeledImages, chosen: Tensor, chunk: int | None) -> Tensor:
    """Return whether the observed model repeats the label that was planted on each canary, bool [n] on the CPU."""
    canaries = records[chosen]
    return decisions(observed, canaries.images, chunk).cpu() == canaries.labels.cpu()
