"""Forward passes through a network in chunks of images, and the default chunk size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from distillkit._utils import check

__all__ = ["chunk_size", "forward_chunks"]

_PIXELS_CPU = 16 * 32 * 32
_PIXELS_ACCELERATOR = 4096 * 32 * 32

# glibc returns freed activations to the kernel and faults them in again for every chunk, which takes a quarter of the
# time of a forward pass. Freeing one block just below 32 MiB raises that threshold to 64 MiB for the whole process.
# The block is never touched, so it costs nothing. Other allocators and all results are unaffected.
torch.empty(31 << 20, dtype=torch.uint8)


def chunk_size(images: Tensor, chunk: int | None = None, *, chunked_stem: bool = False) -> int:
    """Return the number of images per pass through a network: `chunk`, or a default for the device and image size.

    On a CPU the default is 16 images of 32x32 pixels. The activations of a width-128 network then stay in the cache,
    which makes forward passes faster. With `chunked_stem`, the default is four times as large, because the network
    computes its first block, which has the largest feature maps, in smaller chunks. On an accelerator the default is
    4096 images of 32x32 pixels, which limits memory use. For larger images, the default is smaller in proportion to the
    number of pixels; for smaller images, it is larger.

    Args:
        images: float [N, C, H, W]. Only the shape and device matter.
        chunk: number of images per pass; None for the default, which is a power of two.
        chunked_stem: whether the pass records no gradients and the network computes its first block in chunks
            (`networks.ConvNet`).

    Raises:
        TypeError, ValueError: `chunk` is not a positive int, or `images` is not a tensor [N, C, H, W].
    """
    if not isinstance(images, Tensor) or images.ndim != 4:
        came = f"shape {list(images.shape)}" if isinstance(images, Tensor) else type(images).__name__
        raise (ValueError if isinstance(images, Tensor) else TypeError)(f"images must be [N, C, H, W], got {came}")
    if chunk is not None:
        return check.positive_int(chunk, "chunk")
    pixels = _PIXELS_ACCELERATOR
    if images.device.type == "cpu":
        pixels = 4 * _PIXELS_CPU if chunked_stem else _PIXELS_CPU
    fitting: int = max(1, pixels // (images.shape[2] * images.shape[3]))
    return 1 << (fitting.bit_length() - 1)


def forward_chunks(
    function: Callable[[Tensor], Tensor], images: Tensor | Iterable[Tensor], size: int
) -> Iterator[Tensor]:
    """Apply a function to images chunk by chunk, with gradients disabled.

    Args:
        function: a network, or a function that calls one.
        images: float [N, C, H, W]; or an iterable of such tensors, so that only one of them need be in memory.
        size: number of images per chunk; the last chunk of a tensor may be smaller.

    Yields:
        `function(chunk)` for consecutive chunks. On a CPU the chunks are channels_last, unless the network does not
        support this layout, for example because it flattens with `view`.

    Raises:
        TypeError, ValueError: an argument has the wrong type, or `size` is not positive.
    """
    check.callable_with(function, "function", ["images"], "a network")
    check.positive_int(size, "size")
    parts = [images] if isinstance(images, Tensor) or not isinstance(images, Iterable) else images
    layout = torch.channels_last
    for part in parts:
        check.instance(part, Tensor, "images", "a torch.Tensor [N, C, H, W], or an iterable of them")
        layout = layout if part.device.type == "cpu" else torch.contiguous_format
        for chunk in part.split(size):
            with torch.no_grad():
                try:
                    out = function(chunk.contiguous(memory_format=layout))
                except RuntimeError:
                    if layout == torch.contiguous_format:
                        raise
                    layout = torch.contiguous_format
                    out = function(chunk.contiguous())
            yield out
