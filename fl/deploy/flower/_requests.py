"""Packing of one or two requests to a client into one message. Tensors that are equal in both are sent once."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fl._codec import Parts, entry_key
from fl.deploy._wire import Job, job_parts
from fl.engine._transport import ClientResult
from fl.message import payload_bytes

__all__ = ["PendingRequest", "ResultCallback", "bundle", "pack_requests", "unbundle", "unpack_replies"]

ResultCallback = Callable[[ClientResult], None]

_COMMON = "common"
_PREFIXES = ("0:", "1:")
"""Prefixes of the names of tensors and strings in a bundle: one for the first message, and one for the second."""


@dataclass(frozen=True)
class PendingRequest:
    """Request to a client whose reply has not arrived yet.

    Attributes:
        job: content of the request.
        on_result: function that is called with the result; None if the result is yielded by `GridTransport.exchange`.
        resent: None for a first request. For a repeated request, number of bytes of the values that the first request
            omitted. The server had assumed that the client has these values in its cache.
        bytes_spared: for the first of two requests in a message, number of bytes that are saved because tensors that
            both requests contain are sent only once. Cached message entries are not counted.
    """

    job: Job
    on_result: ResultCallback | None
    resent: int | None = None
    bytes_spared: int = 0

    def retry(self) -> PendingRequest:
        """Return a copy of this request, to send it again with all values, because the client's cache lacks some.

        The first time, values that the client should have in its cache were omitted. The attribute `resent` of the copy
        is the number of bytes of these values.
        """
        request = self.job.request
        missing = [size for key, size in payload_bytes(request.message).items() if key.split(":")[0] in request.cached]
        return replace(self, resent=sum(missing))


def pack_requests(
    requests: Sequence[PendingRequest], metadata: Mapping[str, str], *, include_cached: bool = False
) -> tuple[list[PendingRequest], Parts]:
    """Pack one or two requests into one message.

    Args:
        requests: one or two requests to the same client.
        metadata: additional strings to send with each request, by name.
        include_cached: whether to send the values of all message entries, including those that the client has in its
            cache.

    Returns:
        The requests, and the parts (tensors and strings by name) of the message. If there are two requests, the
        attribute `bytes_spared` of the first request is set to the number of bytes that are saved by sending equal
        tensors only once.
    """
    parts, *rest = [job_parts(one.job, metadata, include_cached=include_cached) for one in requests]
    if not rest:
        return list(requests), parts
    tensors, cached = parts[0], requests[0].job.request.digests
    parts, common = bundle(parts, rest[0])
    size = sum(tensors[name].nbytes for name in common if entry_key(name) not in cached)
    return [replace(requests[0], bytes_spared=size), requests[1]], parts


def unpack_replies(requests: Sequence[PendingRequest], parts: Parts) -> list[Parts]:
    """Return the parts of the reply to each request in a message.

    If two requests have one common reply, such as a refusal, it is returned twice.

    Args:
        requests: one or two requests that were sent in one message.
        parts: parts of the received message.

    Raises:
        ValueError: there are more replies than requests, or a message with two replies is malformed.
    """
    found = unbundle(parts)
    if len(found) == 1:
        return found * len(requests)
    if len(found) != len(requests):
        raise ValueError("it sent two replies to one request")
    return found


def bundle(first: Parts, second: Parts) -> tuple[Parts, list[str]]:
    """Join two messages into one, called a bundle, in which tensors that are equal in both are stored once.

    Args:
        first: parts of the first message: tensors and strings by name, see `fl._codec.to_parts`.
        second: parts of the second message.

    Returns:
        A pair: the parts of the bundle; and the names of the tensors that are bitwise equal in both messages.
    """
    common = [name for name, tensor in second[0].items() if name in first[0] and _same(tensor, first[0][name])]
    rest = {name: tensor for name, tensor in second[0].items() if name not in common}
    tensors = {p + n: t for p, found in zip(_PREFIXES, (first[0], rest), strict=True) for n, t in found.items()}
    strings = {p + n: s for p, (_, found) in zip(_PREFIXES, (first, second), strict=True) for n, s in found.items()}
    return (tensors, {**strings, _COMMON: json.dumps(common)}), common


def unbundle(parts: Parts) -> list[Parts]:
    """Split the parts of a received message into the parts of two messages if it is a bundle (see `bundle`).

    Otherwise, return its parts in a list of one item.

    Raises:
        ValueError: the bundle is malformed.
    """
    tensors, strings = parts
    if _COMMON not in strings:
        return [parts]
    first, second = (
        (
            {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)},
            {n.removeprefix(prefix): s for n, s in strings.items() if n.startswith(prefix)},
        )
        for prefix in _PREFIXES
    )
    try:
        second[0].update({name: first[0][name] for name in json.loads(strings[_COMMON])})
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"not a bundle of two messages: {type(error).__name__}: {error}") from error
    return [first, second]


def _same(one: Tensor, other: Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return not one.numel() or torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
