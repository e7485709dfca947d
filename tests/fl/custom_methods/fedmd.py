"""FedMD (Li and Wang, 2019) written from the documentation with public names only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.functional import l1_loss

from distillkit import LabeledImages
from distillkit.networks._dropout import seed_dropout
from fl import Entry, EntrySpec, Message, Method, Networks, Predictor, evaluation_spec, shuffled_indices


@dataclass(frozen=True)
class FedMD(Method):
    """Networks stay on their clients and learn from the mean scores on public images.

    The first round in which a client is drawn is its transfer learning: the public set, then its own. In every later
    one it learns the last round's consensus and revisits its own images.
    """

    networks: Networks = field(repr=False)
    subset: int = 64
    transfer: int = 5
    lr: float = 0.001
    public = Entry[LabeledImages]("first", cached=True)
    places, consensus, upcoming = (Entry[torch.Tensor]("first") for _ in range(3))
    own = Entry[dict[str, torch.Tensor]]("first")
    scores = Entry[torch.Tensor]("mean")
    tested = Entry[dict[str, torch.Tensor]]("sum")

    def architectures(self, classes: int) -> Any:
        return self.networks.templates(classes)

    def assigned_architectures(self, clients: int) -> Any:
        return self.networks.assigned_architectures(clients)

    def check_run(self, server: Any, rounds: int) -> None:
        if len(server.data.get("public", ())) < self.subset:
            raise ValueError(f"FedMD needs at least subset={self.subset} images in server_data={{'public': ...}}")
        self.networks.check_run(server)

    def start(self, server: Any) -> None:
        order = torch.randperm(len(server.data["public"]), generator=server.generator("subset"))
        server.state[self.upcoming] = order[: self.subset]

    def send(self, server: Any, client: int) -> Message:
        return Message.unchecked({**dict(server.state.items()), self.public.key: server.data["public"]})

    def expect(self, server: Any, client: int) -> Any:
        return {self.scores.key: EntrySpec(torch.ones(self.subset, server.task.num_classes), minimum=-1e4, maximum=1e4)}

    def fit(self, client: Any, net: Any, purpose: str, images: Any, targets: Any, loss: Any, epochs: int) -> None:
        optimizer = torch.optim.Adam(net.train().parameters(), lr=self.lr)
        for index in shuffled_indices(len(images), 32, client.generator(purpose), epochs, None):
            optimizer.zero_grad()
            loss(net(images[index]), targets[index]).backward()
            optimizer.step()

    def network(self, client: Any) -> Any:
        first = self.networks.first(self.networks.architecture(client.id), client.task.num_classes, client.seed)
        return self.networks.on(client, client.memory.get(self.own, first)).eval()

    def local(self, client: Any, message: Message) -> Message:
        net, public, new = self.network(client), message[self.public], self.own not in client.memory
        seed_dropout(net, client.generator("dropout"))
        if new:
            self.fit(client, net, "public", public.images, public.labels, client.task.loss, self.transfer)
        else:
            seen = public.images[message[self.places]]
            self.fit(client, net, "digest", seen, message[self.consensus], l1_loss, self.transfer)
        self.fit(client, net, "own", client.data.images, client.data.labels, client.task.loss, self.transfer)
        client.memory[self.own] = {n: t.detach().clone() for n, t in net.eval().state_dict().items()}
        return Message({self.scores: net(public.images[message[self.upcoming]]).detach()})

    def receive(self, server: Any, replies: Any) -> None:
        server.state[self.places], server.state[self.consensus] = server.state[self.upcoming], replies[self.scores]
        self.start(server)

    def evaluate(self, client: Any, message: Message) -> Message:
        return Message({self.tested: {"personal": Predictor(self.network(client)).sums(client.test, client.task)}})

    def expect_evaluation(self, server: Any, client: int) -> Any:
        return {self.tested.key: evaluation_spec(server.task, "personal")}
