"""The handshake: each node's description of itself, from which the server checks that the nodes fit together.

No image and no count of images is sent. The fingerprint of the data is made with a key that stays on the node: with a
plain hash the server could test guesses of the node's data.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import distillkit
from distillkit.sets import LabeledImages
from fl._codec import Parts, from_parts, to_parts
from fl._components import identity
from fl.engine._clients import ClientRegistry
from fl.engine._validation import require_public
from fl.message import Entry, Message
from fl.method import Method
from fl.task import LabelTask

__all__ = ["IncompatibleNode", "NodeInfo", "describe_node", "identity_of", "read_partition"]


class IncompatibleNode(ValueError):
    """A node that cannot take part in the run; the message names the node and the difference."""


class _Space:
    images = Entry[LabeledImages]("first")


def identity_of(value: Method | LabelTask | None) -> str:
    """Return a description of a method or task that is equal in every process: without addresses of functions.

    Equal descriptions do not imply equal code. Node owners must verify the code that their nodes run.
    """
    text = "" if value is None else identity(value) if isinstance(value, Method) else repr(value)
    return re.sub(" at 0x[0-9a-f]+", "", text)


def read_partition(config: Mapping[str, object]) -> tuple[int, int]:
    """Return a node's partition and the number of partitions.

    Args:
        config: Flower's `context.node_config`.

    Raises:
        ValueError: they are missing or invalid.
    """
    found = [config.get(name) for name in ("partition-id", "num-partitions")]
    number, count = (int(v) if isinstance(v, int | str) and str(v).isdecimal() else -1 for v in found)
    if not 0 <= number < count:
        raise ValueError(
            f"the node has partition-id={found[0]!r} and num-partitions={found[1]!r}; expected a number from 0 on, and "
            "the number of partitions: start it with flower-supernode --node-config 'partition-id=0 num-partitions=2'"
        )
    return number, count


@dataclass(frozen=True)
class NodeInfo:
    """A node's description of itself.

    Attributes:
        partition: its number, which is the client's number.
        partitions: number of partitions that it knows of.
        method, task: descriptions of its method and task (`identity_of`).
        fingerprint: fingerprint of its data, with its own key.
        ledger: name of its ledger in a private run.
        classes: its class names as JSON, or "".
        empty: whether it has no training images; always False in a private run.
        untested: whether it has no test images.
        version: its version of distillkit.
        space: an empty set with the shape, normalization and labels of its images.
        node: Flower's number of the node; not sent, but known from the reply.
    """

    partition: int
    partitions: int
    method: str
    task: str
    fingerprint: str
    ledger: str
    classes: str
    empty: bool
    untested: bool
    version: str
    space: LabeledImages
    node: int = 0

    def parts(self) -> Parts:
        """Return the parts of the message, see `fl._codec.to_parts`."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("space", "node")}
        return to_parts(Message({_Space.images: self.space}), {"hello": json.dumps(values)})

    @classmethod
    def read(cls, parts: Parts, node: int) -> NodeInfo:
        """Read an untrusted reply to the handshake.

        Args:
            parts: parts of the reply.
            node: its sender.

        Raises:
            ValueError: the reply is malformed, or the node refuses with a reason.
        """
        message, facts = from_parts(*parts)
        if "refused" in facts:
            raise ValueError(facts["refused"])
        try:
            found = cls(**json.loads(facts["hello"]), space=message[_Space.images], node=node)
            types = {f.name: type(getattr(found, f.name)).__name__ for f in fields(cls)}
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"invalid reply to the handshake: {type(error).__name__}: {error}") from error
        wrong = [name for name, kind in types.items() if kind != _TYPES[name]]
        if wrong or len(found.space):
            raise ValueError(
                f"invalid reply to the handshake: {wrong[0] if wrong else 'space'} has a wrong type or size"
            )
        read_partition({"partition-id": found.partition, "num-partitions": found.partitions})
        return found


_TYPES = {f.name: str(f.type) for f in fields(NodeInfo)}


def describe_node(
    number: int,
    count: int,
    method: Method,
    task: LabelTask | None,
    clients: ClientRegistry,
    fingerprint: str,
    ledger: str,
    names: Sequence[str] = (),
) -> NodeInfo:
    """Return a node's description of itself.

    Args:
        number, count: its partition, and the number of partitions.
        method, task: its method and task.
        clients: its data, as a registry of one client.
        fingerprint: fingerprint of its data, with its own key.
        ledger: name of its ledger.
        names: its class names, if known.

    Raises:
        PrivacyError: the method is private, and the description would be measured on the data, see `require_public`.
    """
    data = clients[0]
    require_public(method, clients.first, task)
    empty = not method.private and not len(data.train)
    return NodeInfo(
        number, count, identity_of(method), identity_of(task), fingerprint, ledger if method.private else "",
        json.dumps(list(names)) if names else "", empty, data.test is None, distillkit.__version__, clients.first,
    )  # fmt: skip
