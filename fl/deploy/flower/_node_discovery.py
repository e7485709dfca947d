"""Which nodes are there: every one is asked once who it is, at the start or when it comes."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, field

from fl._codec import to_parts
from fl.deploy.flower._handshake import Hello, Misfit, Roll
from fl.deploy.flower._messages_in_flight import Mail, unanswered
from fl.message import Message
from fl.method import NoUsableReply

__all__ = ["Met", "call_roll", "gather"]


@dataclass
class Met:
    """Flower's nodes as the server has met them.

    Attributes:
        nodes: those that have said who they are.
        silent: why the others have not, by node.
    """

    nodes: set[int] = field(default_factory=set)
    silent: dict[int, str] = field(default_factory=dict)


def call_roll(mail: Mail, roll: Roll, met: Met, seconds: float) -> list[Misfit]:
    """Ask every node that has not been met who it is, and take those that fit into the roll.

    Args:
        mail: to the nodes.
        roll: the nodes by client.
        met: the nodes that have answered, which grow.
        seconds: for which an answer is waited for; a node without one is asked again the next time.

    Returns:
        Why the others do not fit, each named.
    """
    new = sorted(set(mail.grid.get_node_ids()) - met.nodes)
    if not new:
        return []
    asked = {node: (node, to_parts(Message(), {"hello": "who are you"})) for node in new}
    left = set(new) - set(mail.send("query.hello", asked, "hello", seconds))
    heard: list[Hello] = []
    wrong: list[Misfit] = []
    while left:
        for node, message in mail.collect():
            left.discard(node)
            if message is None or message.has_error():
                met.silent[node] = unanswered(message, seconds)
                continue
            met.nodes.add(node)
            met.silent.pop(node, None)
            try:
                heard.append(Hello.of(mail.read(message), node))
            except ValueError as error:
                wrong.append(Misfit(f"node {node} cannot take part: {error}"))
    heard.sort(key=lambda hello: (hello.partition, hello.node))
    for hello, other in itertools.pairwise(heard):
        if hello.partition == other.partition:
            wrong.append(
                Misfit(
                    f"nodes {hello.node} and {other.node} both say that they are partition {hello.partition}: give "
                    "each node a partition-id of its own"
                )
            )
    for hello in heard:
        try:
            roll.welcome(hello)
        except Misfit as error:
            wrong.append(error)
    return wrong


def gather(mail: Mail, roll: Roll, met: Met, clients: int | None, wait: float) -> None:
    """Wait until every client's node has said who it is.

    Args:
        mail, roll, met: see `call_roll`.
        clients: how many there are; None: as many as the nodes themselves say.
        wait: seconds.

    Raises:
        Misfit: a node does not fit, or the nodes say that there are more or fewer clients.
        NoUsableReply: some have not come in time.
    """
    end, pause = time.monotonic() + wait, mail.poll
    while True:
        wrong = call_roll(mail, roll, met, max(end - time.monotonic(), 1.0))
        if wrong:
            raise wrong[0]
        there = next(iter(roll.guests.values())).partitions if roll.guests else None
        if there is not None and clients is not None and there != clients:
            raise Misfit(f"clients={clients} are wanted, and the nodes know of {there}: start them with num-partitions")
        missing = sorted(set(range(there or clients or 1)) - set(roll.guests))
        if there is not None and not missing:
            return
        if time.monotonic() > end:
            silent = "".join(f"; node {node}: {why}" for node, why in list(met.silent.items())[:3])
            raise NoUsableReply(
                f"the nodes of partitions {missing[:10]} have not come in {wait:g} seconds (here are "
                f"{sorted(roll.guests)[:10]}{silent}): start them, or wait longer"
            )
        time.sleep(pause)
        pause = min(2 * pause, 5.0)
