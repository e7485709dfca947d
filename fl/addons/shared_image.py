"""Federated learning with a single shared image: knowledge travels as logits on crops that everybody can render."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from distillkit import check
from distillkit.generate import Patches
from fl.addon import AddOn, fills
from fl.addons.scaffold import Scaffold
from fl.averaging import FedAvg
from fl.crops import Crops, View
from fl.distil import distill_models, due, falling_steps, validation_accuracy
from fl.message import Entry, Message, Tensors
from fl.method import NoUsableReply, Server
from fl.reduce import Like, Reduced, Schema

if TYPE_CHECKING:
    from fl.core import Core
    from fl.local import Local

__all__ = ["SharedImage"]

_WEIGHTS = (FedAvg.update, FedAvg.buffers, FedAvg.counters)
_AVERAGES = ("normalise", "rescale", "server_step", "tested")


@dataclass(frozen=True, eq=False)
class SharedImage(AddOn):
    """Soni, Saeed and Asano, "Federated Learning with a Single Shared Image" (2024), Algorithm 1.

    Everybody renders the same `count` crops of one image (section 3.1). Each round the global model selects `keep` of
    them (section 3.2). Their numbers travel down, the clients' logits up; weights only in rounds with "FedAvg
    initialisation". Each architecture's copy on the server starts from its clients' average in those rounds, else from
    itself, and learns the softmax of the weighted mean of all logits. `fl.methods.single_image` sets it up.

    Deviations. Crop numbers travel, as in the paper; the release sends the crops, 61 MB a client and round. Averages
    weigh by samples (the release: by batches). As in the release the first round has FedAvg initialisation, and the
    student's logits are rescaled to norm 2.5, of which the paper says nothing. The last weights stay, as in the paper;
    the release keeps the best on the clients' own validation images (`returns="best"`: on `server.data["validation"]`).
    Of several architectures the best on that set, or else the first, selects (the release: the best on the test set).

    Args:
        image: uint8 [C, H, W], or float in [0, 1], which is rounded to 8 bits; C as in the clients' images.
        keep, count: crops in a round, and crops to select them from; equal: no selection.
        seed, size: of the crops; size None: that of the clients' images, which must be square then.
        rate: share of rounds with FedAvg initialisation, in [0, 1], evenly spaced; the paper has 1, 0.5 and 0.2.
        warm_rounds: that many first rounds have it too.
        steps, batch, lr: Adam on the server (the release's batch: 32 in Tables 1, 3 and 4, else 512).
        least_steps: the steps fall along half a cosine to this and begin anew in the rounds that have FedAvg
            initialisation (Table 4: 250; `fl.distil.falling_steps`).
        clip: norm of the students' logits (`losses.clip_logit_norm`), or None.
        returns: "last" or "best".
        crops: further options of `generate.Patches` (the paper: rotation=35, flip=0.5).
        selection: options of `select.select`, in place of {"kmeans_share": 0}: pruning alone, which section 4.1's "we
            remove 90 % of the training examples" by entropy leaves of k-means at 5,000 of 50,000, in the release too.
    """

    image: Tensor = field(repr=False)
    keep: int = 5000
    count: int = 50_000
    seed: int = 0
    size: int | None = None
    rate: float = 0.2
    warm_rounds: int = 1
    steps: int = 500
    batch: int = 32
    lr: float = 0.005
    least_steps: int | None = None
    clip: float | None = 2.5
    returns: Literal["last", "best"] = "last"
    crops: Mapping[str, Any] = field(default_factory=dict)
    selection: Mapping[str, Any] = field(default_factory=lambda: {"kmeans_share": 0.0})
    fingerprint: str = field(init=False)
    _rendered: Crops = field(init=False, repr=False)
    reads: Literal["nothing", "example", "batch"] = "nothing"
    single_label = True

    picture = Entry[Tensor]("first", kept=True)
    index = Entry[Tensor]("first")
    logits = Entry[Tensor]("mean", by=FedAvg.samples)

    def __post_init__(self) -> None:
        check.positive_int(self.keep, "keep", most=check.positive_int(self.count, "count"))
        check.real_number(self.rate, "rate", least=0.0, most=1.0)
        check.positive_int(self.warm_rounds, "warm_rounds", least=0)
        check.positive_int(self.steps, "steps")
        check.positive_int(self.batch, "batch")
        check.real_number(self.lr, "lr", above=0.0)
        if self.least_steps is not None:
            check.positive_int(self.least_steps, "least_steps", most=self.steps)
        if self.clip is not None:
            check.real_number(self.clip, "clip", above=0.0)
        check.one_of(self.returns, "returns", ("last", "best"))
        patches = Patches(self.image, self.seed, size=self.size or 1, count=self.count, **self.crops)
        object.__setattr__(self, "image", (255 * patches.image.cpu()).round().to(torch.uint8))
        object.__setattr__(self, "fingerprint", patches.digest[:16])
        object.__setattr__(self, "_rendered", Crops(self.seed, self.count, self.size, self.crops))

    def check(self, method: Core) -> None:
        """The server needs whole models, and what corrects averages needs averages in every round."""
        if method.personal:
            raise ValueError("SharedImage distils whole models on the server: nothing can be personal")
        for addon in method.addons if self.rate < 1 else ():
            if isinstance(addon, Scaffold) or any(fills(addon, slot) for slot in _AVERAGES):
                raise ValueError(f"{addon.name} needs weights from the clients in every round: SharedImage(rate=1)")

    def warm(self, number: int) -> bool:
        """Whether a round has FedAvg initialisation."""
        return number <= self.warm_rounds or due(self.rate, number)

    def start(self, server: Server) -> None:
        """Generate X (line 1) and select for the first round (line 4)."""
        if self.returns == "best" and "validation" not in server.data:
            raise ValueError("returns='best' needs server_data={'validation': ...}")
        server.state[self.index] = self._select(server)

    def send(self, server: Server, client: int, message: Message) -> None:
        """The indices (line 5), and once the image."""
        message[self.picture], message[self.index] = self.image, server.state[self.index]

    def expect(self, server: Server, client: int, schema: Schema) -> None:
        """A row of logits for each crop; weights only in a round that asks for them."""
        outputs = server.method.output_count(server.task.num_classes)
        schema[self.logits.key] = Like(torch.zeros(len(server.state[self.index]), outputs))
        for entry in () if self.warm(server.round) else _WEIGHTS:
            schema.pop(entry.key, None)

    def end(self, local: Local, update: Tensors, reply: Message) -> None:
        """Predict on the crops; the weights stay at home unless it is their round (lines 9 and 10)."""
        net, width = local.at(local.trained()), local.method.output_count(local.task.num_classes)
        message, view = local.message, View.of(local.client)
        reply[self.logits] = self._rendered.outputs(net, message[self.picture], message[self.index], view, width)[1]
        for entry in () if self.warm(local.round) else _WEIGHTS:
            if entry in reply:
                del reply[entry]

    def refine(self, server: Server, replies: Reduced, old: Tensors) -> Tensors:
        """Start from the average or from the weights of before, and learn the ensemble's logits (lines 11 and 12)."""
        if not float(replies.weight(self.logits)) > 0:
            raise NoUsableReply("all weights of the round's replies are zero")
        start = server.state[FedAvg.model] if self.warm(server.round) else old
        images = self._rendered.images(self.image, server.state[self.index], View.of(server))
        period = round(1 / self.rate) if self.rate else 1
        steps = falling_steps(self.steps, self.least_steps or self.steps, period, server.round)
        server.notes["initialised"] = int(self.warm(server.round))
        return distill_models(
            server, start, images, replies[self.logits], owner=self.name, best=self.returns == "best",
            steps=steps, batch=self.batch, lr=self.lr, clip=self.clip,
        )  # fmt: skip

    def receive(self, server: Server, replies: Reduced, old: Tensors) -> None:
        """Select for the next round (line 4)."""
        server.state[self.index] = self._select(server)

    def _select(self, server: Server) -> Tensor:
        method, state = server.method, server.state[server.method.model]
        nets = [method.network_on(server, name, method.part(state, name)).eval() for name in method.networks]
        judge = max(nets, key=partial(validation_accuracy, server)) if "validation" in server.data else nets[0]
        width, generator = method.output_count(server.task.num_classes), server.generator("SharedImage selection")
        return self._rendered.select(judge, self.image, self.keep, View.of(server), width, generator, self.selection)
