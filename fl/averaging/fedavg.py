"""Federated averaging with add-ons.

The algorithm is in three files. Read them in this order:

1. `fl/averaging/fedavg.py` (this file): a round is `FedAvg.send` on the server, `FedAvg.local` on the clients and
   `FedAvg.receive` on the server.
2. `fl/averaging/_training.py`: `train` runs the phases, epochs and optimizer steps of `FedAvg.local`.
3. `fl/averaging/step.py`: `Step` computes the loss of one batch and its gradient.

`addon.py` lists the hooks that add-ons override. The other modules check options, test models and hold state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, Literal

from distillkit._utils.user_warnings import warn
from distillkit.augment._validation import Augment
from distillkit.privacy import PrivacyError
from fl._codec import digest
from fl._components import KeyedObject, require_own_entries
from fl.aggregation import AggregatedReplies, EntrySpec, Schema
from fl.averaging._composition import check_records, composed, from_slot
from fl.averaging._entries import Entries
from fl.averaging._tested_models import evaluate_models, evaluated_models, global_models
from fl.averaging._training import train
from fl.averaging._trials import require_patterns, trial_trainings, try_augmentation, try_objective
from fl.averaging.addon import AddOn, slot_owner
from fl.averaging.local import Local
from fl.averaging.optimizer import ClientOptimizer
from fl.averaging.server import AveragingServer
from fl.averaging.settings import Objective, Settings, as_patterns, as_phases, variances
from fl.batches import Phase
from fl.message import Message, Tensors
from fl.method import Method, NoUsableReply, Predictor, evaluation_spec, require_single_label
from fl.networks import Factory, Networks
from fl.participants import Client, Server
from fl.schema import MAX_WEIGHT


class FedAvg(Entries, Method):
    """Federated averaging (McMahan et al., AISTATS 2017, Algorithm 1), which add-ons extend.

    In each round every drawn client starts from the server's weights w, trains on its own data to w_k, and sends its
    change w_k - w. The server adds the mean change, weighted by the clients' sample counts. The average is the same as
    if clients sent w_k, but server optimizers, clipping and secure sums work on w_k - w. Run the method with
    `fl.simulate`.

    `FedAvg(FedProx(0.01), SCAFFOLD(), factory=..., lr=...)` adds other papers' extensions; see `fl.addons`.

    Args:
        addons: extensions from `fl.addons`, or your own (`fl.AddOn`), in any order. An add-on with an option that
            disables it, such as `FedProx(0)`, is left out.
        factory: function that takes the number of outputs and returns a network; or, for several architectures, a
            mapping from the name of each architecture to its function.
        assign: mapping or function from a client's index to the name of its architecture. Required if there are several
            architectures, and refused otherwise.
        initial: initial weights (a state dict). Weights that it lacks are drawn at random from the run's seed.
        lr: eta, the clients' learning rate in round 1. Default: 0.1 for SGD, and 0.001 for Adam, as recommended by
            Adam's authors.
        momentum: momentum of the clients' SGD, in [0, 1); 0 with Adam. Algorithm 1 of McMahan et al. has no momentum.
        optimizer: the clients' optimizer: "sgd", "adam", or a `ClientOptimizer` with weight decay, a decay of the rate,
            or momentum that is kept between rounds.
        epochs: passes over the local data in a round (default 1). More epochs cost client time, but fewer rounds are
            needed.
        steps: exact number of steps in a round; use it instead of `epochs`.
        phases: phases of local training, which run one after the other; FedRep has two. Set it instead of `epochs` or
            `steps`.
        batch: images per step. The last batch of a pass may be smaller.
        augment: function `augment(images, generator)`, applied to every batch of the client's own data.
        objective: function `objective(logits, labels)` that returns the scalar loss of a batch. Default: the task's
            loss.
        weights: a client's weight in the mean: "samples" for its number of images n_k, or "uniform" for 1.
        max_samples: with "samples", the largest sample count that a client may claim; replies that claim more are
            refused. This public number limits one client's influence on an average. Pass the sample count of your
            largest client.
        max_update_norm: largest l2 norm of a client's change w_k - w. A reply whose change is larger is left out, and
            the history names its client. Default: 100 times (1 + the norm of w), which only a diverged client exceeds.
        buffers: treatment of float buffers (batch-norm statistics). "mean": the server averages them. "local": each
            client keeps its own. "drop": clients do not send them, and the server keeps their initial values.
            Integer buffers are replaced by their maximum over clients, except with "drop". Buffers registered with
            `persistent=False` are never sent.
        personal: patterns of the names of parameters that stay with the client and are never sent. FedRep uses
            "classifier.*".
        predict: outputs that a test uses for predictions: those of the task's classes ("real"), or "all". The two
            differ only if an add-on, such as VHL, adds classes.

    Attributes:
        addons: the active add-ons, in the order in which they act.
        networks: the architectures, and the initial weights.
        settings: the checked options, as add-ons read them.

    Raises:
        TypeError: an argument has another type, such as an add-on's class instead of an object, or a network instead of
            a factory.
        ValueError: an option is out of range, two add-ons override the same slot (see `AddOn`), an add-on is given
            twice, or an add-on cannot be combined with the other add-ons or options.
    """

    def __init__(
        self,
        *addons: AddOn,
        factory: Factory | Mapping[str, Factory] | None = None,
        assign: Mapping[int, str] | Callable[[int], str] | None = None,
        initial: Tensors | None = None,
        lr: float | None = None,
        momentum: float = 0.0,
        optimizer: Literal["sgd", "adam"] | ClientOptimizer = "sgd",
        epochs: int | None = None,
        steps: int | None = None,
        phases: Sequence[Phase] | None = None,
        batch: int = 32,
        augment: Augment | None = None,
        objective: Objective | None = None,
        weights: Literal["samples", "uniform"] = "samples",
        max_samples: float = MAX_WEIGHT,
        max_update_norm: float | None = None,
        buffers: Literal["mean", "local", "drop"] = "mean",
        personal: str | Sequence[str] = (),
        predict: Literal["real", "all"] = "real",
    ) -> None:
        self.addons = composed(addons)
        first_outputs, extra = dict[str, int](), 0
        for addon in self.addons:
            first_outputs[addon.key] = extra
            extra += addon.extra_outputs
        self.networks = Networks(factory, assign, extra=extra, initial=initial)
        self.settings = Settings(
            networks=self.networks, lr=lr, momentum=momentum, optimizer=ClientOptimizer.of(optimizer),
            phases=as_phases(epochs, steps, phases), batch=batch, augment=augment, objective=objective,
            weights=weights, max_samples=max_samples, max_update_norm=max_update_norm, buffers=buffers,
            personal=as_patterns(personal), predict=predict, first_outputs=first_outputs,
            layers=tuple(name for a in self.addons for name in a.layers),
            damping=sum(a.damping for a in self.addons),
        )  # fmt: skip
        for addon in self.addons:
            addon.check(self.settings, self.addons)
        self._check_private()
        require_own_entries(self.parts)

    def _check_private(self) -> None:
        """Refuse what reveals records beside an add-on that alone may see them: weights, and a subclass's own code."""
        private = next((addon.name for addon in self.addons if addon.private), None)
        if private is None:
            return
        if self.settings.weights != "uniform":
            raise ValueError(
                f"{private} needs weights='uniform': the number of a client's records is private, got 'samples'"
            )
        names = ("local", "answer", "run_on_client", *self.exchanges)
        own = [n for n in names if getattr(type(self), str(n), None) is not getattr(FedAvg, str(n), None)]
        if own:
            raise PrivacyError(
                f"{type(self).__name__}.{own[0]} sees the clients' records beside {private}, and nothing bounds or "
                "charges what it sends; write it as an add-on, which gets no records"
            )

    # A round.

    def send(self, server: Server, client: int) -> Message:
        """Return the message to a client: the global weights w of its architecture, and the entries of the add-ons.

        Parameters and buffers that stay with the client are left out.
        """
        name = self.networks.architecture(client)
        kept = self.settings.kept_by_client(self.networks.template(name, server.task.num_classes))
        state = {n: t for n, t in self.networks.unprefixed(server.state[self.model], name).items() if n not in kept}
        message = Message({self.model: self.networks.prefixed(state, name)})
        for addon in self.addons:
            addon.send(self._view(server), client, message)
        return message

    def local(self, client: Client, message: Message) -> Message:
        """Train the received weights w on the client's data, and reply with their change and the client's sample count.

        This is ClientUpdate in Algorithm 1 of McMahan et al. With the trained weights w_k, the change is w_k - w.

        `docs/user_methods.md` lists the add-ons' hooks in the order in which this function calls them.
        """
        records, private = client.data, any(addon.private for addon in self.addons)
        if private:  # only the private add-on gets the records; all others see an empty set
            client = client.without_records()
        local = Local(self.settings, client, message, self.addons)
        for addon in self.addons:
            addon.before_training(local)
        slot = slot_owner(self.addons, "dataset")
        local.data = client.data
        if slot:
            local.data = check_records(slot, "dataset", slot.dataset(local), client.data)
        samples = float(len(local.data)) if self.settings.weights == "samples" else 1.0
        extra = [
            check_records(addon, "extra_records", records_of, client.data, ", or None")
            for addon in self.addons
            if (records_of := addon.extra_records(local)) is not None
        ]
        if extra:
            local.data = type(local.data).concatenate([local.data, *extra])
        train(local, self.addons, records if private else local.data)

        update = from_slot(self.addons, "scale_update", local, local.delta, default=local.delta, name="update")
        sent, kept = self.settings.sent_buffers(local.net), self.settings.kept_by_client(local.net)
        whole = any(a.needs_previous for a in self.addons)
        state = local.state() if sent or kept or whole else {}
        reply = Message({self.samples: samples, self.update: local.prefixed(update)})
        for entry, names in sent:
            reply[entry] = local.prefixed({n: state[n] for n in names})
        for addon in self.addons:
            addon.after_training(local, update, reply)
        if kept:
            client.memory[self.own] = {n: state[n] for n in kept}
        if whole:
            client.memory[self.last] = state
        return reply

    def receive(self, server: Server, replies: AggregatedReplies) -> None:
        """Add the weighted mean of the clients' changes to the global weights.

        The new weights are w + sum_k n_k (w_k - w) / sum_k n_k, where client k has the trained weights w_k and the
        sample count n_k. Add-ons may replace the mean (`aggregate`), the change of the global weights (`server_step`)
        or the new weights (`refine`).

        Float buffers are replaced by their mean over clients, integer buffers by their maximum. If no reply holds an
        update, the weights do not change.

        Raises:
            NoUsableReply: the sample counts n_k of all replies are zero.
        """
        view, old = self._view(server), server.state[self.model]
        if self.update in replies:
            if not float(replies.weight(self.update)) > 0:
                raise NoUsableReply("all weights of the round's replies are zero")
            mean = replies[self.update]
            mean = from_slot(self.addons, "aggregate", view, replies, mean, default=mean, name="mean")
            step = from_slot(self.addons, "server_step", view, mean, default=mean, name="mean")
            new = {**old, **{n: old[n] + step[n] for n in step}}
            for entry in (self.buffers, self.counters):
                replaced: Tensors = replies.get(entry, {})
                new.update(replaced)
            aliases = self.networks.aliases(server.task.num_classes)
            server.state[self.model] = new | {n: new[first] for n, first in aliases.items()}
        if slot_owner(self.addons, "refine"):
            server.state[self.model] = from_slot(self.addons, "refine", view, replies, old, default=old, name="old")
        for addon in self.addons:
            addon.receive(view, replies, old)

    def expect(self, server: Server, client: int) -> Schema:
        """Return the schema of a reply: changes of shared parameters, buffers, sample count and entries of add-ons."""
        name = self.networks.architecture(client)
        net = self.networks.template(name, server.task.num_classes)
        model = self.networks.unprefixed(server.state[self.model], name)
        shared = {n: model[n] for n, _ in net.named_parameters() if not self.settings.is_personal(n)}
        minimum, maximum = (0.0, self.settings.max_samples) if self.settings.weights == "samples" else (1.0, 1.0)
        schema: Schema = {
            self.samples.key: EntrySpec(1.0, minimum=minimum, maximum=maximum),
            self.update.key: EntrySpec(
                self.networks.prefixed(shared, name),
                max_norm=self.settings.update_limit(shared),
                max_ratio=None if self.settings.max_update_norm is None else math.inf,
            ),
        }
        positive = set(self.networks.prefixed({n: model[n] for n in variances(net) & model.keys()}, name))
        for entry, names in self.settings.sent_buffers(net):
            sent = self.networks.prefixed({n: model[n] for n in names}, name)
            schema[entry.key] = EntrySpec(sent, nonnegative=positive)
        for addon in self.addons:
            addon.expect(self._view(server), client, schema)
        return schema

    def read_reply(self, server: Server, reply: Message) -> Message:
        """Return the additional entries that the add-ons compute from one client's reply before it is aggregated."""
        out = Message()
        for addon in self.addons:
            addon.read_reply(self._view(server), reply, out)
        return out

    # Tests.

    def predictors(self, server: Server) -> Mapping[str, Predictor]:
        """Return the global model of each architecture, unless a part of it stays with the clients."""
        return global_models(self._view(server), self.addons)

    def evaluate(self, client: Client, message: Message) -> Message:
        """Test the received model ("global") and the personal model, if there is one, on the client's test data."""
        if client.test is None or not len(client.test):
            return Message()
        return Message({self.tested: evaluate_models(self.settings, self.addons, client, message, client.test)})

    def expect_evaluation(self, server: Server, client: int) -> Schema:
        """Return the schema of the results of `evaluate`: `LabelTask.sums` of each tested model."""
        return {self.tested.key: evaluation_spec(server.task, *evaluated_models(self.settings, self.addons))}

    # Before round 1.

    def check_run(self, server: Server, rounds: int) -> None:
        """Test the networks, `augment` and `objective` on noise images, and call the add-ons' `check_run`.

        Warn about add-ons that have no effect because the run has too few rounds.

        Raises:
            ValueError: a network, `augment` or `objective` fails; a pattern in `personal` or `phases` matches no
                parameter; `initial` does not fit the networks; or an add-on refuses the networks. The message names the
                argument.
        """
        self.networks.check_run(server)
        settings = self.settings
        known = require_patterns(settings, self.networks.templates(server.task.num_classes))
        for addon in self.addons:
            addon.check_run(settings, known)
        try_augmentation(server, settings.augment)
        try_objective(server, settings.objective, self.networks.outputs(server.task.num_classes))
        for addon in (a for a in self.addons if a.first_round > rounds):
            warn(
                f"{addon.name} changes nothing before round {addon.first_round}, and the run has {rounds}: it is "
                f"as without {addon.name}"
            )
        for addon in self.addons:
            if (selected := getattr(addon, "selected", ())) and min(selected) > rounds:
                warn(f"{addon.name}: selected={selected} names no round of this run, which has {rounds}")

    def start(self, server: Server) -> None:
        """Store the initial weights of every architecture, then call the hooks `start` and `dry_run` of each add-on.

        `dry_run` tests the add-on on noise images.

        Raises:
            ValueError: an add-on needs one class per image but the task is multi-label, or an add-on fails the test.
        """
        for addon in (a for a in self.addons if a.single_label):
            require_single_label(addon.name, server.task)
        server.state[self.model] = self.networks.all_first(server)
        for addon in self.addons:
            addon.start(self._view(server))
        for local in trial_trainings(self.settings, self.addons, server, self.send):
            for addon in self.addons:
                addon.dry_run(local)

    @property
    def has_query(self) -> bool:
        """True if an add-on queries the clients before round 1."""
        return any(a.has_query for a in self.addons)

    def answer(self, client: Client, message: Message) -> Message:
        """Return a client's answers to the add-ons' queries before round 1."""
        local, reply = Local(self.settings, client, message, self.addons), Message()
        for addon in self.addons:
            if addon.has_query:
                addon.answer(local, reply)
        return reply

    def expect_answer(self, server: Server, client: int) -> Schema:
        """Return the schema of a client's answers to the add-ons' queries before round 1."""
        schema: Schema = {}
        for addon in self.addons:
            if addon.has_query:
                addon.expect_answer(self._view(server), client, schema)
        return schema

    def receive_answers(self, server: Server, replies: AggregatedReplies) -> None:
        """Pass the clients' aggregated answers to `receive_answers` of each add-on."""
        for addon in self.addons:
            addon.receive_answers(self._view(server), replies)

    # Composition and records.

    @property
    def parts(self) -> tuple[KeyedObject, ...]:
        """The method and its add-ons: the objects whose classes declare message entries."""
        return (self, *self.addons)

    @property
    def private(self) -> bool:
        """True if an add-on, such as `DPSGD`, adds noise to the clients' releases and charges a ledger for them."""
        return any(a.private for a in self.addons)

    def arguments(self) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Return the add-ons and the options, for `repr` and a run's record.

        The weights in `initial` are replaced by a digest.
        """
        settings, optimizer = self.settings, self.settings.optimizer
        options = {
            "lr": settings.lr, "momentum": settings.momentum,
            "optimizer": optimizer.name if optimizer == ClientOptimizer(optimizer.name) else optimizer,
            "batch": settings.batch, "phases": settings.phases,
            "weights": settings.weights, "buffers": settings.buffers, "personal": settings.personal,
            "predict": settings.predict, "architectures": [n for n in self.networks.names if n],
            "objective": settings.objective, "augment": settings.augment,
            "initial": digest("initial", self.networks.initial) if self.networks.initial is not None else None,
            "max_update_norm": settings.max_update_norm,
            "max_samples": settings.max_samples if settings.max_samples != MAX_WEIGHT else None,
        }  # fmt: skip
        return self.addons, {k: v for k, v in options.items() if v not in ((), [], None)}

    def _view(self, server: Server) -> AveragingServer:
        return AveragingServer(**{f.name: getattr(server, f.name) for f in fields(Server)}, settings=self.settings)
