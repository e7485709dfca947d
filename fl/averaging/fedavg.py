"""Weight averaging as a core with add-ons."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fl.averaging.core import Core
from fl.averaging.local import Local
from fl.message import Entry, Message, Tensors
from fl.method import Client, NoUsableReply, Predictor, Server, sums_like
from fl.reduce import Like, Reduced, Schema

__all__ = ["FedAvg"]


class FedAvg(Core):
    """Federated averaging (McMahan et al., AISTATS 2017, Algorithm 1), and the ground on which add-ons stand.

    In each round every drawn client starts from the server's weights, trains on its own data, and sends its change
    w_k - w; the server adds the mean change, weighted by the clients' sample counts. (Sending the change instead of
    the weights is the same average and is what server steps, clipping and secure sums need.)

    `FedAvg(*add_ons, network=..., lr=..., ...)`: see `Core` for the options.
    """

    key = "FedAvg"
    model = Entry[Tensors]("first")
    samples = Entry[float]("sum")
    update = Entry[Tensors]("mean", by=samples)
    buffers = Entry[Tensors]("mean", by=samples)
    counters = Entry[Tensors]("max")
    last = Entry[Tensors]("first")
    own = Entry[Tensors]("first")
    moments = Entry[Tensors]("first")
    tested = Entry[Tensors]("sum")

    def state_for(self, client: Client, message: Message) -> Tensors:
        """The whole state that a client starts from: what was sent, and what it keeps itself (at first, as drawn)."""
        architecture = self.architecture(client.id)
        state = dict(self.part(message[self.model], architecture))
        kept = self.kept_by_client(self.template(architecture, client.task.num_classes))
        if kept:
            own = client.memory.get(self.own) or self.beginning(architecture, client.task.num_classes, client.seed)
            state |= {n: own[n] for n in kept}
        return {n: t.to(client.device) for n, t in state.items()}

    def _sent_buffers(self, net: nn.Module) -> list[tuple[Entry[Tensors], list[str]]]:
        """Which buffers travel back, and under which rule: floats by their mean, integers by their maximum."""
        if self.buffer_rule == "drop":
            return []
        floating = self.floating_buffers(net) if self.buffer_rule == "mean" else []
        integer = [n for n, b in net.named_buffers() if not b.is_floating_point()]
        return [(e, names) for e, names in ((self.buffers, floating), (self.counters, integer)) if names]

    def start(self, server: Server) -> None:
        """Draw the initial weights of every architecture, then let the add-ons prepare.

        Raises:
            ValueError: an add-on that wants one class an image in a task with several.
        """
        for addon in self.addons:
            if addon.single_label and not server.task.single_label:
                raise ValueError(f"{addon.name} needs one class an image, which {server.task!r} does not have")
        state: Tensors = {}
        for architecture in self.networks:
            state |= self.named(self.beginning(architecture, server.task.num_classes, server.seed), architecture)
        server.state[self.model] = {n: t.to(server.device) for n, t in state.items()}
        for addon in self.addons:
            addon.start(server)
        for addon in self.addons:
            addon.ready(server)

    def send(self, server: Server, client: int) -> Message:
        """The model of the client's architecture without what the client keeps itself, and what the add-ons say."""
        architecture = self.architecture(client)
        kept = self.kept_by_client(self.template(architecture, server.task.num_classes))
        state = {n: t for n, t in self.part(server.state[self.model], architecture).items() if n not in kept}
        message = Message({self.model: self.named(state, architecture)})
        for addon in self.addons:
            addon.send(server, client, message)
        return message

    def expect(self, server: Server, client: int) -> Schema:
        """An update with the model's shared parameters, its buffers, and its weight."""
        architecture = self.architecture(client)
        net = self.template(architecture, server.task.num_classes)
        model = self.part(server.state[self.model], architecture)
        shared = {n: model[n] for n, _ in net.named_parameters() if not self.is_personal(n)}
        least, most = (0.0, self.most_samples) if self.weights == "samples" else (1.0, 1.0)
        schema: Schema = {
            self.samples.key: Like(1.0, least=least, most=most),
            self.update.key: Like(self.named(shared, architecture)),
        }
        for entry, names in self._sent_buffers(net):
            schema[entry.key] = Like(self.named({n: model[n] for n in names}, architecture))
        for addon in self.addons:
            addon.expect(server, client, schema)
        return schema

    @property
    def private(self) -> bool:
        """Whether an add-on makes it so."""
        return any(a.private for a in self.addons)

    @property
    def asks(self) -> bool:
        """Whether an add-on has a question before round 1."""
        return any(a.asks for a in self.addons)

    def answer(self, client: Client, message: Message) -> Message:
        """Answer the add-ons' questions."""
        local, reply = Local(self, client, message), Message()
        for addon in self.addons:
            if addon.asks:
                addon.answer(local, reply)
        return reply

    def expect_answer(self, server: Server, client: int) -> Schema:
        """The add-ons' parts of the answer."""
        schema: Schema = {}
        for addon in self.addons:
            if addon.asks:
                addon.expect_answer(server, client, schema)
        return schema

    def answered(self, server: Server, replies: Reduced) -> None:
        """Give the answers to the add-ons."""
        for addon in self.addons:
            addon.answered(server, replies)

    def local(self, client: Client, message: Message) -> Message:
        """Train from the received weights on the client's data; reply with the change."""
        local = Local(self, client, message)
        for addon in self.addons:
            addon.begin(local)
        slot = self.slot("dataset")
        local.data = slot.dataset(local) if slot else client.data
        samples = float(len(local.data)) if self.weights == "samples" else 1.0
        joined = [r for r in (a.extra_records(local) for a in self.addons) if r is not None]
        if joined:
            local.data = type(local.data).concatenate([local.data, *joined])
        local.train()

        slot = self.slot("normalise")
        update = slot.normalise(local, local.delta) if slot else local.delta
        architecture, state = self.architecture(client.id), local.state()
        reply = Message({self.samples: samples, self.update: self.named(update, architecture)})
        for entry, names in self._sent_buffers(local.net):
            reply[entry] = self.named({n: state[n] for n in names}, architecture)
        for addon in self.addons:
            addon.end(local, update, reply)
        kept = self.kept_by_client(local.net)
        if kept:
            client.memory[self.own] = {n: state[n] for n in kept}
        if any(a.keeps_previous for a in self.addons):
            client.memory[self.last] = state
        return reply

    def read_reply(self, server: Server, reply: Message) -> Message:
        """What the add-ons derive from one reply."""
        out = Message()
        for addon in self.addons:
            addon.read_reply(server, reply, out)
        return out

    def replied(self, server: Server, reply: Message) -> Predictor:
        """The model that one client trained, from its reply, in eval mode; for an add-on's `read_reply`.

        An add-on that asks for it calls `require_replied` in its `check`.
        """
        state, update = server.state[self.model], reply[self.update]
        trained = {n: state[n] + d.to(server.device) for n, d in update.items()}
        trained |= {n: t.to(server.device) for e in (self.buffers, self.counters) for n, t in reply.get(e, {}).items()}
        name = next(n for n in self.networks if self.part(update, n))
        net = self.network_on(server, name, {**self.part(state, name), **self.part(trained, name)})
        return Predictor(net.eval(), self._outputs(server.task.num_classes))

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
        slot = self.slot("refine")
        if slot:
            server.state[self.model] = slot.refine(server, replies, old)
        for addon in self.addons:
            addon.receive(server, replies, old)

    # Testing.

    def _tested(self, server: Server) -> Tensors:
        slot = self.slot("tested_model")
        return slot.tested_model(server) if slot else server.state[self.model]

    def _outputs(self, num_classes: int) -> int | None:
        return num_classes if self.predict == "real" else None

    def predictors(self, server: Server) -> Mapping[str, Predictor]:
        """The global model of each architecture; none if part of it stays with the clients."""
        found: dict[str, Predictor] = {}
        for architecture in self.networks:
            template = self.template(architecture, server.task.num_classes)
            local_statistics = self.buffer_rule != "mean" and bool(self.floating_buffers(template))
            if self.personal or (local_statistics and "calibration" not in server.data):
                continue
            weights = self.part(self._tested(server), architecture)
            net = self.network_on(server, architecture, weights)
            if local_statistics:
                _estimate_statistics(net, server.data["calibration"].images)
            found[architecture] = Predictor(net.eval().requires_grad_(False), self._outputs(server.task.num_classes))
        return found

    def evaluate(self, client: Client, message: Message) -> Message:
        """Test the received model ("global") and the client's own ("personal", where there is one) on its test data."""
        if client.test is None or not len(client.test):
            return Message()
        states = {"global": self.state_for(client, message)}
        slot = self.slot("personal_model")
        if slot:
            states["personal"] = {**states["global"], **slot.personal_model(Local(self, client, message))}
        elif self.personal or self.buffer_rule == "local":
            states = {"personal": states["global"]}
        noised = self.private and slot is None
        ledger = client.ledger
        if "personal" in states and not noised and ledger is not None and ledger.epsilon(client.id) is not None:
            ledger.void("its personal model, which has no noise, was tested and the result sent", client=client.id)
        sums: Tensors = {}
        for name, state in states.items():
            net = self.network_at(client, state).eval().requires_grad_(False)
            predictor = Predictor(net, self._outputs(client.task.num_classes))
            sums[name] = predictor.sums(client.test, client.task)
        return Message({self.tested: sums})

    def expect_evaluation(self, server: Server, client: int) -> Schema:
        """Sums of the models that `evaluate` tests."""
        personal = self.slot("personal_model") is not None
        alone = not personal and (bool(self.personal) or self.buffer_rule == "local")
        names = ["personal"] if alone else ["global", "personal"] if personal else ["global"]
        return {self.tested.key: sums_like(server.task, *names)}


@torch.no_grad()
def _estimate_statistics(net: nn.Module, images: Tensor) -> None:
    """Re-estimate batch-norm statistics on the given images (cumulative mean over chunks of 64)."""
    norms = [m for m in net.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None
    net.train()
    for chunk in images.split(64):
        net(chunk)
