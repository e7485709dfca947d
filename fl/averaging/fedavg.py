"""Weight averaging as a core with add-ons."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from torch import nn

from distillkit.augment.contract import Augment
from distillkit.plausible import warn
from fl.averaging.addon import AddOn, filling, installed, require_composable, require_expected
from fl.averaging.entries import Entries
from fl.averaging.local import Local, received_state
from fl.averaging.options import local_phases, patterns
from fl.averaging.server import AveragingServer, estimate_statistics
from fl.averaging.settings import Objective, Settings, floating_buffers
from fl.averaging.train import train
from fl.averaging.trial import require_matches, trial_locals, try_augmentation, try_objective
from fl.batches import Phase
from fl.codec import digest
from fl.message import Message, Tensors
from fl.method import Client, Method, NoUsableReply, Predictor, Server, sums_like
from fl.networks import Factory, Networks
from fl.parts import Keyed, require_own_entries
from fl.reduce import Like, Reduced, Schema
from fl.schema import MOST

__all__ = ["FedAvg"]


class FedAvg(Entries, Method):
    """Federated averaging (McMahan et al., AISTATS 2017, Algorithm 1), and the ground on which add-ons stand.

    In each round every drawn client starts from the server's weights, trains on its own data, and sends its change
    w_k - w; the server adds the mean change, weighted by the clients' sample counts. (Sending the change instead of
    the weights is the same average and is what server steps, clipping and secure sums need.)

    `FedAvg(FedProx(0.01), SCAFFOLD(), factory=..., lr=...)` adds other papers' ideas; see `fl.addons`.

    Args:
        addons: see `AddOn`; their order does not matter. One that is off is left out.
        factory: called with the number of outputs, gives the network; or a mapping architecture -> such a factory.
        assign: with several architectures, client number -> architecture (a mapping or a function).
        initial: weights to begin with (a state dict); default: drawn from the run's seed.
        lr, momentum, weight_decay, optimizer: the clients' optimiser ("sgd" or "adam"). The rate is by default 0.1 for
            SGD, without momentum as in Algorithm 1 of McMahan et al.: with ten clients, Dirichlet(0.1), one local epoch
            and five rounds 0.01 ends at 68 % and 0.1 at 86 % on digits, at 54 and 66 % on 3,000 images of FashionMNIST
            (ConvNets, means of two seeds). For Adam 0.001, its authors'.
        optimizer_state: its momentum begins anew in each "round", or stays with the "client" from one participation to
            the next, as in VHL's release (where the client's optimiser is never cleared).
        lr_decay: the rate of round t is lr * lr_decay ** (t - 1).
        epochs: passes over the local data in a round (default 1). More cost clients' time and save rounds: 5 end at 92
            and 71 % in the same comparison. Or:
        steps: an exact number of steps in a round.
        phases: several parts of a local training instead of `epochs`/`steps` (FedRep).
        batch: images a step.
        augment: applied to the real batches, `augment(images, generator)`.
        objective: `objective(logits, labels)`; default: the task's loss.
        weights: "samples" or "uniform".
        most_samples: with "samples", the largest sample count that a client may claim; a reply that claims more is
            refused. It is public, and bounds what one client can do to an average: give your largest client's count.
        buffers: float buffers (batch-norm statistics) are averaged ("mean"), kept by each client ("local"), or left
            at their initial values on the server ("drop", integers too). Else integer buffers take the maximum.
        personal: patterns of parameter names that stay with the client (FedRep: "classifier.*").
        predict: with extra outputs, test the argmax over the "real" classes or over "all" outputs.

    Attributes:
        addons: those that are on, in the order in which they act.
        settings: the options, checked, as add-ons read them.

    Raises:
        TypeError: an argument of another kind: an add-on's class, say, or a network instead of a factory.
        ValueError: a bad option, two add-ons for one slot, an add-on given twice, or a combination that one refuses.
    """

    key = "FedAvg"

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
        most_samples: float = MOST,
        buffers: Literal["mean", "local", "drop"] = "mean",
        personal: str | Sequence[str] = (),
        predict: Literal["real", "all"] = "real",
    ) -> None:
        self.addons = installed(addons)
        require_composable(self.addons)
        first_outputs, extra = dict[str, int](), 0
        for addon in self.addons:
            first_outputs[addon.key] = extra
            extra += addon.extra_outputs
        self.networks = Networks(factory, assign, extra=extra, initial=initial)
        self.settings = Settings(
            networks=self.networks, lr=lr, momentum=momentum, weight_decay=weight_decay, optimizer=optimizer,
            optimizer_state=optimizer_state, lr_decay=lr_decay, phases=local_phases(epochs, steps, phases), batch=batch,
            augment=augment, objective=objective, weights=weights, most_samples=most_samples, buffers=buffers,
            personal=patterns(personal), predict=predict, first_outputs=first_outputs,
            layers=tuple(name for a in self.addons for name in a.layers), damping=sum(a.damping for a in self.addons),
        )  # fmt: skip
        for addon in self.addons:
            addon.check(self.settings, self.addons)
        require_expected(self.addons)
        require_own_entries(self.parts)

    def arguments(self) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """The add-ons, and the options that are not empty; of `initial` a digest."""
        held = self.settings
        options = {
            "lr": held.lr, "momentum": held.momentum, "weight_decay": held.weight_decay, "optimizer": held.optimizer,
            "optimizer_state": None if held.optimizer_state == "round" else held.optimizer_state,
            "lr_decay": held.lr_decay, "batch": held.batch, "phases": held.phases, "weights": held.weights,
            "buffers": held.buffers, "personal": held.personal, "predict": held.predict,
            "architectures": [n for n in self.networks.names if n], "objective": held.objective,
            "augment": held.augment,
            "initial": digest("initial", self.networks.initial) if self.networks.initial is not None else None,
            "most_samples": held.most_samples if held.most_samples != MOST else None,
        }  # fmt: skip
        return self.addons, {k: v for k, v in options.items() if v not in ((), [], None)}

    def _slot(self, name: str) -> AddOn | None:
        return filling(self.addons, name)

    def _seen(self, server: Server) -> AveragingServer:
        return AveragingServer.of(server, self.settings)

    # Before round 1.

    @property
    def parts(self) -> tuple[Keyed, ...]:
        """The method and its add-ons."""
        return (self, *self.addons)

    def architectures(self, classes: int) -> Mapping[str, nn.Module]:
        """The template of every architecture."""
        return self.networks.templates(classes)

    def check_run(self, server: Server, rounds: int) -> None:
        """Try networks, augmentation and objective on noise; every pattern must match, `initial` must fit.

        Raises:
            ValueError: one of them does not; the argument is named.
        """
        self.networks.check_run(server)
        templates, settings = self.networks.templates(server.task.num_classes), self.settings
        parameters = {name: [n for n, _ in net.named_parameters()] for name, net in templates.items()}
        known = list(dict.fromkeys(n for names in parameters.values() for n in names))
        require_matches(settings.personal, known, "personal")
        require_matches([p.train for p in settings.phases], known, "Phase(train=...)")
        for name, names in parameters.items():
            where = f" of architecture {name!r}" if name else ""
            if all(settings.is_personal(n) for n in names):
                raise ValueError(
                    f"personal={settings.personal} keeps every parameter{where} with its client: none is averaged"
                )
            for phase in settings.phases:
                if not any(phase.trains(n) for n in names):
                    raise ValueError(f"{phase} trains no parameter{where}: its pattern takes all of them out")
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
        """Draw the initial weights of every architecture, then let the add-ons prepare and try themselves out.

        Raises:
            ValueError: an add-on that wants one class an image in a task with several.
        """
        for addon in self.addons:
            if addon.single_label and not server.task.single_label:
                raise ValueError(f"{addon.name} needs one class an image, which {server.task!r} does not have")
        server.state[self.model] = self.networks.all_first(server)
        for addon in self.addons:
            addon.start(self._seen(server))
        for local in trial_locals(self.settings, self.addons, server, self.send):
            for addon in self.addons:
                addon.try_out(local)

    @property
    def private(self) -> bool:
        """Whether an add-on makes it so."""
        return any(a.private for a in self.addons)

    @property
    def asks(self) -> bool:
        """Whether an add-on has a question before round 1."""
        return any(a.asks for a in self.addons)

    def answer(self, client: Client, message: Message) -> Message:
        """On a client: answer the add-ons' questions."""
        local, reply = Local(self.settings, client, message, self.addons), Message()
        for addon in self.addons:
            if addon.asks:
                addon.answer(local, reply)
        return reply

    def expect_answer(self, server: Server, client: int) -> Schema:
        """What the add-ons' parts of the answer must look like."""
        schema: Schema = {}
        for addon in self.addons:
            if addon.asks:
                addon.expect_answer(self._seen(server), client, schema)
        return schema

    def answered(self, server: Server, replies: Reduced) -> None:
        """On the server: give the clients' answers to the add-ons."""
        for addon in self.addons:
            addon.answered(self._seen(server), replies)

    # A round.

    def send(self, server: Server, client: int) -> Message:
        """The model of the client's architecture without what the client keeps itself, and what the add-ons say."""
        name = self.networks.architecture(client)
        kept = self.settings.kept_by_client(self.networks.template(name, server.task.num_classes))
        state = {n: t for n, t in self.networks.part(server.state[self.model], name).items() if n not in kept}
        message = Message({self.model: self.networks.named(state, name)})
        for addon in self.addons:
            addon.send(self._seen(server), client, message)
        return message

    def expect(self, server: Server, client: int) -> Schema:
        """An update with the model's shared parameters, its buffers, and its weight."""
        name = self.networks.architecture(client)
        net = self.networks.template(name, server.task.num_classes)
        model = self.networks.part(server.state[self.model], name)
        shared = {n: model[n] for n, _ in net.named_parameters() if not self.settings.is_personal(n)}
        least, most = (0.0, self.settings.most_samples) if self.settings.weights == "samples" else (1.0, 1.0)
        schema: Schema = {
            self.samples.key: Like(1.0, least=least, most=most),
            self.update.key: Like(self.networks.named(shared, name)),
        }
        for entry, names in self.settings.sent_buffers(net):
            schema[entry.key] = Like(self.networks.named({n: model[n] for n in names}, name))
        for addon in self.addons:
            addon.expect(self._seen(server), client, schema)
        return schema

    def local(self, client: Client, message: Message) -> Message:
        """Train from the received weights on the client's data; reply with the change."""
        local = Local(self.settings, client, message, self.addons)
        for addon in self.addons:
            addon.begin(local)
        slot = self._slot("dataset")
        local.data = slot.dataset(local) if slot else client.data
        samples = float(len(local.data)) if self.settings.weights == "samples" else 1.0
        joined = [r for r in (a.extra_records(local) for a in self.addons) if r is not None]
        if joined:
            local.data = type(local.data).concatenate([local.data, *joined])
        train(local, self.addons)

        slot = self._slot("normalise")
        update, state = slot.normalise(local, local.delta) if slot else local.delta, local.state()
        reply = Message({self.samples: samples, self.update: local.named(update)})
        for entry, names in self.settings.sent_buffers(local.net):
            reply[entry] = local.named({n: state[n] for n in names})
        for addon in self.addons:
            addon.end(local, update, reply)
        kept = self.settings.kept_by_client(local.net)
        if kept:
            client.memory[self.own] = {n: state[n] for n in kept}
        if any(a.keeps_previous for a in self.addons):
            client.memory[self.last] = state
        return reply

    def read_reply(self, server: Server, reply: Message) -> Message:
        """What the add-ons derive from one reply."""
        out = Message()
        for addon in self.addons:
            addon.read_reply(self._seen(server), reply, out)
        return out

    def receive(self, server: Server, replies: Reduced) -> None:
        """Add the (rescaled) mean update to the model, through the server's step if an add-on has one."""
        seen, old = self._seen(server), server.state[self.model]
        if self.update in replies:
            if not float(replies.weight(self.update)) > 0:
                raise NoUsableReply("all weights of the round's replies are zero")
            mean = replies[self.update]
            slot = self._slot("rescale")
            mean = slot.rescale(seen, replies, mean) if slot else mean
            slot = self._slot("server_step")
            step = slot.server_step(seen, mean) if slot else mean
            new = {**old, **{n: old[n] + step[n].to(old[n].device) for n in step}}
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
        found: dict[str, Predictor] = {}
        slot, seen, settings = self._slot("tested_model"), self._seen(server), self.settings
        for name, template in self.networks.templates(server.task.num_classes).items():
            local_statistics = settings.buffers != "mean" and bool(floating_buffers(template))
            if settings.personal or (local_statistics and "calibration" not in server.data):
                continue
            tested = slot.tested_model(seen) if slot else server.state[self.model]
            net = seen.network(name, seen.weights(name, of=tested))
            if local_statistics:
                estimate_statistics(net, server.data["calibration"].images)
            outputs = settings.tested_outputs(server.task.num_classes)
            found[name] = Predictor(net.eval().requires_grad_(False), outputs)
        return found

    def evaluate(self, client: Client, message: Message) -> Message:
        """Test the received model ("global") and the client's own ("personal", where there is one) on its test data."""
        if client.test is None or not len(client.test):
            return Message()
        states = {"global": received_state(self.settings, client, message)}
        slot = self._slot("personal_model")
        if slot:
            local = Local(self.settings, client, message, self.addons)
            states["personal"] = {**states["global"], **slot.personal_model(local)}
        elif self._personal_alone:
            states = {"personal": states["global"]}
        noised = self.private and slot is None
        ledger = client.ledger
        if "personal" in states and not noised and ledger is not None and ledger.epsilon(client.id) is not None:
            ledger.void("its personal model, which has no noise, was tested and the result sent", client=client.id)
        sums: Tensors = {}
        for name, state in states.items():
            net = self.networks.on(client, state).eval().requires_grad_(False)
            predictor = Predictor(net, self.settings.tested_outputs(client.task.num_classes))
            sums[name] = predictor.sums(client.test, client.task)
        return Message({self.tested: sums})

    @property
    def _personal_alone(self) -> bool:
        return bool(self.settings.personal) or self.settings.buffers == "local"

    def expect_evaluation(self, server: Server, client: int) -> Schema:
        """Sums of the models that `evaluate` tests."""
        both = self._slot("personal_model") is not None
        names = ["global", "personal"] if both else ["personal"] if self._personal_alone else ["global"]
        return {self.tested.key: sums_like(server.task, *names)}
