"""Weight averaging as a core with add-ons."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

from torch import nn

from distillkit._sanity_checks import warn
from distillkit.augment._validation import Augment
from fl._codec import digest
from fl._components import KeyedObject, require_own_entries
from fl.aggregation import AggregatedReplies, EntrySpec, Schema
from fl.averaging._composition import active_addons, check_update, require_answer_schema, require_composable
from fl.averaging._entries import Entries
from fl.averaging._evaluation import evaluate_models, evaluated_models, global_models
from fl.averaging._options import local_phases, patterns
from fl.averaging._training import train
from fl.averaging._validation import require_patterns, trial_trainings, try_augmentation, try_objective
from fl.averaging.addon import AddOn, slot_owner
from fl.averaging.local import Local
from fl.averaging.server import AveragingServer
from fl.averaging.settings import Objective, Settings
from fl.batches import Phase
from fl.message import Message, Tensors
from fl.method import Method, NoUsableReply, Predictor, evaluation_spec
from fl.networks import Factory, Networks
from fl.participants import Client, Server
from fl.schema import MAX_WEIGHT

__all__ = ["FedAvg"]


class FedAvg(Entries, Method):
    """Federated averaging (McMahan et al., AISTATS 2017, Algorithm 1), and the ground on which add-ons stand.

    In each round every drawn client starts from the server's weights w, trains on its own data to w_k, and sends its
    change w_k - w; the server adds the mean change, weighted by the clients' sample counts. (Sending the change instead
    of the weights is the same average and is what server steps, clipping and secure sums need.) `fl.simulate` runs it.

    `FedAvg(FedProx(0.01), SCAFFOLD(), factory=..., lr=...)` adds other papers' ideas; see `fl.addons`.

    Args:
        addons: other papers' ideas, from `fl.addons` or your own (`fl.AddOn`), in any order; one whose options turn it
            off is left out.
        factory: called with the number of outputs, gives the network; or a mapping architecture -> such a factory.
        assign: with several architectures, who has which: client number -> architecture (a mapping or a function).
        initial: weights to begin with (a state dict; names that it lacks are drawn); default: all are drawn from the
            run's seed.
        lr: eta, the clients' learning rate in round 1. By default 0.1 for SGD, without momentum as in Algorithm 1 of
            McMahan et al.: with ten clients, Dirichlet(0.1), one local epoch and five rounds 0.01 ends at 68 % and 0.1
            at 86 % on digits, at 54 and 66 % on 3,000 images of FashionMNIST (ConvNets, means of two seeds). For Adam
            0.001, its authors'.
        momentum: of the clients' SGD, in [0, 1); 0 with Adam.
        weight_decay: of the clients' optimiser: lambda w is added to the gradient.
        optimizer: the clients' optimiser, "sgd" or "adam".
        optimizer_state: the optimiser's momentum begins anew in each "round", or stays with the "client" from one
            participation to the next, as in VHL's release (where the client's optimiser is never cleared).
        lr_decay: the rate of round t is lr * lr_decay ** (t - 1).
        epochs: passes over the local data in a round (default 1). More cost clients' time and save rounds: 5 end at 92
            and 71 % in the same comparison. Or:
        steps: an exact number of steps in a round.
        phases: several parts of a local training, one after the other, instead of `epochs`/`steps` (FedRep).
        batch: images a step; the last batch of a pass is short if they do not divide.
        augment: changes the images of every batch of the client's own data, `augment(images, generator)`.
        objective: the loss of a batch, `objective(logits, labels)`, one number; default: the task's loss.
        weights: a client's weight in the mean: its "samples" (n_k), or "uniform" for 1.
        max_samples: with "samples", the largest sample count that a client may claim; a reply that claims more is
            refused. It is public, and bounds what one client can do to an average: give your largest client's count.
        buffers: float buffers (batch-norm statistics) are averaged ("mean"), kept by each client ("local"), or left
            at their initial values on the server ("drop", integers too). Else integer buffers take the maximum.
            Those made with `persistent=False` are no part of this: each network has them as its factory makes them.
        personal: patterns of names of parameters that stay with the client and are never sent (FedRep: "classifier.*").
        predict: where add-ons have classes of their own (VHL), a test takes the largest output of the "real" classes or
            of "all".

    Attributes:
        addons: those that are on, in the order in which they act.
        networks: who has which architecture, and the first weights.
        settings: the options, checked, as add-ons read them.

    Raises:
        TypeError: an argument of another kind: an add-on's class, say, or a network instead of a factory.
        ValueError: a bad option, two add-ons for one slot, an add-on given twice, or a combination that one refuses.
    """

    key = "FedAvg"
    old_options: ClassVar[Mapping[str, str]] = {"max_samples": "most_samples"}

    def __init__(
        self,
        *addons: AddOn,
        factory: Factory | Mapping[str, Factory] | None = None,
        assign: Mapping[int, str] | Callable[[int], str] | None = None,
        initial: Tensors | None = None,
        lr: float | None = None,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        optimizer: Literal["sgd", "adam"] = "sgd",
        optimizer_state: Literal["round", "client"] = "round",
        lr_decay: float = 1.0,
        epochs: int | None = None,
        steps: int | None = None,
        phases: Sequence[Phase] | None = None,
        batch: int = 32,
        augment: Augment | None = None,
        objective: Objective | None = None,
        weights: Literal["samples", "uniform"] = "samples",
        max_samples: float = MAX_WEIGHT,
        buffers: Literal["mean", "local", "drop"] = "mean",
        personal: str | Sequence[str] = (),
        predict: Literal["real", "all"] = "real",
    ) -> None:
        self.addons = active_addons(addons)
        require_composable(self.addons)
        first_outputs, extra = dict[str, int](), 0
        for addon in self.addons:
            first_outputs[addon.key] = extra
            extra += addon.extra_outputs
        self.networks = Networks(factory, assign, extra=extra, initial=initial)
        self.settings = Settings(
            networks=self.networks, lr=lr, momentum=momentum, weight_decay=weight_decay, optimizer=optimizer,
            optimizer_state=optimizer_state, lr_decay=lr_decay, phases=local_phases(epochs, steps, phases), batch=batch,
            augment=augment, objective=objective, weights=weights, max_samples=max_samples, buffers=buffers,
            personal=patterns(personal), predict=predict, first_outputs=first_outputs,
            layers=tuple(name for a in self.addons for name in a.layers), damping=sum(a.damping for a in self.addons),
        )  # fmt: skip
        for addon in self.addons:
            addon.check(self.settings, self.addons)
        require_answer_schema(self.addons)
        require_own_entries(self.parts)

    def arguments(self) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """What `repr` and the record of a run say: the add-ons and the options that are set; of `initial` a digest."""
        held = self.settings
        options = {
            "lr": held.lr, "momentum": held.momentum, "weight_decay": held.weight_decay, "optimizer": held.optimizer,
            "optimizer_state": None if held.optimizer_state == "round" else held.optimizer_state,
            "lr_decay": held.lr_decay, "batch": held.batch, "phases": held.phases, "weights": held.weights,
            "buffers": held.buffers, "personal": held.personal, "predict": held.predict,
            "architectures": [n for n in self.networks.names if n], "objective": held.objective,
            "augment": held.augment,
            "initial": digest("initial", self.networks.initial) if self.networks.initial is not None else None,
            "max_samples": held.max_samples if held.max_samples != MAX_WEIGHT else None,
        }  # fmt: skip
        return self.addons, {k: v for k, v in options.items() if v not in ((), [], None)}

    def _slot(self, name: str) -> AddOn | None:
        return slot_owner(self.addons, name)

    def _seen(self, server: Server) -> AveragingServer:
        return AveragingServer.of(server, self.settings)

    # Before round 1.

    @property
    def parts(self) -> tuple[KeyedObject, ...]:
        """The method and its add-ons: whose entries may travel or be kept."""
        return (self, *self.addons)

    def architectures(self, classes: int) -> Mapping[str, nn.Module]:
        """The template of every architecture, by name, with the outputs that add-ons put beside the `classes`."""
        return self.networks.templates(classes)

    def assigned(self, clients: int) -> Sequence[str]:
        """The architecture of each client, if there are several."""
        return self.networks.assigned(clients)

    def check_run(self, server: Server, rounds: int) -> None:
        """Try the networks, `augment` and `objective` on noise, and let every add-on look at the parameters' names.

        Raises:
            ValueError: one of them fails, a pattern (`personal`, `phases`) matches no parameter, or `initial` does not
                fit; the argument is named.
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

    def start(self, server: Server) -> None:
        """Draw w_0 of every architecture (or take `initial`), then let the add-ons prepare and try themselves out.

        Raises:
            ValueError: an add-on that wants one class an image in a task with several, or that refuses what it sees.
        """
        for addon in self.addons:
            if addon.single_label and not server.task.single_label:
                raise ValueError(
                    f"{addon.name} needs one class an image, which {server.task!r} does not have: leave it out"
                )
        server.state[self.model] = self.networks.all_first(server)
        for addon in self.addons:
            addon.start(self._seen(server))
        for local in trial_trainings(self.settings, self.addons, server, self.send):
            for addon in self.addons:
                addon.dry_run(local)

    @property
    def private(self) -> bool:
        """Whether an add-on noises what the clients release and charges a ledger for it (`DPSGD`)."""
        return any(a.private for a in self.addons)

    @property
    def has_query(self) -> bool:
        """Whether an add-on has a question for the clients before round 1."""
        return any(a.has_query for a in self.addons)

    def answer(self, client: Client, message: Message) -> Message:
        """Answer every add-on's question before round 1, on a client."""
        local, reply = Local(self.settings, client, message, self.addons), Message()
        for addon in self.addons:
            if addon.has_query:
                addon.answer(local, reply)
        return reply

    def expect_answer(self, server: Server, client: int) -> Schema:
        """What the answer must look like: every add-on says it of its own part."""
        schema: Schema = {}
        for addon in self.addons:
            if addon.has_query:
                addon.expect_answer(self._seen(server), client, schema)
        return schema

    def receive_answers(self, server: Server, replies: AggregatedReplies) -> None:
        """Give the clients' answers to the add-ons, on the server."""
        for addon in self.addons:
            addon.receive_answers(self._seen(server), replies)

    # A round.

    def send(self, server: Server, client: int) -> Message:
        """w, the model of the client's architecture without what the client keeps itself; and what the add-ons say."""
        name = self.networks.architecture(client)
        kept = self.settings.kept_by_client(self.networks.template(name, server.task.num_classes))
        state = {n: t for n, t in self.networks.unprefixed(server.state[self.model], name).items() if n not in kept}
        message = Message({self.model: self.networks.prefixed(state, name)})
        for addon in self.addons:
            addon.send(self._seen(server), client, message)
        return message

    def expect(self, server: Server, client: int) -> Schema:
        """A change for every shared parameter, the buffers that travel, the weight n_k, and what the add-ons add."""
        name = self.networks.architecture(client)
        net = self.networks.template(name, server.task.num_classes)
        model = self.networks.unprefixed(server.state[self.model], name)
        shared = {n: model[n] for n, _ in net.named_parameters() if not self.settings.is_personal(n)}
        least, most = (0.0, self.settings.max_samples) if self.settings.weights == "samples" else (1.0, 1.0)
        schema: Schema = {
            self.samples.key: EntrySpec(1.0, minimum=least, maximum=most),
            self.update.key: EntrySpec(self.networks.prefixed(shared, name)),
        }
        for entry, names in self.settings.sent_buffers(net):
            schema[entry.key] = EntrySpec(self.networks.prefixed({n: model[n] for n in names}, name))
        for addon in self.addons:
            addon.expect(self._seen(server), client, schema)
        return schema

    def local(self, client: Client, message: Message) -> Message:
        """ClientUpdate: train from the received weights on the client's data; reply with the change w_k - w and n_k.

        The hooks of the add-ons are called from here in the order that `docs/user_methods.md` lists.
        """
        local = Local(self.settings, client, message, self.addons)
        for addon in self.addons:
            addon.before_training(local)
        slot = self._slot("dataset")
        local.data = slot.dataset(local) if slot else client.data
        samples = float(len(local.data)) if self.settings.weights == "samples" else 1.0
        joined = [r for r in (a.extra_records(local) for a in self.addons) if r is not None]
        if joined:
            local.data = type(local.data).concatenate([local.data, *joined])
        train(local, self.addons)

        slot = self._slot("scale_update")
        update = slot.scale_update(local, local.delta) if slot else local.delta
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

    def read_reply(self, server: Server, reply: Message) -> Message:
        """What the add-ons derive from one reply before it is folded and forgotten."""
        out = Message()
        for addon in self.addons:
            addon.read_reply(self._seen(server), reply, out)
        return out

    def receive(self, server: Server, replies: AggregatedReplies) -> None:
        """w <- w + sum_k n_k (w_k - w) / sum_k n_k; an add-on may rescale the mean, take the step or refine the model.

        Buffers are replaced by the clients' mean (integers by their maximum). Without an update the weights stay.

        Raises:
            NoUsableReply: all weights n_k are zero.
        """
        seen, old = self._seen(server), server.state[self.model]
        if self.update in replies:
            if not float(replies.weight(self.update)) > 0:
                raise NoUsableReply("all weights of the round's replies are zero")
            mean = replies[self.update]
            slot = self._slot("aggregate")
            mean = check_update(slot, "aggregate", slot.aggregate(seen, replies, mean), mean) if slot else mean
            slot = self._slot("server_step")
            step = check_update(slot, "server_step", slot.server_step(seen, mean), mean) if slot else mean
            new = {**old, **{n: old[n] + step[n] for n in step}}
            for entry in (self.buffers, self.counters):
                replaced: Tensors = replies.get(entry, {})
                new.update(replaced)
            server.state[self.model] = new
        slot = self._slot("refine")
        if slot:
            server.state[self.model] = slot.refine(seen, replies, old)
        for addon in self.addons:
            addon.receive(seen, replies, old)

    # Testing.

    def predictors(self, server: Server) -> Mapping[str, Predictor]:
        """The global model of each architecture; none if part of it stays with the clients."""
        return global_models(self._seen(server), self.addons)

    def evaluate(self, client: Client, message: Message) -> Message:
        """Test the received model ("global") and the client's own ("personal", where there is one) on its test data."""
        if client.test is None or not len(client.test):
            return Message()
        return Message({self.tested: evaluate_models(self.settings, self.addons, client, message, client.test)})

    def expect_evaluation(self, server: Server, client: int) -> Schema:
        """Sums over a client's test images, for each of the models that `evaluate` tests."""
        return {self.tested.key: evaluation_spec(server.task, *evaluated_models(self.settings, self.addons))}
