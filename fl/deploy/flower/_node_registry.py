"""The server's registry of nodes, which finds new nodes and checks that they match the server and each other."""

from __future__ import annotations

import itertools
import json
import time

import distillkit
from distillkit._utils.user_warnings import warn
from distillkit.fingerprint import tensor_fingerprint
from distillkit.sets import LabeledImages
from fl._codec import to_parts
from fl.deploy.flower._handshake import IncompatibleNode, NodeInfo, identity_of
from fl.deploy.flower._messages import GridConnection, app_failed, loss_reason
from fl.engine._clients import extend_classes, require_like
from fl.message import Message
from fl.method import Method, NoUsableReply
from fl.task import LabelTask

_CLOCK_TOLERANCE = 5.0
"""Seconds by which a node's clock may differ from the server's without a warning."""


class NodeRegistry:
    """Registry of the nodes in a run, each of which runs one client.

    Args:
        method: the server's method, which all nodes must have.
        task: the server's label task, such as `Classification`, which all nodes must have; None for the default task.

    Attributes:
        nodes: description of each client's node, by client index.
    """

    def __init__(self, method: Method, task: LabelTask | None) -> None:
        self._expected = {"method": identity_of(method), "task": identity_of(task), "version": distillkit.__version__}
        self.nodes: dict[int, NodeInfo] = {}
        self._contacted: set[int] = set()
        self._unreachable: dict[int, str] = {}

    def wait_for_all(self, connection: GridConnection, clients: int | None, seconds: float) -> None:
        """Wait until every client's node is registered."""
        end, pause = time.monotonic() + seconds, connection.poll_interval
        while True:
            errors = self.discover(connection, max(end - time.monotonic(), 1.0))
            if errors:
                raise errors[0]
            count = next(iter(self.nodes.values())).partitions if self.nodes else None
            if count is not None and clients is not None and count != clients:
                raise IncompatibleNode(f"clients={clients}, but the nodes have num-partitions={count}: make them equal")
            missing = sorted(set(range(count or clients or 1)) - set(self.nodes))
            if count is not None and not missing:
                return
            if time.monotonic() > end:
                reasons = "".join(f"; node {node}: {why}" for node, why in list(self._unreachable.items())[:3])
                raise NoUsableReply(
                    f"the nodes of partitions {missing[:10]} did not connect in {seconds:g} seconds (connected: "
                    f"{sorted(self.nodes)[:10]}{reasons}): start them, or increase connect_timeout"
                )
            time.sleep(pause)
            pause = min(2 * pause, 5.0)

    def discover(self, connection: GridConnection, seconds: float) -> list[IncompatibleNode]:
        """Ask new nodes for their descriptions, and register the compatible nodes.

        A compatible node has the same method, task and version of distillkit as the server. Its number of partitions
        and its class names are the same as those of the other nodes; see `register`.
        """
        new = sorted(set(connection.grid.get_node_ids()) - self._contacted)
        if not new:
            return []
        messages = {node: (node, to_parts(Message(), {})) for node in new}
        sent = time.time()
        waiting = set(new) - set(connection.send("query.node", messages, "handshake", seconds))
        found: list[NodeInfo] = []
        errors: list[IncompatibleNode] = []
        while waiting:
            for node, message in connection.collect():
                waiting.discard(node)
                if app_failed(message):
                    self._contacted.add(node)
                    errors.append(
                        IncompatibleNode(
                            f"node {node} cannot take part: its client app failed in the handshake, so it was not made "
                            "with client_app or reply_to of fl.deploy.flower, or cannot be loaded (see its log). "
                            + loss_reason(message, seconds).removeprefix("lost: ")
                        )
                    )
                    continue
                if message is None or message.has_error():
                    self._unreachable[node] = loss_reason(message, seconds)
                    continue
                self._contacted.add(node)
                self._unreachable.pop(node, None)
                try:
                    found.append(NodeInfo.read(connection.read(message), node))
                    _warn_of_clock(found[-1], sent, time.time())
                except ValueError as error:
                    errors.append(IncompatibleNode(f"node {node} cannot take part: {error}"))
        found.sort(key=lambda info: (info.partition, info.node))
        for one, other in itertools.pairwise(found):
            if one.partition == other.partition:
                both = f"nodes {one.node} and {other.node} both have partition {one.partition}"
                errors.append(IncompatibleNode(f"{both}: give each node its own partition-id"))
        for info in found:
            try:
                self.register(info)
            except IncompatibleNode as error:
                errors.append(error)
        return errors

    def register(self, info: NodeInfo) -> None:
        """Add a node to the registry, after checking its description.

        The description of a node that was restarted replaces its earlier description.
        """
        name = f"node {info.node} (partition {info.partition})"
        for field, expected in self._expected.items():
            found = getattr(info, field)
            if found != expected:
                raise IncompatibleNode(
                    f"{name} has another {field} than the server: {found or 'none'!r}, not {expected!r}"
                )
        for other in self.nodes.values():
            if other.partitions != info.partitions:
                raise IncompatibleNode(
                    f"{name} has {info.partitions} partitions, partition {other.partition} has {other.partitions}: "
                    "start all nodes with the same num-partitions"
                )
            if other.classes and info.classes and other.classes != info.classes:
                raise IncompatibleNode(
                    f"{name} has the classes {info.classes}, partition {other.partition} has {other.classes}: labels "
                    "must mean the same on all nodes; number the classes alike in load_client, and return a "
                    "LabeledImages"
                )
        before = self.nodes.get(info.partition)
        if before is not None and before.fingerprint != info.fingerprint:
            raise IncompatibleNode(
                f"{name} has other data, or another key, than node {before.node}, which had that partition before: "
                "give each node its own partition-id, and leave its data and its folder unchanged"
            )
        self.nodes[info.partition] = info

    def common_space(self, task: LabelTask | None) -> LabeledImages:
        """Check that all nodes have compatible images, and return an empty set with their shape and normalization.

        The number of classes is that of the task, or the one that a node's user gave, or else the largest number that a
        node inferred from its labels.
        """
        own = {n: self.nodes[n].space for n in sorted(self.nodes)}
        stated = [space.num_classes for space in own.values() if space.classes_given]
        stated = stated if task is None else [task.num_classes]
        classes = stated[0] if stated else max(space.num_classes for space in own.values())
        spaces = {n: extend_classes(space, classes, bool(stated)) for n, space in own.items()}
        first = spaces[min(spaces)]
        for number, space in spaces.items():
            try:
                require_like(first, space, f"node {self.nodes[number].node} (partition {number})")
            except ValueError as error:
                raise IncompatibleNode(str(error).replace("clients[0]", f"partition {min(spaces)}")) from error
        return first

    def fingerprint(self, key: bytes) -> str:
        """Return a fingerprint of the data of all nodes, made with the server's secret key `key`."""
        rows = [[n, self.nodes[n].fingerprint] for n in sorted(self.nodes)]
        return tensor_fingerprint([json.dumps(rows)], key=key)


def _warn_of_clock(info: NodeInfo, sent: float, received: float) -> None:
    """Warn if a node's clock differs from the server's clock."""
    ahead = max(info.clock - received, 0.0) - max(sent - info.clock, 0.0)
    if abs(ahead) > _CLOCK_TOLERANCE:
        warn(
            f"the clock of node {info.node} (partition {info.partition}) is at least {abs(ahead):.0f} seconds "
            f"{'ahead of' if ahead > 0 else 'behind'} the server's, so its clients are stopped that much too "
            f"{'early' if ahead > 0 else 'late'}: set both clocks by NTP"
        )
