"""Base class of add-ons, which extend weight averaging."""

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

SLOTS = (
    "dataset", "batches", "gradient", "scale_update", "aggregate", "server_step", "refine",
    "evaluation_model", "personal_model",
)  # fmt: skip
"""Names of the slots: hooks that only one add-on of a method may override, as the order of several would matter."""


class AddOn(Component):
    """Base class of extensions of `FedAvg`, such as FedProx and SCAFFOLD.

    Write a frozen dataclass whose fields are the options of your extension, and override the hooks (methods) that it
    needs. `FedAvg(MyIdea(0.1), factory=...)` then calls each hook at the time that the hook's docstring states. There
    are two kinds of hooks. An additive hook adds something, such as a term of the loss or an entry of a message. It is
    called for every add-on, in the order of the add-ons' keys (`key`, by default the class name), so the order of
    arguments has no effect. A slot replaces a part of the algorithm, so only one add-on of a method may override it.

    Hooks add entries to messages, and never remove the model's: layers that stay on a client, as batch norm in FedBN,
    are options of the method, `FedAvg(personal=[...], buffers="local")` with the names of its layers, such as "bn1.*".

    The server and all clients share one add-on object across threads, so the object must not store values of a run.
    Store persistent values in `server.state` or a client's `local.memory`, under `Entry` objects that the class
    declares. Store values that are needed only during one client's training in the dict `local.scratch(self)`.

    Attributes:
        extra_outputs: number of additional network outputs for the add-on, after the outputs of the task's classes.
            `local.first_output(self)` is the index of the first of them.
        needs_previous: whether the add-on reads `local.previous`, the client's weights after its last training.
        layers: names of modules of the network whose outputs the add-on reads. In the hook `loss`, which receives the
            training step as `step`, `step.output(...).inner[name]` holds the output of a module for a batch of B
            images, flattened to B rows.
        damping: coefficient mu, if the add-on adds mu (w - w_0) to the gradient and so pulls the weights w towards
            their values w_0 at the start of the round. It affects `local.effective_lrs`, which SCAFFOLD and FedNova
            use.
        data_access: how the add-on uses private data, in its loss terms or for the values that it sends. "none": it
            uses no data, but may use trained weights. "example": its loss terms use data, but the term of one example
            does not depend on any other example. "batch" (the default): no restriction. `DPSGD` accepts "none" and
            "example".
        single_label: whether the add-on needs a task in which each image has exactly one class. If True, multi-label
            tasks are refused.
        disabled_at_zero: names of options. The add-on is disabled if all of these options are 0.
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
    _usage = "FedAvg({}, factory=...)"

    @property
    def has_query(self) -> bool:
        """True if the add-on queries clients before round 1. Default: True if it overrides `answer`.

        The server then queries every client that has images, once.
        """
        return overrides(self, "answer")

    @property
    def disabled(self) -> bool:
        """True if the options disable the add-on (see `disabled_at_zero`). `FedAvg` leaves out a disabled add-on."""
        return bool(self.disabled_at_zero) and all(getattr(self, name) == 0 for name in self.disabled_at_zero)

    @property
    def private(self) -> bool:
        """True if the add-on adds noise to a client's releases and charges their privacy cost to a ledger."""
        return False

    # Before round 1.

    def check(self, settings: Settings, addons: Sequence[AddOn]) -> None:
        """Raise ValueError if the add-on cannot work with the method's options or other add-ons.

        Called when the method is built, before any data are known.

        Args:
            settings: the method's options and its networks.
            addons: the active add-ons, this one included.
        """

    def check_run(self, settings: Settings, names: Sequence[str]) -> None:
        """Raise ValueError if the add-on cannot work with the network's parameters, or would have no effect on them.

        Called on the server before round 1.

        Args:
            settings: the method's options and its networks.
            names: names of the parameters of all architectures.
        """

    def start(self, server: AveragingServer) -> None:
        """Prepare the add-on's values in `server.state`. Called once, on the server, before round 1.

        `server.state` already holds the initial weights. A resumed run does not call this hook again.
        """

    def dry_run(self, local: Local) -> None:
        """Test the add-on on noise images, and raise ValueError if it cannot work.

        The noise images are the training set of `local`. Called on the server before round 1, once for each
        architecture, and before any privacy cost is charged. Before this call, every add-on has run `start`, and then
        `before_training` with this `local`, but no training step has run.
        """

    def answer(self, local: Local, reply: Message) -> None:
        """Add this add-on's entries to `reply`, the client's answer to the server's query before round 1.

        The answer may hold class statistics, for example. Called once on every client that has images. The network in
        `local` has the initial weights.
        """

    def expect_answer(self, server: AveragingServer, client: int, schema: Schema) -> None:
        """Add the specifications of the entries that `answer` adds to a client's answer. Called on the server.

        Args:
            server: server of the run.
            client: index of the client that answers.
            schema: schema to extend with an `EntrySpec` for each entry, under the `key` of the entry.
        """

    def receive_answers(self, server: AveragingServer, replies: AggregatedReplies) -> None:
        """Read `replies`, the clients' aggregated answers to the query before round 1. Called once on the server."""

    # A round, in this order: the server sends,

    def send(self, server: AveragingServer, client: int, message: Message) -> None:
        """Add entries to the `message` that the server sends to this `client` for training, evaluation or the query.

        Called on the server any number of times, for any client. The hook must not change any state.
        """

    def expect(self, server: AveragingServer, client: int, schema: Schema) -> None:
        """Add the entries of the add-on's reply to the schema. Called on the server.

        Args:
            server: server of the run.
            client: index of the client that replies.
            schema: schema to extend with an `EntrySpec` for each entry that `after_training` adds to the reply, under
                the `key` of the entry.
        """

    # the client trains,

    def before_training(self, local: Local) -> None:
        """Prepare the client's training, for example by reading `local.message` or setting `local.weight`.

        Called on the client, before all other hooks of its training.
        """

    def extra_records(self, local: Local) -> LabeledImages | None:
        """Return images to add to the client's training set `local.data`, or None. Called once on the client before
        training.

        They do not change the weight of the client's reply in the mean over clients.
        """
        return None

    def extra_batches(self, local: Local) -> Iterator[Batch] | None:
        """Return an endless iterator over additional batches of the add-on, one per step, or None if it has none.

        Called once on the client, before the first step. `local.stream(self, images)` returns such an iterator over a
        set. In a step, `step.batch_of(self)` returns the batch, and `step.output(self)` the network's outputs for it.
        """
        return None

    def loss(self, step: Step) -> Tensor | None:
        """Return a scalar tensor to add to the loss of this `step`, or None to add nothing.

        Called on the client in each step, after the forward pass. If an add-on such as FedSAM computes the gradient
        twice in a step, this hook is called twice.
        """
        return None

    def correct_gradient(self, step: Step, grads: Tensors) -> None:
        """Change the gradients `grads`, by parameter name, in place. Called on the client in each step.

        The hook is called after the gradient of the whole loss has been computed, and before the optimizer applies it.
        """

    def after_step(self, step: Step) -> None:
        """Change the values of the parameters in `step.trained` after the optimizer's step.

        Called on the client in each step.
        """

    def after_training(self, local: Local, update: Tensors, reply: Message) -> None:
        """Add entries to the reply, and store values in `local.memory`. Called on the client after training.

        Args:
            local: the client's training. `local.delta` is the change of the shared parameters in this training.
            update: the update that the client sends, by parameter name. It is `local.delta`, unless an add-on changed
                it by the hook `scale_update`.
            reply: reply to extend with the entries that `expect` describes.
        """

    # and the server receives the replies.

    def read_reply(self, server: AveragingServer, reply: Message, out: Message) -> None:
        """Compute additional entries from one client's `reply` before it is aggregated, and add them to `out`.

        Called on the server for each reply. FedDF, for example, computes the predictions of each client's model. This
        hook must not change any state. If it raises an exception, the reply is left out and its client reported.
        """

    def receive(self, server: AveragingServer, replies: AggregatedReplies, old: Tensors) -> None:
        """Update the add-on's values in `server.state` with the replies. Called on the server after each round.

        Args:
            server: server of the run. Its state already holds the new model.
            replies: the clients' aggregated replies.
            old: parameters and buffers of all architectures before this round, by name.
        """

    # Slots: at most one add-on fills each.

    def dataset(self, local: Local) -> LabeledImages:
        """Return the training set to use in place of the client's own images, `local.client.data`.

        Called on the client after `before_training`.

        With `FedAvg(weights="samples")`, the size of this set is the weight of the client's reply.
        """
        return local.client.data

    def batches(self, local: Local, data: LabeledImages, phase: Phase) -> Iterator[Batch]:
        """Yield the batches of one phase of training. Called on the client, once for each phase.

        If no add-on overrides this function, the batches come from shuffled passes over the training set.

        Args:
            local: the client's training.
            data: training set from which to take the batches.
            phase: phase of the training, which states the number of epochs or steps.
        """
        return iter(())

    def gradient(self, step: Step, compute: Callable[[], Tensors]) -> Tensors:
        """Return the gradient of a step, by parameter name. Called on the client in each step.

        Without this hook, it is the gradient of the loss at the current weights. FedSAM, for example, moves the
        weights, computes the gradient there, and moves the weights back.

        Args:
            step: step with its batches and trained parameters.
            compute: function that returns the gradient of the whole loss at the network's current weights. It may be
                called several times.

        Returns:
            A gradient for every parameter in `step.trained`, by its name.
        """
        return compute()

    def scale_update(self, local: Local, update: Tensors) -> Tensors:
        """Return a rescaled update for the client to send. Called on the client after training.

        Args:
            local: the client's training.
            update: trained minus received values, by parameter name.
        """
        return update

    def aggregate(self, server: AveragingServer, replies: AggregatedReplies, mean: Tensors) -> Tensors:
        """Return the aggregate of the clients' updates to use in place of their weighted mean.

        Called on the server once per round, if a reply holds an update.

        Args:
            server: server of the run. Its state still holds the model before this round.
            replies: the clients' replies. The values of each entry are aggregated over the clients by the entry's rule
                (see `Entry`).
            mean: weighted mean of the clients' updates for all architectures, by name. The names are
                "architecture/parameter", or only "parameter" if there is one architecture.
        """
        return mean

    def server_step(self, server: AveragingServer, mean: Tensors) -> Tensors:
        """Return the change to add to the global model, computed from the clients' mean update.

        Called on the server once per round, if a reply holds an update. `FedAdam`, for example, overrides this hook.

        Args:
            server: server of the run. Its state still holds the model before this round.
            mean: mean of the clients' updates, or the result of `aggregate`, for all architectures, by name. The names
                are "architecture/parameter", or only "parameter" if there is one architecture.
        """
        return mean

    def refine(self, server: AveragingServer, replies: AggregatedReplies, old: Tensors) -> Tensors:
        """Train the averaged model further on the server, for example by distillation, and return the result.

        Called on the server once per round, even if no reply holds an update.

        Args:
            server: server of the run. Its state already holds the averaged model.
            replies: the clients' replies. The values of each entry are aggregated over the clients by the entry's rule
                (see `Entry`).
            old: parameters and buffers of all architectures before this round, by name.

        Returns:
            The whole new model, parameters and buffers of all architectures.
        """
        raise LookupError(f"{self.name} does not fill the slot 'refine'")

    def evaluation_model(self, server: AveragingServer) -> Tensors:
        """Return the weights to test and save in place of the current global weights, such as their mean over rounds.

        Called on the server.

        Returns:
            Parameters and buffers of all architectures, by name, like `server.state[FedAvg.model]`.
        """
        raise LookupError(f"{self.name} does not fill the slot 'evaluation_model'")

    def personal_model(self, local: Local) -> Tensors:
        """Return the client's personal model. It is tested in addition to the global model.

        Called on the client in each test. The hook must not change the client's memory. `local` has not been trained,
        so use only its received weights, the memory, and `local.fit`, which trains a separate network.

        Returns:
            Parameters and buffers of the personal model, by name. Missing parameters and buffers have the received
            values.
        """
        raise LookupError(f"{self.name} does not fill the slot 'personal_model'")


def overrides(addon: AddOn, hook: str) -> bool:
    """Return whether the class of `addon` overrides the hook of `AddOn` that is called `hook`."""
    return getattr(type(addon), hook) is not getattr(AddOn, hook)


def slot_owner(addons: Sequence[AddOn], hook: str) -> AddOn | None:
    """Return the one add-on among `addons` that overrides the hook called `hook`, or None if no add-on does."""
    return next((a for a in addons if overrides(a, hook)), None)
