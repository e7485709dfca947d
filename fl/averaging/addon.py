"""Base class of add-ons to weight averaging, with additive hooks, and slots that only one add-on may fill."""

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
"""Names of the slots. Only one add-on may fill a slot, because the result would depend on the order of several."""


class AddOn(Component):
    """Base class of extensions of `FedAvg`, such as FedProx and SCAFFOLD.

    Write a frozen dataclass whose fields are the paper's options, and override the hooks that the extension needs. All
    other hooks do nothing. `FedAvg(MyIdea(0.1), factory=...)` then calls each hook at the time that the hook's
    docstring states. An additive hook (a term of the loss, an entry of a message) runs for every add-on, in the order
    of their keys, so the order of arguments has no effect. A slot replaces a part of the algorithm, so only one add-on
    may fill it.

    The server and all clients share one add-on object across threads, so the object must not store values of a run.
    Store persistent values in `server.state` or a client's `local.memory`, under entries that the class declares. Store
    values that are needed only during one client's training in the dict `local.scratch(self)`.

    Attributes:
        extra_outputs: number of network outputs that the add-on gets after the outputs of the classes;
            `local.first_output(self)` is the index of the first extra output.
        needs_previous: whether the add-on reads `local.previous`, the weights that this client trained in the last
            round for which it was drawn.
        layers: names of modules of the network whose outputs, [B, m], the add-on reads as
            `step.output(...).inner[name]`.
        damping: mu, if the add-on adds mu (w - w_0) to the gradient, which pulls the weights w towards their values w_0
            at the start of the round. SCAFFOLD and FedNova divide by `local.effective_lrs`, which depends on mu.
        data_access: private data, besides trained weights, that the add-on reads for its loss terms and for the values
            that it sends: "none"; "example", one example at a time and only in loss terms; or "batch", any data (the
            default). `DPSGD` accepts only the first two.
        single_label: whether the loss terms need exactly one class per image; other tasks are refused.
        disabled_at_zero: options, such as a weight, whose value 0 disables the add-on. If several are listed, all must
            be 0.
        first_round: first round in which the add-on can change anything. A run with fewer rounds warns that the add-on
            has no effect.
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
        """Return example code, for error messages, of a method with this add-on; `part` is the add-on's code."""
        return f"FedAvg({part}, factory=...)"

    @property
    def has_query(self) -> bool:
        """Whether the server queries every client once before round 1, because the add-on overrides `answer`."""
        return overrides(self, "answer")

    @property
    def disabled(self) -> bool:
        """Whether the options disable the add-on. The method then leaves it out."""
        return bool(self.disabled_at_zero) and all(getattr(self, name) == 0 for name in self.disabled_at_zero)

    @property
    def private(self) -> bool:
        """Whether the add-on adds noise to a client's releases and charges a ledger; see `Method.private`."""
        return False

    # Before round 1.

    def check(self, settings: Settings, addons: Sequence[AddOn]) -> None:
        """Refuse a combination that makes no sense, with a ValueError that gives the reason and the remedy.

        This hook is called when the method is built, before any data are known.

        Args:
            settings: the method's options and its networks.
            addons: the active add-ons, this one included.
        """

    def check_run(self, settings: Settings, names: Sequence[str]) -> None:
        """Raise ValueError if the add-on would have no effect with these networks. Called before round 1.

        Args:
            settings: the method's options and its networks.
            names: names of the parameters of all architectures.
        """

    def start(self, server: AveragingServer) -> None:
        """Prepare the add-on's values in `server.state`. Called once, on the server, before round 1.

        `server.state` already holds the initial weights. A resumed run does not call this hook again.
        """

    def dry_run(self, local: Local) -> None:
        """Inspect an untrained `local` that is set up with noise images; raise ValueError if the setup cannot work.

        Called on the server before round 1, once for each architecture; the ledger has not been charged yet. Before
        this call, every add-on has run `start`, and `before_training` with this `local`.
        """

    def answer(self, local: Local, reply: Message) -> None:
        """Write this client's answer to the query before round 1 (class statistics, for example) into `reply`.

        Called once on every client that has images. The training of `local` has not begun.
        """

    def expect_answer(self, server: AveragingServer, client: int, schema: Schema) -> None:
        """Add the entries of the add-on's answer to the schema. Called on the server.

        Entries without a specification are refused.

        Args:
            server: server as an add-on sees it.
            client: index of the client that answers.
            schema: schema to extend with an `EntrySpec` for each entry, under its `key`.
        """

    def receive_answers(self, server: AveragingServer, replies: AggregatedReplies) -> None:
        """Store values from the aggregated answers, `replies`, in `server.state`. Called on the server."""

    # A round, in this order: the server sends,

    def send(self, server: AveragingServer, client: int, message: Message) -> None:
        """Add entries to the `message` that the server sends to this `client` for a round, a query or a test.

        Called on the server. The hook must be pure: it may be called any number of times, for any client, and changes
        no state.
        """

    def expect(self, server: AveragingServer, client: int, schema: Schema) -> None:
        """Add the entries of the add-on's reply to the schema. Called on the server.

        Entries without a specification are refused.

        Args:
            server: server as an add-on sees it.
            client: index of the client that replies.
            schema: schema to extend with an `EntrySpec` for each entry that `after_training` adds to the reply, under
                its `key`.
        """

    # the client trains,

    def before_training(self, local: Local) -> None:
        """Prepare the client's training, for example by reading `local.message` or setting `local.weight`.

        Called on the client, before all other hooks of its training.
        """

    def extra_records(self, local: Local) -> LabeledImages | None:
        """Return images to add to the training set, or None. Called on the client, once, when `local.data` is set.

        The client trains on these images together with its own, but they do not count in the reply's weight.
        """
        return None

    def extra_batches(self, local: Local) -> Iterator[Batch] | None:
        """Return an endless stream of the add-on's own batches (one per step), or None if it has no batches.

        Called once on the client. `local.stream(self, images)` makes such a stream from a set. In a step,
        `step.batch_of(self)` is the batch, and `step.output(self)` the network's outputs for it.
        """
        return None

    def loss(self, step: Step) -> Tensor | None:
        """Return a scalar tensor to add to the loss of this `step`, or None to add nothing.

        Called on the client in each step, after the forward pass. If the gradient is computed again, so is this term.
        """
        return None

    def correct_gradient(self, step: Step, grads: Tensors) -> None:
        """Change the gradients `grads`, by parameter name, in place. Called on the client in each step.

        The hook runs after the gradient is computed (by the losses and the slot `gradient`), and before the optimizer's
        step.
        """

    def after_step(self, step: Step) -> None:
        """Change the parameters, `step.trained`, after the optimizer's step. Called on the client in each step."""

    def after_training(self, local: Local, update: Tensors, reply: Message) -> None:
        """Add entries to the reply, and store values in `local.memory`. Called on the client after training.

        Args:
            local: the client's training; `local.delta` is the change of the weights before `scale_update`.
            update: update to send, by parameter name, after the slot `scale_update`.
            reply: reply to extend with the entries that `expect` describes.
        """

    # and the server receives the replies.

    def read_reply(self, server: AveragingServer, reply: Message, out: Message) -> None:
        """Derive additional entries from one `reply` before it is aggregated, and write them to `out`.

        Called on the server for each reply. FedDF, for example, computes the predictions of each client's model. The
        derived entries are aggregated over the clients by their rules. The hook must be pure. If it raises an
        exception, the reply is left out and its client is reported.
        """

    def receive(self, server: AveragingServer, replies: AggregatedReplies, old: Tensors) -> None:
        """Update the add-on's values in `server.state` with the replies. Called on the server after each round.

        Args:
            server: server whose state holds the new model.
            replies: the clients' replies, aggregated by their entries' rules.
            old: weights of all architectures before this round, in one group.
        """

    # Slots: at most one add-on fills each.

    def dataset(self, local: Local) -> LabeledImages:
        """Return the training set to use in place of `local.client.data`. Called on the client after `before_training`.

        The size of this set is the reply's weight if clients are weighted by samples.
        """
        return local.client.data

    def batches(self, local: Local, data: LabeledImages, phase: Phase) -> Iterator[Batch]:
        """Yield the batches of a phase. The default is shuffled passes. Called on the client, once for each phase.

        Args:
            local: the training.
            data: set to draw from.
            phase: phase, with its number of epochs or steps.
        """
        return iter(())

    def gradient(self, step: Step, compute: Callable[[], Tensors]) -> Tensors:
        """Return the gradient of a step. The default is the gradient of the loss at the current weights.

        Called on the client in each step. SAM, for example, moves the weights, computes the gradient there, and moves
        the weights back.

        Args:
            step: step with its batches and trained parameters.
            compute: function that returns the gradient of the whole loss at the network's current weights.

        Returns:
            A gradient for every parameter in `step.trained`, by its name.
        """
        return compute()

    def scale_update(self, local: Local, update: Tensors) -> Tensors:
        """Return the rescaled update, which the client sends. Called on the client after training.

        Args:
            local: the training.
            update: trained minus received values, by parameter name.
        """
        return update

    def aggregate(self, server: AveragingServer, replies: AggregatedReplies, mean: Tensors) -> Tensors:
        """Return the aggregated update. The default is the weighted mean. Called on the server, once a round.

        Args:
            server: server whose state holds the previous model.
            replies: the clients' replies, aggregated by their entries' rules.
            mean: weighted mean of the clients' updates, for all architectures in one group.
        """
        return mean

    def server_step(self, server: AveragingServer, mean: Tensors) -> Tensors:
        """Return the server's step, which is added to the model. Called on the server, once a round.

        Args:
            server: server whose state holds the previous model.
            mean: mean update after `aggregate`, for all architectures in one group.
        """
        return mean

    def refine(self, server: AveragingServer, replies: AggregatedReplies, old: Tensors) -> Tensors:
        """Return the new model after additional training of the averaged model, such as distillation.

        Called on the server once a round, even if no reply holds an update.

        Args:
            server: server whose state holds the averaged model.
            replies: the clients' replies, aggregated by their entries' rules.
            old: weights of all architectures before this round, in one group.

        Returns:
            The whole new model, parameters and buffers of all architectures.
        """
        raise LookupError(f"{self.name} does not fill the slot 'refine'")

    def evaluation_model(self, server: AveragingServer) -> Tensors:
        """Return weights to test and save in place of the current ones, such as a running mean. Called on the server.

        Returns:
            Parameters and buffers of all architectures, as `server.state` holds the model.
        """
        raise LookupError(f"{self.name} does not fill the slot 'tested_model'")

    def personal_model(self, local: Local) -> Tensors:
        """Return the client's personal model, which is tested in addition to the global one.

        Called on the client in each test. The hook must be pure. The training of `local` has not begun, so use only its
        received weights, the client's memory, and `local.fit`.

        Returns:
            Parameters and buffers of the personal model, by name; missing names keep the received values.
        """
        raise LookupError(f"{self.name} does not fill the slot 'personal_model'")


def overrides(addon: AddOn, hook: str) -> bool:
    """Return whether `addon` overrides `hook`, the name of a hook or slot."""
    return getattr(type(addon), hook) is not getattr(AddOn, hook)


def slot_owner(addons: Sequence[AddOn], slot: str) -> AddOn | None:
    """Return the add-on among `addons` that fills a `slot` (see `SLOTS`), or None."""
    return next((a for a in addons if overrides(a, slot)), None)
