"""Base class of distribution matching and gradient matching. It samples real images and networks, and builds the
result.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from distillkit._utils import check
from distillkit._utils.batches import require_batch_statistics, uses_batch_statistics
from distillkit._utils.devices import CHECKED_STEPS
from distillkit._utils.display import stable_repr
from distillkit._utils.progress import Bar
from distillkit._utils.provenance import provenance
from distillkit._utils.shares import require_unsplit
from distillkit._utils.user_warnings import warn
from distillkit.augment import Augmentation, apply_augmentation
from distillkit.condense._pixel_descent import Distance, PixelDescent
from distillkit.condense._state import Progress, Resume
from distillkit.condense.initialization import initial_images
from distillkit.fingerprint import network_fingerprint, set_fingerprint
from distillkit.networks._base import Network
from distillkit.networks._validation import check_network
from distillkit.networks.samplers import NetworkSampler
from distillkit.rng import as_generator, derive
from distillkit.sets import LabeledImages, TiledImages, Tiles
from distillkit.sets._class_index import class_rows, with_class_labels
from distillkit.sets._devices import DrawOnDevice
from distillkit.sets._info import derived_info
from distillkit.sets._stored import RealImages, cached

_FAR = 5.0
"""A warning is given if a pixel is farther than this from [0, 1]. Initial noise does not reach this distance."""

_FIRST_CHANGE = 0.05
"""Change of a pixel in [0, 1] (root mean square) by one step from noise images, which gives the automatic rate.

DM's rate of 1 changes pixels by 0.07 for CIFAR-10 with one image per class and a ConvNet of width 128.
"""


class Condensation(PixelDescent):
    """Optimization of synthetic images for selected classes of a real set, with a network sampled in each step.

    Args:
        method: name of the method, which is recorded in the result.
        real: the set to condense. A small `StoredImages` is read into memory.
        networks: sampler that returns the network of each step.
        ipc, init, parametrize: number of images per class, source of the initial images, and their parametrization
            (`sets.Tiles`, or None to optimize pixels), as in `initial_images`.
        classes: the classes to condense. Default: the classes of `init` if it is a set, otherwise all classes with a
            real image.
        augment: augmentation that is applied equally to real and synthetic images (Siamese), or None.
        generator: an int seed, or a CPU generator from which one seed is drawn.
        arguments: all other arguments of the condensing function that affect its results, as JSON values by name.
        lr, momentum, steps, resume, callback: as in `PixelDescent`.

    Attributes:
        rows: mapping from each condensed class to the indices of its real images.
        start: the initial synthetic set.
        classes, counts: the condensed classes, and the number of synthetic images of each of them.
        images: the tensor that is optimized. Without a parametrization it holds the synthetic images. With one, it
            holds the stored images, from which `synthetic` decodes the synthetic images.
    """

    def __init__(
        self, method: str, real: RealImages, networks: NetworkSampler, *, ipc: int, init: str | LabeledImages,
        classes: Sequence[int] | None, augment: Augmentation | None, generator: int | torch.Generator,
        parametrize: Tiles | None, arguments: Mapping[str, Any], lr: float | None, momentum: float, steps: int,
        resume: Resume | None, callback: Callable[[Progress], object] | None,
    ) -> None:  # fmt: skip
        if lr is None:
            require_unsplit("lr=None chooses a rate for all classes; pass a number as lr", "over_classes")
        if isinstance(init, str) and init != "real":
            require_unsplit(f"init={init!r} draws all classes together; pass 'real' or a set as init", "over_classes")
        seed = int(torch.randint(2**62, (), generator=as_generator(generator)))
        self.real = real = cached(real)
        self.method, self.networks, self.augment, self.generator = method, networks, augment, generator
        if isinstance(init, LabeledImages) and classes is None:
            classes = list(class_rows(with_class_labels(init)))
        self.rows = class_rows(real, classes)
        self.start = initial_images(
            real, ipc, init=init, classes=list(self.rows), parametrize=parametrize, generator=derive(seed, "init")
        )
        self.tiles, self._far_pixels = parametrize, False
        self.classes = list(self.rows)
        self.counts = self.start.counts()[self.classes].tolist()
        recorded = {
            "method": method,
            "networks": type(networks).__name__,
            "augment": None if augment is None else stable_repr(augment),
            **arguments,
            "classes": {str(c): [len(own), n] for (c, own), n in zip(self.rows.items(), self.counts, strict=True)},
        }
        if parametrize is not None:
            recorded["parametrize"] = repr(parametrize)
        identity = lambda: call_identity(real, networks)  # noqa: E731
        images = self.start.stored if isinstance(self.start, TiledImages) else self.start.images
        super().__init__(
            images,
            lr=lr,
            momentum=momentum,
            steps=steps,
            arguments=recorded,
            seed=seed,
            resume=resume,
            identity=identity,
            callback=callback,
        )

    def synthetic(self) -> Tensor:
        """Return the current synthetic images [N, C, H, W], decoded from `images` if there is a parametrization."""
        return self._decode(self.images)

    def _decode(self, images: Tensor) -> Tensor:
        return images if self.tiles is None else self.tiles.decode(images)

    def step(self, distance: Distance) -> float | Tensor:
        """Take one step of SGD with momentum on the optimized images, and return the loss, as `PixelDescent.step`.

        If the learning rate is None, it is chosen first.

        Args:
            distance: function of the synthetic images [N, C, H, W] that returns the loss, a scalar tensor, and its
                gradient with respect to the images.

        Raises:
            FloatingPointError: the loss is not finite.
            ValueError: no learning rate can be chosen, because the gradient is zero or not finite.
        """

        def stored_distance(images: Tensor) -> tuple[Tensor, Tensor]:
            loss, gradient = distance(self._decode(images))
            return loss, gradient if self.tiles is None else self.tiles.adjoint(gradient)

        if self.lr is None:
            self.lr = self._automatic_lr(stored_distance)
        return super().step(stored_distance)

    def _automatic_lr(self, distance: Distance) -> float:
        """Return the learning rate with which a step from noise images has a fixed size.

        The size of a step is the root mean square of the changes of the pixels. Noise is used instead of the initial
        images, which may be near an optimum. The gradient is small there, so the rate would be too large.
        """
        noise = torch.randn(self.images.shape, generator=derive(self.seed, "lr"), dtype=self.images.dtype)
        size = float(distance(noise.to(self.images.device))[1].square().mean().sqrt())
        if not 0 < size < math.inf:
            raise ValueError(f"lr must be given, because the gradient at noise images has size {size}; try lr=1.0")
        return float(f"{_FIRST_CHANGE / statistics.fmean(self.real.normalization.std) / size:.3g}")

    def report(self, loss: float | Tensor, bar: Bar | None = None) -> None:
        """Count a finished step, and report it to the callback and the progress bar.

        Warn once if pixels are far outside [0, 1].

        Args:
            loss: the loss of this step.
            bar: progress bar to advance by one step, or None.
        """
        super().report(loss, bar)
        if self._far_pixels or (self.done % CHECKED_STEPS and self.done < self.steps):
            return
        low, high = (float(v) for v in self.real.normalization.decode(self.images).aminmax())
        self._far_pixels = low < -_FAR or high > 1 + _FAR
        if self._far_pixels:
            warn(
                f"{self.method}: after step {self.done}, pixels range from {low:.3g} to {high:.3g}, far outside "
                f"[0, 1]; the result is unlikely to be useful. Lower lr={self.lr:g}"
            )

    def draw_networks(
        self, *, smallest: int, classes: int | None, features: bool = False
    ) -> Iterator[tuple[int, Network]]:
        """Sample a network for each remaining step, and check that the first network accepts the images.

        Args:
            smallest: number of images of the smallest batch that a network normalizes with batch statistics.
            classes, features: what the condenser requires of a network, as in `check_network`.

        Yields:
            The index of the step, counted from 0, and the network for this step.
        """
        first, draw = self.done, self.networks.draw
        generators = (derive(self.seed, step, "network") for step in self.remaining_steps())
        drawn = draw.ahead(generators) if isinstance(draw, DrawOnDevice) else map(draw, generators)
        for step, network in zip(self.remaining_steps(), drawn, strict=True):
            if step == first:
                if uses_batch_statistics(network):
                    require_unsplit("batch norm uses the statistics of all classes; use group norm", "over_classes")
                check_network(network, self.images, classes=classes, features=features, name="networks")
                require_batch_statistics(network, self.images, smallest, "networks")
            yield step, network

    def batch_sizes(self, limit: int) -> list[int]:
        """Return the number of real images of each class in a sample of at most `limit`."""
        return [min(len(rows), limit) for rows in self.rows.values()]

    @contextmanager
    def samples(
        self, limit: int, count: int, keys: Callable[[int, int], Sequence[int | str]]
    ) -> Iterator[Callable[[int, int], Tensor]]:
        """Provide a function that samples images of each class in each of several steps; a stored set is read ahead.

        Args:
            limit: largest number of images of a class, which are sampled without replacement.
            count: number of steps.
            keys: function of a step and a class that returns the keys of the draw. They and the run's seed determine
                the sample.

        Yields:
            The function. Its arguments are a step and the position of a class in `classes`.
        """
        k = len(self.classes)

        def rows(number: int) -> Tensor:
            step, c = number // k, self.classes[number % k]
            index = self.rows[c]
            if len(index) > limit:
                index = index[torch.randperm(len(index), generator=derive(self.seed, *keys(step, c)))[:limit]]
            return index

        with self.real._reader(rows, count * k) as read:
            yield lambda step, position: read(step * k + position)

    def transform(self, images: Tensor, *draw: int | str) -> Tensor:
        """Augment images with the transformation that the keys `draw` and the run's seed determine.

        Real and synthetic images that are augmented with equal keys get the same transformation (Siamese).
        """
        if self.augment is None:
            return images
        return apply_augmentation(self.augment, images, derive(self.seed, *draw, "augment"), siamese=True)

    def result(self, loss: float | None, options: Mapping[str, object]) -> LabeledImages:
        """Return the synthetic set, with a description of how it was made.

        Args:
            loss: loss of the last step; None if there was no step.
            options: options of the method by name, which are recorded in the description.

        Raises:
            FloatingPointError: the images are not finite.
        """
        info = {
            "method": self.method,
            "networks": repr(self.networks),
            "augment": None if self.augment is None else repr(self.augment),
            **options,
            **({} if self.tiles is None else {"parametrize": repr(self.tiles)}),
            "loss": loss,
            **self.start.info,
            "ipc": self._ipc(),
            "absent": (self.real.counts() == 0).nonzero().flatten().tolist(),
            **provenance(self.generator, seed=self.seed),
        }
        check.converged(self.images, "lr, or the lr of inner")
        sources = [self.real.info, self.start.info]
        info = derived_info(info, sources, self.method, "condensation with networks of unknown origin")
        if isinstance(self.start, TiledImages):
            return self.start.with_stored(self.images).replace(info=info)
        return self.start.replace(images=self.images, info=info)

    def _ipc(self) -> int | list[int]:
        """Return the number of (stored) images per class, or a list with that of each class if they differ."""
        each = [n if self.tiles is None else n // self.tiles.count for n in self.counts]
        return each if len(set(each)) > 1 else each[0]


def call_identity(real: RealImages, networks: NetworkSampler) -> dict[str, Any]:
    """Return fingerprints of the data and networks of a condensation. Resuming with other data or networks is
    refused.

    The fingerprints are saved in the condenser's state. The fingerprint of the data uses no secret key. Anyone who has
    the state can therefore test guesses about the data.

    Args:
        real: the set to condense.
        networks: sampler of the networks. One network is drawn, and its fingerprint is computed from its outputs on
            noise.
    """
    drawn = networks.draw(derive(0, "identity"))
    return {"data": set_fingerprint(real), "network": network_fingerprint(drawn, real._empty.images)}
