"""The base of every add-on to weight averaging: hooks that add up, and slots that one add-on may fill."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, Literal

from torch import Tensor

from distillkit.sets import LabeledImages
from fl._components import Component
from fl.aggregation import AggregatedReplies, Schema
from fl.averaging.local import Local
from fl.averaging.server import AveragingServer
from fl.averaging.settings import Settings
from fl.averaging.step import Step
from fl.batches import Batch, Phase
from fl.message import Message, Tensors

__all__ = ["SLOTS", "AddOn", "overrides", "slot_owner"]

SLOTS = (
    "dataset", "batches", "gradient", "scale_update", "aggregate", "server_step", "refine",
    "evaluation_model", "personal_model",
)  # fmt: skip
"""What does not commute: one add-on may fill each, a second is refused when the method is built."""


class AddOn(Component):
    """The base of an idea on top of `FedAvg`, as papers have them: FedProx is one, SCAFFOLD another.

    Write a frozen dataclass whose fields are the paper's options and override the hooks that the idea needs; all others
    do nothing. `FedAvg(MyIdea(0.1), factory=...)` then calls each hook where its docstring says. A hook that adds up (a
    term of the loss, an entry of a message) runs for every add-on, in the order of their keys, so that the order of
    arguments changes nothing. A slot replaces something, so that one add-on alone may fill it.

    One object serves the server and all clients, whose threads share it, so it holds nothing of a run. What must last
    goes to `server.state` or a client's `local.memory` under entries that the class declares; what one training needs
    goes to the dict `local.scratch(self)`.

    Attributes:
        extra_outputs: how many outputs the network gets for it behind the classes; `local.first_output(self)` is the
            index of the first.
        needs_previous: whether it reads `local.previous`, the weights that this client trained when it was last drawn.
        layers: names of modules of the network whose outputs it reads, as `step.output(...).inner[name]`: [B, m].
        damping: mu of a pull mu (w - w_0) to the start of the round that it adds to the gradient; SCAFFOLD and
            FedNova divide by `local.effective_lrs`, which depends on it.
        data_access: what it reads of private data besides trained weights, in its loss terms and for what it sends:
            "none"; in its terms alone, one "example" at a time; or anything, the "batch" together (the default).
            `DPSGD` stands beside the first two only.
        single_label: whether its terms make sense only where each image has one class; another task is refused.
        disabled_at_zero: options, such as a weight, whose value 0 disables the add-on. Of several, all must be 0.
        first_round: the first round in which it can change anything; a run with fewer rounds warns that it will not.
    """

    extra_outputs: int = 0
    needs_previous: bool = False
    layers: tuple[str, ...] = ()
    damping: float = 0.0
    data_access: Literal["none", "example", "batch"] = "batch"
    single_label: ClassVar[bool] = False
    disabled_at_zero: ClassVar[tuple[str, ...]] = ()
    first_round: int = 1

    @classmethod
    def usage_example(cls, part: str) -> str:
        """How a method with this add-on, written as `part`, is written; for the error where it is given alone."""
        return f"FedAvg({part}, factory=...)"

    @property
    def has_query(self) -> bool:
        """Whether the server asks every client one question for it before round 1; yes if it writes `answer`."""
        return overrides(self, "answer")

    @property
    def disabled(self) -> bool:
        """Whether its options turn it off. The method leaves it out, and behaves as without it."""
        return bool(self.disabled_at_zero) and all(getattr(self, name) == 0 for name in self.disabled_at_zero)

    @property
    def private(self) -> bool:
        """Whether it noises what the client releases and charges a ledger for it; see `Method.private`."""
        return False

    # Before round 1.

    def check(self, settings: Settings, addons: Sequence[AddOn]) -> None:
        """Refuse a combination that makes no sense, with a ValueError that gives the reason and the remedy.

        Called when the method is built, before there is any data.

        Args:
            settings: the method's options and its networks.
            addons: all that are installed, this one too.
        """

    def check_run(self, settings: Settings, names: Sequence[str]) -> None:
        """Refuse networks with which it could do nothing, with a ValueError; called before round 1.

        Args:
            settings: the method's options and its networks.
            names: of the parameters of all architectures.
        """

    def start(self, server: AveragingServer) -> None:
        """Prepare what it keeps in `server.state`. Called once, on the server, before round 1.

        The first weights are there already. A run that is resumed does not call it again.
        """

    def dry_run(self, local: Local) -> None:
        """Look at a training that is about to begin, on images of noise, and refuse with a ValueError what cannot work.

        Called on the server before round 1, once for each architecture, so that nothing is charged or trained yet. In
        `local` every add-on has started and begun.
        """

    def answer(self, local: Local, reply: Message) -> None:
        """Write this client's answer to the one question before round 1 (class statistics, say) into `reply`.

        Called on every client that has images, once. `local` is a training that is not begun.
        """

    def expect_answer(self, server: AveragingServer, client: int, schema: Schema) -> None:
        """Say what its part of that answer must look like; what has no line is refused. Called on the server.

        Args:
            server: see `AveragingServer`.
            client: whose answer it is.
            schema: to write to: a `EntrySpec` for each entry, under its `key`.
        """

    def receive_answers(self, server: AveragingServer, replies: AggregatedReplies) -> None:
        """Take the clients' answers into `server.state`: `replies`, combined as their entries say. Called once."""

    # A round, in this order: the server sends,

    def send(self, server: AveragingServer, client: int, message: Message) -> None:
        """Add to the `message` what this `client` is told: in a round, for the question before round 1, for a test.

        Called on the server. Pure: it may be called any number of times, for any client, and changes no state.
        """

    def expect(self, server: AveragingServer, client: int, schema: Schema) -> None:
        """Say what its part of a reply must look like; an entry without a line is refused. Called on the server.

        Args:
            server: see `AveragingServer`.
            client: whose reply it is.
            schema: to write to: a `EntrySpec` for each entry that `end` puts into the reply, under its `key`.
        """

    # the client trains,

    def before_training(self, local: Local) -> None:
        """Prepare a training: read what `local.message` says, set `local.weight` or a scratch value.

        Called on the client, first of all hooks.
        """

    def extra_records(self, local: Local) -> LabeledImages | None:
        """Images that join the set that is trained on, or None. Called on the client, once, with `local.data` set.

        They go through the same batches and the same objective; they do not count in the reply's weight.
        """
        return None

    def extra_batches(self, local: Local) -> Iterator[Batch] | None:
        """An endless stream of batches of its own, of which each step reads one, or None. Called on the client, once.

        `local.stream(self, images)` makes one from a set; in a step `step.batch_of(self)` is the batch, and
        `step.output(self)` what the network says of it.
        """
        return None

    def loss(self, step: Step) -> Tensor | None:
        """A term of the loss in this `step`, a tensor without dimensions that is added to the objective, or None.

        Called on the client in each step, after the forward pass; more than once where the gradient is taken again.
        """
        return None

    def correct_gradient(self, step: Step, grads: Tensors) -> None:
        """Change the gradient in place, by parameter's name in `grads`. Called on the client in each step.

        All that computes the gradient is done (losses, the slot `gradient`), and the optimiser has not moved yet.
        """

    def after_step(self, step: Step) -> None:
        """Change the parameters, `step.trained`, after the optimiser moved. Called on the client in each step."""

    def after_training(self, local: Local, update: Tensors, reply: Message) -> None:
        """Add to the reply, and write what the client shall remember to `local.memory`. Called when training is over.

        Args:
            local: the training; `local.delta` is the change of the weights as it was.
            update: the change as it goes out, once the slot `scale_update` has rescaled it, by parameter's name.
            reply: to write to; `expect` says what it may hold.
        """

    # and the server takes the replies.

    def read_reply(self, server: AveragingServer, reply: Message, out: Message) -> None:
        """Derive entries from one `reply` before it is folded and forgotten, and write them to `out`.

        Called on the server for each reply; FedDF's predictions of each client's model are an example. They combine
        over the clients as their entries say. Pure; what it raises leaves this reply out, by name.
        """

    def receive(self, server: AveragingServer, replies: AggregatedReplies, old: Tensors) -> None:
        """Learn from the round: update what it keeps in `server.state`. Called on the server, once a round, at its end.

        Args:
            server: its state holds the new model.
            replies: the clients' replies, combined as their entries say.
            old: the weights before this round, all architectures' in one group.
        """

    # Slots: at most one add-on fills each.

    def dataset(self, local: Local) -> LabeledImages:
        """The set to train on instead of `local.client.data`. Called on the client, once, after `begin`.

        Its size is the reply's weight where clients are weighed by samples.
        """
        return local.client.data

    def batches(self, local: Local, data: LabeledImages, phase: Phase) -> Iterator[Batch]:
        """Make the batches of a phase, in place of shuffled passes. Called on the client, once for each phase.

        Args:
            local: the training.
            data: the set to draw from.
            phase: how long to train: its epochs or steps.
        """
        return iter(())

    def gradient(self, step: Step, compute: Callable[[], Tensors]) -> Tensors:
        """The gradient of a step, in place of that of the loss at the current weights. Called in each step.

        SAM, say, moves the weights, computes there, and moves them back.

        Args:
            step: what the step reads and trains.
            compute: gives the gradient of the loss, all terms in it, at the network's current weights.

        Returns:
            A gradient for every parameter in `step.trained`, by its name.
        """
        return compute()

    def scale_update(self, local: Local, update: Tensors) -> Tensors:
        """The update as it goes out, for one that rescales it. Called on the client when training is over.

        Args:
            local: the training.
            update: trained minus received, by parameter's name.
        """
        return update

    def aggregate(self, server: AveragingServer, replies: AggregatedReplies, mean: Tensors) -> Tensors:
        """The mean update, rescaled. Called on the server, once a round, before `server_step`.

        Args:
            server: its state holds the model of before.
            replies: the clients' replies, combined as their entries say.
            mean: the weighted mean of their updates, all architectures' in one group.
        """
        return mean

    def server_step(self, server: AveragingServer, mean: Tensors) -> Tensors:
        """What the server adds to the model, made of the mean update. Called on the server, once a round.

        Args:
            server: its state holds the model of before.
            mean: the mean update, after `aggregate`, all architectures' in one group.
        """
        return mean

    def refine(self, server: AveragingServer, replies: AggregatedReplies, old: Tensors) -> Tensors:
        """The model to go on with, made of the averaged one, for one that trains it further (distillation).

        Called on the server, once a round, also when no reply holds an update.

        Args:
            server: its state holds the averaged model.
            replies: the clients' replies, combined as their entries say.
            old: the weights before this round, all architectures' in one group.

        Returns:
            The whole new model, parameters and buffers of all architectures.
        """
        raise LookupError(f"{self.name} does not fill the slot 'refine'")

    def evaluation_model(self, server: AveragingServer) -> Tensors:
        """The weights to test and save in place of the current ones (a running mean, say). Called on the server.

        Returns:
            Parameters and buffers of all architectures, as `server.state` holds the model.
        """
        raise LookupError(f"{self.name} does not fill the slot 'tested_model'")

    def personal_model(self, local: Local) -> Tensors:
        """The client's personal model, which is tested beside the global one. Called on the client, in each test.

        Pure. `local` is a training that is not begun: what was received, the client's memory, and `local.fit`.

        Returns:
            Its parameters and buffers, by name; what is missing is as received.
        """
        raise LookupError(f"{self.name} does not fill the slot 'personal_model'")


def overrides(addon: AddOn, hook: str) -> bool:
    """Whether `addon` overrides the method of this name, a `hook` or a slot."""
    return getattr(type(addon), hook) is not getattr(AddOn, hook)


def slot_owner(addons: Sequence[AddOn], slot: str) -> AddOn | None:
    """Of these `addons` the one that fills a `slot` (see `SLOTS`), or None."""
    return next((a for a in addons if overrides(a, slot)), None)
