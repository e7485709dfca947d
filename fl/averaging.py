"""Weight averaging as a core with add-ons."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from distillkit import check
from fl.addon import SLOTS, AddOn, fills
from fl.local import Local, Phase
from fl.message import Entry, Message, Tensors, declared
from fl.method import Client, Method, NoUsableReply, Predictor, Server
from fl.networks import Factory, Templates
from fl.reduce import Like, Reduced, Schema
from fl.task import Task

__all__ = ["FedAvg"]

Objective = Callable[[Tensor, Tensor], Tensor]


class FedAvg(Method):
    """Federated averaging (McMahan et al., 2017, Algorithm 1), and the ground on which add-ons stand.

    In each round every drawn client starts from the server's weights, trains on its own data, and sends its change
    w_k - w; the server adds the mean change, weighted by the clients' sample counts. (Sending the change instead of
    the weights is the same average and is what server steps, clipping and secure sums need.)

    Args:
        addons: see `AddOn`; their order does not matter. One that is off is left out.
        network: called with the number of outputs, gives the network; or a mapping architecture -> such a factory.
        assign: with several architectures, client number -> architecture (a mapping or a function).
        initial: weights to begin with (a state dict); default: drawn from the run's seed.
        lr, momentum, weight_decay, optimizer: the clients' optimiser ("sgd" or "adam"), rebuilt in each round.
        lr_decay: the rate of round t is lr * lr_decay ** (t - 1).
        epochs, steps: passes over the local data in a round; `steps`, if given, is an exact number instead.
        phases: several parts of a local training instead of `epochs`/`steps` (FedRep).
        batch: images a step.
        augment: applied to the real batches, `augment(images, generator)`.
        objective: `objective(logits, labels)`; default: the task's loss.
        weights: "samples" or "uniform".
        buffers: float buffers (batch-norm statistics) are averaged ("mean"), kept by each client ("local"), or left
            at their initial values on the server ("drop"). Integer buffers take the maximum.
        personal: patterns of parameter names that stay with the client (FedRep: "classifier.*").
        predict: with extra outputs, test the argmax over the "real" classes or over "all" outputs.

    Raises:
        ValueError: a bad option, two add-ons for one slot, an add-on given twice, or a combination that one refuses.
    """

    model = Entry[Tensors]("first")
    samples = Entry[float]("sum")
    update = Entry[Tensors]("mean", by=samples)
    buffers = Entry[Tensors]("mean", by=samples)
    counters = Entry[Tensors]("max")
    last = Entry[Tensors]("first")
    own = Entry[Tensors]("first")
    tested = Entry[Tensors]("sum")

    def __init__(
        self,
        *addons: AddOn,
        network: Factory | Mapping[str, Factory],
        assign: Mapping[int, str] | Callable[[int], str] | None = None,
        initial: Tensors | None = None,
        lr: float = 0.01,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        optimizer: Literal["sgd", "adam"] = "sgd",
        lr_decay: float = 1.0,
        epochs: int = 1,
        steps: int | None = None,
        phases: Sequence[Phase] | None = None,
        batch: int = 32,
        augment: Callable[[Tensor, torch.Generator], Tensor] | None = None,
        objective: Objective | None = None,
        weights: Literal["samples", "uniform"] = "samples",
        buffers: Literal["mean", "local", "drop"] = "mean",
        personal: str | Sequence[str] = (),
        predict: Literal["real", "all"] = "real",
    ) -> None:
        self.addons = tuple(sorted((a for a in addons if not a.off), key=lambda a: a.name))
        self.lr = check.real_number(lr, "lr", above=0.0)
        self.momentum = check.real_number(momentum, "momentum", least=0.0, most=1.0)
        self.weight_decay = check.real_number(weight_decay, "weight_decay", least=0.0)
        self.lr_decay = check.real_number(lr_decay, "lr_decay", above=0.0)
        self.optimizer = check.one_of(optimizer, "optimizer", ("sgd", "adam"))
        self.batch = check.positive_int(batch, "batch")
        check.positive_int(epochs, "epochs")
        if steps is not None:
            check.positive_int(steps, "steps")
        self.phases = tuple(phases) if phases else (Phase(epochs, steps),)
        self.augment, self.objective = augment, objective
        self.weights = check.one_of(weights, "weights", ("samples", "uniform"))
        self.buffer_rule = check.one_of(buffers, "buffers", ("mean", "local", "drop"))
        self.personal = (personal,) if isinstance(personal, str) else tuple(personal)
        self.predict = check.one_of(predict, "predict", ("real", "all"))
        self.templates = Templates(network if isinstance(network, Mapping) else {"": network})
        self.networks = tuple(self.templates.factories)
        self.assign, self.initial = assign, initial
        if (len(self.networks) > 1) != (assign is not None):
            raise ValueError("assign must say which client has which architecture if and only if there are several")
        self._compose()

    def _compose(self) -> None:
        names = [a.name for a in self.addons]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"{name} is given twice; an add-on may stand in a method once")
        for slot in SLOTS:
            filling = [a.name for a in self.addons if fills(a, slot)]
            if len(filling) > 1:
                raise ValueError(f"{' and '.join(filling)} cannot be combined: both fill the slot {slot!r}")
        for addon in self.addons:
            addon.check(self)

    def __repr__(self) -> str:
        options = {
            "lr": self.lr, "momentum": self.momentum, "weight_decay": self.weight_decay, "optimizer": self.optimizer,
            "lr_decay": self.lr_decay, "batch": self.batch, "phases": self.phases, "weights": self.weights,
            "buffers": self.buffer_rule, "personal": self.personal, "predict": self.predict,
            "architectures": [n for n in self.networks if n],
        }  # fmt: skip
        said = [repr(a) for a in self.addons] + [f"{k}={v!r}" for k, v in options.items() if v not in ((), [])]
        return f"FedAvg({', '.join(said)})"

    # Who has what.

    def entries(self) -> list[Entry[Any]]:
        """The core's entries and every add-on's."""
        return [*declared(self), *(e for a in self.addons for e in declared(a))]

    def slot(self, name: str) -> AddOn | None:
        """The add-on that fills a slot, if one does."""
        return next((a for a in self.addons if fills(a, name)), None)

    def offset(self, addon: AddOn, num_classes: int) -> int:
        """The index of an add-on's first extra output."""
        return num_classes + sum(a.outputs for a in self.addons[: self.addons.index(addon)])

    def output_count(self, num_classes: int) -> int:
        """How many outputs the network has: the classes, and the add-ons' extra rows."""
        return num_classes + sum(a.outputs for a in self.addons)

    def objective_of(self, task: Task) -> Objective:
        """The base objective."""
        return self.objective or task.loss

    def is_personal(self, name: str) -> bool:
        """Whether a parameter stays with its client."""
        return any(fnmatch.fnmatch(name, pattern) for pattern in self.personal)

    def architecture(self, client: int) -> str:
        """The name of a client's architecture ("" if there is only one)."""
        if self.assign is None:
            return next(iter(self.networks))
        name = self.assign(client) if callable(self.assign) else self.assign.get(client, "")
        return check.one_of(name, f"assign({client})", self.networks)

    def template(self, architecture: str, num_classes: int) -> nn.Module:
        """A network of an architecture, not to be changed (its weights mean nothing)."""
        return self.templates.of(architecture, self.output_count(num_classes))

    def network_at(self, client: Client, weights: Tensors) -> nn.Module:
        """A fresh network of the client's architecture, on its device, with the given weights and buffers."""
        outputs = self.output_count(client.task.num_classes)
        return self.templates.at(self.architecture(client.id), outputs, weights, client.device)

    def part(self, group: Tensors, architecture: str) -> Tensors:
        """The tensors of one architecture, under the network's own names."""
        if not architecture:
            return group
        prefix = f"{architecture}/"
        return {n.removeprefix(prefix): t for n, t in group.items() if n.startswith(prefix)}

    def named(self, tensors: Tensors, architecture: str) -> Tensors:
        """The inverse of `part`."""
        return {f"{architecture}/{n}": t for n, t in tensors.items()} if architecture else tensors

    def _floating_buffers(self, net: nn.Module) -> list[str]:
        return [n for n, b in net.named_buffers() if b.is_floating_point()]

    def _kept_by_client(self, net: nn.Module) -> set[str]:
        kept = {n for n, _ in net.named_parameters() if self.is_personal(n)}
        return kept | (set(self._floating_buffers(net)) if self.buffer_rule == "local" else set())

    def state_for(self, client: Client, message: Message) -> Tensors:
        """The whole state that a client starts from: what was sent, and what it keeps itself."""
        architecture = self.architecture(client.id)
        state = dict(self.part(message[self.model], architecture))
        own: Tensors = client.memory.get(self.own, {})
        state.update(own)
        return {n: t.to(client.device) for n, t in state.items()}

    # The verbs.

    def start(self, server: Server) -> None:
        """Draw the initial weights of every architecture, then let the add-ons prepare."""
        state: Tensors = {}
        for architecture in self.networks:
            outputs = self.output_count(server.task.num_classes)
            net = self.templates.draw(architecture, outputs, server.generator(f"init {architecture}"))
            state |= self.named({n: t.detach().clone() for n, t in net.state_dict().items()}, architecture)
        if self.initial is not None:
            unknown = sorted(set(self.initial) - set(state))
            if unknown:
                raise ValueError(f"initial holds names that the network lacks: {', '.join(unknown[:5])}")
            state |= {n: t.detach().clone() for n, t in self.initial.items()}
        server.state[self.model] = {n: t.to(server.device) for n, t in state.items()}
        for addon in self.addons:
            addon.start(server)

    def send(self, server: Server, client: int) -> Message:
        """The model of the client's architecture, and what the add-ons say."""
        architecture = self.architecture(client)
        message = Message({self.model: self.named(self.part(server.state[self.model], architecture), architecture)})
        for addon in self.addons:
            addon.send(server, client, message)
        return message

    def expect(self, server: Server, client: int) -> Schema:
        """An update with the model's shared parameters, and its buffers."""
        architecture = self.architecture(client)
        net = self.template(architecture, server.task.num_classes)
        model = self.part(server.state[self.model], architecture)
        shared = {n: model[n] for n, _ in net.named_parameters() if not self.is_personal(n)}
        schema: Schema = {self.samples.key: Like(1.0), self.update.key: Like(self.named(shared, architecture))}
        floating = self._floating_buffers(net) if self.buffer_rule == "mean" else []
        integer = [n for n, b in net.named_buffers() if not b.is_floating_point()]
        for entry, names in ((self.buffers, floating), (self.counters, integer)):
            if names:
                schema[entry.key] = Like(self.named({n: model[n] for n in names}, architecture))
        for addon in self.addons:
            addon.expect(server, client, schema)
        return schema

    def setup(self, client: Client, message: Message) -> Message | None:
        """Ask the add-ons that have a question before round 1."""
        asking = [a for a in self.addons if fills(a, "setup")]
        if not asking:
            return None
        local, reply = Local(self, client, message), Message()
        for addon in asking:
            addon.setup(local, reply)
        return reply

    def begin(self, server: Server, replies: Reduced) -> None:
        """Give the answers to the add-ons."""
        for addon in self.addons:
            addon.begun(server, replies)

    def local(self, client: Client, message: Message) -> Message:
        """Train from the received weights on the client's data; reply with the change."""
        local = Local(self, client, message)
        for addon in self.addons:
            addon.begin(local)
        slot = self.slot("dataset")
        local.data = slot.dataset(local) if slot else client.data
        samples = float(len(local.data)) if self.weights == "samples" else 1.0
        joined = [r for r in (a.records(local) for a in self.addons) if r is not None]
        if joined:
            local.data = type(local.data).concatenate([local.data, *joined])
        local.train()

        slot = self.slot("normalise")
        update = slot.normalise(local, local.delta) if slot else local.delta
        architecture, state = self.architecture(client.id), local.trained()
        reply = Message({self.samples: samples, self.update: self.named(update, architecture)})
        floating = self._floating_buffers(local.net) if self.buffer_rule == "mean" else []
        integer = [n for n, b in local.net.named_buffers() if not b.is_floating_point()]
        for entry, names in ((self.buffers, floating), (self.counters, integer)):
            if names:
                reply[entry] = self.named({n: state[n] for n in names}, architecture)
        for addon in self.addons:
            addon.end(local, update, reply)
        kept = self._kept_by_client(local.net)
        if kept:
            client.memory[self.own] = {n: state[n] for n in kept}
        if any(a.previous for a in self.addons):
            client.memory[self.last] = state
        return reply

    def digest(self, server: Server, reply: Message) -> Message:
        """What the add-ons derive from one reply."""
        out = Message()
        for addon in self.addons:
            addon.digest(server, reply, out)
        return out

    def receive(self, server: Server, replies: Reduced) -> None:
        """Add the (rescaled) mean update to the model, through the server's step if an add-on has one."""
        old = server.state[self.model]
        if self.update in replies:
            if not float(replies.weight(self.update)) > 0:
                raise NoUsableReply("all weights of the round's replies are zero")
            mean = replies[self.update]
            slot = self.slot("rescale")
            mean = slot.rescale(server, replies, mean) if slot else mean
            slot = self.slot("server_step")
            step = slot.server_step(server, mean) if slot else mean
            moved = {n: old[n] + step[n].to(old[n].device) for n in step}
            new = {**old, **moved}
            for entry in (self.buffers, self.counters):
                replaced: Tensors = replies.get(entry, {})
                new.update(replaced)
            server.state[self.model] = new
        for addon in self.addons:
            addon.receive(server, replies, old)

    # Testing.

    def _tested(self, server: Server) -> Tensors:
        slot = self.slot("tested")
        return slot.tested(server) if slot else server.state[self.model]

    def _outputs(self, num_classes: int) -> int | None:
        return num_classes if self.predict == "real" else None

    def predictors(self, server: Server) -> Mapping[str, Predictor]:
        """The global model of each architecture; none if part of it stays with the clients."""
        found: dict[str, Predictor] = {}
        for architecture in self.networks:
            template = self.template(architecture, server.task.num_classes)
            local_statistics = self.buffer_rule != "mean" and bool(self._floating_buffers(template))
            if self.personal or (local_statistics and "calibration" not in server.data):
                continue
            weights = self.part(self._tested(server), architecture)
            net = self.templates.at(architecture, self.output_count(server.task.num_classes), weights, server.device)
            if local_statistics:
                _estimate_statistics(net, server.data["calibration"].images)
            found[architecture] = Predictor(net.eval().requires_grad_(False), self._outputs(server.task.num_classes))
        return found

    def evaluate(self, client: Client, message: Message) -> Message:
        """Test the received model ("global") and the client's own ("personal", where there is one) on its test data."""
        if client.test is None or not len(client.test):
            return Message()
        states = {"global": self.state_for(client, message)}
        slot = self.slot("personal")
        if slot:
            states["personal"] = {**states["global"], **slot.personal(client, message)}
        elif self.personal or self.buffer_rule == "local":
            states = {"personal": states["global"]}
        sums: Tensors = {}
        for name, state in states.items():
            net = self.network_at(client, state).eval().requires_grad_(False)
            predictor = Predictor(net, self._outputs(client.task.num_classes))
            sums[name] = predictor.sums(client.test, client.task)
        return Message({self.tested: sums})


@torch.no_grad()
def _estimate_statistics(net: nn.Module, images: Iterable[Tensor] | Tensor) -> None:
    """Re-estimate batch-norm statistics on the given images (cumulative mean over chunks of 64)."""
    norms = [m for m in net.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None
    net.train()
    for chunk in torch.as_tensor(images).split(64):
        net(chunk)
