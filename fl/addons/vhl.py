"""Virtual homogeneity learning: clients align their features with those of a shared set of noise images."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from distillkit._utils import check
from distillkit._utils.options import AtLeastTwo, NonNegative, Options, PositiveInt, Temperature
from distillkit.augment import adapt_normalization, require_augmentation
from distillkit.augment._validation import Augment
from distillkit.losses import supervised_contrastive
from distillkit.networks import split
from distillkit.sets import LabeledImages
from fl.addons._virtual import require_source, virtual_set
from fl.averaging import AddOn, AveragingServer, Local, Settings, Step
from fl.averaging._trials import try_augmentation
from fl.averaging.step import outputs
from fl.batches import Batch
from fl.message import Entry, Message


@dataclass(frozen=True)
class VHL(AddOn):
    """VHL (Tang et al., "Virtual homogeneity learning", ICML 2022, Algorithm 1, Eq. 4, appendix C).

    Clients whose data differ share a set of noise images, on which their features are aligned.

    The server makes a set of noise images with `classes` virtual classes, each with its own kind of noise. Each client
    downloads the set once. In every step, a batch of virtual images is concatenated with the batch of real images in
    the forward pass, so that both share batch-norm statistics. The client adds to the objective

        cross_entropy * CE(virtual logits, virtual labels)
        + calibration * SupCon([real, virtual features], labels), virtual features detached
        + contrast * SupCon(virtual features),

    where CE is the cross-entropy and SupCon the supervised contrastive loss. Each virtual class k has an additional
    output of the classifier. The second term treats images of virtual class k and real class k as one class.

    Deviations. The third term is in the authors' code (with weight 0.1), but not in the paper. It keeps the virtual
    classes apart, which the second term cannot do, because its virtual features have no gradient. The authors' code
    uses the second term only in the first five local epochs of a round. Here, it is used in all epochs, which is the
    same in the published settings, because none has more than five. When a pass over the virtual set ends with a batch
    of fewer than `batch` images, the authors' code drops this batch; here, it is used. In the tests of the authors'
    code, a prediction of a virtual class counts as an error; `FedAvg(predict="all")` does the same here.

    In the authors' code, a client's learning rate decays each time the client takes part; here it decays with the
    rounds, as in the paper. The authors' code keeps momentum between rounds; use `ClientOptimizer(state="client")` for
    this. The authors' code always crops and flips the virtual images, even if the real images have another
    augmentation; use the option `augment` for this.

    Args:
        source: "stylegan", "gaussian" or "cnn" (see `distillkit.generate`), the name of a set in `server_data`, or a
            set of images in the clients' normalization and shape.
        classes: number of virtual classes; the paper uses 10, and 100 for CIFAR-100.
        per_class: number of noise images per class; it is unclear from the authors' code whether it should be 200 or
            5,000.
        cross_entropy, calibration, contrast: weights of the three terms, at least 0; all at 0 disable the add-on.
        batch: number of virtual images per step; default: the method's `batch`, as in the paper.
        augment: augmentation of the virtual images: "method" for the augmentation of the real images, another
            augmentation, or None. It is adapted to the normalization of the virtual set.
        layer: name of the module (as in `named_modules()`) whose flattened outputs are the features in the contrastive
            terms (`model_out_feature_layer` in the authors' code, Table 6). None: the embedding.
        temperature: temperature of the contrastive loss.
        empty: treatment of images without a positive partner in the contrastive terms: "drop", or "zero" as in the
            authors' code (see `distillkit.losses.supervised_contrastive`).
        options: further options of the function that generates the noise, such as `{"width": 64}`.
    """

    disabled_at_zero = ("cross_entropy", "calibration", "contrast")
    source: str | LabeledImages = "stylegan"
    classes: AtLeastTwo = 10
    per_class: PositiveInt = 200
    cross_entropy: NonNegative = 1.0
    calibration: NonNegative = 1.0
    contrast: NonNegative = 0.1
    batch: PositiveInt | None = None
    augment: Augment | Literal["method"] | None = "method"
    layer: str | None = None
    temperature: Temperature = 0.07
    empty: Literal["drop", "zero"] = "drop"
    options: Options = field(default_factory=dict)
    single_label = True
    noise = Entry[LabeledImages]("first", cached=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_source(self.source, self.options)
        if isinstance(self.augment, str):
            check.one_of(self.augment, "augment", ("method",))
        else:
            require_augmentation(self.augment, siamese=False)
        if self.layer is not None and not (self.calibration or self.contrast):
            raise ValueError(
                f"only calibration and contrast use layer, but both are 0: leave it out, got layer={self.layer!r}"
            )

    @property
    def extra_outputs(self) -> int:  # type: ignore[override]
        """Number of additional outputs of the network: one for each virtual class."""
        return self.classes

    @property
    def layers(self) -> tuple[str, ...]:  # type: ignore[override]
        """The option `layer` as a tuple, which is empty if `layer` is None."""
        return () if self.layer is None else (self.layer,)

    def check(self, settings: Settings, addons: Sequence[AddOn]) -> None:
        """Refuse `VHL` together with `NaiveVHL`: a method can have only one virtual set (shared noise images)."""
        several = [a.name for a in addons if isinstance(a, VHL)]
        if len(several) > 1:
            raise ValueError(
                f"{' and '.join(several)} cannot be combined: both are VHL with other weights; leave one out"
            )

    def start(self, server: AveragingServer) -> None:
        """Make the set of noise images with which all clients train, and check the option `layer`, if it is given.

        `layer` must be the name of a module that exists in every network, runs exactly once in a forward pass, and
        returns a tensor with one row per image.
        """
        if self.augment is not None and not isinstance(self.augment, str):
            try_augmentation(server, adapt_normalization(self.augment, server.normalization), f"{self.name}: augment")
        noise = virtual_set(server, self, self.source, self.classes, self.per_class, self.options)
        for architecture in server.settings.networks.names if self.layer is not None else ():
            net = server.network(architecture).eval()
            named = dict(net.named_modules())
            if self.layer not in named or not self.layer:
                known = ", ".join(n for n in named if n)
                raise ValueError(f"{self.name}: the network has no layer {self.layer!r}; it has {known}")
            with torch.no_grad():
                outputs(split(net), noise.images[:2], {self.layer: named[self.layer]})
        server.state[self.noise] = noise

    def send(self, server: AveragingServer, client: int, message: Message) -> None:
        """Send the virtual set of noise images. It never changes, so its images are sent only once to each client."""
        message[self.noise] = server.state[self.noise]

    def extra_batches(self, local: Local) -> Iterator[Batch]:
        """Return an iterator over batches of the virtual set (noise images), augmented by the option `augment`."""
        noise = local.message[self.noise]
        change = local.settings.augment if isinstance(self.augment, str) else self.augment
        augment = None if change is None else adapt_normalization(change, noise.normalization)
        return local.stream(self, noise, batch=self.batch, joint=True, augment=augment)

    def loss(self, step: Step) -> Tensor:
        """Return the weighted sum of the three terms that VHL adds to the objective (see the formula in `VHL`).

        They are the cross-entropy of the virtual images, the contrastive loss over the real and the virtual features
        together, and the contrastive loss of the virtual features alone.
        """
        real, virtual, labels = step.output(), step.output(self), step.batch_of(self).labels
        x, v = (o.embedding if self.layer is None else o.inner[self.layer] for o in (real, virtual))
        contrast = partial(supervised_contrastive, temperature=self.temperature, empty=self.empty)
        total = self.cross_entropy * F.cross_entropy(virtual.logits, labels + step.local.first_output(self))
        if self.calibration:
            near = contrast(x, step.batch.labels, v, labels, detach_other=True)
            total = total + self.calibration * near
        if self.contrast:
            total = total + self.contrast * contrast(v, labels)
        return total


@dataclass(frozen=True)
class NaiveVHL(VHL):
    """Ablation "naive VHL" of VHL (section 5.3): clients also train on the virtual set, but without contrastive terms.

    The arguments are those of `VHL`, with the weights `calibration` and `contrast` at 0.
    """

    calibration: NonNegative = 0.0
    contrast: NonNegative = 0.0
    data_access = "none"
