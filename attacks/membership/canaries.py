"""Canary attack on the labels of a teacher: wrong labels that the teacher memorized and that its students repeat."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from attacks.membership._inputs import decisions
from attacks.statistics import Rate
from distillkit._utils import check
from distillkit.rng import as_generator
from distillkit.sets import Images, LabeledImages, as_set

__all__ = ["CanaryAttack", "canary_attack", "plant_canaries"]

Observed = nn.Module | Callable[[Tensor], Tensor]


def plant_canaries(records: Images, count: int, generator: int | torch.Generator = 0) -> tuple[LabeledImages, Tensor]:
    """Give some records random wrong labels.

    Nobody can guess such a label from the image. A model that returns it has seen the record or its label.

    Args:
        records: real images with class indices.
        count: number of canaries, at most the number of records.
        generator: an int seed, or a CPU generator, which is advanced.

    Returns:
        The records, of which the canaries have new labels, and the canaries' indices int64 [count] in random order.
        Every wrong class of a canary is equally likely.

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
    """Result of `canary_attack`. Print it to see both rates and the p-value.

    Attributes:
        taught: share of the canaries whose planted label is the decision of the model whose teacher saw them.
        control: share of the same canaries whose planted label is the decision of the other model, whose teacher saw
            other canaries. It shows how often the planted label is a decision without any memory.
        only_taught, only_control: numbers of canaries that only one of the two models gives the planted label.
    """

    taught: Rate
    control: Rate
    only_taught: int
    only_control: int

    @property
    def p_value(self) -> float:
        """Probability of at least `only_taught` such canaries if labels do not leak: McNemar's exact one-sided test."""
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
    """Measure how often a model repeats wrong labels that only the training set of its teacher contained.

    Use it before you publish a set with a teacher's labels, or a student of a teacher: soft labels can reveal records
    that no published image resembles. Two teachers are trained. Each sees half of the records, with its own canaries
    (`plant_canaries`) in that half. `publish` turns each teacher into what an attacker observes. Every canary is then
    tested on both models: on the one whose teacher saw it, and on the other as a control. Both teachers have equally
    many wrong labels, so a difference comes from memory and not from label noise.

    Args:
        records: real records with class indices, at least 2 * `canaries`.
        train: function of a labeled set and a seed that returns the trained teacher.
        publish: function of a teacher and a seed that returns the observed model, for example a student trained on
            other images with the teacher's labels. It returns a network, or a function from images to logits or
            decisions, and must not use `records`. Default: the teacher itself is observed.
        canaries: number of canaries of each teacher.
        generator: an int seed, or a CPU generator, which is advanced.
        chunk: number of images per forward pass; by default chosen by device and size.

    Returns:
        Rates over all 2 * `canaries` canaries. Their intervals cover the draw of the canaries for these two teachers,
        not the variation between trainings: repeat the attack with several seeds.

    Raises:
        TypeError, ValueError: an argument is invalid, or the observed model returns neither logits nor class indices.

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
        teacher = train(half, teacher_seed)
        observed.append(teacher if publish is None else publish(teacher, seed))
    taught, control = (
        torch.cat([_repeats(network, *own, chunk) for network, own in zip(order, planted, strict=True)])
        for order in (observed, observed[::-1])
    )
    taught_rate, control_rate = (Rate.of(int(hits.sum()), len(hits)) for hits in (taught, control))
    return CanaryAttack(taught_rate, control_rate, int((taught & ~control).sum()), int((control & ~taught).sum()))


def _repeats(network: Observed, records: LabeledImages, chosen: Tensor, chunk: int | None) -> Tensor:
    """Return for each canary whether the network decides for its planted label, bool [n] on the CPU."""
    canaries = records[chosen]
    return decisions(network, canaries.images, chunk).cpu() == canaries.labels.cpu()
