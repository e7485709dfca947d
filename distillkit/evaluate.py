"""Evaluation of a small set by the test accuracy of networks that are trained on the set."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from distillkit._utils import check
from distillkit._utils.progress import bar
from distillkit.networks._factory import NetworkFactory, build, require_factory
from distillkit.rng import as_generator, derive
from distillkit.sets import Images, LabeledImages, StoredImages, as_set
from distillkit.sets._class_index import class_rows, random_rows
from distillkit.training import CLASSIC, Protocol, accuracy, require_protocol, train

__all__ = ["Evaluation", "Row", "evaluate"]


@dataclass(frozen=True)
class Row:
    """Result of one kind of training data on one architecture.

    Attributes:
        data: "set" or "random real".
        architecture: name of the factory, or class name of the network.
        accuracies: accuracy of each trained network, in [0, 1], at the last iterate.
        seconds: wall time of training and testing all networks.
    """

    data: str
    architecture: str
    accuracies: tuple[float, ...]
    seconds: float

    @property
    def mean(self) -> float:
        """Mean accuracy, in [0, 1]."""
        return statistics.fmean(self.accuracies)

    @property
    def std(self) -> float | None:
        """Sample standard deviation of the accuracies (n - 1); None for a single network."""
        return statistics.stdev(self.accuracies) if len(self.accuracies) > 1 else None


@dataclass(frozen=True)
class Evaluation:
    """Result of `evaluate`. Print it to see a table.

    Attributes:
        rows: for each architecture, the row of the set, followed by the row of random real images if there is one.
        protocol: the training protocol.
        images: number of images in the set.
    """

    rows: tuple[Row, ...]
    protocol: Protocol
    images: int

    @property
    def accuracy(self) -> float:
        """Mean accuracy of the set on the first architecture, in [0, 1]."""
        return self.rows[0].mean

    def record(self) -> dict[str, Any]:
        """Return the result as JSON values: rows with mean and std, the protocol, and the size of the set."""
        fields = {f.name: getattr(self.protocol, f.name) for f in dataclasses.fields(Protocol)}
        fields["augment"] = None if self.protocol.augment is None else repr(self.protocol.augment)
        rows = [{**dataclasses.asdict(r), "accuracy_mean": r.mean, "accuracy_std": r.std} for r in self.rows]
        return {"images": self.images, "protocol": fields, "rows": rows}

    def __str__(self) -> str:
        lines = [f"{'data':<12} {'architecture':<16} {'accuracy %':>12}  draws  seconds"]
        for row in self.rows:
            shown = f"{100 * row.mean:.1f}" + ("" if row.std is None else f" ± {100 * row.std:.1f}")
            lines.append(
                f"{row.data:<12} {row.architecture:<16} {shown:>12}  {len(row.accuracies):5}  {row.seconds:7.1f}"
            )
        return "\n".join(lines)

    __repr__ = __str__


def evaluate(
    data: Images,
    test: Images | StoredImages,
    factory: NetworkFactory | Mapping[str, NetworkFactory],
    *,
    num_networks: int = 3,
    protocol: Protocol = CLASSIC,
    real: Images | None = None,
    generator: int | torch.Generator = 0,
    chunk: int | None = None,
    progress: bool = True,
) -> Evaluation:
    """Train networks from scratch on a small set, and test them.

    Args:
        data: the set to evaluate: a `LabeledImages`, or anything that `sets.as_set` accepts.
        test: test images with class indices, with the same normalization, shape and classes as `data`. A `StoredImages`
            is read in chunks.
        factory: function without arguments that returns a network, which is moved to the data's device; or a mapping
            from names to several such functions (cross-architecture).
        num_networks: number of networks trained for each row, each with a different initialization. The papers train 20
            networks on each of 5 sets.
        protocol: training protocol. The published protocol has 1,000 epochs, which take minutes per network on a CPU.
        real: the real training images. If given, each architecture has a second row for random real images, with as
            many images per class as the set. These images are sampled anew for each network. Initialization and order
            of training are the same as for the set. A distilled set should have a higher accuracy than this row.
        generator: an int seed, or a CPU generator from which one seed is drawn.
        chunk: see `train`.
        progress: whether to show a progress bar, which counts epochs.

    Raises:
        TypeError, ValueError: an argument is invalid, or the sets differ in normalization, shape or classes.
        FloatingPointError: training diverged.

    Deviations from the authors' protocol: the standard deviation is the sample standard deviation (n - 1), and random
    real images are sampled anew for each network.
    """
    num_networks = check.positive_int(num_networks, "num_networks")
    require_protocol(protocol)
    data = as_set(data, name="data", progress=progress)
    if not isinstance(test, StoredImages):
        test = as_set(test, name="test", progress=progress)
    data.require_compatible(test[:0].read() if isinstance(test, StoredImages) else test, names=("data", "test"))
    for name, count in (("data", len(data)), ("test", len(test))):
        if not count:
            raise ValueError(f"{name} must hold at least one image, got an empty set")
    if test.labels.ndim != 1:
        raise ValueError(f"test must have class indices as labels, got rows of shape {list(test.labels.shape)}")
    if real is not None:
        real = as_set(real, name="real", progress=progress)
        data.require_compatible(real, names=("data", "real"))
    factories = dict(factory) if isinstance(factory, Mapping) else {"": factory}
    for name, make in factories.items():
        require_factory(make, f"factory[{name!r}]" if name else "factory")
    if not factories:
        raise ValueError("factory must name at least one architecture, got an empty mapping")
    seed = int(torch.randint(2**62, (), generator=as_generator(generator)))
    if not isinstance(test, StoredImages):
        test = test.to(data.images.device, data.images.dtype)
    rows = []
    kinds = ("set",) if real is None else ("set", "random real")
    total = len(factories) * len(kinds) * num_networks * (protocol.epochs + 1)
    with bar(total, "evaluate", unit="epoch", progress=progress) as shown:
        for name, make in factories.items():
            for kind in kinds:
                accuracies, begun, architecture = [], time.perf_counter(), name
                for i in range(num_networks):
                    network = build(make, derive(seed, name, i, "network")).to(data.images)
                    architecture = name or type(network).__name__
                    own = data
                    if real is not None and kind == "random real":
                        own = _random_like(data, real, derive(seed, i, "random real"))
                    order, tick = derive(seed, name, i, "train"), lambda _: shown.update()
                    train(network, own, protocol, generator=order, chunk=chunk, callback=tick, progress=False)
                    accuracies.append(accuracy(network, test, chunk=chunk))
                rows.append(Row(kind, architecture, tuple(accuracies), time.perf_counter() - begun))
    return Evaluation(tuple(rows), protocol, len(data))


def _random_like(data: LabeledImages, real: LabeledImages, generator: torch.Generator) -> LabeledImages:
    labels = data.labels if data.labels.ndim == 1 else data.labels.argmax(1)
    counts = torch.bincount(labels, minlength=data.num_classes)
    wanted = counts.nonzero().flatten().tolist()
    index, _ = random_rows(class_rows(real, wanted), counts[wanted].tolist(), generator)
    return real[index.to(real.images.device)].to(data.images.device, data.images.dtype)
