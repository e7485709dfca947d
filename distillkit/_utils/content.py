"""A checksum of a tensor's values, which finds changes that PyTorch does not count."""

from __future__ import annotations

import torch
from torch import Tensor


def content(tensor: Tensor) -> int:
    """Return a checksum of the values. It also shows writes through `.data` or numpy, which `Tensor._version` does not.

    It is the sum of all blocks of 512 bytes, each the sum of its integers of 64 bits, multiplied by their positions.
    """
    bits = tensor.detach().contiguous().flatten().view(torch.uint8)
    bits = bits.clone() if bits.storage_offset() % 8 else bits
    words, rest = bits[: len(bits) // 8 * 8].view(torch.int64), bits[len(bits) // 8 * 8 :]
    blocks = words[: len(words) // 64 * 64].view(-1, 64).sum(1)
    sums = torch.cat([blocks, words[len(blocks) * 64 :], rest.long()])
    return int((sums * torch.arange(1, len(sums) + 1, device=sums.device)).sum())
