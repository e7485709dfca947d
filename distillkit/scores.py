"""Scores that separate the contribution of a small set's images from that of soft labels and augmentation.

The small set is, for example, a condensed set. The scores are those of DD-Ranking (Li et al., 2025).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from distillkit._evaluation_checks import check_baseline, check_factor, check_test_images
from distillkit._utils import check
from distillkit._utils.user_warnings import each_warning_once
from distillkit.evaluate import Row, evaluate, per_cent
from distillkit.networks._factory import NetworkFactory
from distillkit.rng import as_generator, derive
from distillkit.sets import Images, StoredImages
from distillkit.sets._class_index import class_rows, with_class_labels
from distillkit.sets._devices import on_device
from distillkit.sets._stored import RealImages
from distillkit.sets.as_set import open_set
from distillkit.training import CLASSIC, Protocol, require_protocol

__all__ = ["Scores", "augmentation_robust_score", "label_robust_score", "scores"]


def label_robust_score(
    *, real_hard: float, data_hard: float, data_own: float, random_own: float, weight: float = 0.5
) -> float:
    """Return the label-robust score (LRS) of a small set, such as a condensed one, in [0, 1].

    A high score means that the images themselves are informative, not only their labels. The score is (e^alpha - 1/e) /
    (e - 1/e), with alpha = weight * IOR - (1 - weight) * HLR. HLR = real_hard - data_hard is the hard-label recovery,
    and IOR = data_own - random_own is the improvement over random images.

    Args:
        real_hard: test accuracy of networks trained on the whole real set with hard labels (class indices).
        data_hard: test accuracy of networks trained on the small set with hard labels.
        data_own: test accuracy of networks trained on the small set with the set's own protocol.
        random_own: test accuracy of networks trained on as many random real images with the same protocol.
        weight: weight of IOR, in [0, 1].

    Raises:
        ValueError: a value is outside [0, 1]. Accuracies are fractions, not per cent.

    Source: DD-Ranking (Li et al., 2025). Deviation: accuracies are fractions. The authors' code inserts accuracies in
    per cent, for which the score does not lie in [0, 1].
    """
    given = {"real_hard": real_hard, "data_hard": data_hard, "data_own": data_own, "random_own": random_own}
    real_hard, data_hard, data_own, random_own = (_fraction(value, name) for name, value in given.items())
    weight = _fraction(weight, "weight")
    return _normalized(weight * (data_own - random_own) - (1 - weight) * (real_hard - data_hard))


def augmentation_robust_score(
    *,
    data_augmented: float,
    random_augmented: float,
    data_plain: float,
    random_plain: float,
    weight: float = 0.5,
) -> float:
    """Return the augmentation-robust score (ARS) of a set, in [0, 1].

    A high score means that the set beats random real images with and without augmentation. The score is (e^beta - 1/e)
    / (e - 1/e), with beta = weight * (data_augmented - random_augmented) + (1 - weight) * (data_plain - random_plain).

    Args:
        data_augmented, random_augmented: test accuracies of networks trained with augmentation on the small set, and on
            as many random real images.
        data_plain, random_plain: test accuracies of networks trained without augmentation on the same two sets.
        weight: weight of the difference with augmentation, in [0, 1].

    Raises:
        ValueError: a value is outside [0, 1]. Accuracies are fractions, not per cent.

    Source: DD-Ranking (Li et al., 2025); see `label_robust_score`.
    """
    given = {"data_augmented": data_augmented, "random_augmented": random_augmented}
    given |= {"data_plain": data_plain, "random_plain": random_plain}
    ours, random, ours_plain, random_plain = (_fraction(value, name) for name, value in given.items())
    weight = _fraction(weight, "weight")
    return _normalized(weight * (ours - random) + (1 - weight) * (ours_plain - random_plain))


def _fraction(value: float, name: str) -> float:
    """Return a number after checking that it lies in [0, 1]."""
    value = check.real_number(value, name)
    if not 0 <= value <= 1:
        raise ValueError(f"{name} must be a fraction in [0, 1], got {value}; divide per cent by 100")
    return value


def _normalized(x: float) -> float:
    """Map [-1, 1] to [0, 1] by (e^x - 1/e) / (e - 1/e)."""
    return (math.exp(x) - math.exp(-1)) / (math.e - math.exp(-1))


@dataclass(frozen=True)
class Scores:
    """Label-robust score (LRS) and augmentation-robust score (ARS) of a small set, and the accuracies behind them.

    Print the object to see the scores and the accuracies.

    Attributes:
        rows: test results by name of the training. "real, hard" is a training on all real images with hard labels, and
            "set, hard" one on the small set with hard labels. "set" is a training on the small set with its own
            protocol, and "random" one on as many random real images with the same protocol. "set, no augmentation" and
            "random, no augmentation" are like "set" and "random", but without augmentation.
        settings: selected settings of the protocol, by name of the training. The argument `search` of `scores` lists
            the settings that were compared.
        weight: weight in LRS of IOR, the improvement over random images. HLR, the hard-label recovery, has the weight
            1 - `weight`.
        augmented_weight: weight in ARS of the difference "set" minus "random". The difference without augmentation has
            the weight 1 - `augmented_weight`.
    """

    rows: Mapping[str, Row]
    settings: Mapping[str, Mapping[str, Any]]
    weight: float = 0.5
    augmented_weight: float = 0.5

    @property
    def hlr(self) -> float:
        """Hard-label recovery: test accuracy after training on all real images, minus that after training on the set.

        Both trainings use hard labels. Lower is better.
        """
        return self.rows["real, hard"].mean - self.rows["set, hard"].mean

    @property
    def ior(self) -> float:
        """Improvement over random: test accuracy after training on the set, minus that after training on random images.

        There are as many random real images as images in the set. Both trainings use the same protocol.
        """
        return self.rows["set"].mean - self.rows["random"].mean

    @property
    def lrs(self) -> float:
        """Label-robust score, see `label_robust_score`."""
        accuracies = [self.rows[name].mean for name in ("real, hard", "set, hard", "set", "random")]
        real_hard, data_hard, data_own, random_own = accuracies
        return label_robust_score(
            real_hard=real_hard, data_hard=data_hard, data_own=data_own, random_own=random_own, weight=self.weight
        )

    @property
    def ars(self) -> float:
        """Augmentation-robust score, see `augmentation_robust_score`."""
        return augmentation_robust_score(
            data_augmented=self.rows["set"].mean,
            random_augmented=self.rows["random"].mean,
            data_plain=self.rows["set, no augmentation"].mean,
            random_plain=self.rows["random, no augmentation"].mean,
            weight=self.augmented_weight,
        )

    def record(self) -> dict[str, Any]:
        """Return the scores, accuracies and chosen settings as JSON values."""
        rows = {name: {"accuracies": list(row.accuracies), "labels": row.labels} for name, row in self.rows.items()}
        found = {"hlr": self.hlr, "ior": self.ior, "lrs": self.lrs, "ars": self.ars}
        return {**found, "rows": rows, "settings": {name: dict(one) for name, one in self.settings.items()}}

    def __str__(self) -> str:
        lines = [f"{'training':<24} {'labels':<8} {'accuracy %':>12}  networks  settings"]
        for name, row in self.rows.items():
            shown = per_cent(row.accuracies)
            settings = ", ".join(f"{key}={value}" for key, value in self.settings[name].items()) or "–"
            lines.append(f"{name:<24} {row.labels:<8} {shown:>12}  {len(row.accuracies):8}  {settings}")
        lines.append(f"HLR {100 * self.hlr:.1f} points, IOR {100 * self.ior:+.1f} points, LRS {self.lrs:.3f}")
        return "\n".join([*lines, f"ARS {self.ars:.3f}"])

    __repr__ = __str__


@on_device("data", "test", "real")
def scores(
    data: Images | StoredImages,
    test: Images | StoredImages,
    factory: NetworkFactory,
    *,
    real: Images | StoredImages,
    protocol: Protocol = CLASSIC,
    whole: Protocol | None = None,
    search: Sequence[Mapping[str, Any]] = ({},),
    validation: float = 0.2,
    weight: float = 0.5,
    augmented_weight: float = 0.5,
    num_networks: int = 3,
    generator: int | torch.Generator = 0,
    chunk: int | None = None,
    device: torch.device | str | None = None,
    precision: str | None = None,
    progress: bool = True,
) -> Scores:
    """Score a set by training networks on it, on random real images and on the whole real set.

    Use this function to compare sets whose protocols differ: the scores separate the contribution of the images from
    that of soft labels and augmentation. Six kinds of training are compared; `Scores.rows` lists them. The scores are
    LRS (see `label_robust_score`) and ARS (see `augmentation_robust_score`). A difference of seven points of accuracy
    changes LRS by only about 0.03. Also compare the two parts of LRS: the hard-label recovery (HLR) and the improvement
    over random images (IOR).

    Args:
        data: the set to score, a `LabeledImages` or anything that `sets.as_set` accepts.
        test: test images with class indices.
        factory: function without arguments that returns a network.
        real: the real training images. If `data` has soft labels and the protocol does not relabel, random images need
            soft labels of the same teacher: pass `soft_labels(real, teacher)`. The whole real set is always used with
            its class indices.
        protocol: the set's own training protocol. It must have an augmentation, because ARS compares training with and
            without augmentation. Trainings with hard labels use the same protocol without its teacher.
        whole: protocol of the training on the whole real set, which takes long if the protocol has many epochs.
            Default: `protocol` with hard labels.
        search: settings of the protocol to compare, such as `[{"lr": 0.01}, {"lr": 0.05}]`, without `augment` and
            `relabel`, in which the kinds of training differ. For every kind of training,
            one network is trained with each item of this list. The final trainings use the item with the best accuracy
            on held-out real images.
        validation: share of each class of `real` that is held out during the search, in (0, 1). The final trainings use
            all real images. Note that the set may have been made from the held-out images.
        weight: weight of IOR in LRS, in [0, 1]; HLR has the remaining weight.
        augmented_weight: weight in ARS of the results with augmentation, in [0, 1]; the results without augmentation
            have the remaining weight.
        num_networks: number of networks per kind of training in the final trainings.
        generator: an int seed, or a CPU generator from which one seed is drawn.
        chunk: number of images per forward and backward pass; None for a default.
        device: device that computes, or "auto". Default: nothing moves.
        precision: "bf16" or "tf32" for faster, less exact products; see `docs/gpu.md`. Default: float32.
        progress: whether to show progress bars.

    Raises:
        TypeError, ValueError: an argument is invalid; see `evaluate`.

    Source: DD-Ranking (Li et al., 2025). Deviations: accuracies are fractions, and are measured after the last training
    step. The authors' code uses the best of many tests, in per cent, and searches the learning rate on the test set.
    """
    data, test, real = (open_set(s, name=n) for s, n in ((data, "data"), (test, "test"), (real, "real")))
    require_protocol(protocol)
    if protocol.augment is None:
        raise ValueError(
            "protocol must have an augmentation, because ARS compares training with and without it; got none. "
            "Use dataclasses.replace(protocol, augment=DSA())"
        )
    listed = check.sequence(search, "search", "mappings from a field of Protocol to a value")
    tried = [dict(check.mapping(one, f"search[{i}]")) for i, one in enumerate(listed)]
    if not tried:
        raise ValueError("search must hold at least one mapping, got none; [{}] tries the protocol as it is")
    known = [f.name for f in fields(Protocol) if f.name not in ("augment", "relabel")]
    for one in tried:
        for name in one:
            check.one_of(name, "search", known)
        replace(protocol, **one)
    weight, augmented_weight = _fraction(weight, "weight"), _fraction(augmented_weight, "augmented_weight")
    seed = int(torch.randint(2**62, (), generator=as_generator(generator)))
    validation = check.real_number(validation, "validation", above=0.0, below=1.0)
    part, held_out = _split(real, validation, seed) if len(tried) > 1 else (real, real)
    hard, plain = replace(protocol, relabel=None), replace(protocol, augment=None)
    rows: dict[str, Row] = {}
    settings: dict[str, Mapping[str, Any]] = {}

    check_baseline(data, real, relabel=protocol.relabel)
    check_test_images(test, {"data": data, "real": real})
    check_factor(data.info, protocol.augment, relabel=protocol.relabel is not None)

    def measure(variant: Protocol, train_set: RealImages | None, *names: str) -> None:
        """Train networks, and store the results in `Scores.rows` and the selected settings in `Scores.settings`.

        Args:
            variant: training protocol. Each item of `search` (an argument of `scores`) changes some of its options. A
                network is trained with each item, and the item with the best accuracy on held-out images is used.
            train_set: set to train on; None for all real images.
            names: keys under which the results are stored. The first is for `train_set`. If there is a second key,
                networks are also trained on as many random real images, and their result is stored under it.
        """

        @functools.cache
        def trained(position: int, *, final: bool) -> tuple[Row, ...]:
            images, against = (real, test) if final else (part, with_class_labels(held_out))
            return evaluate(
                with_class_labels(images) if train_set is None else train_set, against, factory,
                protocol=replace(variant, **tried[position]),
                num_networks=num_networks if final else 1, real=images if len(names) > 1 else None,
                generator=derive(seed, "final" if final else "search"), chunk=chunk, progress=progress,
            ).rows  # fmt: skip

        for i, name in enumerate(names):
            best = max(range(len(tried)), key=lambda p: trained(p, final=False)[i].mean) if len(tried) > 1 else 0
            rows[name], settings[name] = trained(best, final=True)[i], tried[best]

    if whole is not None:
        require_protocol(whole)
    with each_warning_once():  # the long training on all real images comes after those that refuse other mistakes
        measure(protocol, data, "set", "random")
        measure(plain, data, "set, no augmentation", "random, no augmentation")
        measure(hard, with_class_labels(data), "set, hard")
        measure(whole or hard, None, "real, hard")
    names = ("real, hard", "set, hard", "set", "random", "set, no augmentation", "random, no augmentation")
    settings = {name: settings[name] for name in names}
    return Scores({name: rows[name] for name in names}, settings, weight, augmented_weight)


def _split(real: RealImages, share: float, seed: int) -> tuple[RealImages, RealImages]:
    """Split a set into two parts. The second part gets the fraction `share` of each class, at least one image."""
    first, second = [], []
    for c, rows in class_rows(with_class_labels(real)).items():
        if len(rows) < 2:
            raise ValueError(f"real must have at least 2 images of each class to hold some out, got 1 of class {c}")
        order = rows[torch.randperm(len(rows), generator=derive(seed, c, "held out"))]
        count = min(max(1, round(share * len(rows))), len(rows) - 1)
        first.append(order[count:])
        second.append(order[:count])
    return real[torch.cat(first)], real[torch.cat(second)]
