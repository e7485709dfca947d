"""Common parts of distribution and gradient matching: real images by class, networks by step, and the result."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from distillkit._utils.display import stable_repr
from distillkit._utils.progress import Bar
from distillkit._utils.provenance import provenance
from distillkit._utils.user_warnings import warn
from distillkit.augment import Augmentation, apply_augmentation
from distillkit.condense._pixel_descent import PixelDescent
from distillkit.condense._state import call_identity
from distillkit.condense.initialization import initial_images
from distillkit.networks._base import Network
from distillkit.networks._validation import check_network
from distillkit.networks.samplers import NetworkSampler
from distillkit.rng import as_generator, derive
from distillkit.sets import LabeledImages, TiledImages, Tiles
from distillkit.sets._class_index import class_rows, with_class_labels

__all__ = ["Condensation"]

_FAR = 5.0
"""Distance from [0, 1], in pixel units, beyond which a warning is given. Initial noise stays within it."""

_CHECKED_STEPS = 10
"""The range of the pixels is checked after this many steps, and after the last one."""


class Condensation(PixelDescent):
    """Optimization of synthetic images for some classes of a real set, with a newly sampled network in each step.

    Args:
        method: name of the method, which is recorded in the result.
        real: the set to condense.
        networks: sampler of the networks.
        ipc, init, parametrize: see `initial_images`.
        classes: the classes to condense. Default: the classes of `init` if it is a set, otherwise all classes with a
            real image.
        augment: Siamese augmentation of real and synthetic images, or None.
        generator: an int seed, or a CPU generator from which one seed is drawn.
        arguments: further arguments of the call that affect its results, as JSON values.
        descent: `lr`, `momentum`, `steps`, `resume` and `callback` of `PixelDescent`.

    Attributes:
        rows: indices of the real images of each class.
        start: the initial set.
        counts: number of synthetic images of each class.
        images: the optimized images. With a parametrization these are the stored images, and `synthetic` returns the
            images that a network sees.
    """

    def __init__(
        self, method: str, real: LabeledImages, networks: NetworkSampler, *, ipc: int, init: str | LabeledImages,
        classes: Sequence[int] | None, augment: Augmentation | None, generator: int | torch.Generator,
        parametrize: Tiles | None, arguments: Mapping[str, Any], **descent: Any,
    ) -> None:  # fmt: skip
        seed = int(torch.randint(2**62, (), generator=as_generator(generator)))
        self.method, self.real, self.networks, self.augment, self.generator = method, real, networks, augment, generator
        if isinstance(init, LabeledImages) and classes is None:
            classes = list(class_rows(with_class_labels(init)))
        self.rows = class_rows(real, classes)
        self.start = initial_images(
            real, ipc, init=init, classes=list(self.rows), parametrize=parametrize, generator=derive(seed, "init")
        )
        self.tiles, self._far_pixels = parametrize, False
        self.counts = self.start.counts()[list(self.rows)].tolist()
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
        super().__init__(images, arguments=recorded, seed=seed, identity=identity, **descent)

    def synthetic(self) -> Tensor:
        """Return the current synthetic images [sum of counts, C, H, W], decoded if there is a parametrization."""
        return self.images if self.tiles is None else self.tiles.decode(self.images)

    def step(self, loss: Tensor, gradient: Tensor) -> float:
        """Update the optimized images, see `PixelDescent.step`.

        Args:
            loss: loss of this step, a scalar tensor.
            gradient: gradient of the loss with respect to the images of `synthetic`.
        """
        return super().step(loss, gradient if self.tiles is None else self.tiles.adjoint(gradient))

    def report(self, loss: float, bar: Bar | None = None) -> None:
        """Count a step, see `PixelDescent.report`. Warn once if pixels are far outside their valid range.

        Args:
            loss: the loss of this step.
            bar: progress bar to advance by one step, or None.
        """
        super().report(loss, bar)
        if self._far_pixels or (self.done % _CHECKED_STEPS and self.done < self.steps):
            return
        low, high = (float(v) for v in self.real.normalization.decode(self.images).aminmax())
        self._far_pixels = low < -_FAR or high > 1 + _FAR
        if self._far_pixels:
            warn(
                f"{self.method}: after step {self.done}, pixels range from {low:.3g} to {high:.3g}, far outside "
                f"[0, 1]; the result is unlikely to be useful. Lower lr={self.lr:g}"
            )

    def draw_networks(self, images: Tensor, **needs: Any) -> Iterator[tuple[int, Network]]:
        """Sample a network for each remaining step, and check that the first network accepts the images.

        Args:
            images: images with the shape, dtype and device that the networks must accept.
            needs: the condenser's requirements for the networks, see `check_network`.

        Yields:
            The index of the step, counted from 0, and the network for this step.
        """
        first = self.done
        for step in self.remaining_steps():
            network = self.networks.draw(derive(self.seed, step, "network"))
            if step == first:
                check_network(network, images, name="networks", **needs)
            yield step, network

    def sample(self, c: int, limit: int, *draw: int | str) -> Tensor:
        """Sample at most `limit` real images of class `c` without replacement. Equal keys `draw` give equal samples."""
        index = self.rows[c]
        if len(index) > limit:
            index = index[torch.randperm(len(index), generator=derive(self.seed, *draw))[:limit]]
        return self.real.images.index_select(0, index.to(self.real.images.device))

    def transform(self, images: Tensor, *draw: int | str) -> Tensor:
        """Augment images. The same keys `draw` give the same transformation for real and synthetic images (Siamese)."""
        if self.augment is None:
            return images
        return apply_augmentation(self.augment, images, derive(self.seed, *draw, "augment"), siamese=True)

    def result(self, loss: float | None, options: Mapping[str, object]) -> LabeledImages:
        """Return the synthetic set, with a description of how it was made.

        Args:
            loss: loss of the last step; None if there was no step.
            options: options of the method, which the description contains.
        """
        info = {
            "method": self.method,
            "networks": repr(self.networks),
            "augment": None if self.augment is None else repr(self.augment),
            **options,
            **({} if self.tiles is None else {"parametrize": repr(self.tiles)}),
            "loss": loss,
            **self.start.info,
            "absent": (self.real.counts() == 0).nonzero().flatten().tolist(),
            **provenance(self.generator, seed=self.seed),
        }
        if isinstance(self.start, TiledImages):
            return self.start.with_stored(self.images).replace(info=info)
        return self.start.replace(images=self.images, info=info)
