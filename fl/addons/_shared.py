"""Base class of `SharedImage` and `SharedPool`, in which clients send logits on images that all participants have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor

from distillkit._utils import check
from distillkit._utils.options import Fraction, LearningRate, NonNegativeInt, Options, Positive, PositiveInt
from distillkit.select import select
from fl.addons._crops import Source
from fl.addons._distill import distill_models, falling_steps, starts_from_average, validation_accuracy
from fl.addons.scaffold import SCAFFOLD
from fl.aggregation import AggregatedReplies, EntrySpec, Schema
from fl.averaging import AddOn, AveragingServer, FedAvg, Local, Settings
from fl.averaging._composition import require_whole_models
from fl.averaging.addon import overrides
from fl.message import Entry, Message, Tensors
from fl.method import NoUsableReply

_WEIGHTS = (FedAvg.update, FedAvg.buffers, FedAvg.counters)
_AVERAGES = ("scale_update", "aggregate", "server_step", "evaluation_model")


@dataclass(frozen=True, eq=False, kw_only=True)
class Shared(AddOn):
    """Base class of `SharedImage` and `SharedPool`: clients send their models' logits on images that all participants
    have.

    The class implements lines 4 to 12 of Algorithm 1 of "Federated Learning with a Single Shared Image" (Soni, Saeed
    and Asano, 2024). A subclass documents the options, declares the message entries `picture` (the image or pool),
    `index` (indices of the selected images) and `logits`, and passes the image or pool to `_set_source`.
    """

    keep: PositiveInt
    rate: Fraction = 0.2
    warm_rounds: NonNegativeInt = 1
    steps: PositiveInt = 500
    batch: PositiveInt = 32
    lr: LearningRate = 0.005
    least_steps: PositiveInt | None = None
    clip: Positive | None = 2.5
    returns: Literal["last", "best"] = "last"
    selection: Options = field(default_factory=lambda: {"kmeans_share": 0.0})
    fingerprint: str = field(init=False)
    pixels: Tensor = field(init=False, repr=False)
    source: Source = field(init=False, repr=False)
    data_access = "none"
    single_label = True

    picture: ClassVar[Entry[Tensor]]
    index: ClassVar[Entry[Tensor]]
    logits: ClassVar[Entry[Tensor]]

    def _set_source(self, pixels: Tensor, source: Source, fingerprint: str) -> None:
        check.positive_int(self.keep, "keep", most=source.count)
        check.accepts(select, self.selection, "selection")
        if self.least_steps is not None:
            check.positive_int(self.least_steps, "least_steps", most=self.steps)
        for name, value in {"pixels": pixels, "source": source, "fingerprint": fingerprint}.items():
            object.__setattr__(self, name, value)

    def check(self, settings: Settings, addons: Sequence[AddOn]) -> None:
        """Refuse personal parameters and, with `rate` below 1, add-ons that need weights in every round."""
        require_whole_models(self, settings, "it distils them on the server")
        for addon in addons if self.rate < 1 else ():
            if isinstance(addon, SCAFFOLD) or any(overrides(addon, slot) for slot in _AVERAGES):
                raise ValueError(
                    f"{addon.name} needs weights from the clients in every round: use {self.name}(rate=1) with it, got "
                    f"rate={self.rate:g}"
                )

    def has_average(self, number: int) -> bool:
        """Return whether clients send their weights in round `number`, from whose average the server starts."""
        return starts_from_average(number, self.rate, self.warm_rounds)

    def start(self, server: AveragingServer) -> None:
        """Select the shared images for the first round (Soni et al., 2024, Algorithm 1, line 4).

        Raises:
            ValueError: `returns` is "best", but the server has no images `server.data["validation"]`.
        """
        if self.returns == "best" and "validation" not in server.data:
            raise ValueError(
                "returns='best' needs server_data={'validation': ...}, labelled images on the server; or give "
                "returns='last'"
            )
        server.state[self.index] = self._select(server)

    def send(self, server: AveragingServer, client: int, message: Message) -> None:
        """Send the source of the shared images, once, and the indices of this round's images (Algorithm 1, line 5)."""
        message[self.picture], message[self.index] = self.pixels, server.state[self.index]

    def expect(self, server: AveragingServer, client: int, schema: Schema) -> None:
        """Add a row of logits for each shared image; without an average, remove the weights."""
        shape = len(server.state[self.index]), server.outputs
        schema[self.logits.key] = EntrySpec(torch.zeros(shape, dtype=server.dtype))
        for entry in () if self.has_average(server.round) else _WEIGHTS:
            schema.pop(entry.key, None)

    def after_training(self, local: Local, update: Tensors, reply: Message) -> None:
        """Add the trained model's logits on the shared images to the reply (Algorithm 1, lines 9-10).

        In rounds in which clients do not send their weights (see `has_average`), these are removed.
        """
        net, width = local.at(local.state()), local.settings.networks.outputs(local.task.num_classes)
        picture, index = local.message[self.picture], local.message[self.index]
        reply[self.logits] = self.source.outputs(net, picture, index, local.client, width)[1]
        for entry in () if self.has_average(local.round) else _WEIGHTS:
            if entry in reply:
                del reply[entry]

    def refine(self, server: AveragingServer, replies: AggregatedReplies, old: Tensors) -> Tensors:
        """Train the server's models to match the clients' mean logits, and return their weights."""
        if not float(replies.weight(self.logits)) > 0:
            raise NoUsableReply("all weights of the round's replies are zero")
        start = server.state[FedAvg.model] if self.has_average(server.round) else old
        images = self.source.images(self.pixels, server.state[self.index], server)
        period = round(1 / self.rate) if self.rate else 1
        steps = falling_steps(self.steps, self.least_steps or self.steps, period, server.round)
        server.notes["initialised"] = int(self.has_average(server.round))
        return distill_models(
            server, start, images, replies[self.logits], owner=self.key, best=self.returns == "best",
            steps=steps, batch=self.batch, lr=self.lr, clip=self.clip,
        )  # fmt: skip

    def receive(self, server: AveragingServer, replies: AggregatedReplies, old: Tensors) -> None:
        """Select the shared images for the next round (Soni et al., 2024, Algorithm 1, line 4)."""
        server.state[self.index] = self._select(server)

    def _select(self, server: AveragingServer) -> Tensor:
        nets = [server.network(name).eval() for name in server.settings.networks.names]
        judge = max(nets, key=partial(validation_accuracy, server)) if "validation" in server.data else nets[0]
        width, generator = server.outputs, server.generator(f"{self.key} selection")
        return self.source.select(judge, self.pixels, self.keep, server, width, generator, self.selection)
