"""Base class of federated methods, whose functions exchange messages between the server and the clients.

A run calls a method's functions in this order:

1. Before round 1: `check_run`, then `start`.
2. If `has_query` is true: `send`, then `answer` on every client that has images, then `receive_answers`.
3. In every round: `draw`, if the method itself draws the round's clients. For each drawn client: `send` on the server,
   `local` on the client, then `expect` and `read_reply` on the server. After all clients, once: `receive` and
   `predictors`. For each client that tests models on its own images: `send` and `evaluate`.

A method can exchange several messages with each client in a round, see `Method.exchanges`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from distillkit._utils.options import CheckedOptions, PositiveInt
from distillkit.sets import LabeledImages
from fl._components import Component, KeyedObject, constructor_call, require_plain_options
from fl.aggregation import AggregatedReplies, EntrySpec, Schema
from fl.message import Entry, Message, declared_entries
from fl.networks import Networks
from fl.participants import Client, Server
from fl.task import LabelTask


class NoUsableReply(RuntimeError):
    """Error: the server has too few usable replies to compute an update, or all their weights are zero.

    The error ends the run; its result is the state after the previous round. `Method.receive` may raise the error
    before it changes the state, but not afterwards.
    """


@dataclass(frozen=True)
class Predictor(CheckedOptions):
    """Model to test and save. `Method.predictors` returns one for each global model.

    Attributes:
        network: network in eval mode, with the weights to test.
        outputs: number of outputs to use, counted from the first one. Set it if the network has more outputs than the
            task has classes, because an add-on adds classes. None: all outputs.
    """

    network: nn.Module
    outputs: PositiveInt | None = None

    @torch.no_grad()
    def sums(self, data: LabeledImages, task: LabelTask, chunk: int | None = None) -> torch.Tensor:
        """Test the model on a set, and return the counts and the summed loss from which metrics are computed.

        Args:
            data: test images, on the network's device.
            task: task to which the labels belong; it has K classes.
            chunk: images per forward pass. Default: the result of `evaluation_batch_size`.

        Returns:
            Sums over all images, float64 [3 + 3K], as `LabelTask.sums` defines them.
        """
        chunk = evaluation_batch_size(data.shape, data.images.device) if chunk is None else chunk
        total = torch.zeros(3 + 3 * task.num_classes, dtype=torch.float64, device=data.images.device)
        for start in range(0, len(data), chunk):
            logits = self.network(data.images[start : start + chunk])[:, : self.outputs]
            total += task.sums(logits, data.labels[start : start + chunk])
        return total.cpu()


def evaluation_batch_size(shape: Sequence[int], device: torch.device) -> int:
    """Return the number of test images per forward pass: 256, or fewer if the images are large.

    The memory of a forward pass grows with the number of pixels. On a CPU, the limit is the number of pixels in 256
    images of 32x32 pixels; on an accelerator, it is sixteen times as large.

    Args:
        shape: (C, H, W) of an image.
        device: device that holds the images.
    """
    _, height, width = shape
    pixels = (1 << 18) if device.type == "cpu" else (1 << 22)
    fitting: int = max(1, min(256, pixels // (height * width)))
    return 1 << (fitting.bit_length() - 1)


def evaluation_spec(task: LabelTask, *names: str) -> EntrySpec:
    """Return the specification of a message entry that holds a client's test results. Use it in
    `Method.expect_evaluation`.

    Args:
        task: task of the run. The results of a model are 3 + 3K sums for a task of K classes, see `LabelTask.sums`.
        names: names of the tested models: "global", "personal", or others.

    Raises:
        TypeError: `task` is no label task, or a name is not a string.
    """
    _require_task(task)
    if wrong := [name for name in names if not isinstance(name, str)]:
        raise TypeError(f"names must be strings, got {wrong[0]!r:.80}")
    sums = {name: torch.zeros(3 + 3 * task.num_classes, dtype=torch.float64) for name in names}
    return EntrySpec.finite(sums)  # the loss of a diverged model has no bound


class Method(KeyedObject, ABC):
    """Base class of federated methods. For an extension of weight averaging, write an `fl.AddOn` instead.

    Method objects are immutable and exist on the server and on every client. Values that change in a run are kept in
    `server.state` and `client.memory`. A subclass declares an `Entry` as class attribute for each value that it sends
    or keeps, and implements `start`, `send`, `local`, `receive`, and `expect`, which returns the schema of a reply. If
    it overrides `answer` (a client's answer to a query before round 1), it also overrides `expect_answer`. If it
    overrides `evaluate` (a client's test), it also overrides `expect_evaluation`. A reply that does not match its
    schema, or has an entry that the schema lacks, is not aggregated, and the history reports its client.
    """

    networks: Networks

    @property
    def inner(self) -> Method:
        """The method without the filters (`fl.filters`) that change its messages; without filters, this object."""
        return self

    @property
    def private(self) -> bool:
        """True if noise is added to all releases and a ledger is charged for them.

        A run of a private method has a ledger. Clients without images get requests like all other clients, because the
        server must not learn which clients have images. By default, models are not evaluated on the clients' own test
        images.
        """
        return False

    @property
    def sealed(self) -> bool:
        """True if the server learns only sums over clients, and never a single client's reply.

        For a sealed method, models are not evaluated on the clients' own test images by default, because the results
        would be exact values of single clients.
        """
        return False

    @property
    def draws_clients(self) -> bool:
        """True if the method overrides `draw`, and so draws the clients of each round itself."""
        return type(self).draw is not Method.draw

    def draw(self, server: Server) -> list[int]:
        """Return the clients that take part in this round. By default, the engine draws the clients.

        Override this function if the method's privacy guarantee depends on the random draw.

        An override draws with the random numbers of `server.secret`, and returns client indices in ascending order; the
        list may be empty. The result is not recorded in the history, because it must stay secret.
        """
        raise LookupError(f"{type(self).__name__} leaves the draw to the engine")

    @property
    def parts(self) -> tuple[KeyedObject, ...]:
        """The method itself, its add-ons and its filters. Each may declare message entries (`Entry`)."""
        return (self,)

    def entries(self) -> list[Entry[Any]]:
        """Return every `Entry` of the method: the declarations of all values that it may send in messages or keep in a
        state.

        The engine calls this function once, before the run.
        """
        return [entry for part in self.parts for entry in declared_entries(part)]

    def architectures(self, classes: int) -> Mapping[str, nn.Module]:
        """Return one network of each architecture, for a task of `classes` classes, by the name of the architecture.

        The engine records the structure of these networks, and a resumed run must have the same structure. The weights
        are not used. Default: the architectures of `self.networks`, if the method has this attribute.
        """
        return self.networks.templates(classes) if hasattr(self, "networks") else {}

    def assigned_architectures(self, clients: int) -> Sequence[str]:
        """Return the name of each client's architecture for the run's record. A resumed run must have the same names.

        Args:
            clients: number of clients.

        Returns:
            One name for each client, in client order; empty if all clients have the same architecture. By default, the
            names come from `self.networks`, if the method has this attribute.
        """
        return self.networks.assigned_architectures(clients) if hasattr(self, "networks") else ()

    def check_run(self, server: Server, rounds: int) -> None:
        """Raise ValueError if the method cannot run with these clients and data. Warn about options without effect.

        The engine calls this function before `start` and before it resumes a run. The state of the `server` is still
        empty, and `rounds` is the number of rounds of the run. Use the function to detect errors that would otherwise
        appear only in a late round.
        """

    def start(self, server: Server) -> None:
        """Put the values that `send` needs, such as initial weights, into `server.state`.

        The engine calls this function once, before round 1. A resumed run restores the state instead.
        """

    @abstractmethod
    def send(self, server: Server, client: int) -> Message:
        """Return the message from the `server` to this `client`, which `answer`, `local` and `evaluate` receive.

        The engine may call this function any number of times, for any client, so it must not change any state.
        """

    @abstractmethod
    def expect(self, server: Server, client: int) -> Schema:
        """Return the schema of a client's reply to `send(server, client)`: an `EntrySpec` for each entry, by entry key.

        The engine refuses a reply that has an entry without a specification.
        """

    @property
    def has_query(self) -> bool:
        """True if the server sends a query before round 1 to all clients with images (see `answer`). Default: False."""
        return False

    def answer(self, client: Client, message: Message) -> Message:
        """Return this client's answer to the query before round 1, such as its class counts; see `has_query`.

        The `message` comes from `send`. Changes to `client.memory`, the values that a client keeps between
        rounds, are discarded.
        """
        return Message()

    def expect_answer(self, server: Server, client: int) -> Schema:
        """Return the schema of the message that a client's `answer` returns.

        The schema is a mapping from entry keys to an `EntrySpec` for each entry.

        Args:
            server: server of the run.
            client: index of the client.
        """
        return {}

    def receive_answers(self, server: Server, replies: AggregatedReplies) -> None:
        """Read the clients' answers to the query before round 1, and store values for later rounds in `server.state`.

        In `replies`, the answers are aggregated over the clients.
        """

    @abstractmethod
    def local(self, client: Client, message: Message) -> Message:
        """Train on the client in a round, and return the client's reply.

        The function reads only `client` and the `message` that `send` returned. Its reply must match the schema that
        `expect` returns. If the function raises an exception, the client is left out of the round, and the history
        reports the exception. A charge that the ledger refuses (`BudgetExhausted`) ends the run instead.
        """

    def read_reply(self, server: Server, reply: Message) -> Message:
        """Return additional entries that the server computes from one checked `reply` before replies are aggregated.

        FedDF, for example, computes the predictions of the client's model. The additional entries are aggregated
        together with the entries of the reply. The function must not change `server`. If it raises an exception, this
        reply is left out. Default: no additional entries.
        """
        return Message()

    @property
    def exchanges(self) -> tuple[str, ...]:
        """Names of the exchanges (a request and its reply) with each drawn client in a round, in order.

        Default: "local". To add an exchange, define a function that runs on the client. It has the name of the exchange
        and the signature of `local`. On the server, `send_exchange`, `expect_exchange` and `receive_exchange` handle
        all additional exchanges. A client takes part in an exchange if all its earlier replies in this round are usable
        (`server.present`). Only `local` may change `client.memory`, the values that a client keeps between rounds.
        """
        return ("local",)

    def send_exchange(self, server: Server, verb: str, client: int) -> Message:
        """Return the message from the `server` to a `client` in the exchange called `verb`.

        The engine may call this function any number of times, for any client, so it must not change any state.
        """
        return Message()

    def expect_exchange(self, server: Server, verb: str, client: int) -> Schema:
        """Return the schema of a client's reply in the exchange called `verb`.

        The schema is a mapping from entry keys to an `EntrySpec` for each entry.

        Args:
            server: server of the run.
            verb: name of the exchange.
            client: index of the client.
        """
        return {}

    def receive_exchange(self, server: Server, verb: str, replies: AggregatedReplies) -> Mapping[int, str]:
        """Update `server.state` with the replies of one exchange, before the next one begins.

        The engine calls this function only if the method has several exchanges. It calls the function after each of
        them, including the training ("local"). After the last exchange, `receive` gets the replies of `local`.

        Args:
            server: server whose state to update.
            verb: name of the exchange.
            replies: replies of the exchange, which may be none. The values of each entry are aggregated over the
                clients by the entry's rule (see `Entry`).

        Returns:
            The clients whose replies cannot be used: a mapping, client index -> reason. These clients get no more
            requests in this round.

        Raises:
            NoUsableReply: too few clients are left to continue.
        """
        return {}

    def run_on_client(self, verb: str, client: Client, message: Message) -> Message:
        """Run this method's function called `verb` on a client, and return its reply.

        Args:
            verb: name of the function: "answer" (the query before round 1), "evaluate" (a test), or the name of an
                exchange in a round, such as "local" (the training).
            client: client on which the function runs.
            message: message from the server.

        Raises:
            LookupError: the method has no exchange of this name.
        """
        if verb not in ("answer", "evaluate", *self.exchanges):
            raise LookupError(f"{type(self).__name__} has no exchange {verb!r:.40}")
        return getattr(self, verb)(client, message)

    @abstractmethod
    def receive(self, server: Server, replies: AggregatedReplies) -> None:
        """Update `server.state` with the round's replies.

        The values of each entry of the replies are aggregated over the clients by the entry's rule (see `Entry`).

        The engine calls this function once per round, with at least as many replies as the run's option `min_replies`
        requires. If the method overrides `draw`, there may be no reply.

        Raises:
            NoUsableReply: no update can be computed from the replies.
        """

    def evaluate(self, client: Client, message: Message) -> Message:
        """Test a client's models on `client.test` after the round. The `message` holds the new global model.

        The client's memory is read-only. The reply has one entry, a dict of tensors: the name of each model ("global",
        "personal") -> the result of `LabelTask.sums`. An empty reply means that there is no model to test.
        """
        return Message()

    def expect_evaluation(self, server: Server, client: int) -> Schema:
        """Return the schema of the reply that `evaluate` returns on a `client`.

        If there are models to test, the schema has one entry, whose specification `evaluation_spec` returns.

        Args:
            server: server of the run.
            client: index of the client.
        """
        return {}

    def predictors(self, server: Server) -> Mapping[str, Predictor]:
        """Return the global models to test and save, by name. A single model has the name "".

        The models are built from `server.state`. The mapping is empty if the method has no global model.
        """
        return {}


def require_single_label(name: str, task: LabelTask) -> None:
    """Refuse a multi-label `task`.

    The error message names the method or add-on, `name`, that needs one class per image.

    Raises:
        ValueError: images of the task may have several classes.
    """
    _require_task(task)
    if not task.single_label:
        raise ValueError(f"{name} needs exactly one class per image, which {task!r} does not guarantee: leave it out")


def _require_task(task: object) -> None:
    if isinstance(task, type) or not hasattr(task, "num_classes") or not hasattr(task, "single_label"):
        raise TypeError(f"task must be a label task, as server.task, got {task!r:.80}")


def require_method(method: object) -> Method:
    """Return `method` if it is a federated method.

    Raises:
        TypeError: `method` is a class, an add-on, a filter or another object. The message says what to pass instead.
    """
    kind = method if isinstance(method, type) else type(method)
    if issubclass(kind, Component):
        part = constructor_call(method) if isinstance(method, Component) else f"{kind.__name__}(...)"
        raise TypeError(f"{kind.__name__} is a part of a method, not a method: pass {kind._usage.format(part)}")
    if isinstance(method, type):
        raise TypeError(f"method must be an object, got the class {method.__name__}: {method.__name__}(...)")
    if not isinstance(method, Method):
        raise TypeError(f"method must be a federated method, as FedAvg(factory=...), got {type(method).__name__}")
    require_plain_options(method, Method)
    return method


def short_name(method: Method) -> str:
    """Return the name of a method in short, made of the class names of the method, its add-ons and its filters.

    For example `FedAvg(DPSGD)`, or `Filtered(FedAvg(DPSGD), ClientDP)`.
    """
    inner = method.inner
    addons = [type(part).__name__ for part in inner.parts if part is not inner]
    name = f"{type(inner).__name__}({', '.join(addons)})" if addons else type(inner).__name__
    filters = [type(part).__name__ for part in method.parts if all(part is not p for p in inner.parts)]
    return f"{type(method).__name__}({', '.join([name, *filters])})" if filters else name
