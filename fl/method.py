"""A federated method: three verbs over messages, and what stands beside them.

The life of a run, in the order of calls: `check_run`, `start`; if the method `has_query`, `send`, `answer` at every
client and `receive_answers`; then in every round `draw` or the engine's own draw, `send` for each drawn client, `local`
there, `expect` and `read_reply` for each reply as it comes, `receive` once, `predictors`, and `send` and `evaluate`
for the clients that are tested. A method may talk with its clients more than once in a round, see `exchanges`.
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
    "Method",
    "NoUsableReply",
    "Predictor",
    "evaluation_batch_size",
    "evaluation_spec",
    "require_method",
    "require_single_label",
]


class NoUsableReply(RuntimeError):
    """The replies of a round leave nothing to learn from: too few are usable, or all weights are zero.

    It ends the run with the state after the round before. `Method.receive` may raise it, before it changes anything.
    """


@dataclass(frozen=True)
class Predictor:
    """A model that can be tested and saved; what `Method.predictors` returns.

    Attributes:
        network: in eval mode, with the weights to test.
        outputs: how many of its outputs count, from the first on: the task's classes where an add-on has classes of its
            own behind them. None for all.
    """

    network: nn.Module
    outputs: int | None = None

    @torch.no_grad()
    def sums(self, data: LabeledImages, task: LabelTask, chunk: int | None = None) -> torch.Tensor:
        """Test it on a set: the task's sums over all images, float64 [3 + 3K], see `LabelTask.sums`.

        Args:
            data: the test images, where the network lies.
            task: what the labels mean.
            chunk: images per forward pass. Default: `evaluation_batch_size`.
        """
        chunk = evaluation_batch_size(data.shape, data.images.device) if chunk is None else chunk
        total = torch.zeros(3 + 3 * task.num_classes, dtype=torch.float64)
        for start in range(0, len(data), chunk):
            logits = self.network(data.images[start : start + chunk])[:, : self.outputs]
            total += task.sums(logits, data.labels[start : start + chunk])
        return total


def evaluation_batch_size(shape: Sequence[int], device: torch.device) -> int:
    """How many test images go through a network at a time: 256, or fewer if they are large.

    A network keeps a multiple of its images in memory; on a CPU as many as of 256 images of 32x32, on an accelerator
    sixteen times that.

    Args:
        shape: (C, H, W) of an image.
        device: where they are.
    """
    pixels = (1 << 18) if device.type == "cpu" else (1 << 22)
    fitting: int = max(1, min(256, pixels // (shape[1] * shape[2])))
    return 1 << (fitting.bit_length() - 1)


def evaluation_spec(task: LabelTask, *names: str) -> EntrySpec:
    """What a client's test results must look like: the line of the schema that `expect_evaluation` returns.

    Args:
        task: gives the number of classes.
        names: of the models that are tested: "global", "personal", or others.
    """
    return EntrySpec({name: torch.zeros(3 + 3 * task.num_classes, dtype=torch.float64) for name in names})


class Method(KeyedObject, ABC):
    """Base of every federated method. For an idea on top of weight averaging write an `fl.AddOn` instead.

    Method objects are frozen and live on the server and on every client alike; what changes is kept in `server.state`
    and `client.memory`. A subclass declares its entries as class attributes and writes `start`, `send`, `local`,
    `receive`, and `expect`, which says what a reply looks like. One that overrides `answer` or `evaluate` says so in
    `expect_answer` or `expect_evaluation` too. These schemas are closed: a client whose reply is otherwise is named and
    left out.
    """

    networks: Networks

    @property
    def inner(self) -> Method:
        """The method itself, without the filters that are wrapped around it."""
        return self

    @property
    def private(self) -> bool:
        """Whether what is released is noised and charged to a ledger.

        Then the run has one, clients without images are asked like all others (that they have none is private), and
        nothing is measured on the clients' own test images unless asked for.
        """
        return False

    @property
    def sealed(self) -> bool:
        """Whether the server learns sums over clients alone, and never what a single one sends.

        Then nothing is measured on the clients' own test images unless asked for, because those are exact numbers.
        """
        return False

    @property
    def draws_clients(self) -> bool:
        """Whether `draw` says who takes part in a round, and not the engine."""
        return type(self).draw is not Method.draw

    def draw(self, server: Server) -> list[int]:
        """Say which clients take part in this round, for a method whose privacy rests on the draw; default: the engine.

        The draw, from `server.secret`, stays secret: the history does not say who they were. Numbers, ascending;
        there may be none.
        """
        raise LookupError(f"{type(self).__name__} leaves the draw to the engine")

    @property
    def parts(self) -> tuple[KeyedObject, ...]:
        """What declares entries: the method itself, and whatever it is made of."""
        return (self,)

    def entries(self) -> list[Entry[Any]]:
        """Every entry that may travel or be kept; the engine asks once, before the run."""
        return [entry for part in self.parts for entry in declared_entries(part)]

    def architectures(self, classes: int) -> Mapping[str, nn.Module]:
        """Return the networks by name, for `classes` classes; the record of a run tells by them that one has changed.

        They are only read, and their weights need not mean anything. Default: those of `self.networks`, if there are.
        """
        return self.networks.templates(classes) if hasattr(self, "networks") else {}

    def assigned(self, clients: int) -> Sequence[str]:
        """Return each client's architecture for the run's record; a resumed run must have the same.

        Args:
            clients: how many there are.

        Returns:
            A name for each client; nothing where all have the same. Default: as `self.networks` assigns them.
        """
        return self.networks.assigned(clients) if hasattr(self, "networks") else ()

    def check_run(self, server: Server, rounds: int) -> None:
        """Raise ValueError if the method cannot run on such data; warn of what will not act within `rounds`.

        Called before `start`, and before a run goes on, with a `server` whose state is still empty: the place to try
        what would otherwise fail in round 40.
        """

    def start(self, server: Server) -> None:
        """Put into `server.state` what the first `send` needs: the first weights, say. Not called on a resumption."""

    @abstractmethod
    def send(self, server: Server, client: int) -> Message:
        """What `server` tells the client of this number, before `answer`, `local` and `evaluate` alike.

        Pure: it may be called any number of times, for any client, and changes nothing.
        """

    @abstractmethod
    def expect(self, server: Server, client: int) -> Schema:
        """What the reply to `send(server, client)` must look like, so that nothing else is let in.

        A `EntrySpec` for each entry that is due, by its key; what has no line is refused.
        """

    @property
    def has_query(self) -> bool:
        """Whether the server asks every client with images one question (`answer`) before round 1. Default: no."""
        return False

    def answer(self, client: Client, message: Message) -> Message:
        """Answer the one question before round 1, where the data lives: with class counts, say. See `has_query`.

        What `client` writes into its memory is lost; `message` is that of `send`.
        """
        return Message()

    def expect_answer(self, server: Server, client: int) -> Schema:
        """What the `answer` to `send(server, client)` must look like; as `expect`."""
        return {}

    def receive_answers(self, server: Server, replies: AggregatedReplies) -> None:
        """Put into `server.state` what later rounds need of the answers: `replies`, combined as their entries say."""

    @abstractmethod
    def local(self, client: Client, message: Message) -> Message:
        """What a drawn client does where its data lives: train, and say what it learned.

        It sees nothing but `client` and the `message` of `send`, and returns the reply, with what `expect` says and
        nothing else. Whatever it raises leaves this client out of the round, by name (but `BudgetExhausted`, which ends
        the run).
        """

    def read_reply(self, server: Server, reply: Message) -> Message:
        """Read one `reply`, checked, before it is folded and forgotten, and derive further entries from it.

        FedDF's predictions are an example. They are folded beside those of the reply. Pure: if it raises, this reply is
        left out, and nothing else in `server` may have changed. Default: none.
        """
        return Message()

    @property
    def exchanges(self) -> tuple[str, ...]:
        """What drawn clients are asked for in a round, one exchange after the other. Default: `local` alone.

        A further one is a method of the same form as `local`, by name; clients are asked for it if their answers to
        all before it can be used (`server.present`). Their server side is
        `send_exchange`, `expect_exchange` and `receive_exchange`. What a
        client writes into its memory is kept of `local` alone.
        """
        return ("local",)

    def send_exchange(self, server: Server, verb: str, client: int) -> Message:
        """What the client of this number is told in a further exchange, named by its `verb`; as `send`, pure.

        Called on the `server`.
        """
        return Message()

    def expect_exchange(self, server: Server, verb: str, client: int) -> Schema:
        """What a client's answer in the further exchange `verb` must look like; as `expect`, on the `server`."""
        return {}

    def receive_exchange(self, server: Server, verb: str, replies: AggregatedReplies) -> Mapping[int, str]:
        """Take the answers of one exchange into `server.state`, before the next one begins.

        Called after each exchange of a method that has several, after `local` too (whose replies `receive` still gets).

        Args:
            server: its state.
            verb: of the exchange.
            replies: combined as their entries say; there may be none.

        Returns:
            The clients whose answers cannot be used after all, and why: they are asked nothing more in this round.

        Raises:
            NoUsableReply: too few are left to go on.
        """
        return {}

    def run_on_client(self, verb: str, client: Client, message: Message) -> Message:
        """What `client` answers to a `message`: `local` and its like, called by the name of the exchange, the `verb`.

        Raises:
            LookupError: the method has no such exchange; the server asks for something else than it should.
        """
        if verb not in ("answer", "evaluate", *self.exchanges):
            raise LookupError(f"{type(self).__name__} has no exchange {verb!r:.40}")
        return getattr(self, verb)(client, message)

    @abstractmethod
    def receive(self, server: Server, replies: AggregatedReplies) -> None:
        """Learn from the round: update `server.state`, and prepare the next round. Called once a round.

        `replies` are combined as their entries say. There are enough of them, unless the method draws its clients
        itself; then there may be none.

        Raises:
            NoUsableReply: they leave nothing to learn from.
        """

    def evaluate(self, client: Client, message: Message) -> Message:
        """Test a client's models on `client.test`, after the round, whose new model is in the `message`.

        Its memory is read-only. The results are groups of the task's sums, model's name ("global", "personal") ->
        `LabelTask.sums`; an empty reply says that there is nothing to test.
        """
        return Message()

    def expect_evaluation(self, server: Server, client: int) -> Schema:
        """What the results of `evaluate` after `send(server, client)` must look like, see `evaluation_spec`."""
        return {}

    def predictors(self, server: Server) -> Mapping[str, Predictor]:
        """The global models in `server.state`, to be tested and saved: one (named ""), several by name, or none."""
        return {}


def require_single_label(name: str, task: LabelTask) -> None:
    """Refuse a task with several classes an image, for the method or add-on called `name`.

    Raises:
        ValueError: the `task` is such a task.
    """
    if not task.single_label:
        raise ValueError(f"{name} needs one class an image, which {task!r} does not have: leave it out")


def require_method(method: object) -> Method:
    """Return `method` if it is one.

    Raises:
        TypeError: a class, an add-on or a filter, with what to write instead.
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
