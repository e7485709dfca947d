"""Evaluation of a small set by the test accuracy of networks that are trained on the set."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn

from distillkit._evaluation_checks import check_baseline, check_factor, check_test_images
from distillkit._utils import check
from distillkit._utils.display import stable_repr
from distillkit._utils.progress import bar
from distillkit._utils.user_warnings import each_warning_once
from distillkit.labels import Relabel
from distillkit.labels._teacher import try_teacher
from distillkit.networks._factory import NetworkFactory, build, require_factory
from distillkit.protocols import describe_protocol
from distillkit.rng import as_generator, derive
from distillkit.robustness import Perturbation, pixels_in_range, require_perturbations
from distillkit.sets import Images, LabeledImages, StoredImages, TiledImages
from distillkit.sets._class_index import class_labels, class_rows, random_rows, with_class_labels
from distillkit.sets._devices import on_device
from distillkit.sets._stored import RealImages, cached, images_of
from distillkit.sets.as_set import open_set
from distillkit.training import CLASSIC, Protocol, accuracy, require_protocol, train

__all__ = ["Evaluation", "Row", "evaluate"]


@dataclass(frozen=True)
class Row:
    """Accuracies of networks of one architecture that were trained on one kind of data.

    Attributes:
        data: "set" or "random real".
        architecture: name of the factory, or class name of the network.
        accuracies: test accuracy of each network after the last training step, in [0, 1].
        seconds: wall time of training and testing all networks.
        labels: kind of labels in training: "hard" (class indices), "one row" (one vector of probabilities per image) or
            "per view" (a teacher's probabilities for each augmented view of an image). Do not compare accuracies with
            different kinds of labels.
        against: accuracy of each network on changed test images, in [0, 1], by the name of the perturbation.
    """

    data: str
    architecture: str
    accuracies: tuple[float, ...]
    seconds: float
    labels: str = "hard"
    against: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    @property
    def mean(self) -> float:
        """Mean of the networks' accuracies, in [0, 1]."""
        return statistics.fmean(self.accuracies)

    @property
    def std(self) -> float | None:
        """Sample standard deviation of the accuracies (n - 1); None for a single network."""
        return statistics.stdev(self.accuracies) if len(self.accuracies) > 1 else None

    @property
    def against_mean(self) -> dict[str, float]:
        """Mean accuracy of the networks under each perturbation, in [0, 1], by the perturbation's name."""
        return {name: statistics.fmean(found) for name, found in self.against.items()}


def per_cent(values: Sequence[float]) -> str:
    """Return mean and sample standard deviation of `values`, accuracies in [0, 1], as text in per cent."""
    spread = f" ± {100 * statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{100 * statistics.fmean(values):.1f}{spread}"


@dataclass(frozen=True)
class Evaluation:
    """Result of `evaluate`. Print it to see a table.

    Attributes:
        rows: for each architecture, one row for networks trained on the evaluated set. If the argument `real` of
            `evaluate` was given, a second row follows, for networks trained on random real images.
        protocol: the training protocol.
        images: number of images in the evaluated set, on which the networks are trained.
        against: perturbations of the test images, by name.
        device, precision: the device on which the networks were trained, and the argument `precision`.
    """

    rows: tuple[Row, ...]
    protocol: Protocol
    images: int
    against: Mapping[str, Perturbation] = field(default_factory=dict)
    device: str = "cpu"
    precision: str | None = None

    @property
    def accuracy(self) -> float:
        """Mean accuracy of the networks of the first architecture that were trained on the set, in [0, 1]."""
        return self.rows[0].mean

    def record(self) -> dict[str, Any]:
        """Return the attributes of this result as JSON values.

        Each row (an element of `rows`) also contains the mean and the standard deviation of its accuracies over the
        networks. A teacher network in the protocol is described by its Python class, fingerprint and path. The
        perturbations of the test images are under the key "against", each with its name and options.
        """
        fields = {"name": describe_protocol(self.protocol), **self.protocol.record()}
        rows = [
            {
                **dataclasses.asdict(r), "accuracy_mean": r.mean, "accuracy_std": r.std,
                "against": {name: list(found) for name, found in r.against.items()}, "against_mean": r.against_mean,
            }
            for r in self.rows
        ]  # fmt: skip
        against = {name: stable_repr(one) for name, one in self.against.items()}
        facts = {"device": self.device, "precision": self.precision}
        return {"images": self.images, "protocol": fields, "against": against, "rows": rows, **facts}

    def __str__(self) -> str:
        columns = "".join(f"  {name:>12}" for name in self.against)
        lines = [f"{'data':<12} {'architecture':<16} {'labels':<8} {'accuracy %':>12}{columns}  draws  seconds"]
        for row in self.rows:
            names = f"{row.data:<12} {row.architecture:<16} {row.labels:<8}"
            columns = "".join(f"  {per_cent(row.against[name]):>{max(12, len(name))}}" for name in self.against)
            shown = f"{per_cent(row.accuracies):>12}{columns}"
            lines.append(f"{names} {shown}  {len(row.accuracies):5}  {row.seconds:7.1f}")
        return "\n".join([*lines, f"protocol: {describe_protocol(self.protocol)}"])

    __repr__ = __str__


@on_device("data", "test", "real")
def evaluate(
    data: Images | StoredImages,
    test: Images | StoredImages,
    factory: NetworkFactory | Mapping[str, NetworkFactory],
    *,
    num_networks: int = 3,
    protocol: Protocol = CLASSIC,
    real: Images | StoredImages | None = None,
    against: Sequence[Perturbation] = (),
    generator: int | torch.Generator = 0,
    chunk: int | None = None,
    device: torch.device | str | None = None,
    precision: str | None = None,
    progress: bool = True,
) -> Evaluation:
    """Train networks from scratch on a small set, and test them.

    Args:
        data: the set to evaluate: a `LabeledImages`, a `StoredImages`, or anything that `sets.as_set` accepts.
        test: test images with class indices, with the same normalization, shape and classes as `data`. A `StoredImages`
            is read in chunks.
        factory: function without arguments that returns a network, which is moved to the data's device. To test several
            architectures, pass a mapping from their names to such functions.
        num_networks: number of networks of each architecture that are trained on the set, each with a different
            initialization. DC, DSA and DM (Zhao et al., 2021 to 2023) train 20 networks on each of 5 sets.
        protocol: training protocol, such as one of `distillkit.protocols.PROTOCOLS`. The published protocols have 300
            or 1,000 epochs, which take minutes per network on a CPU.
        real: the real training images. If given, as many networks are also trained on random real images, with as many
            images per class as in the set, and the result has a second row of accuracies per architecture. The
            accuracy of a distilled set should be higher than that of random images. The random images are sampled anew
            for each network; initial weights and order of batches are the same as for the set. If the set is a
            `TiledImages`, the random images are shrunk to the same tiles. If the set has soft labels, random images
            need soft labels of the same teacher: pass `soft_labels(real, teacher)`. Stored labels of views cannot label
            them: use `Relabel`.
        against: corruptions and attacks, such as `[Corruption("gaussian_noise", 3), PGD(8 / 255)]` of
            `distillkit.robustness`. For each entry, every network is also tested on the changed test images. All
            networks are tested with the same noise. The test images must be pixels in [0, 1] after removing their
            normalization.
        generator: an int seed, or a CPU generator from which one seed is drawn.
        chunk: number of images per forward and backward pass; None for a default.
        device: device that computes, or "auto". Default: nothing moves.
        precision: "bf16" or "tf32" for faster, less exact products; see `docs/gpu.md`. Default: float32.
        progress: whether to show a progress bar, which counts epochs.

    Raises:
        TypeError, ValueError: an argument is invalid; the sets differ in normalization, shape or classes, or in their
            kind of labels; `real` has fewer images than the set, or none of one of its classes; a network returns NaN;
            or the protocol's teacher is not clearly better than chance on `real` (on `test` if `real` is not given).
        FloatingPointError: training diverged.

    Deviation: the tables of DC, DSA and DM give the population standard deviation of the accuracies over networks; here
    the sample standard deviation (n - 1) is used.
    """
    num_networks = check.positive_int(num_networks, "num_networks")
    require_protocol(protocol)
    perturbations = require_perturbations(against)
    data, test = (open_set(s, name=n, progress=progress) for s, n in ((data, "data"), (test, "test")))
    data = cached(data)
    like = data._empty
    like.require_compatible(test._empty, names=("data", "test"))
    for name, count in (("data", len(data)), ("test", len(test))):
        if not count:
            raise ValueError(f"{name} must hold at least one image, got an empty set")
    if test.labels.ndim != 1:
        raise ValueError(f"test must have class indices as labels, got rows of shape {list(test.labels.shape)}")
    if real is not None:
        real = open_set(real, name="real", progress=progress)
        like.require_compatible(real._empty, names=("data", "real"))
    with each_warning_once() as outermost:
        if outermost:
            if real is not None:
                check_baseline(data, real, relabel=protocol.relabel)
            check_test_images(test, {"data": data, "real": real})
            check_factor(data.info, protocol.augment, relabel=protocol.relabel is not None)
    factories = dict(factory) if isinstance(factory, Mapping) else {"": factory}
    for name, make in factories.items():
        require_factory(make, f"factory[{name!r}]" if name else "factory")
    if not factories:
        raise ValueError("factory must name at least one architecture, got an empty mapping")
    if isinstance(protocol.relabel, Relabel):
        protocol.relabel.require(images_of(data), data.num_classes, protocol.view_options)
        try_teacher(
            cast(nn.Module, protocol.relabel.teacher), *((real, "real") if real is not None else (test, "test"))
        )
    seed = int(torch.randint(2**62, (), generator=as_generator(generator)))
    if not isinstance(test, StoredImages):
        test = test.to(like.images.device, like.images.dtype)
        for part in test.images.split(1024) if perturbations else ():
            pixels_in_range(part, test.normalization, "test")
    rows = []
    kinds = ("set",) if real is None else ("set", "random real")
    total = len(factories) * len(kinds) * num_networks * protocol.num_epochs
    with each_warning_once(), bar(total, "evaluate", unit="epoch", progress=progress) as shown:
        for name, make in factories.items():
            for kind in kinds:
                accuracies, begun, architecture = [], time.perf_counter(), name
                changed: dict[str, list[float]] = {other: [] for other in perturbations}
                for i in range(num_networks):
                    network = build(make, derive(seed, name, i, "network")).to(like.images)
                    architecture = name or type(network).__name__
                    own = data
                    if real is not None and kind == "random real":
                        own = _random_like(data, real, derive(seed, i, "random real"))
                    order, tick = derive(seed, name, i, "train"), lambda _: shown.update()
                    train(network, own, protocol, generator=order, chunk=chunk, callback=tick, progress=False)
                    accuracies.append(accuracy(network, test, chunk=chunk))
                    for other, one in perturbations.items():
                        draws = derive(seed, other, "against")
                        changed[other].append(accuracy(network, test, against=one, generator=draws, chunk=chunk))
                labels = protocol.labels or ("hard" if data.labels.ndim == 1 else "one row")
                seconds, found = time.perf_counter() - begun, {other: tuple(each) for other, each in changed.items()}
                rows.append(Row(kind, architecture, tuple(accuracies), seconds, labels, found))
    return Evaluation(tuple(rows), protocol, len(data), perturbations, str(like.images.device), precision)


def _random_like(data: RealImages, real: RealImages, generator: torch.Generator) -> LabeledImages:
    counts = torch.bincount(class_labels(data))
    wanted = counts.nonzero().flatten().tolist()
    index, _ = random_rows(class_rows(with_class_labels(real), wanted), counts[wanted].tolist(), generator)
    like = data._empty.images
    drawn = real._part(index).to(like.device, like.dtype)
    return data.tiles.pack(drawn) if isinstance(data, TiledImages) else drawn
