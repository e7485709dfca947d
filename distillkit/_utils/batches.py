"""Division of images into batches for training, and checks of batches for batch norm."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor, nn

from distillkit._utils.eval_mode import eval_mode


def uses_batch_statistics(network: object) -> bool:
    """Return whether a layer of the network normalizes with batch statistics. If so, a batch must not be split."""
    return any(True for _ in _batch_norms(network))


def _batch_norms(network: object) -> Iterator[nn.Module]:
    for module in network.modules() if isinstance(network, nn.Module) else ():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and (module.training or module.running_mean is None):
            yield module


def batch_indices(order: Tensor, size: int, *, merge_single: bool) -> list[Tensor]:
    """Divide the order of the images of one epoch into batches. Every training loop of the library uses this function.

    The last batch may be smaller. With `size=1`, all batches have a single image.
    """
    batches = list(order.split(size))
    if len(batches) > 1 and len(batches[-1]) == 1 < size and merge_single:
        batches[-2:] = [torch.cat(batches[-2:])]
    return batches


def shuffled_orders(
    count: int, generator: torch.Generator, device: torch.device, epochs: int, together: int
) -> Iterator[Tensor]:
    """Yield a random order of `count` images for each epoch. Those of several epochs go to the device together."""
    for first in range(0, epochs, together or 1):
        drawn = [torch.randperm(count, generator=generator) for _ in range(min(together, epochs - first))]
        yield from torch.stack(drawn).to(device, non_blocking=True)


@torch.no_grad()
def require_batch_statistics(network: object, images: Tensor, count: int, name: str = "network") -> None:
    """Refuse a batch of one image if batch norm would normalize a single value per channel."""
    norms = list(_batch_norms(network)) if count == 1 else []
    if not norms:
        return
    sizes: dict[nn.Module, int] = {}

    def record(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        sizes[module] = inputs[0].numel() // inputs[0].shape[1]
        if sizes[module] == 1:
            raise _SingleValue

    hooks = [norm.register_forward_pre_hook(record) for norm in norms]
    try:
        with eval_mode(cast(nn.Module, network)), contextlib.suppress(_SingleValue):
            cast(nn.Module, network)(images[:1].detach())
    finally:
        for hook in hooks:
            hook.remove()
    if 1 in sizes.values():
        kind = type(getattr(network, "model", network)).__name__
        raise ValueError(
            f"{name} ({kind}) has batch norm, which cannot normalize a batch of one image: pass at least two images, "
            "in batches of at least two, or a network with group norm or instance norm"
        )


class _SingleValue(Exception):
    """Batch norm has a single value per channel."""
