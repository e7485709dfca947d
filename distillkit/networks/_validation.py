"""Validation of networks and network samplers that users pass as arguments."""

from __future__ import annotations

import contextlib
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from distillkit._sanity_checks import check_logits
from distillkit._utils import check
from distillkit._utils.eval_mode import eval_mode
from distillkit.networks._base import Network
from distillkit.networks.samplers import NetworkSampler
from distillkit.rng import derive


def require_sampler(networks: object, name: str = "networks") -> NetworkSampler:
    """Check that `networks` is a network sampler and return it.

    Args:
        networks: value to check. A sampler is any object with a method `draw` and a bool `fixed`.
        name: name of the argument in error messages.

    Raises:
        TypeError: `networks` is not a sampler. For a network or a factory, the message recommends a sampler.
    """
    if isinstance(networks, nn.Module):
        kind = type(networks).__name__
        wanted = (
            f"to match at this {kind} pass FixedNetwork(network), for draws around it NetworkBall(network, radius=5)"
        )
    elif isinstance(networks, type) and hasattr(networks, "draw"):
        wanted = f"{networks.__name__} is a class: create an instance"
    elif not hasattr(networks, "draw"):
        wanted = f"for fresh networks of a factory pass RandomNetworks(factory), got {type(networks).__name__}"
    elif not isinstance(getattr(networks, "fixed", None), bool):
        wanted = f"{type(networks).__name__} lacks the attribute fixed: True if every draw returns the same network"
    else:
        return cast(NetworkSampler, networks)
    raise TypeError(f"{name} must be a network sampler; {wanted}")


@torch.no_grad()
def check_network(
    network: nn.Module | Network,
    images: Tensor,
    *,
    classes: int | None = None,
    more: bool = False,
    features: bool = False,
    probabilities: Literal["warn", "refuse", "accept"] = "warn",
    name: str = "network",
) -> None:
    """Check that a network fits the data, by passing two noise images through it in eval mode.

    Args:
        network: the network to check.
        images: images [N, C, H, W] of the data. The noise images have the same shape, dtype and device.
        classes: number of classes K. The logits must then be [2, K]. None if the logits are not used.
        more: whether a network with more than K logits is accepted, too.
        features: whether the embeddings are used. They must then be [2, d]. If `classes` is given too, the logits must
            be the output of the network's `classifier` for these embeddings.
        probabilities: what to do if the network ends in a softmax, so that the logits are probabilities.
        name: name of the argument in error messages.

    Raises:
        ValueError: the network is on another device than the images, does not accept images of this shape, or returns
            wrong shapes, NaN or Inf; it changes its images in place; or it ends in a softmax and `probabilities` is
            "refuse".
    """
    check.default_device()
    shape = tuple(images.shape[1:])
    parts = cast(Network, network)
    require_same_device(parts, images, name)
    noise = torch.randn(2, *shape, generator=derive(0, "a network's trial")).to(images)
    before = noise.clone()
    with contextlib.nullcontext() if not isinstance(network, nn.Module) else eval_mode(network):
        try:
            embedding: Any = parts.features(noise) if features else None
            logits: Any = network(noise) if classes is not None else None
            again: Any = parts.classifier(embedding) if features and classes is not None else None
        except Exception as error:
            raise ValueError(
                f"{name} ({_kind(network)}) does not accept images of the data's shape {shape}: "
                f"{str(error) or repr(error)}"
            ) from error
    if not torch.equal(noise, before):
        raise ValueError(
            f"{name} ({_kind(network)}) must not change its images in place; use operations without a trailing "
            "underscore, and no inplace=True before the first layer that computes new values"
        )
    if features:
        _check_rows(embedding, "embeddings [N, d]", name, shape)
    if classes is None:
        return
    _check_rows(logits, "logits [N, K]", name, shape)
    if not (logits.shape[1] == classes or (more and logits.shape[1] > classes)):
        raise ValueError(
            f"{name} must return {classes} logits, one per class of the data, but {_kind(network)} returns "
            f"{logits.shape[1]}; build it for {classes} classes, or pass num_classes={logits.shape[1]} for the data"
        )
    if probabilities != "accept":
        check_logits(logits, f"{name} ({_kind(network)})", refuse=probabilities == "refuse")
    if features and not _alike(again, logits):
        raise ValueError(
            f"{name}'s logits must be the output of its classifier, but those of {_kind(network)} are not; name the "
            "module that computes them: split(network, classifier='...')"
        )


def _alike(a: object, b: Tensor) -> bool:
    return isinstance(a, Tensor) and a.shape == b.shape and torch.allclose(a.float(), b.float(), rtol=1e-2, atol=1e-3)


def _check_rows(value: object, expected: str, name: str, shape: tuple[int, ...]) -> None:
    if not isinstance(value, Tensor) or value.ndim != 2 or len(value) != 2 or not value.is_floating_point():
        came: object = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        if isinstance(value, Tensor) and not value.is_floating_point():
            came = f"{value.dtype} {came}"
        raise ValueError(f"{name} must return {expected}, but returns {came} for 2 images of shape {shape}")
    if not bool(torch.isfinite(value).all()):
        raise ValueError(f"{name} returns NaN or Inf for noise of shape {shape}; check that its weights are finite")


def _kind(network: object) -> str:
    inner = getattr(network, "model", network)
    return type(inner if isinstance(inner, nn.Module) else network).__name__


def require_same_device(network: Network, images: Tensor, name: str = "networks") -> None:
    """Refuse a network whose device or dtype differs from that of the images."""
    own = next(network.parameters(), None) if isinstance(network, nn.Module) else None
    if own is not None and (own.device, own.dtype) != (images.device, images.dtype):
        raise ValueError(
            f"{name} must have the dtype and device of the images ({images.dtype} on {images.device}), got "
            f"{own.dtype} on {own.device}; convert the network with .to(device, dtype), or the data with "
            "data.to(...), or pass device=, which moves both"
        )
