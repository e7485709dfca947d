"""The virtual set of VHL and its variants: noise images from an untrained generator, or a set that you pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from distillkit._utils import check
from distillkit.generate import cnn_noise, stylegan_noise, upsampled_gaussian
from distillkit.sets import LabeledImages
from fl.averaging.addon import AddOn
from fl.participants import Server

NOISE: dict[str, Callable[..., LabeledImages]] = {
    "stylegan": stylegan_noise,
    "gaussian": upsampled_gaussian,
    "cnn": cnn_noise,
}
"""VHL's three sources of noise, by name."""


def require_source(source: object, options: Mapping[str, Any]) -> None:
    """Raise TypeError unless `source` is a string or a `LabeledImages` and its noise has the options."""
    if not isinstance(source, str | LabeledImages):
        names, kind = ", ".join(NOISE), type(source).__name__
        raise TypeError(f"source must be one of {names}, a name in server_data, or a LabeledImages, got {kind}")
    if isinstance(source, str) and source in NOISE:
        check.accepts(NOISE[source], options, "options")


def virtual_set(
    server: Server, owner: AddOn, source: str | LabeledImages, classes: int, per_class: int, options: Mapping[str, Any]
) -> LabeledImages:
    """Return the virtual set of VHL or a variant: labeled images, usually noise, that all clients share.

    The set consists of generated noise images, or it is a given set, which is checked.

    As in the code of VHL's authors (Tang et al., ICML 2022), noise has its own normalization, with mean 0 and std 1,
    unless `options` sets another one. A given set must have the clients' normalization.

    Args:
        server: server of the run. `source` may be the name of a set in its `data`.
        owner: add-on that uses the set. Its key determines the random draws, and error messages show its name.
        source: a kind of noise ("stylegan", "gaussian" or "cnn"), the name of a set in `server.data`, or a set.
        classes: number of classes of the virtual set.
        per_class: number of noise images per class.
        options: further options of the function that generates the noise.

    Raises:
        ValueError: `source` is an unknown name; noise is requested but the clients' images are not square; or a given
            set does not fit the clients' images or `classes`, has no images, or has labels other than class indices.
    """
    channels, height, width = server.shape
    if isinstance(source, str) and source in NOISE:
        if height != width:
            raise ValueError(
                f"{owner.name}: noise images are square, but the clients' images are {height}x{width}; give a set"
            )
        generator = server.generator(owner.key)
        made = NOISE[source](classes, per_class, height, channels, device=server.device, generator=generator, **options)
        return made.to(dtype=server.dtype)
    if isinstance(source, str) and source not in server.data:
        known = ", ".join([*NOISE, *server.data])
        raise ValueError(f"{owner.name}: source must be a set or one of {known}, got {source!r}")
    found = server.data[source] if isinstance(source, str) else source
    if not len(found) or found.labels.ndim != 1:
        raise ValueError(
            f"{owner.name}: the virtual set must hold images with class indices, got {len(found)} images, labels "
            f"{list(found.labels.shape)}"
        )
    if found.num_classes != classes:
        raise ValueError(
            f"{owner.name}: the virtual set has {found.num_classes} classes, but classes={classes}: give "
            f"classes={found.num_classes}"
        )
    if found.shape != server.shape or found.normalization != server.normalization:
        raise ValueError(
            f"{owner.name}: the virtual set has images {found.shape} ({found.normalization}), the clients have "
            f"{server.shape} ({server.normalization}); resize its pixels, or convert it with `renormalize`"
        )
    return found.replace(columns={}, info={}).to(server.device, server.dtype)
