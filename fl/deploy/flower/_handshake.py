"""The first word of every node: which client it is, and whether what it holds and runs fits the others.

No image travels, and no count of images. The fingerprint of the data is made with a key that stays on the node: with a
plain hash the server could try whether a set that it guesses is the node's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import distillkit
from distillkit.fingerprint import tensor_fingerprint
from distillkit.sets import LabeledImages
from fl._codec import Parts, from_parts, to_parts
from fl._components import identity
from fl.engine._clients import ClientRegistry, grown, require_like
from fl.engine._validation import require_public
from fl.message import Entry, Message
from fl.method import Method
from fl.task import LabelTask

__all__ = ["Hello", "Misfit", "Roll", "identity_of", "require_partition", "said_of"]


class Misfit(ValueError):
    """A node cannot take part in the run: what differs is named, and which node it is."""


class _Space:
    images = Entry[LabeledImages]("first")


def identity_of(value: Method | LabelTask | None) -> str:
    """The `value`, a method or task, in words that are the same in every process: without addresses of functions.

    Two that say the same may differ in code: what a node runs is its owner's to pin.
    """
    said = "" if value is None else identity(value) if isinstance(value, Method) else repr(value)
    return re.sub(" at 0x[0-9a-f]+", "", said)


def require_partition(config: Mapping[str, object]) -> tuple[int, int]:
    """Which client a node is, and how many there are, from what its owner started it with.

    Args:
        config: Flower's `context.node_config`.

    Raises:
        ValueError: it does not say, or says what cannot be.
    """
    found = [config.get(name) for name in ("partition-id", "num-partitions")]
    number, count = (int(v) if isinstance(v, int | str) and str(v).isdecimal() else -1 for v in found)
    if not 0 <= number < count:
        raise ValueError(
            f"the node says partition-id={found[0]!r} and num-partitions={found[1]!r}, and want a number from 0 on and "
            "how many there are: start it with flower-supernode --node-config 'partition-id=0 num-partitions=2'"
        )
    return number, count


@dataclass(frozen=True)
class Hello:
    """What a node says of itself.

    Attributes:
        partition: the client that it is.
        partitions: how many there are, as far as it knows.
        method, task: what it runs, in words (`identity_of`).
        fingerprint: of its data, with its own key.
        ledger: the name of its ledger, in a private run.
        classes: the names of its classes as JSON, "" if it was not told any.
        empty: whether it holds no training images; in a private run nobody says so.
        untested: whether it holds no test images.
        version: of distillkit there.
        space: none of its images, in their space.
        node: Flower's number of it; it is not said, but known from the answer.
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
        """What travels, as `fl._codec.to_parts` gives it."""
        said = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("space", "node")}
        return to_parts(Message({_Space.images: self.space}), {"hello": json.dumps(said)})

    @classmethod
    def of(cls, parts: Parts, node: int) -> Hello:
        """Read back what `parts` gave.

        Args:
            parts: what came; it may be anything.
            node: who sent it.

        Raises:
            ValueError: no hello, or the node says why it has none.
        """
        message, facts = from_parts(*parts)
        if "refused" in facts:
            raise ValueError(facts["refused"])
        try:
            said = json.loads(facts["hello"])
            found = cls(**said, space=message[_Space.images], node=node)
            kinds = {f.name: type(getattr(found, f.name)).__name__ for f in fields(cls)}
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"not a hello: {type(error).__name__}: {error}") from error
        wrong = [name for name, kind in kinds.items() if kind != _KINDS[name]]
        if wrong or len(found.space):
            raise ValueError(f"not a hello: its {wrong[0] if wrong else 'space'} is not as it should be")
        require_partition({"partition-id": found.partition, "num-partitions": found.partitions})
        return found


_KINDS = {f.name: str(f.type) for f in fields(Hello)}


def said_of(
    number: int,
    count: int,
    method: Method,
    task: LabelTask | None,
    roster: ClientRegistry,
    fingerprint: str,
    ledger: str,
    names: Sequence[str] = (),
) -> Hello:
    """What a node says of itself.

    Args:
        number, count: which client it is, of how many.
        method, task: what it was given.
        roster: its data, as the only client of a roster.
        fingerprint: of its data, with its own key.
        ledger: the name of its ledger.
        names: of its classes, if it was told any.

    Raises:
        PrivacyError: the method is private, and what is said would be measured on the data (see `door.require_public`).
    """
    held = roster[0]
    require_public(method, roster.first, task)
    empty = not method.private and not len(held.train)
    return Hello(
        number, count, identity_of(method), identity_of(task), fingerprint, ledger if method.private else "",
        json.dumps(list(names)) if names else "", empty, held.test is None, distillkit.__version__, roster.first,
    )  # fmt: skip


class Roll:
    """The nodes of a run, by the client that each is; the server's list of them.

    Args:
        method, task: what the server runs.
    """

    def __init__(self, method: Method, task: LabelTask | None) -> None:
        self._wanted = {"method": identity_of(method), "task": identity_of(task), "version": distillkit.__version__}
        self.guests: dict[int, Hello] = {}

    def welcome(self, hello: Hello) -> None:
        """Take a node in that has said `hello`; one that comes back after a restart takes its place again.

        Raises:
            Misfit: it runs something else than the server, or holds another client's place or other data than before.
        """
        who = f"node {hello.node} (partition {hello.partition})"
        for name, wanted in self._wanted.items():
            found = getattr(hello, name)
            if found != wanted:
                raise Misfit(f"{who} has another {name} than the server: {found or 'none'!r}, and not {wanted!r}")
        for other in self.guests.values():
            if other.partitions != hello.partitions:
                raise Misfit(
                    f"{who} knows of {hello.partitions} partitions, partition {other.partition} of {other.partitions}: "
                    "start all nodes with one num-partitions"
                )
            if other.classes and hello.classes and other.classes != hello.classes:
                raise Misfit(
                    f"{who} has the classes {hello.classes}, partition {other.partition} {other.classes}: a label must "
                    "mean one thing on all nodes; let load_client number the classes alike, and return a LabeledImages"
                )
        before = self.guests.get(hello.partition)
        if before is not None and before.fingerprint != hello.fingerprint:
            raise Misfit(
                f"{who} holds other data, or another key, than node {before.node}, which was that partition before: "
                "give each node a partition-id of its own, and leave its data and its folder as they are"
            )
        self.guests[hello.partition] = hello

    @property
    def classes(self) -> int:
        """How many classes there are: what a node says that knows, or the most that any has seen."""
        spaces = [self.guests[n].space for n in sorted(self.guests)]
        said = [space.num_classes for space in spaces if space.classes_given]
        return said[0] if said else max(space.num_classes for space in spaces)

    def first(self, task: LabelTask | None) -> LabeledImages:
        """The space of client 0, which all others share.

        Args:
            task: of the run, if one was given.

        Raises:
            Misfit: another node's images are of another shape, normalisation, class count, dtype or kind of labels.
        """
        classes = task.num_classes if task is not None else self.classes
        given = task is not None or any(hello.space.classes_given for hello in self.guests.values())
        spaces = {n: grown(self.guests[n].space, classes, given) for n in sorted(self.guests)}
        first = spaces[min(spaces)]
        for number, space in spaces.items():
            name = f"node {self.guests[number].node} (partition {number})"
            try:
                require_like(first, space, name)
            except ValueError as error:
                raise Misfit(str(error).replace("clients[0]", f"partition {min(spaces)}")) from error
        return first

    def fingerprint(self, key: bytes) -> str:
        """A fingerprint of all nodes' data under a `key`, made of theirs."""
        said = [[n, self.guests[n].fingerprint, self.guests[n].untested] for n in sorted(self.guests)]
        return tensor_fingerprint([json.dumps(said)], key=key)
