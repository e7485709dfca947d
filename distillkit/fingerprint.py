"""Fingerprints of tensors, sets and networks, which are compared before an interrupted run is resumed."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from distillkit._utils import check
from distillkit.networks._base import split
from distillkit.rng import derive
from distillkit.sets import LabeledImages, StoredImages

__all__ = ["network_fingerprint", "set_fingerprint", "tensor_fingerprint"]

_BYTES = 16


def tensor_fingerprint(tensors: Sequence[Tensor | str], *, key: bytes = b"") -> str:
    """Return a fingerprint of tensors: 32 hex digits of the BLAKE2b hash of their dtypes, shapes and bytes.

    Args:
        tensors: tensors and strings, hashed in the given order.
        key: secret key of up to 64 bytes. Without a key, anyone can test whether some given data have this fingerprint.
            For private data, use a key and store it with the data.

    Raises:
        TypeError, ValueError: `tensors` is not a list of strings and tensors with values, or the key is invalid.
    """
    if not isinstance(key, bytes) or len(key) > hashlib.blake2b.MAX_KEY_SIZE:
        came = f"{len(key)} bytes" if isinstance(key, bytes) else type(key).__name__
        raise (ValueError if isinstance(key, bytes) else TypeError)(f"key must be at most 64 bytes, got {came}")
    if isinstance(tensors, Tensor):
        raise TypeError("tensors must be a list of tensors and strings, got a Tensor; pass [tensor]")
    state = hashlib.blake2b(key=key, digest_size=_BYTES)
    for item in check.sequence(tensors, "tensors", "tensors and strings"):
        if isinstance(item, str):
            state.update(f"str {len(item)} {item}".encode())
            continue
        check.has_values(check.instance(item, Tensor, "tensors", "tensors and strings"), "tensors")
        raw = item.detach().cpu().contiguous()
        state.update(f"{raw.dtype} {list(raw.shape)}".encode())
        state.update(raw.flatten().view(torch.uint8).numpy().data)
    return state.hexdigest()


def set_fingerprint(data: LabeledImages | StoredImages, *, key: bytes = b"") -> str:
    """Return a fingerprint of a set, so that a resumed run can detect changed data.

    The hash covers images, labels, columns, classes and normalization. For a `StoredImages`, the recorded hashes of its
    images are used instead of the images. The same images therefore have different fingerprints in memory and in a
    file.

    Args:
        data: the set.
        key: secret key of up to 64 bytes, for private data; see `tensor_fingerprint`.

    Raises:
        TypeError, ValueError: `data` is not a set, or the key is invalid.
    """
    if not isinstance(data, StoredImages):
        check.instance(data, LabeledImages, "data", "a LabeledImages or a StoredImages")
    columns = [part for name in sorted(data.columns) for part in (name, data.columns[name])]
    space = f"{data.num_classes} {data.normalization!r}"
    images = data.digests if isinstance(data, StoredImages) else data.images
    return tensor_fingerprint([images, data.labels, *columns, space], key=key)


def network_fingerprint(network: object, like: Tensor) -> dict[str, Any]:
    """Return a network's class and parameter count, and hashes of its tensor shapes and its outputs.

    A float64 copy in eval mode computes embeddings and outputs for two noise images. The results are rounded to six
    digits and hashed. The fingerprint depends on the architecture and the weights, but not on the number of threads or
    the device.

    Args:
        network: the network; it is not changed. For an object that is not an `nn.Module`, only the class is returned.
        like: images [*, C, H, W] with the shape that the noise images should have.
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
        torch.default_generator.manual_seed(0)  # for networks that draw random numbers in eval mode, too
        try:
            twin = copy.deepcopy(network).cpu().double().eval()
            try:
                parts = [split(twin).features(noise), twin(noise)]
            except (ValueError, TypeError):  # no features/classifier split
                parts = [twin(noise)]
            values = torch.cat([part.flatten() for part in parts]).tolist()
        except Exception:  # `check_network` reports what is wrong with a network
            return None
    return tensor_fingerprint([" ".join(f"{value:.5e}" for value in values)])
