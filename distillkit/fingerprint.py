"""What a set and a network are, in a few characters: so that work is not gone on with on others."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from distillkit.networks._base import split
from distillkit.rng import derive
from distillkit.sets import LabeledImages, StoredImages

__all__ = ["network_identity", "set_fingerprint", "tensor_fingerprint"]

_BYTES = 16


def tensor_fingerprint(tensors: Sequence[Tensor | str], *, key: bytes = b"") -> str:
    """A short text that differs when tensors do: 32 hex digits of their BLAKE2b. About a second per GB.

    Hashed are dtype, shape and every byte of tensors, and strings.

    Args:
        tensors: what is hashed, in this order.
        key: up to 64 bytes: who does not have them cannot tell from the hash what was hashed. A hash without a key lets
            anybody who has a candidate try whether it is the very data, so for private data keep a key beside the data.
    """
    state = hashlib.blake2b(key=key, digest_size=_BYTES)
    for item in tensors:
        if isinstance(item, str):
            state.update(f"str {len(item)} {item}".encode())
            continue
        raw = item.detach().cpu().contiguous()
        state.update(f"{raw.dtype} {list(raw.shape)}".encode())
        state.update(raw.flatten().view(torch.uint8).numpy().data)
    return state.hexdigest()


def set_fingerprint(data: LabeledImages | StoredImages, *, key: bytes = b"") -> str:
    """A short text that differs when sets do: a resumed run compares it, and is refused on other data.

    Hashed are images, labels, columns, classes and normalisation; of a stored set, which is not read, the hashes of its
    pictures in place of images (so the same pictures in memory and in a file have two fingerprints).

    Args:
        data: the set.
        key: see `tensor_fingerprint`.
    """
    columns = [part for name in sorted(data.columns) for part in (name, data.columns[name])]
    space = f"{data.num_classes} {data.normalization!r}"
    images = data.digests if isinstance(data, StoredImages) else data.images
    return tensor_fingerprint([images, data.labels, *columns, space], key=key)


def network_identity(network: object, like: Tensor) -> dict[str, Any]:
    """What a network is, in a line: a resumed run compares it, and is refused with another network.

    It says its class, how many parameters it has, a fingerprint of their shapes, and one of what it does.

    What it does is the embedding and the outputs of two noise images, worked out in float64 in eval mode on a copy and
    rounded to six digits, so that neither the number of threads nor the device matters; another activation, width or
    weight does.

    Args:
        network: with or without the features/classifier split; left as it is. Of what is no `nn.Module` only the class.
        like: images [*, C, H, W]; only their shape is used.
    """
    found: dict[str, Any] = {"class": type(network).__name__}
    if not isinstance(network, nn.Module):
        return found
    named = [*network.named_parameters(), *network.named_buffers()]
    found["parameters"] = sum(p.numel() for p in network.parameters())
    found["shapes"] = tensor_fingerprint([f"{name} {list(value.shape)}" for name, value in named])
    found["outputs"] = _outputs(network, like)
    return found


def _outputs(network: nn.Module, like: Tensor) -> str | None:
    noise = torch.randn(2, *like.shape[1:], generator=derive(0, "identity"), dtype=torch.float64)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)  # for a network that draws in eval mode too
        try:
            twin = copy.deepcopy(network).cpu().double().eval()
            try:
                parts = [split(twin).features(noise), twin(noise)]
            except (ValueError, TypeError):  # no embedding to speak of
                parts = [twin(noise)]
            values = torch.cat([part.flatten() for part in parts]).tolist()
        except Exception:  # the trial at the door, not this, says what is wrong with a network
            return None
    return tensor_fingerprint([" ".join(f"{value:.5e}" for value in values)])
