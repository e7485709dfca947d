"""FedDF: fusion of the clients' models on the server by distilling their ensemble."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from distillkit._utils.options import Fraction, LearningRate, NonNegativeInt, Positive, PositiveInt
from distillkit.chunking import chunk_size, forward_chunks
from fl.addons._distill import distill_models, starts_from_average
from fl.aggregation import AggregatedReplies
from fl.averaging import AddOn, AveragingServer, FedAvg, Settings
from fl.averaging._composition import require_full_models
from fl.averaging.addon import overrides
from fl.message import Entry, Message, Tensors


@dataclass(frozen=True)
class FedDF(AddOn):
    """Ensemble distillation for robust model fusion (Lin et al., NeurIPS 2020, Algorithms 1 and 3).

    The server fuses models by distilling the clients' ensemble on unlabeled images of its own.

    Pass the unlabeled images as `server_data={"proxy": ...}`. When a client's reply arrives, the server runs the
    client's model on these images and updates the mean of the logits. The model is in eval mode, with the batch-norm
    statistics that the client sent. At the end of the round, one student per architecture is trained with Adam on the
    softmax of the mean logits (Eq. 3: KL(softmax(mean of logits) || softmax(student))). Every client has the same
    weight in this mean, whatever its architecture. A student starts from FedAvg's weights for its architecture: the
    weighted average of the clients' weights, after the step of a server optimizer if there is one.

    In the paper, the student is scored every 100 steps on labeled validation images. The distillation takes at most
    10,000 steps, stops when the accuracy has not risen for 1,000 steps, and keeps the best weights. To do the same, use
    `FedDF(steps=10_000, returns="best", patience=1000)` with `server_data={"validation": ...}`. By default, no
    validation images are needed: the student takes 1,000 steps, and the last weights are kept. The learning rate falls
    along a cosine, and gradients are clipped, as in the authors' code (epfml/federated-learning-public-code:
    `NoiseKTSolver` in FedDF-code/pcode/aggregation/noise_knowledge_transfer.py).

    Deviation: the paper scores the student every 100 steps; here, it is also scored after step 1 and after the last
    step.

    In "Federated Learning with a Single Shared Image" (Soni, Saeed and Asano, 2024) FedDF is the baseline. There, the
    student starts from the average only in a share of the rounds ("FedAvg initialization"), and otherwise from the
    server's last model (lines 366-375 of strategy/fed_df.py in its code). The student's logits are clipped. To
    reproduce this baseline, use `FedDF(steps=500, batch=32, lr=0.005, schedule="constant", gradient_norm=None,
    rate=0.2, clip=2.5)`, and train the clients with the options of `fl.methods.SingleImage`. Clients send logits in
    that paper, but weights here. The server computes the same logits from the weights, so only the messages are larger:
    they are as large as FedAvg's.

    Args:
        steps: number of Adam steps in a round; 0 disables the add-on.
        batch: number of images per step; the paper uses 128.
        lr: learning rate of Adam; the paper uses 1e-3.
        schedule: schedule of the learning rate: "cosine", with which it falls to 0 over `steps` steps along half a
            cosine, or "constant".
        gradient_norm: largest norm of a gradient; the authors' code uses 5. None: gradients are not clipped.
        returns: which weights of the student are kept: the "last", or the "best" on the validation images. The weights
            are scored after step 1, after every 100th step and after the last step.
        patience: number of steps without a better validation accuracy after which the distillation stops; only with
            `returns="best"`. The paper uses 1,000.
        rate: share of rounds, in [0, 1], in which the student starts from the clients' average. These rounds are evenly
            spaced.
        warm_rounds: number of rounds at the start of the run in which the student always starts from the average; the
            code of the single-image paper uses 1.
        clip: largest norm of the student's logits (`losses.clip_logit_norm`), or None.
    """

    disabled_at_zero = ("steps",)
    steps: NonNegativeInt = 1000
    batch: PositiveInt = 128
    lr: LearningRate = 1e-3
    schedule: Literal["cosine", "constant"] = "cosine"
    gradient_norm: Positive | None = 5.0
    returns: Literal["last", "best"] = "last"
    patience: PositiveInt | None = None
    rate: Fraction = 1.0
    warm_rounds: NonNegativeInt = 1
    clip: Positive | None = None

    logits = Entry[Tensor]("mean")
    data_access = "none"
    single_label = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.patience is not None and self.returns != "best":
            raise ValueError(f"patience needs returns='best', got returns={self.returns!r}")

    def check(self, settings: Settings, addons: Sequence[AddOn]) -> None:
        """Refuse methods whose replies do not contain every client's whole model."""
        require_full_models(self, settings, addons)
        for addon in addons:
            if self.rate < 1 and any(
                overrides(addon, slot) for slot in ("aggregate", "server_step", "evaluation_model")
            ):
                raise ValueError(
                    f"{addon.name} needs the average in every round: use FedDF(rate=1) with it, got rate={self.rate:g}"
                )

    def start(self, server: AveragingServer) -> None:
        """Refuse a run without proxy images (unlabeled images on the server)."""
        for name in ("proxy", "validation") if self.returns == "best" else ("proxy",):
            if name not in server.data:
                raise ValueError(f"FedDF needs images on the server: server_data={{{name!r}: ...}}")

    def read_reply(self, server: AveragingServer, reply: Message, out: Message) -> None:
        """Write the logits of the client's trained model on the server's unlabeled images (the proxy images) to `out`.

        The logits in `out` are averaged over the clients.
        """
        net = server.trained(reply).network
        images = server.data["proxy"].images
        out[self.logits] = torch.cat(list(forward_chunks(net, images, chunk_size(images))))

    def refine(self, server: AveragingServer, replies: AggregatedReplies, old: Tensors) -> Tensors:
        """Return the weights of each architecture's student, after training on the mean of the clients' logits.

        The student is the server's model of the architecture.
        """
        warm = starts_from_average(server.round, self.rate, self.warm_rounds)
        if self.rate < 1:
            server.notes["initialised"] = int(warm)
        return distill_models(
            server,
            server.state[FedAvg.model] if warm else old,
            server.data["proxy"].images,
            replies[self.logits],
            owner=self.key,
            best=self.returns == "best",
            steps=self.steps,
            batch=self.batch,
            lr=self.lr,
            schedule=self.schedule,
            gradient_norm=self.gradient_norm,
            clip=self.clip,
            every=100,
            patience=self.patience,
        )
