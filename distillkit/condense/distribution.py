"""Distribution matching: DM, FedLGD's iterative DM and FedDM in one function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from distillkit._utils import check
from distillkit._utils.progress import bar
from distillkit._utils.provenance import provenance
from distillkit.augment import Augmentation, augmented, require_augmentation
from distillkit.condense._descent import Descent
from distillkit.condense._mean_matching import MATCHES, distance_to_means, embedding_means, groups
from distillkit.condense._parallel import Abreast, abreast
from distillkit.condense._state import Progress, Resume, identity_of, named
from distillkit.condense.initialization import class_starts
from distillkit.networks._base import Network
from distillkit.networks._validation import check_network, require_sampler, uses_batch_statistics
from distillkit.networks.samplers import NetworkSampler
from distillkit.normalization import Normalization
from distillkit.rng import as_generator, derive
from distillkit.sets import Images, LabeledImages, Labels, as_set

__all__ = ["distribution_matching"]


@dataclass(frozen=True)
class _Real:
    """The real images, class by class, as the network of one step sees them."""

    images: Tensor
    rows: dict[int, Tensor]
    seed: int
    augment: Augmentation | None
    match: str
    chunk: int | None

    def transform(self, images: Tensor, step: int, c: int) -> Tensor:
        """Apply the one draw of this class and step, the same for its real and its synthetic images."""
        if self.augment is None:
            return images
        return augmented(self.augment, images, derive(self.seed, step, c, "augment"), siamese=True)

    def batch(self, step: int, c: int, limit: int) -> Tensor:
        """At most `limit` images of class `c`, without replacement."""
        index = self.rows[c]
        if len(index) > limit:
            index = index[torch.randperm(len(index), generator=derive(self.seed, step, c, "real"))[:limit]]
        return self.transform(self.images.index_select(0, index.to(self.images.device)), step, c)

    def means(self, network: Network, at_once: Abreast, step: int, limit: int) -> Tensor:
        """Mean embedding [K, d] of such a batch of each class."""
        classes, sizes = list(self.rows), [min(len(own), limit) for own in self.rows.values()]

        def of(network: Network, group: slice) -> Tensor:
            images = torch.cat([self.batch(step, c, limit) for c in classes[group]])
            return embedding_means(network, images, sizes[group], match=self.match, chunk=self.chunk)

        return torch.cat(at_once(of, list(groups(network, self.images, sizes, self.chunk))))

    def distance(
        self, network: Network, at_once: Abreast, step: int, targets: Tensor, images: Tensor, counts: list[int]
    ) -> tuple[Tensor, Tensor]:
        """How far synthetic images are from the means of all classes, and the gradient for each of them."""
        classes, parts = list(self.rows), images.split(counts)

        def of(network: Network, group: slice) -> tuple[Tensor, Tensor]:
            def view(images: Tensor, position: int) -> Tensor:
                return self.transform(images, step, classes[group][position])

            augment = None if self.augment is None else view
            return distance_to_means(
                network, targets[group], torch.cat(parts[group]), counts[group],
                match=self.match, augment=augment, chunk=self.chunk,
            )  # fmt: skip

        found = at_once(of, list(groups(network, images, counts, self.chunk)))
        return torch.stack([distance for distance, _ in found]).sum(), torch.cat([gradient for _, gradient in found])


def distribution_matching(
    images: Images,
    labels: Labels | None = None,
    *,
    networks: NetworkSampler,
    ipc: int = 10,
    steps: int = 1000,
    match: str = "embedding",
    init: str | LabeledImages = "real",
    classes: Sequence[int] | None = None,
    batch_real: int | None = 256,
    cache: bool = True,
    lr: float = 1.0,
    momentum: float = 0.5,
    augment: Augmentation | None = None,
    num_classes: int | None = None,
    normalization: Normalization | None = None,
    generator: int | torch.Generator = 0,
    chunk: int | None = None,
    callback: Callable[[Progress], object] | None = None,
    resume: Resume | None = None,
    progress: bool = True,
) -> LabeledImages:
    """Condense a set by distribution matching: learn images whose mean embedding per class is that of the real ones.

    Each step draws a network phi and minimises, by one step of SGD with momentum on the pixels,

        sum over classes c of || mean phi(real images of c) - mean phi(synthetic images of c) ||^2,

    summed over the d embedding dimensions, so that `lr` belongs to the embedding's size. The papers are settings:

    | paper | networks | match | augment | steps |
    |---|---|---|---|---|
    | DM (Zhao and Bilen, WACV 2023) | `RandomNetworks(factory)` | embedding | `DSA()` | 20,000 |
    | FedLGD (Huang et al., TMLR 2024), section 3.3.1 | `FixedNetwork(network)` | embedding | `DSA()` | 100 |
    | FedDM (Xiong et al., CVPR 2023), Eq. 8 | `NetworkBall(network, 5.0)` | embedding+logits | none | 1,000 |

    Args:
        images: the real images, float [N, C, H, W] in the normalised space, or a `LabeledImages` (then no `labels`).
        labels: their class indices, int [N].
        networks: where phi comes from, on the images' device and of their dtype. With batch norm that uses batch
            statistics (`RandomNetworks` of such networks), one forward pass holds all classes, real or synthetic: a
            class alone would be normalised to the same mean as any other. It is then not cut into chunks.
        ipc: synthetic images per class.
        steps: optimisation steps.
        match: `"embedding"` or `"embedding+logits"` (adds the squared distance of the mean logits, FedDM).
        init: see `initial_images`; a `LabeledImages` is gone on with, and decides classes and counts.
        classes: the classes to condense; default those that own a real image.
        batch_real: real images per class and step, drawn without replacement; a class that has fewer gives all.
            None: always all.
        cache: with a fixed network and no augmentation, compute the means of whole classes once in place of a random
            batch at every step: the same expectation without its noise, at almost no cost. False: as the papers do.
        lr: step size on the pixels. The papers take 1, DM 10 from 100 images per class on.
        momentum: in [0, 1).
        augment: applied with one draw per class and step to its real and its synthetic images (Siamese).
        num_classes, normalization: of the data, when `images` is a tensor; see `LabeledImages`.
        generator: an int seed, or a CPU generator, from which one number is drawn; all else derives from it, the step
            and the class.
        chunk: images per forward pass over real images; default by device and size (see `chunking.chunk_size`). It
            bounds memory and changes results by rounding only.
        callback: called with a `Progress` after each step.
        resume: a state of `Progress.state()`, or the file that `save_state` wrote: go on from there, to the same bits
            as without the interruption. Pass the other arguments again (data, networks, ...); `steps` counts from the
            very beginning and may be larger than before.
        progress: whether long work shows a bar (see `distillkit._utils.progress`).

    Returns:
        A set of `ipc` images per class, class-major, in the same normalised space, never clipped; `info` says how it
        was made and by which versions, the `seed` that all draws derived from, which classes were `absent` in the data,
        and for which ones the start repeats images (`with_replacement`).

    Raises:
        TypeError, ValueError: what is wrong with which argument.
        FloatingPointError: the loss is no longer finite.

    On a CPU as many classes as `torch.get_num_threads()` are worked on at once, each on one thread and a copy of the
    network, so that the result is that of one thread. (A network that cannot be copied takes them in turn. What goes
    through it in one piece, because of batch statistics or because it is little, goes on all threads.)

    Deviations: the released code of DM seeds its augmentation from the clock; ours derives it. It runs
    `steps + 1` steps; we run `steps`. FedLGD's and DM's averages over absent classes are NaN; ours leave them out.
    FedDM's text draws a batch of the synthetic images too; we always use all of them.
    """
    real = as_set(images, labels, num_classes=num_classes, normalization=normalization, progress=progress)
    networks = require_sampler(networks)
    ipc = check.positive_int(ipc, "ipc")
    steps = check.positive_int(steps, "steps", least=0)
    check.one_of(match, "match", MATCHES)
    check.boolean(cache, "cache")
    require_augmentation(augment, real.normalization)
    batch_real = len(real) if batch_real is None else check.positive_int(batch_real, "batch_real")

    seed = int(torch.randint(2**62, (), generator=as_generator(generator)))
    rows, start, counts = class_starts(real, ipc, init, classes, seed)
    options = {"match": match, "lr": lr, "momentum": momentum, "batch_real": batch_real}
    arguments = {
        "method": "distribution matching",
        "networks": type(networks).__name__,
        "augment": None if augment is None else named(augment),
        **options,
        "cache": cache,
        "classes": {str(c): [len(own), n] for (c, own), n in zip(rows.items(), counts, strict=True)},
    }
    run = Descent(start.images, lr, momentum, steps, arguments, seed, resume, lambda: identity_of(real, networks))

    side = _Real(real.images, rows, run.seed, augment, match, chunk)
    loss, cached = None, None
    at_work = bar(steps, "distribution matching", progress=progress, done=run.done)
    with at_work as shown, abreast(real.images) as at_once:
        for step in range(run.done, steps):
            network = networks.draw(derive(run.seed, step, "network"))
            at_once.see(network)
            if loss is None:
                classes_used = real.num_classes if match == "embedding+logits" else None
                check_network(network, real.images, classes=classes_used, features=True, name="networks")
                if cache and networks.fixed and augment is None and not uses_batch_statistics(network):
                    cached = side.means(network, at_once, step, len(real))
            targets = side.means(network, at_once, step, batch_real) if cached is None else cached
            distance, gradient = side.distance(network, at_once, step, targets, run.images, counts)
            loss = run.descend(distance, gradient)
            run.report(callback, loss, shown)
    info = {
        "method": "distribution matching",
        "networks": repr(networks),
        "augment": None if augment is None else repr(augment),
        **options,
        "ipc": ipc,
        "steps": steps,
        "loss": loss,
        **start.info,
        "absent": (real.counts() == 0).nonzero().flatten().tolist(),
        **provenance(generator, seed=run.seed),
    }
    return start.replace(images=run.images, info=info)
