"""What a network must do with the data, tried on noise before any work is done."""

from __future__ import annotations

import contextlib
from typing import cast

import torch
from torch import Tensor, nn

from distillkit._utils.eval_mode import eval_mode
from distillkit.networks._base import Network, require_network
from distillkit.networks.samplers import NetworkSampler
from distillkit.rng import derive

__all__ = ["check_network", "require_network", "require_same_device", "require_sampler", "uses_batch_statistics"]


def require_sampler(networks: object, name: str = "networks") -> NetworkSampler:
    """Return `networks` if they are a sampler, else raise a TypeError that says which one is meant.

    Args:
        networks: what a user gave: anything with a method `draw` is a sampler.
        name: what the argument is called in the message.
    """
    if isinstance(networks, nn.Module):
        kind = type(networks).__name__
        wanted = (
            f"to match at this {kind} give FixedNetwork(network), for draws around it NetworkBall(network, radius=5)"
        )
    elif isinstance(networks, type) and hasattr(networks, "draw"):
        wanted = f"{networks.__name__} is a class: build it"
    elif not hasattr(networks, "draw"):
        wanted = f"for fresh networks of a factory give RandomNetworks(factory), got {type(networks).__name__}"
    else:
        return cast(NetworkSampler, networks)
    raise TypeError(f"{name} must be a sampler of networks; {wanted}")


@torch.no_grad()
def check_network(
    network: nn.Module | Network,
    images: Tensor,
    *,
    classes: int | None = None,
    more: bool = False,
    features: bool = False,
    name: str = "network",
) -> None:
    """Try a network before any work is done: two images of noise go through it, in eval mode; it stays as it was.

    Args:
        network: the network that will be used.
        images: [N, C, H, W], whose shape, dtype and device the noise takes.
        classes: K, if its logits are used: they must be [2, K].
        more: whether it may give more logits than K, as where further classes are virtual ones.
        features: whether its embeddings are used: they must be [2, d], and if logits are too, the logits must be its
            classifier's of the embeddings.
        name: the argument's, for messages.

    Raises:
        ValueError: a network elsewhere, one that cannot take such images, other shapes or class counts, or NaN.
    """
    shape = tuple(images.shape[1:])
    require_same_device(cast(Network, network), images, name)
    noise = torch.randn(2, *shape, generator=derive(0, "a network's trial")).to(images)
    with contextlib.nullcontext() if not isinstance(network, nn.Module) else eval_mode(network):
        try:
            embedding = cast(Network, network).features(noise) if features else None
            logits = network(noise) if classes is not None else None
            again = None
            if embedding is not None and logits is not None:
                again = cast(Network, network).classifier(embedding)
        except Exception as error:
            raise ValueError(
                f"{name} ({_kind(network)}) cannot take images of the data's shape {shape}: {error or repr(error)}"
            ) from error
    for what, value in (("embeddings [N, d]", embedding), ("logits [N, K]", logits)):
        if value is not None:
            _check_rows(value, what, name, shape)
    if (
        logits is not None
        and classes is not None
        and not (logits.shape[1] == classes or (more and logits.shape[1] > classes))
    ):
        raise ValueError(
            f"{name} must give {classes} logits, one a class of the data, but {_kind(network)} gives "
            f"{logits.shape[1]}; build it for {classes} classes, or say num_classes={logits.shape[1]} of the data"
        )
    if again is not None and logits is not None and not _alike(again, logits):
        raise ValueError(
            f"{name}'s logits must be the output of its classifier, but those of {_kind(network)} are not; name the "
            "module that gives them: split(network, classifier='...')"
        )


def _alike(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a.float(), b.float(), rtol=1e-2, atol=1e-3)


def _check_rows(value: object, what: str, name: str, shape: tuple[int, ...]) -> None:
    if not isinstance(value, Tensor) or value.ndim != 2 or len(value) != 2 or not value.is_floating_point():
        came = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"{name} must give {what}, but 2 images of shape {shape} give {came}")
    if not bool(torch.isfinite(value).all()):
        raise ValueError(f"{name} gives NaN or Inf for noise of shape {shape}: are its weights finite?")


def _kind(network: object) -> str:
    inner = getattr(network, "model", network)
    return type(inner if isinstance(inner, nn.Module) else network).__name__


def uses_batch_statistics(network: object) -> bool:
    """Whether some layer of a network normalises with the statistics of the batch, so that a batch must not be cut up.

    Args:
        network: True for batch norm in training mode, or without running statistics; False for what is no `nn.Module`.
    """
    if not isinstance(network, nn.Module):
        return False
    return any(
        isinstance(module, nn.modules.batchnorm._BatchNorm) and (module.training or module.running_mean is None)
        for module in network.modules()
    )


def require_same_device(network: Network, images: Tensor, name: str = "networks") -> None:
    """Refuse a network that is on another device, or of another dtype, than the images it is to see.

    Args:
        network: what was given, or drawn.
        images: the data.
        name: what the argument is called in the message.

    Raises:
        ValueError: they are not in one place; the message says how to bring them together.
    """
    own = next(network.parameters(), None) if isinstance(network, nn.Module) else None
    if own is not None and (own.device, own.dtype) != (images.device, images.dtype):
        raise ValueError(
            f"{name} must be where the images are ({images.dtype} on {images.device}), but what is given or drawn is "
            f"{own.dtype} on {own.device}; build it there: .to(device, dtype), or move the data with data.to(...)"
        )
