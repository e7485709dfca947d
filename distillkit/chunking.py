"""How many images go through a network at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from distillkit._utils import check

__all__ = ["chunk_size", "forward_chunks"]

_PIXELS_CPU = 16 * 32 * 32
_PIXELS_ACCELERATOR = 4096 * 32 * 32

# glibc gives freed activations back to the kernel and faults them in again, page by page, for every chunk: a quarter of
# the time of a forward pass. Freeing one block just below 32 MiB raises its limit to 64 MiB for the whole process; the
# block is never touched, so it costs nothing. Other allocators do not care, and no result changes.
torch.empty(31 << 20, dtype=torch.uint8)


def chunk_size(images: Tensor, chunk: int | None = None, *, chunked_stem: bool = False) -> int:
    """How many images to pass through a network at once: `chunk` if given, else what suits device and image size.

    Args:
        images: float [N, C, H, W], or like those that will pass.
        chunk: what the caller was told; None for the default, a power of two.
        chunked_stem: whether no graph is recorded and the network takes its first maps in parts (`networks.ConvNet`).

    On a CPU 16 images of 32x32, and as many pixels of any other size: the activations of a width-128 network then stay
    in the cache, which halves the time of a forward pass; four times as many where a network takes its first maps,
    the largest ones, in parts. On an accelerator 4096 of them, which only bounds memory.

    Raises:
        TypeError, ValueError: `chunk` is not a positive int.
    """
    if chunk is not None:
        return check.positive_int(chunk, "chunk")
    pixels = _PIXELS_ACCELERATOR
    if images.device.type == "cpu":
        pixels = 4 * _PIXELS_CPU if chunked_stem else _PIXELS_CPU
    fitting: int = max(1, pixels // (images.shape[2] * images.shape[3]))
    return 1 << (fitting.bit_length() - 1)


def forward_chunks(function: Callable[[Tensor], Tensor], images: Tensor, size: int) -> Iterator[Tensor]:
    """Run a function over many images piece by piece, without a graph.

    Args:
        function: a network, or what calls one.
        images: float [N, C, H, W].
        size: images a part; the last may be smaller.

    Yields:
        `function(part)` for consecutive parts of `size` images, which are channels_last on a CPU.

    A network that flattens with `view` refuses channels_last maps; it gets the images as they are.
    """
    layout = torch.channels_last if images.device.type == "cpu" else torch.contiguous_format
    for part in images.split(size):
        with torch.no_grad():
            try:
                out = function(part.contiguous(memory_format=layout))
            except RuntimeError:
                if layout == torch.contiguous_format:
                    raise
                layout = torch.contiguous_format
                out = function(part.contiguous())
        yield out
