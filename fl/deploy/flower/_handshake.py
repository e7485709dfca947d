"""The handshake before round 1, in which each node sends a description of itself to the server.

The server checks with these descriptions that all nodes are compatible. They contain neither the images nor the number
of images. They contain a fingerprint of the data, which is made with a secret key of the node. With a plain hash, the
server could test guesses about the data.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields

from distillkit.sets import LabeledImages
from fl._codec import Parts, from_parts, to_parts
from fl._components import without_addresses
from fl.deploy._fields import MAX_CLIENTS, read_fields
from fl.message import Entry, Message
from fl.method import Method
from fl.task import LabelTask


class IncompatibleNode(ValueError):
    """Error: a node does not match the server or the other nodes. The message names the node and the difference."""


class _Space:
    images = Entry[LabeledImages]("first")


def identity_of(value: Method | LabelTask | None) -> str:
    """Return a text that describes a method or task and its options, without memory addresses.

    Equal objects have equal descriptions in every process. Equal descriptions do not imply equal code: node owners must
    verify the code that their nodes run.
    """
    return "" if value is None else without_addresses(value)


def read_partition(config: Mapping[str, object]) -> tuple[int, int]:
    """Return the index of a node's partition (its client), and the number of partitions."""
    found = [config.get(name) for name in ("partition-id", "num-partitions")]
    number, count = (int(v) if isinstance(v, int | str) and str(v).isdecimal() else -1 for v in found)
    if not 0 <= number < count <= MAX_CLIENTS:
        raise ValueError(
            f"the node has partition-id={found[0]!r:.40} and num-partitions={found[1]!r:.40}; expected a number from 0 "
            f"on, and the number of partitions, at most {MAX_CLIENTS}: start it with flower-supernode --node-config "
            "'partition-id=0 num-partitions=2'"
        )
    return number, count


@dataclass(frozen=True)
class NodeInfo:
    """Description of a node, which the node sends to the server before round 1.

    Attributes:
        partition: index of the node's partition, which is the index of its client.
        partitions: number of partitions in the node's config.
        method: description of the node's method (`identity_of`).
        task: description of the node's label task (`identity_of`).
        fingerprint: fingerprint of the node's data, made with the node's secret key.
        ledger: name of the node's privacy ledger; "" if the method is not private.
        classes: class names as JSON, or "" if unknown.
        version: version of distillkit on the node.
        clock: time of the node's clock when it replied, in seconds since 1970.
        space: set without images, with the shape and normalization of the node's images and the form of their labels
            (class indices, or rows with one value per class).
        node: Flower's id of the node. It is not part of the reply's contents, because Flower supplies it.
    """

    partition: int
    partitions: int
    method: str
    task: str
    fingerprint: str
    ledger: str
    classes: str
    version: str
    clock: float
    space: LabeledImages
    node: int = 0

    def parts(self) -> Parts:
        """Encode the description as the parts of a message."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("space", "node")}
        return to_parts(Message({_Space.images: self.space}), {"node": json.dumps(values)})

    @classmethod
    def read(cls, parts: Parts, node: int) -> NodeInfo:
        """Decode a node's untrusted description."""
        message, metadata = from_parts(*parts)
        if "refused" in metadata:
            raise ValueError(metadata["refused"][:500])
        try:
            found = cls(**read_fields("node", metadata.get("node", "")), space=message[_Space.images], node=node)
        except (KeyError, ValueError) as error:
            raise ValueError(f"invalid reply to the handshake: {error}") from error
        if not isinstance(found.space, LabeledImages) or len(found.space):
            raise ValueError("invalid reply to the handshake: its space must be a set without images")
        read_partition({"partition-id": found.partition, "num-partitions": found.partitions})
        return found
