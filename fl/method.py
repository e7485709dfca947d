"""Base class of federated methods, whose functions exchange messages between the server and the clients.

A run calls a method's functions in this order:

1. `check_run` and `start`. 2. If the method has a query (`has_query`): `send`, `answer` at every client, and
`receive_answers`. 3. In every round: `draw`, unless the engine draws the clients. For each drawn client, `send` and
`local`, and `expect` and `read_reply` when the reply arrives. Once per round, `receive` and `predictors`. For each
tested client, `send` and `evaluate`.

A method may exchange more than one message per round, see `exchanges`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from distillkit.sets import LabeledImages
from fl._components import Component, KeyedObject, constructor_call, require_plain_options
from fl.aggregation import AggregatedReplies, EntrySpec, Schema
from fl.message import Entry, Message, declared_entries
from fl.networks import Networks
from fl.participants import Client, Server
from fl.task import LabelTask

__all__ = [
    "Method", "NoUsableReply", "Predictor", "evaluation_batch_size", "evaluation_spec", "require_method",
    "require_single_label",
]  # fmt: skip


class NoUsableReply(RuntimeError):
    """Error: a round's replies are too few, or all their weights are zero.

    The error ends the run with the state after the previous round. `Method.receive` may raise it, but only before it
    changes the state.
    """


@dataclass(frozen=True)
class Predictor:
    """Model that can be tested and saved, as `Method.predictors` returns it.

    Attributes:
        network: network in eval mode, with the weights to test.
        outputs: number of leading outputs to use, for networks that have outputs for add-on classes after the outputs
            of the task's classes. None means all outputs.
    """

    network: nn.Module
    outputs: int | None = None

    @torch.no_grad()
    def sums(self, data: LabeledImages, task: LabelTask, chunk: int | None = None) -> torch.Tensor:
        """Test the model on a set and return the task's sums over all images, float64 [3 + 3K], see `LabelTask.sums`.

        Args:
            data: test images, on the network's device.
            task: meaning of the labels.
            chunk: images per forward pass. Default: `evaluation_batch_size`.
        """
        chunk = evaluation_batch_size(data.shape, data.images.device) if chunk is None else chunk
        total = torch.zeros(3 + 3 * task.num_classes, dtype=torch.float64)
        for start in range(0, len(data), chunk):
            logits = self.network(data.images[start : start + chunk])[:, : self.outputs]
            total += task.sums(logits, data.labels[start : start + chunk])
        return total


def evaluation_batch_size(shape: Sequence[int], device: torch.device) -> int:
    """Return the number of test images per forward pass: 256, or fewer if the images are large.

    The memory of a forward pass grows with the number of pixels. On a CPU, the limit is the number of pixels in 256
    images of 32x32 pixels; on an accelerator, it is sixteen times as large.

    Args:
        shape: (C, H, W) of an image.
        device: device that holds the images.
    """
    pixels = (1 << 18) if device.type == "cpu" else (1 << 22)
    fitting: int = max(1, min(256, pixels // (shape[1] * shape[2])))
    return 1 << (fitting.bit_length() - 1)


def evaluation_spec(task: LabelTask, *names: str) -> EntrySpec:
    """Return the specification of a client's test results, for the schema that `expect_evaluation` returns.

    Args:
        task: task with the number of classes.
        names: names of the tested models: "global", "personal", or others.
    """
    sums = {name: torch.zeros(3 + 3 * task.num_classes, dtype=torch.float64) for name in names}
    return EntrySpec.finite(sums)  # the loss of a diverged model has no bound


class Method(KeyedObject, ABC):
    """Base class of federated methods. For an extension of weight averaging, write an `fl.AddOn` instead.

    Method objects are immutable and exist on the server and on every client. Changing values are kept in `server.state`
    and `client.memory`. A subclass declares its entries as class attributes and implements `start`, `send`, `local`,
    `receive`, and `expect`, which describes a reply. A subclass that overrides `answer` or `evaluate` also overrides
    `expect_answer` or `expect_evaluation`. These schemas are closed: a reply that does not match is left out, and the
    history names its client.
    """

    networks: Networks

    @property
    def inner(self) -> Method:
        """The method itself, without the filters around it."""
        return self

    @property
    def private(self) -> bool:
        """Whether noise is added to all releases and a ledger is charged for them.

        A run of a private method has a ledger. Clients without images get requests like all others, because it is
        private whether a client has images. By default, models are not evaluated on the clients' own test images.
        """
        return False

    @property
    def sealed(self) -> bool:
        """Whether the server learns only sums over clients, and never a single client's reply.

        For a sealed method, models are not evaluated on the clients' own test images by default, because the results
        would be exact values of single clients.
        """
        return False

    @property
    def draws_clients(self) -> bool:
        """Whether the method draws the clients of a round (`draw`) instead of the engine."""
        return type(self).draw is not Method.draw

    def draw(self, server: Server) -> list[int]:
        """Return the clients of this round, if the method's privacy depends on the draw. Default: the engine draws.

        Draw from `server.secret`. The history does not record the result, which stays secret. Return client indices in
        ascending order; the list may be empty.
        """
        raise LookupError(f"{type(self).__name__} leaves the draw to the engine")

    @property
    def parts(self) -> tuple[KeyedObject, ...]:
        """The objects that declare entries: the method itself and its components."""
        return (self,)

    def entries(self) -> list[Entry[Any]]:
        """Return every entry that may be sent or kept; the engine calls this once, before the run."""
        return [entry for part in self.parts for entry in declared_entries(part)]

    def architectures(self, classes: int) -> Mapping[str, nn.Module]:
        """Return the networks for `classes` classes, by name. A resumed run compares their architectures.

        The engine does not change the networks, and their weights may be arbitrary. Default: the architectures of
        `self.networks`, if the method has this attribute.
        """
        return self.networks.templates(classes) if hasattr(self, "networks") else {}

    def assigned(self, clients: int) -> Sequence[str]:
        """Return each client's architecture for the run's record; a resumed run must have the same.

        Args:
            clients: number of clients.

        Returns:
            A name for each client; empty if all have the same architecture. Default: as `self.networks` assigns them.
        """
        return self.networks.assigned(clients) if hasattr(self, "networks") else ()

    def check_run(self, server: Server, rounds: int) -> None:
        """Raise ValueError if the method cannot run on the clients' data. Warn about parts unused in `rounds` rounds.

        The engine calls this function before `start` and before it resumes a run. The state of the `server` is still
        empty. Use the function to detect errors that would otherwise appear only in a late round.
        """

    def start(self, server: Server) -> None:
        """Put the values that `send` needs, such as initial weights, into `server.state`. A resumed run skips this."""

    @abstractmethod
    def send(self, server: Server, client: int) -> Message:
        """Return the message from the `server` to this `client`, which `answer`, `local` and `evaluate` receive.

        The function must be pure: the engine may call it any number of times, for any client.
        """

    @abstractmethod
    def expect(self, server: Server, client: int) -> Schema:
        """Return the schema of the reply to `send(server, client)`: an `EntrySpec` for each entry, by its key.

        The engine refuses entries without a specification.
        """

    @property
    def has_query(self) -> bool:
        """Whether the server queries every client that has images before round 1 (see `answer`). Default: no."""
        return False

    def answer(self, client: Client, message: Message) -> Message:
        """Return this client's answer to the query before round 1, such as its class counts; see `has_query`.

        The `message` comes from `send`. Changes to the client's memory are discarded.
        """
        return Message()

    def expect_answer(self, server: Server, client: int) -> Schema:
        """Return the schema of the `answer` to `send(server, client)`, as `expect` does for replies."""
        return {}

    def receive_answers(self, server: Server, replies: AggregatedReplies) -> None:
        """Store the values that later rounds need from the aggregated answers, `replies`, in `server.state`."""

    @abstractmethod
    def local(self, client: Client, message: Message) -> Message:
        """Run the client's part of a round, on the client: train, and reply with the result.

        The function reads only `client` and the `message` of `send`, and returns a reply that matches `expect`. If it
        raises an exception, the client is left out of the round and the history reports it. `BudgetExhausted` ends the
        run.
        """

    def read_reply(self, server: Server, reply: Message) -> Message:
        """Derive additional entries, such as FedDF's predictions, from one checked `reply` before it is aggregated.

        These entries are aggregated together with the entries of the reply. The function must not change `server`; if
        it raises, this reply is left out. Default: no additional entries.
        """
        return Message()

    @property
    def exchanges(self) -> tuple[str, ...]:
        """Names of the exchanges with drawn clients in a round, in order. Default: `local` alone.

        An additional exchange is a method with the signature of `local`. Clients take part in it if their replies to
        all earlier exchanges are usable (`server.present`). Its server side is `send_exchange`, `expect_exchange` and
        `receive_exchange`. Only `local` may change a client's memory.
        """
        return ("local",)

    def send_exchange(self, server: Server, verb: str, client: int) -> Message:
        """Return the message from the `server` to a `client` in the exchange `verb`. It must be pure, as `send` is."""
        return Message()

    def expect_exchange(self, server: Server, verb: str, client: int) -> Schema:
        """Return the schema of a `client`'s reply to the `server` in the exchange `verb`; see `expect`."""
        return {}

    def receive_exchange(self, server: Server, verb: str, replies: AggregatedReplies) -> Mapping[int, str]:
        """Update `server.state` with the replies of one exchange, before the next one begins.

        If the method has several exchanges, this function is called after each of them, including `local`, whose
        replies `receive` gets as well.

        Args:
            server: server whose state to update.
            verb: name of the exchange.
            replies: replies of the exchange, aggregated by their entries' rules; there may be none.

        Returns:
            A mapping from each client whose reply turns out to be unusable to the reason. These clients get no more
            requests in this round.

        Raises:
            NoUsableReply: too few clients are left to continue.
        """
        return {}

    def run_on_client(self, verb: str, client: Client, message: Message) -> Message:
        """Return the client's reply to a `message` in the exchange called `verb`, such as "local".

        Raises:
            LookupError: the method has no such exchange.
        """
        if verb not in ("answer", "evaluate", *self.exchanges):
            raise LookupError(f"{type(self).__name__} has no exchange {verb!r:.40}")
        return getattr(self, verb)(client, message)

    @abstractmethod
    def receive(self, server: Server, replies: AggregatedReplies) -> None:
        """Update `server.state` with the round's replies, aggregated by their entries' rules, once per round.

        The number of replies is at least `min_replies`, unless the method draws its clients itself; then there may be
        none.

        Raises:
            NoUsableReply: no update can be computed from the replies.
        """

    def evaluate(self, client: Client, message: Message) -> Message:
        """Test a client's models on `client.test` after the round. The `message` holds the new global model.

        The client's memory is read-only. Each result is a group that maps a model's name ("global", "personal") to
        `LabelTask.sums`. An empty reply means that there is no model to test.
        """
        return Message()

    def expect_evaluation(self, server: Server, client: int) -> Schema:
        """Return the schema of the results of `evaluate` after `send(server, client)`, see `evaluation_spec`."""
        return {}

    def predictors(self, server: Server) -> Mapping[str, Predictor]:
        """Return the global models in `server.state` for tests and saving: one (named ""), several by name, or none."""
        return {}


def require_single_label(name: str, task: LabelTask) -> None:
    """Refuse a multi-label `task`, for the method or add-on called `name`.

    Raises:
        ValueError: images of the task may have several classes.
    """
    if not task.single_label:
        raise ValueError(f"{name} needs one class an image, which {task!r} does not have: leave it out")


def require_method(method: object) -> Method:
    """Return `method` if it is a method.

    Raises:
        TypeError: `method` is a class, an add-on, a filter or another object; the message says what to write instead.
    """
    kind = method if isinstance(method, type) else type(method)
    if issubclass(kind, Component):
        part = constructor_call(method) if isinstance(method, Component) else f"{kind.__name__}(...)"
        raise TypeError(f"{kind.__name__} is part of a method and none by itself: give {kind.usage_example(part)}")
    if isinstance(method, type):
        raise TypeError(f"method must be an object, got the class {method.__name__}: {method.__name__}(...)")
    if not isinstance(method, Method):
        raise TypeError(f"method must be a federated method, as FedAvg(factory=...), got {type(method).__name__}")
    require_plain_options(method, Method)
    return method
