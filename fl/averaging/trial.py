"""Trials on noise before a run: the user's network, augmentation and objective, on images like the clients'."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from distillkit.augment import require_space
from distillkit.networks import door, split
from distillkit.rng import derive
from fl.method import Server

__all__ = ["require_matches", "try_augmentation", "try_network", "try_objective"]


def _noise(server: Server) -> Tensor:
    """Two images of noise pixels in the clients' space."""
    pixels = torch.rand(2, *server.shape, generator=derive(0, "trial"), dtype=server.dtype)
    return server.normalization.encode(pixels)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def try_network(
    server: Server, network: nn.Module, outputs: int, name: str = "network", *, features: bool = False
) -> None:
    """Refuse a network that does not map the clients' images to `outputs` logits each.

    Args:
        server: knows the images' shape and dtype.
        network: left as it is; it runs in eval mode on two images of noise, on the CPU.
        outputs: what it was built for: the classes, and what add-ons put beside them.
        name: of the argument, for the message.
        features: whether its embeddings are always used; see `distillkit.networks.door.try_network`.

    Raises:
        ValueError: it fails on such images, or gives something else than finite [2, outputs]; or it has no linear
            layer to take for its classifier.
    """
    like = torch.empty(0, *server.shape, dtype=server.dtype)
    with torch.random.fork_rng(devices=[]):
        door.try_network(split(network), like, classes=outputs, features=features, name=f"{name}({outputs})")


def try_augmentation(server: Server, augment: Callable[[Tensor, torch.Generator], Tensor] | None) -> None:
    """Refuse an augmentation that does not give as many images of the same shape and dtype.

    Raises:
        ValueError: it fails on noise, or gives something else.
    """
    if augment is None:
        return
    require_space(augment, server.normalization)
    images = _noise(server)
    try:
        changed = augment(images.clone(), derive(0, "trial augment"))
    except Exception as error:
        raise ValueError(f"augment fails on images like the clients', {list(images.shape)}: {_said(error)}") from error
    if not isinstance(changed, Tensor) or changed.shape != images.shape or changed.dtype != images.dtype:
        got = f"{changed.dtype} {list(changed.shape)}" if isinstance(changed, Tensor) else type(changed).__name__
        raise ValueError(f"augment must give {images.dtype} {list(images.shape)} for such images, got {got}")


def try_objective(server: Server, objective: Callable[[Tensor, Tensor], Tensor] | None, outputs: int) -> None:
    """Refuse an objective that does not give one number with a gradient for logits and labels like the task's.

    Raises:
        ValueError: it fails on noise, or gives something else.
    """
    if objective is None:
        return
    logits = torch.randn(2, outputs, generator=derive(0, "trial logits"), dtype=server.dtype).requires_grad_()
    classes = server.task.num_classes
    labels = torch.tensor([0, classes - 1])
    if not server.task.single_label:
        labels = torch.eye(classes, dtype=server.dtype)[labels]
    try:
        loss = objective(logits, labels)
    except Exception as error:
        raise ValueError(f"objective fails on logits [2, {outputs}] and the task's labels: {_said(error)}") from error
    if not isinstance(loss, Tensor) or loss.ndim or not loss.requires_grad:
        got = f"a tensor {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(
            f"objective must give one number, the mean over the batch, that depends on the logits; got {got}"
            f"{'' if isinstance(loss, Tensor) and loss.ndim else ' without a gradient'}"
        )


def require_matches(patterns: Sequence[str], names: Sequence[str], what: str) -> None:
    """Refuse a pattern that matches no parameter's name.

    Raises:
        ValueError: with the names that there are.
    """
    for pattern in patterns:
        if not fnmatch.filter(names, pattern.removeprefix("!")):
            known = ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")
            raise ValueError(f"{what}: the pattern {pattern!r} matches no parameter; there are {known}")
