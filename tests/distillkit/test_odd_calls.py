"""Unusual calls of all public names of `distillkit` and `attacks`: refused by name, warned of, or accepted."""

from __future__ import annotations

import importlib
import warnings
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attacks import leaks
from attacks.inversion import ClassMeans, Gradient, ReplayableMessage, class_counts, compare_messages, invert_message
from attacks.membership import (
    Pipeline,
    ShadowScores,
    canary_attack,
    gradient_norm,
    halves,
    leave_one_out,
    loss,
    model_scorer,
    run_shadows,
    stable_logit,
)
from attacks.statistics import ppv_interval
from distillkit import LabeledImages, Normalization
from distillkit._utils.processes import worker_pool
from distillkit.augment import DSA, CropFlip, apply_augmentation
from distillkit.chunking import chunk_size, forward_chunks
from distillkit.condense import (
    InnerTraining,
    distribution_matching,
    gradient_matching,
    herding,
    load_state,
    save_state,
    stitch,
)
from distillkit.data import Split, clients, load
from distillkit.data import partition as pa
from distillkit.evaluate import evaluate
from distillkit.fingerprint import set_fingerprint, tensor_fingerprint
from distillkit.generate import SmallDecoder, invert, separability
from distillkit.labels import CutMix, Relabel, soft_labels, stored_soft_labels
from distillkit.locking import locked
from distillkit.networks import ConvNet, FixedNetwork, build, initialize
from distillkit.normalization import ZCA
from distillkit.plot import curves
from distillkit.plot import partition as plot_partition
from distillkit.privacy import PrivateGradient, PublicEmbedders, Secret, class_sums, compose, fit_to_means, plan_noise
from distillkit.rng import derive
from distillkit.robustness import FGSM, Perturbation
from distillkit.select import prune_by_confidence
from distillkit.sets import StoredImages, Tiles
from distillkit.study.history import accuracy_late
from distillkit.training import Protocol, accuracy, train
from tests.odd_calls import Call, Listed, table_tests
from tests.refused import refused

PARTS = (
    *("augment", "condense", "data", "data.partition", "evaluate", "generate", "labels", "losses", "networks"),
    *("normalization", "plot", "protocols", "robustness", "serialization", "select", "sets", "training"),
)
ATTACKS = ("attacks", *(f"attacks.{part}" for part in ("audit", "inversion", "membership", "reporting", "transcript")))
PACKAGES = ("distillkit", *(f"distillkit.{part}" for part in PARTS), *ATTACKS)

HALF = Normalization((0.5,), (0.25,))
LABELS = torch.tensor([0, 1, 2] * 3)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=derive(seed, "odd"))


@cache
def data() -> LabeledImages:
    """Nine images of three classes, 1x8x8, in a normalised space."""
    pixels = torch.rand(9, 1, 8, 8, generator=derive(0))
    return LabeledImages.from_pixels(pixels, LABELS, num_classes=3, normalization=HALF)


def pool() -> LabeledImages:
    """Return a set of real images that contains other images than `data`."""
    return LabeledImages.concatenate([data(), data().replace(images=data().images.flip(3))])


def net() -> nn.Module:
    return ConvNet((1, 8, 8), 3, width=4, depth=1)


def made() -> nn.Module:
    return build(net, 0).eval()


def others() -> LabeledImages:
    """Return nine images that are not in `data`."""
    return data().replace(images=normal(9, 1, 8, 8, seed=5) / 4)


def gradient() -> list[Tensor]:
    """Return a vector of the shape of a gradient of `made`."""
    return [normal(*p.shape, seed=i) for i, p in enumerate(made().parameters())]


@cache
def attacked(one: Perturbation) -> str | None:
    return finite(accuracy(made(), data(), against=one))


@cache
def teacher() -> nn.Module:
    return train(made(), data(), Protocol(epochs=30, lr=0.1))


def taught() -> nn.Module:
    return deepcopy(teacher())


def fit(indices: Tensor, seed: int) -> dict[str, Any]:
    """Return the result of a pipeline: here the sum of pixels, minus that of the mean record."""
    mean = data().images[indices].mean(0).sum()
    return {"a": lambda x, y: x.flatten(1).sum(1) - mean}


def pipeline() -> Pipeline:
    return Pipeline(fit, data().images, LABELS)


def sampler() -> FixedNetwork:
    return FixedNetwork(made())


def finite(result: Any) -> str | None:
    """Return a description of non-finite numbers in a tensor, a set, or a tuple of these."""
    if isinstance(result, LabeledImages):
        result = result.images
    if isinstance(result, tuple | list):
        return next((word for one in result if (word := finite(one))), None)
    if isinstance(result, Tensor) and result.is_floating_point() and not bool(torch.isfinite(result).all()):
        return "NaN or Inf comes out"
    if isinstance(result, float) and result != result:
        return "NaN comes out"
    return None


def inverted(message: Any) -> str | None:
    """Return what is wrong with the images reconstructed from the message after two steps."""
    return finite(invert_message(message, (1, 8, 8), 3, labels=LABELS[:3], steps=2).images)


def augments(augment: Any) -> str | None:
    return finite([augment(normal(n, 1, 8, 8), 0) for n in (0, 3)])


def outputs_on_noise(network: nn.Module) -> str | None:
    """Return what is wrong with the network's outputs on noise of its own shape."""
    return finite(network.eval()(torch.zeros(2, *network.shape)))  # type: ignore[arg-type]


def drawn(figure: Any) -> None:
    figure.canvas.draw()


def _makes(value: Any) -> bool:
    """Return whether an argument is a factory of arguments (`net` is none: it is an argument itself)."""
    return (
        any(value is maker for maker in (data, pool, made, sampler, taught))
        or getattr(value, "__name__", "") == "<lambda>"
    )


PUBLIC: dict[str, Any] = {n: getattr(m, n) for m in map(importlib.import_module, PACKAGES) for n in m.__all__}


def C(use: Any = finite, skip: tuple[str, ...] = (), function: Any = None, **arguments: Any) -> Call:
    """A call whose arguments are created anew each time; unnamed functions are called for them."""

    def fresh() -> dict[str, Any]:
        return {k: v() if _makes(v) else v for k, v in arguments.items()}

    return Call(function, fresh, use, ("progress", *skip))


def F(use: Any = lambda result: None, **arguments: Any) -> Call:
    """A formula of tensors, for which NaN inputs are not checked."""
    return C(use, **arguments)


def a_set(**options: Any) -> dict[str, Any]:
    return {"images": lambda: normal(9, 1, 8, 8), "labels": LABELS, "normalization": HALF, "num_classes": 3, **options}


TWO: dict[str, Any] = {"embeddings": lambda: normal(6, 4), "labels": torch.tensor([0, 1, 2, 0, 1, 2])}
LOGITS: dict[str, Any] = {"student_logits": lambda: normal(4, 3), "teacher_logits": lambda: normal(4, 3, seed=1)}
PQ: dict[str, Any] = {"p_logits": lambda: normal(4, 3), "q_logits": lambda: normal(4, 3, seed=1)}
NETS: dict[str, Any] = {"shape": (1, 32, 32), "num_classes": 3}
SMALL: dict[str, Any] = {"num_classes": 2, "per_class": 2, "size": 8, "channels": 1}
CLIENTS: dict[str, Any] = {"labels": torch.arange(40) % 4, "clients": 4}
SCORES: dict[str, Any] = {"scores": lambda: normal(40), "member": torch.arange(40) % 2 == 0}
SHADOWS: dict[str, Any] = {
    "target": lambda: normal(7), "inside": lambda: torch.arange(35).reshape(5, 7) % 2 == 0,
    "shadows": lambda: normal(5, 7, seed=1),
}  # fmt: skip

SENT = torch.tensor([0.25, -0.75, 0.5])
LAYER: dict[str, Any] = {
    "weight_gradient": lambda: torch.outer(SENT, torch.rand(4, generator=derive(0))), "bias_gradient": SENT
}  # fmt: skip

TABLE: dict[str, Call] = {
    # Sets
    "LabeledImages": C(**a_set()),
    "as_set": C(skip=("name",), **a_set()),
    "as_set a pair": C(images=lambda: (normal(9, 1, 8, 8), LABELS), normalization=HALF, num_classes=3, skip=("name",)),
    "Tiles": C(lambda t: finite(t.decode(torch.rand(2, 1, 4, 4))), factor=2),
    "TiledImages": C(
        stored=lambda: torch.rand(2, 1, 4, 4), labels=lambda: torch.tensor([0] * 4 + [1] * 4), tiles=lambda: Tiles(2),
    ),
    "Normalization": C(lambda n: finite(n.encode(torch.zeros(1, 1, 2, 2))), mean=(0.5,), std=(0.2,)),
    "ZCA": C(
        function=ZCA.fit, use=lambda z: finite(z.encode(torch.rand(2, 1, 2, 2))), images=lambda: torch.rand(6, 1, 2, 2),
    ),
    # Augmentation
    "DSA": C(augments),
    "CropFlip": C(augments, normalization=HALF, pad=2, cutout=2),
    "ResizedCrop": C(augments, min_scale=0.5),
    "ShufflePatches": C(augments, factor=3, augment=DSA()),
    "apply_augmentation": F(
        augment=DSA(), images=lambda: normal(3, 1, 8, 8), generator=lambda: derive(0), siamese=True,
    ),
    "require_augmentation": C(augment=DSA(), normalization=HALF),
    "require_normalization": C(augment=CropFlip(HALF), normalization=HALF),
    "adapt_normalization": C(augments, augment=CropFlip(HALF), normalization=HALF),
    # Condensation
    "distribution_matching": C(images=data, networks=sampler, ipc=1, steps=1, chunk=4),
    "distribution_matching of a tensor": C(
        networks=sampler, ipc=1, steps=1, match="embedding+logits", classes=[0, 1], **a_set(),
    ),
    "InnerTraining": C(loops=(2, 1), lr=0.01, batch=4),
    "gradient_matching": C(
        images=data, networks=sampler, ipc=1, iterations=1, inner=InnerTraining(loops=(2, 1)), augment=DSA(), chunk=4,
    ),
    "fit_to_gradient": C(
        network=made, synthetic=data, target=lambda: [torch.ones_like(p) for p in made().parameters()], steps=1,
    ),
    "random_subset": C(skip=("network", "chunk"), images=data, ipc=1, classes=[0, 2]),
    "stitch": C(images=data, observer=taught, ipc=1, pool=9, crops=2, factor=1, chunk=4, device="cpu"),
    "herding": C(skip=("generator",), images=data, ipc=1, network=made, chunk=4),
    "k_center": C(skip=("generator",), images=data, ipc=1, network=made, chunk=4),
    "initial_images": C(real=data, ipc=1, classes=[0, 1]),
    "initial_images given": C(real=data, ipc=1, init=data),
    "class_statistics": F(real=data),
    "images_from_statistics": C(means=lambda: normal(3, 1), stds=lambda: torch.ones(3, 1), ipc=2, size=(4, 4)),
    "loops_for": C(ipc=10),
    "embedding_means": F(network=made, images=lambda: normal(6, 1, 8, 8), counts=[2, 4], chunk=4),
    "distance_to_means": F(
        network=made, targets=lambda: normal(2, 64), images=lambda: normal(6, 1, 8, 8), counts=[2, 4], chunk=4,
    ),
    # Evaluation
    "evaluate": C(
        lambda found: finite(found.accuracy), data=data, test=data, factory=net, num_networks=1,
        protocol=Protocol(epochs=1), real=pool, chunk=4,
    ),
    "train": C(lambda n: finite(n(data().images)), network=made, data=data, protocol=Protocol(epochs=1), chunk=4),
    "accuracy": C(network=made, data=data, chunk=4),
    "accuracy against": C(network=made, data=data, against=FGSM(8 / 255), generator=1, chunk=4),
    "Corruption": C(attacked, kind="contrast", severity=2),
    "FGSM": C(attacked, epsilon=8 / 255),
    "PGD": C(attacked, epsilon=8 / 255, steps=2, step_size=0.1, random_start=True),
    "pixels_in_range": C(skip=("name",), images=lambda: data().images, normalization=HALF),
    "require_perturbations": C(lambda none: None, against=[FGSM(8 / 255)]),
    "require_protocol": C(lambda none: None, protocol=Protocol(epochs=1)),
    "Protocol": C(lambda p: finite(train(made(), data(), p)(data().images)), epochs=1, batch=4),
    # Labels
    "CutMix": C(lambda mix: finite(mix(normal(3, 1, 8, 8), 0).images)),
    "Mixup": C(lambda mix: finite(mix(normal(3, 1, 8, 8), 0).images)),
    "Relabel": C(
        lambda r: finite(train(made(), data(), Protocol(epochs=1, relabel=r))(data().images)), teacher=taught,
        mix=CutMix(), top_k=2,
    ),
    "soft_labels": C(small=data, teacher=taught, pool=data),
    "stored_soft_labels": C(
        lambda labels: finite(labels.logits), small=data, epochs=[0], pool=data,
        protocol=lambda: Protocol(epochs=1, relabel=Relabel(taught())),
    ),
    "describe_protocol": C(lambda name: None, protocol=Protocol(epochs=1)),
    # Networks
    "ConvNet": C(outputs_on_noise, **NETS),
    "SimpleCNN": C(outputs_on_noise, **NETS),
    "FedCOGCNN": C(outputs_on_noise, **NETS),
    "LeNet": C(outputs_on_noise, **NETS),
    "ResNet": C(outputs_on_noise, depth=10, width=4, **NETS),
    "CifarResNet": C(outputs_on_noise, depth=8, **NETS),
    "WideResNet": C(outputs_on_noise, depth=10, width=1, **NETS),
    "named_network": C(outputs_on_noise, name="lenet", **NETS),
    "norm_layer": C(lambda n: finite(n(normal(2, 4, 3, 3))), kind="group", channels=4),
    "build": C(outputs_on_noise, factory=net, generator=0),
    "initialize": C(outputs_on_noise, network=made, generator=0),
    "frozen_copy": C(outputs_on_noise, network=made),
    "split": C(
        lambda n: finite(n.features(data().images)), network=lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 3)),
        classifier="1",
    ),
    "KeepInit": C(lambda f: outputs_on_noise(build(f, 0)), factory=net),
    "RandomNetworks": C(lambda s: outputs_on_noise(s.draw(derive(0))), factory=net),
    "FixedNetwork": C(lambda s: outputs_on_noise(s.draw(derive(0))), network=made),
    "NetworkBall": C(lambda s: outputs_on_noise(s.draw(derive(0))), network=made, radius=1.0),
    # Data
    "load": C(lambda s: finite(s.train), skip=("root", "download"), name="digits", size=4, channels=1),
    "clients": C(lambda sets: finite(sets[0]), data=data, partition=[torch.arange(3), torch.arange(3, 6)]),
    "iid": C(**CLIENTS),
    "classes_per_client": C(**CLIENTS),
    "class_clusters": C(**CLIENTS),
    "dominant_class": C(share=0.9, **CLIENTS),
    "dirichlet": C(alpha=1.0, min_size=2, **CLIENTS),
    "dirichlet_capped": C(alpha=1.0, **CLIENTS),
    "dirichlet_prior": C(alpha=1.0, **CLIENTS),
    "by_domain": C(domains=torch.arange(40) % 2, clients=4),
    "domains_by_dirichlet": C(
        labels=torch.arange(40) % 4, domains=torch.arange(40) // 20, parts=2, alpha=1.0, min_each=1,
    ),
    "split_by": C(
        lambda split: finite(split.train), data=lambda: data().replace(columns={"user": torch.arange(9)}),
        column="user",
    ),
    "apply": C(
        labels=torch.arange(40) % 4, partition=[torch.arange(20), torch.arange(20, 40)], other=torch.arange(12) % 4,
    ),
    "cap_size": C(labels=torch.arange(40) % 4, partition=[torch.arange(20), torch.arange(20, 40)], size=4),
    "summary": C(labels=torch.arange(40) % 4, partition=[torch.arange(20), torch.arange(20, 40)]),
    # Generation
    "stylegan_noise": C(latent=4, width=4, **SMALL),
    "upsampled_gaussian": C(base=4, **SMALL),
    "cnn_noise": C(latent=4, width=4, decorrelation_steps=1, **SMALL),
    "invert": C(teacher=made, targets=torch.tensor([0, 1]), shape=(1, 8, 8), student=made, steps=1, normalization=HALF),
    "invert tiled": C(teacher=made, targets=torch.tensor([0, 1]), shape=(1, 8, 8), steps=1, parametrize=Tiles(2)),
    "LatentDecoder": C(
        lambda d: finite(invert(made(), LABELS[:2], shape=(1, 8, 8), steps=1, parametrize=d).images),
        factory=lambda: lambda: SmallDecoder((1, 8, 8), 4, 4), latent=4,
    ),
    "separability": C(lambda found: finite(found.small_net), images=data, factory=net, epochs=1, batch=4),
    "complement_targets": C(counts=torch.tensor([3, 5, 0]), total=8),
    "decorrelation": F(images=lambda: normal(4, 1, 8, 8)),
    "Patches": C(
        lambda p: finite(p.batch([0, 1])), image=lambda: torch.rand(3, 32, 32), size=8, count=4, jpeg_quality=75,
    ),
    "NoiseDecoder": C(lambda n: finite(n(normal(2, 4))), size=8, channels=1, latent=4, width=4),
    "SmallDecoder": C(lambda n: finite(n(normal(2, 4))), shape=(1, 8, 8), latent=4, width=4),
    "StyleGAN2": C(lambda n: finite(build(lambda: n, 0)(normal(2, 4))), size=8, channels=1, latent=4, width=4),
    # Losses
    "supervised_contrastive": F(**TWO),
    "supervised_contrastive of two": F(
        other_embeddings=lambda: normal(3, 4, seed=2), other_labels=torch.tensor([0, 1, 2]), **TWO,
    ),
    "SupervisedContrastive": F(lambda f: finite(f(normal(6, 4), TWO["labels"]))),
    "model_contrastive": F(
        embeddings=lambda: normal(4, 3), global_embeddings=lambda: normal(4, 3, seed=1),
        previous_embeddings=lambda: normal(4, 3, seed=2),
    ),
    "knowledge_distillation": F(**LOGITS),
    "KnowledgeDistillation": F(lambda f: finite(f(normal(4, 3), normal(4, 3)))),
    "binary_distillation": F(**LOGITS),
    "jensen_shannon": F(**PQ),
    "clamped_disagreement": F(**PQ),
    "class_means": F(num_classes=3, **TWO),
    "mean_embedding_distance": F(
        real=lambda: normal(6, 4), synthetic=lambda: normal(3, 4, seed=1), real_labels=TWO["labels"],
        synthetic_labels=torch.tensor([0, 1, 2]), num_classes=3,
    ),
    "rbf_mmd": F(x=lambda: normal(4, 3), y=lambda: normal(5, 3, seed=1), bandwidth=1.0),
    "RBFMMD": F(lambda f: finite(f(normal(4, 3), normal(5, 3, seed=1))), bandwidth=1.0),
    "gradient_distance": F(gradients=lambda: [normal(3, 4)], targets=lambda: [normal(3, 4, seed=1)]),
    "total_variation": F(images=lambda: normal(2, 1, 4, 4)),
    "deepinversion_variation": F(images=lambda: normal(2, 1, 4, 4)),
    "image_l2": F(images=lambda: normal(2, 1, 4, 4)),
    "BatchNormPrior": F(
        lambda p: p.close() if hasattr(p, "close") else None,
        network=lambda: ConvNet((1, 8, 8), 3, width=4, depth=1, norm="batch").eval(),
    ),
    "proximal": F(parameters=lambda: [normal(3)], reference=lambda: [normal(3, seed=1)], mu=0.1),
    "feature_decorrelation": F(embeddings=lambda: normal(6, 4)),
    "prototype_distance": F(prototypes=lambda: normal(3, 4, seed=1), **TWO),
    "clip_logit_norm": F(logits=lambda: normal(4, 3)),
    # Selection
    "select": C(embeddings=lambda: normal(12, 4), logits=lambda: normal(12, 3), keep=6, clusters=3),
    "kmeans_balance": C(embeddings=lambda: normal(12, 4), predicted=torch.arange(12) % 3, keep=6, clusters=3),
    "centroid_distances": C(embeddings=lambda: normal(12, 4), clusters=3),
    "prune_by_confidence": C(logits=lambda: normal(12, 3), keep=6),
    # Plots
    "grid": C(drawn, images=data, per_class=1),
    "real_and_synthetic": C(drawn, real=data, synthetic=data, per_class=1),
    "selection": C(drawn, images=data, selected=torch.tensor([0, 1]), rows=1, columns=2),
    "pixel_histogram": C(drawn, sets=lambda: {"a": data()}, bins=8),
    "tsne": C(drawn, embeddings=lambda: {"a": normal(6, 4)}, labels=lambda: {"a": TWO["labels"]}),
    "pairwise_mmd": C(embeddings=lambda: {"a": normal(4, 3), "b": normal(5, 3, seed=1)}),
    "mmd_table": C(drawn, before=lambda: {"a": normal(4, 3), "b": normal(5, 3, seed=1)}),
    "plot.partition": C(
        drawn, function=plot_partition, labels=torch.arange(6) % 2, parts=[torch.arange(3), torch.arange(3, 6)],
    ),
    # Attacks
    "psnr": C(images=lambda: torch.rand(2, 1, 16, 16), references=lambda: torch.rand(2, 1, 16, 16)),
    "ssim": C(images=lambda: torch.rand(2, 1, 16, 16), references=lambda: torch.rand(2, 1, 16, 16)),
    "clopper_pearson": C(hits=3, trials=9),
    "bonferroni": C(confidence=0.95, tried=3),
    "ppv": C(tpr=0.5, fpr=0.1, prior=0.5),
    "max_lower_bound": C(runs=20),
    "Audit": C(inside=lambda: normal(8), outside=lambda: normal(8, seed=1), claim=lambda: [(1.0, 1e-5)]),
    "Inversion": C(),
    "audit_claim": C(inside=lambda: normal(8), outside=lambda: normal(8, seed=1), claim=lambda: [(1.0, 1e-5)]),
    "low_bit_scores": C(released=lambda: normal(3, 8), sums=lambda: normal(8).double(), std=1.0),
    "epsilon_lower_bound": C(inside=lambda: normal(8), outside=lambda: normal(8, seed=1), delta=1e-5),
    "one_run_lower_bound": C(
        scores=lambda: normal(8), included=lambda: torch.arange(8) % 2 == 0, guesses=4, delta=1e-5,
    ),
    "step_scores": C(steps=lambda: normal(8, 2), sigma=1.0, rate=0.5),
    "audit_noise": C(drawn=lambda: {1.5: 20}, charged=lambda: [(1.5, 20)]),
    **{f: C(logits=lambda: normal(9, 3), labels=lambda: LABELS) for f in ("loss", "margin", "stable_logit")},
    "lira": C(**SHADOWS),
    "rmia": C(z_target=lambda: normal(6, seed=3), z_shadows=lambda: normal(5, 6, seed=4), **SHADOWS),
    "gradient_norm": C(finite, network=made, images=lambda: data().images, labels=lambda: LABELS, chunk=4),
    "gradient_kde": C(finite, statistic=lambda: normal(24), member=lambda: torch.arange(24) % 2 == 0, folds=3),
    "shadow_classifier": C(finite, **SHADOWS, labels=lambda: torch.arange(7) % 2),
    "halves": C(count=4, records=6, seed=0),
    "model_scorer": C(lambda f: finite(f(data().images, LABELS)), network=made, score=lambda: stable_logit, chunk=4),
    "Pipeline": C(
        lambda p: finite(run_shadows(p, 4).scores["a"]), fit=lambda: fit, images=lambda: data().images,
        labels=lambda: LABELS, population=lambda: (data().images[:4], LABELS[:4]), tag="a tag",
    ),
    "run_shadows": C(lambda s: finite(s.scores["a"]), pipeline=lambda: pipeline(), count=4, skip=("out",)),
    "estimate_cost": C(lambda cost: finite(cost.each), pipeline=lambda: pipeline(), count=4, skip=("out",)),
    "ShadowScores": C(
        lambda s: finite(s.target(0, "a").scores), inside=lambda: halves(6, 9, 0), scores=lambda: {"a": normal(6, 9)},
        population=lambda: {"a": normal(6, 5)}, labels=lambda: LABELS,
    ),
    "leave_one_out": C(
        lambda found: None, shadows=lambda: ShadowScores(halves(6, 12, 0), {"model": normal(6, 12)}),
        attacks=lambda: {"a": lambda target: target.scores}, fpr=0.5,
    ),
    "label_only": C(network=made, images=lambda: data().images, labels=lambda: LABELS, shift=1, noise=(0.5,), draws=1),
    "canary_attack": C(
        lambda found: finite(found.p_value), records=data, train=lambda: lambda known, seed: made(),
        publish=lambda: lambda teacher, seed: lambda images: teacher(images.float()), canaries=2,
    ),
    "plant_canaries": C(lambda found: None, records=data, count=2),
    "leaks": C(lambda found: finite(found.auc), small=lambda: data()[:4], train=data, held_out=lambda: others()),
    "nearest": C(images=lambda: torch.rand(4, 1, 4, 4), candidates=lambda: torch.rand(3, 1, 4, 4)),
    **{f: C(lambda r: finite(getattr(r, "input", r)), **LAYER) for f in ("invert_linear", "invert_linear_batch")},
    **{
        f: C(images=lambda: torch.rand(3, 1, 4, 4), references=lambda: torch.rand(3, 1, 4, 4))
        for f in ("align", "match")
    },
    "invert_message": C(
        lambda a: finite(a.images), message=lambda: Gradient.of(made(), data().images[:3], LABELS[:3]), shape=(1, 8, 8),
        count=3, labels=lambda: LABELS[:3], steps=2, lr=0.1, total_variation=0.1, restarts=2,
    ),
    "Gradient": C(lambda v: inverted(v), network=made, gradients=lambda: gradient()),
    "FedAvgUpdate": C(
        lambda v: inverted(v), network=made, update=lambda: [-0.01 * g for g in gradient()], lr=0.1, batch=2,
    ),
    "FedAvgUpdate in order": C(
        lambda v: inverted(v), network=made, update=lambda: [-0.01 * g for g in gradient()], lr=0.1,
        order=lambda: [torch.tensor([0, 2]), torch.tensor([1])],
    ),
    "ClassMeans": C(
        lambda v: inverted(v), embeddings=lambda: [made().features], means=lambda: [torch.ones(3, 64)],
        counts=lambda: torch.tensor([1, 1, 1]),
    ),
    "ReplayableMessage": C(
        lambda v: inverted(v), observed=lambda: [torch.ones(3, 1, 8, 8)],
        replay=lambda: lambda images, labels: [images], num_classes=3,
    ),
    "compare_messages": C(
        lambda table: finite(table.guess), skip=("steps",),
        messages=lambda: {"a": Gradient.of(made(), data().images[:3], LABELS[:3])}, images=lambda: data().images[:3],
        labels=lambda: LABELS[:3], normalization=HALF, steps=2,
    ),
    "DefendedMessage": C(lambda v: inverted(v), message=lambda: Gradient.of(made(), data().images[:3], LABELS[:3])),
    "Clip": C(lambda d: finite(d([torch.ones(3)])), max_norm=1.0),
    "Noise": C(lambda d: finite(d([torch.ones(3)])), std=1.0),
    "Sparsify": C(lambda d: finite(d([torch.ones(3)])), share=0.5),
    "batch_norm_prior": C(
        lambda prior: finite(prior(data().images)),
        network=lambda: build(lambda: ConvNet((1, 8, 8), 3, width=4, depth=1, norm="batch"), 0).eval(),
    ),
    "infer_label": C(weight_gradient=LAYER["weight_gradient"]),
    "class_bounds": C(
        lambda held: finite(str(held)), num_classes=3, bias_gradient=lambda: torch.tensor([-0.5, 0.25, 0.25]),
        bias_change=lambda: torch.tensor([0.5, -0.25, -0.25]),
        weight_gradient=lambda: torch.tensor([[-0.5], [0.25], [0.25]]), class_rows=lambda: torch.ones(3, 2),
        labels=lambda: torch.tensor([0, 0, 1, 2]), ipc=2, size=6,
    ),
    "class_counts": C(bias_gradient=SENT, count=4, predictions=lambda: torch.eye(3)),
    "at_threshold": C(lambda point: None, threshold=0.1, **SCORES),
    "roc": C(lambda curve: None, **SCORES),
}  # fmt: skip
CALLS = {name: replace(call, function=call.function or PUBLIC[name.split()[0]]) for name, call in TABLE.items()}

RESULTS = (
    *("Reconstruction", "NoiseAudit", "MessageComparison", "Cost", "Estimate", "Leaks", "Evaluation", "AttackResult"),
    *("CanaryAttack", "MessageResult", "ClassBounds", "OperatingPoint", "Progress", "Rate", "CropParameters"),
    *("RecoveredInput", "Report", "Mixed", "StoredLabels", "Roc", "Row", "TranscriptMessage", "Target", "ClaimTest"),
    *("Separability", "Split", "StoredSplit"),
)
NOT_CALLED = {
    "load_set": "reads files, with which its arguments are tested",
    "set_cards": "has no arguments",
    "Perturbation": "a base class",
    **dict.fromkeys(
        ("Augmentation", "Network", "NetworkSampler", "Images", "Labels", "Value"), "a protocol or an alias"
    ),
    **{name: "a constant" for name, value in PUBLIC.items() if not callable(value)},
    **{name: "an error" for name, value in PUBLIC.items() if isinstance(value, type) and issubclass(value, Exception)},
    **dict.fromkeys(RESULTS, "a result"),
    **dict.fromkeys(("StoredImages", "open_folder", "open_npz"), "use a file: `data/test_stored_folder.py`"),
    "store_dataset": "writes a file: `data/test_store_dataset.py`",
    **dict.fromkeys(
        ("Configurable", "from_config", "referenced_objects", "to_config"),
        "refuse by a place in the value: `test_serialization.py`",
    ),
    "ImageNetwork": "the base of the networks, which are called",
    "curves": "draws runs of `fl`, whose odd calls are tried there",
    **dict.fromkeys(("load_folder", "load_npz"), "read files, whose oddities are `data/test_folder_and_npz.py`"),
    **dict.fromkeys(("as_domains", "load_domains"), "join what loaders read: `data/test_domains.py`"),
    **dict.fromkeys(("mnist_m_like", "synth_digits_like"), "make sets: `data/test_lookalike_digits.py`"),
    "open_dataset": "as `load`",
    "report": "reads a run's folder, whose oddities are `attacks/test_reporting.py`",
    "read_transcript": "reads files, whose oddities are `attacks/test_transcript.py`",
    "load_cifar10c": "reads files, whose oddities are `data/test_cifar10c.py`",
    "load_table": "reads files, whose oddities are `data/test_table.py`",
    "open_table": "reads files, whose oddities are `data/test_table.py`",
    **dict.fromkeys(("load_state", "save_state"), "read and write files: `condense/test_state.py`"),
    **dict.fromkeys(
        ("Attack", "Defence", "ObservedMessage", "Prior", "Scorer"),
        "protocols: what is tried is what takes them, `attacks/inversion/test_reconstruction.py`",
    ),
    "lpips": "needs weights that are downloaded; its refusals are `attacks/test_metrics.py`",
}
"""Public names without a call here, and why."""

FORMULA = "a formula in a hot loop does not look for NaN: it comes out, and the loops refuse a loss that is not finite"
NUMBERS = "any numbers will do"
ROW = "one row is enough"
VALID = "another valid set"
SEED = "any integer is a seed"
NONE_DUE = "none asked for, none made"

FORMULAS = (
    *("apply_augmentation", "embedding_means", "distance_to_means", "decorrelation", "total_variation", "image_l2"),
    *("deepinversion_variation", "supervised_contrastive*", "model_contrastive", "knowledge_distillation"),
    *("binary_distillation", "jensen_shannon", "clamped_disagreement", "class_means", "mean_embedding_distance"),
    *("rbf_mmd", "feature_decorrelation", "prototype_distance", "clip_logit_norm"),
)
CONDENSERS = ("distribution_matching", "herding", "k_center")

ACCEPTED: Listed = {
    ("*soft_labels", "pool", "dtype"): "the pool is converted for the teacher",
    **{("canary_attack", "records", c): "functions of the caller" for c in ("class count", "dtype")},
    **{("plant_canaries", "records", c): VALID for c in ("shape", "channels", "class count", "dtype")},
    ("label_only", "shift", "zero"): "no translated copies",
    ("label_only", "noise", "empty"): "no copies with noise",
    ("*", "against", "empty"): "only the clean test images",
    ("Corruption", "severity", "zero"): "the clean image",
    ("*", "generator", "negative"): SEED,
    ("*", "generator", "zero"): SEED,
    ("*", "generator", "beyond int64"): SEED,
    ("apply_augmentation", "generator", "number"): SEED,
    **{(name, "*", "NaN"): FORMULA for name in FORMULAS},
    ("*", "*", "huge"): "large numbers, or class 100, are numbers and a class too",
    ("*", "*", "negated"): NUMBERS,
    ("at_threshold", "threshold", "negative"): NUMBERS,
    ("at_threshold", "*", "bool"): "the truth in other words",
    ("Audit", "mechanism", "unknown"): "words for the reader",
    ("LabeledImages", "class_names", "empty"): "a set without names",
    ("as_set", "class_names", "empty"): "a set without names",
    ("as_set a pair", "class_names", "empty"): "a set without names",
    ("roc", "*", "bool"): "the truth in other words",
    **{(name, "in*", "bool"): "another truth" for name in ("one_run_lower_bound", "lira", "rmia", "shadow_classifier")},
    ("ShadowScores", "inside", "bool"): "another truth",
    ("audit_noise", "drawn", "wrong names"): "two numbers of standard deviation 1",
    ("audit_noise", "charged", "empty"): "nothing was charged",
    ("gradient_kde", "member", "bool"): "another truth",
    ("leave_one_out", "also_tried", "zero"): "no attack was tried besides",
    ("at_threshold", "threshold", "infinite"): "nobody is called a member, or everybody",
    ("*", "*", "one row"): ROW,
    ("*", "*", "*one of them: one row"): ROW,
    ("*", "seed", "zero"): SEED,
    ("Pipeline", "tag", "*"): "any words",
    ("class_counts", "predictions", "one dimension less"): "one prediction, averaged already",
    ("apply_augmentation", "images", "empty"): "no images, none augmented",
    ("decorrelation", "images", "empty"): "no images: 0",
    ("invert*", "targets", "empty"): NONE_DUE,
    ("selection", "selected", "empty"): "all are rejected",
    ("initial_images given", "real", "empty"): "the set to start from decides",
    ("*", "*steps", "zero"): NONE_DUE,
    ("gradient_matching", "iterations", "zero"): NONE_DUE,
    ("CropFlip", "*", "zero"): NONE_DUE,
    ("clopper_pearson", "hits", "zero"): "no hit among the trials",
    ("dirichlet*", "min_size", "zero"): "no client needs an image",
    ("domains_by_dirichlet", "min_each", "zero"): "no client needs an image",
    ("load", "size", "array"): "height and width",
    ("require_*", "augment", "None"): "no augmentation",
    ("require_normalization", "augment", "*"): "what was told no normalisation contradicts none",
    ("*", "data", "dtype"): VALID,
    ("*", "images", "dtype"): VALID,
    ("*", "real", "dtype"): VALID,
    ("*", "init", "dtype"): VALID,
    ("*", "synthetic", "dtype"): VALID,
    ("*", "*", "space"): "a network knows no space, and each of these takes a set of any",
    **{
        (name, "*", c): VALID
        for name in ("clients", "split_by", "random_subset", "grid", "selection", "initial_images")
        for c in ("shape", "channels", "class count")
    },
    ("class_statistics", "real", "*"): VALID,
    **{(name, "images", "class count"): "classes without images are left out" for name in CONDENSERS},
    ("*", "*", "other labels"): "soft labels where they can be used or are not",
    ("selection", "images", "bare images"): "which images were selected needs no labels",
    ("pixel_histogram", "sets", "one of them: *"): "each set is drawn by itself",
}
"""(name, argument, corruption) -> why such a call is right."""

BOTH = "both sets, by what differs, and how to convert one"
NETWORK = "`network`, which cannot take them"
SOFT = "`labels`, which rows are not"

OTHERWISE: Listed = {
    ("*", "*", "other labels"): SOFT,
    **{("initial_images given", "*", c): BOTH for c in ("shape", "channels", "class count", "space", "empty")},
    ("real_and_synthetic", "*", "empty"): BOTH,
    ("fit_to_gradient", "synthetic", "*"): NETWORK,
    ("stitch", "images", "class count"): "the observer",
    ("separability", "images", "class count"): "the factory",
    **{("canary_attack", "records", c): "the network of the caller" for c in ("shape", "channels")},
    **{("*soft_labels", "small", c): "the teacher" for c in ("shape", "channels", "class count", "dtype")},
    ("gradient_matching", "images", "class count"): "`networks`, which give fewer logits",
    ("*", "*", "one row"): "what is too few: classes, labels, rows, or the option that wants more",
    ("*", "labels", "huge"): "the option that one class cannot serve",
    ("*", "*", "empty"): "`images`, or the indices that point at none",
    ("class_bounds", "class_rows", "NaN"): "messages, which contradict: rows of NaN say that no class is held",
    ("norm_layer", "kind", "*"): "`norm`, as the networks call it",
    ("mmd_table", "before", "*"): "`embeddings`, by the client's name",
}
"""(name, argument, corruption) -> what such a call's refusal names instead of the argument."""


def test_every_public_name_is_called_or_has_a_reason() -> None:
    called = {name.split()[0].removeprefix("plot.") for name in CALLS}
    assert PUBLIC.keys() - called - set(NOT_CALLED) == set()
    assert set(NOT_CALLED) <= PUBLIC.keys()


test_odd_calls_are_refused_warned_of_or_accepted = table_tests(
    CALLS, ACCEPTED, OTHERWISE, lambda name: ("accepted", "warned")
)


def pixels(*shape: int) -> LabeledImages:
    return LabeledImages(torch.rand(len(LABELS), *shape), LABELS, num_classes=3)


def stored(**changes: Any) -> nn.Module:
    labels = stored_soft_labels(data(), Protocol(epochs=1, relabel=Relabel(taught())), progress=False)
    changes = {name: change(labels) for name, change in changes.items()}
    return train(made(), data(), Protocol(epochs=1, relabel=replace(labels, **changes)))


def spoil(darken: Any) -> Pipeline:
    """Return a pipeline that darkens its records, by a function of the images."""
    return Pipeline(
        lambda indices, seed: {"a": lambda x, y: x.flatten(1).sum(1) + 0 * float(darken(x).sum())},
        torch.rand(9, 1, 8, 8), LABELS,
    )  # fmt: skip


def shadows() -> ShadowScores:
    return ShadowScores(halves(6, 12, 0), {"model": normal(6, 12)})


def replayed(replay: Any, prior: Any = None, **options: Any) -> Any:
    message = ReplayableMessage([torch.ones(3, 1, 8, 8)], replay, 3)
    priors = [(1.0, prior)] if prior else []
    return invert_message(message, (1, 8, 8), 3, labels=LABELS[:3], steps=1, priors=priors, **options)


def scored(result: Any) -> Tensor:
    return model_scorer(made(), lambda logits, labels: result)(data().images, LABELS)


class Halved(nn.Module):
    """Halve images in place."""

    def forward(self, images: Tensor) -> Tensor:
        return images.mul_(0.5)


class Detached(nn.Module):
    """Cut the gradient."""

    def forward(self, values: Tensor) -> Tensor:
        return values.detach()


class Returning(nn.Module):
    """Return an object in place of logits."""

    def __init__(self, result: object) -> None:
        super().__init__()
        self.result = result

    def forward(self, logits: Tensor) -> object:
        return self.result


def inverting(teacher: nn.Module, **options: Any) -> LabeledImages:
    return invert(teacher, LABELS[:2], shape=(1, 8, 8), steps=1, **options)


def private(parameters: Any, secret: Any = None) -> PrivateGradient:
    return PrivateGradient(parameters, sigma=1.0, clip=1.0, denominator=1.0, secret=secret or Secret())


def embedders() -> PublicEmbedders:
    return PublicEmbedders(sampler(), 1, like=data(), clip=1.0)


def darken(images: Tensor, generator: torch.Generator, *, siamese: bool = False) -> Tensor:
    return images.mul_(0.5)


def dm(**options: Any) -> LabeledImages:
    return distribution_matching(data(), **{"networks": sampler(), "ipc": 1, "steps": 1, "progress": False} | options)


CHANCE = torch.full((9, 3), 1 / 3)
META = torch.zeros(2, 1, 8, 8, device="meta")
MISTAKES: list[tuple[Any, str]] = [
    (lambda: data().replace(class_names=("a", "a", "b")), "class_names must differ, but 'a' names several"),
    (lambda: LabeledImages.concatenate(data()), "sets must be a list of LabeledImages"),
    (lambda: LabeledImages.concatenate([data(), None]), r"sets\[1\] must be a LabeledImages, got NoneType"),
    (lambda: Split(pixels(1, 8, 8), pixels(1, 9, 9), ("a", "b", "c")), "train and test must have the same shape"),
    (lambda: load("digits", size=10**9), "size must be at most 32768"),
    (lambda: pa.apply(LABELS, [torch.arange(9), torch.arange(9)], LABELS), "partition must assign each image at most"),
    (lambda: stored(logits=lambda own: own.logits * torch.nan), "logits must be finite"),
    (lambda: stored(logits=lambda own: own.logits[:, :3]), "stored labels of 3 images, but data has 9"),
    (lambda: ppv_interval(0.5, 0.1, 0.5), "tpr must be a Rate"),
    (lambda: loss(CHANCE, LABELS), "must return logits, but its outputs are not negative"),
    (lambda: scored(None), "the result of score must be a floating tensor"),
    (lambda: scored(torch.ones(9) * torch.nan), "the result of score must be finite"),
    (lambda: run_shadows(pipeline(), 4, out=__file__, progress=False), "out must be a folder, but .* is a file"),
    (lambda: run_shadows(spoil(lambda x: x.numpy().__imul__(0.5)), 4, progress=False), "must not change the pipeline"),
    (
        lambda: canary_attack(pool(), lambda records, seed: [records.images.data.zero_(), made()][1], canaries=2),
        "train must not change its records",
    ),
    (lambda: leave_one_out(shadows(), {"a": lambda t: t.scores.zero_()}, fpr=0.5), "must not change their targets"),
    (lambda: shadows().only(torch.ones(12, dtype=torch.bool)), r"kept must be a bool tensor \[6\]"),
    (lambda: shadows().only(torch.zeros(6, dtype=torch.bool)), "keeps at least one model"),
    (lambda: replayed(lambda x, y: [x.data.zero_() + x]), "replay must not change its images"),
    (
        lambda: replayed(lambda x, y: [x], prior=lambda x: x.data.zero_().sum()),
        r"priors\[0\] must not change its images",
    ),
    (lambda: replayed(lambda x, y: [x], lr=1e38), "lr must be at most 1e37"),
    (lambda: inverted(ClassMeans([lambda x: None], [torch.ones(3, 4)])), "embeddings must give .* got NoneType"),
    (lambda: ClassMeans.of([torch.flatten], data().images, LABELS, 2), "labels must be below num_classes=2, got 2"),
    (lambda: class_counts(torch.tensor([0.2, 0.3, 0.1]), 4), "bias_gradient has the sum 0.6"),
    (lambda: class_counts(100 * SENT, 4), "bias_gradient has .* entries up to 75"),
    (
        lambda: compare_messages({"a": Gradient.of(made(), data().images, LABELS)}, data().images, LABELS, steps=1),
        "images must be pixels in .* in their normalization",
    ),
    (lambda: dm(networks=FixedNetwork(nn.Sequential(Halved(), made()))), "must not change its images in place"),
    (
        lambda: dm(networks=FixedNetwork(nn.Sequential(Detached(), made()))),
        "must be differentiable with respect to their images",
    ),
    (lambda: dm(augment=darken), "augment must not change its images in place"),
    (lambda: dm(augment=lambda x, g, siamese=False: x.detach()), "augment must be differentiable"),
    (lambda: dm(callback=lambda: None), "callback is called as callback"),
    (
        lambda: gradient_matching(
            data(), networks=FixedNetwork(nn.Sequential(made(), Detached())), ipc=1, iterations=1
        ),
        "differentiable",
    ),
    (
        lambda: train(nn.Sequential(made(), Detached()), data(), Protocol(epochs=1)),
        "differentiable with respect to its parameters",
    ),
    (lambda: train(made(), data(), Protocol(epochs=1), callback=lambda: None), "callback is called as callback"),
    (lambda: [train(t := taught(), data(), Protocol(epochs=1, relabel=Relabel(t)))], "another one than the teacher"),
    (lambda: invert(t := made(), LABELS, shape=(1, 8, 8), student=t, steps=1), "student must be another network"),
    (lambda: Relabel(made(), temperature=1e-40), "temperature must be"),
    (lambda: prune_by_confidence(CHANCE, keep=0.5), "must return logits"),
    (lambda: separability(torch.rand(9, 1, 8, 8), torch.zeros(9, dtype=torch.long)), "at least 2 classes"),
    (lambda: SmallDecoder((1, 8, 8), latent=4)(torch.zeros(2, 5)), r"latents must have shape \[B, 4\], as latent=4"),
    (lambda: initialize(made(), 0, redraw=lambda: None), "redraw is called as redraw"),
    (lambda: LabeledImages(META, torch.tensor([0, 1])), "must have values, got a tensor on the device 'meta'"),
    (lambda: tensor_fingerprint(META), "tensors must be a list of tensors"),
    (lambda: tensor_fingerprint([META]), "device 'meta'"),
    (lambda: set_fingerprint(data().images), "data must be a LabeledImages or a StoredImages"),
    (lambda: data()["a"], "index must be an int"),
    (lambda: data()[1.5], "index must be an int"),
    (lambda: data()[torch.zeros(0)], "index must be an int"),
    (lambda: data()[torch.zeros(0, dtype=torch.bool)], "index must be a mask of 9 values"),
    (lambda: data()[LABELS.to_sparse()], "index must be a dense tensor"),
    (lambda: data()[[0, 9]], r"index must be in \[-9, 9\), got 0 to 9"),
    (lambda: data().replace(columns=LABELS), "columns must map names to values, got Tensor"),
    (lambda: data()[torch.tensor([True, False])], "index must be a mask of 9 values"),
    (lambda: data().renormalize((0.5,)), "normalization must be"),
    (lambda: data().replace(num_classes=10**7), "num_classes must be at most 1000000"),
    (lambda: load("digits", size=torch.tensor(4)), "size must be a list of numbers of pixels .* got Tensor"),
    (lambda: accuracy(made(), data(), against=torch.zeros(2)), "against must be a list of perturbations"),
    (lambda: pa.summary(LABELS, [torch.tensor([9], dtype=torch.uint16)]), r"indices in \[0, 9\), got 9 to 9"),
    (lambda: initialize(nn.LazyLinear(3), 0), "network must be one whose shapes are known, but weight is lazy"),
    (lambda: StoredImages("a", LABELS, LABELS, num_classes=3), "file must be the file of a set"),
    (lambda: ZCA(torch.zeros(4), torch.eye(4), torch.eye(3)), r"inverse must have shape \[4, 4\] .* got \[3, 3\]"),
    (lambda: apply_augmentation(lambda x: x, data().images, derive(0), siamese=False), "augment must be .* called as"),
    (lambda: soft_labels(data(), made(), guarantee=1.0), "guarantee must be a Guarantee"),
    (lambda: curves({"a": [{"round": 1, "accuracy": "x"}]}), "accuracy must be a number in each row of 'a', got 'x'"),
    (lambda: inverting(made(), student=ConvNet((1, 9, 9), 3)), r"student cannot take images of shape=\(1, 8, 8\)"),
    (lambda: inverting(made().to("meta")), "network must be one with values, but .* device 'meta'"),
    (lambda: accuracy_late(3), "rows must be the rows of a history"),
    (lambda: accuracy_late([{"accuracy": "x"}]), r"rows\[0\]\['accuracy'\] must be a number or None, got 'x'"),
    (lambda: gradient_norm(nn.Sequential(nn.Flatten(), nn.LazyLinear(3)), data().images, LABELS), "1.weight is lazy"),
    (lambda: data().to("tpu"), "device must be"),
    (lambda: load_state("docs"), "is a folder"),
    (lambda: save_state("unused", data()), "state must map names"),
    (lambda: locked("docs", "x").__enter__(), "lock must be a pathlib.Path"),
    (lambda: locked(Path("docs"), "x", wait=-1.0).__enter__(), "wait must be"),
    (lambda: locked(Path("docs"), "x").__enter__(), "is a folder"),
    (lambda: locked(Path("README.md/a"), "x").__enter__(), "README.md is a file"),
    (lambda: inverting(nn.Sequential(Halved(), made())), "teacher must not change its images in place"),
    (lambda: inverting(made(), student=nn.Sequential(made(), Returning(()))), "student must give logits .* got tuple"),
    (lambda: compose(3, 1e-5), "spends must be a list of triples"),
    (lambda: plan_noise(1.0, 1e-5, spent=3), "spent must be a list of triples"),
    (lambda: private(None), "parameters must be a list of tensors"),
    (lambda: private(torch.zeros(3)), "parameters must be a list of one or more tensors"),
    (lambda: private([META]), "device 'meta'"),
    (lambda: private([torch.zeros(3)], secret=3), "secret must be a Secret"),
    (lambda: class_sums(data().images, LABELS, None, num_classes=3), "embedders must be PublicEmbedders"),
    (lambda: fit_to_means(data().images, None, META), "embedders must be PublicEmbedders"),
    (lambda: fit_to_means(None, embedders(), torch.zeros(1, 3, 4)), "start must be a floating tensor"),
    (lambda: worker_pool(0), "count must be"),
    (lambda: forward_chunks(made(), data().images, 0).__next__(), "size must be"),
    (lambda: chunk_size(torch.zeros(3)), r"images must be \[N, C, H, W\]"),
]


def test_images_with_gradients_or_of_inference_mode_are_images_too() -> None:
    plain, grad = data(), data().replace(images=data().images.clone().requires_grad_())
    with torch.inference_mode():
        inference = plain.images.clone()
    one, other = (train(made(), s, Protocol(epochs=2))(plain.images) for s in (plain, grad))
    assert torch.equal(one, other)
    assert leaks(grad[:4], grad, others()).auc == leaks(plain[:4], plain, others()).auc
    one, other = (run_shadows(Pipeline(fit, x, LABELS), 4).scores["a"] for x in (plain.images, inference))
    assert torch.equal(one, other)


def test_sets_are_indexed_and_calls_that_compute_are_refused_under_the_default_device_meta() -> None:
    real = data()
    with torch.device("meta"):
        for index in ([1, 2], slice(None, None, -1), torch.tensor([1, 2], device="cpu"), real.labels == 1):
            assert len(real[index]) > 1
        assert len(clients(real, [[0, 1], [2]])) == 2
        assert int(real[0][1]) == int(real.labels[0])
        calls: list[Any] = [
            lambda: pa.iid(LABELS, 3, generator=0),
            lambda: pa.class_clusters(LABELS, 3, 3),
            lambda: pa.apply(LABELS, [[0, 1]], LABELS),
            lambda: pa.cap_size(LABELS, [[0, 1]], 1),
            lambda: load("digits"),
            lambda: herding(real, ipc=1),
            lambda: evaluate(real, real, made, num_networks=1, protocol=Protocol(epochs=1)),
        ]
        for call in calls:
            refused(call, ValueError, "default device must hold values, got 'meta'")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_crops_are_stitched_in_half_precision(dtype: torch.dtype) -> None:
    options: dict[str, Any] = {"ipc": 1, "pool": 9, "crops": 2, "factor": 2, "progress": False}
    assert stitch(data().to(dtype=dtype), observer=taught().to(dtype), **options).images.dtype == dtype


@pytest.mark.parametrize(("call", "words"), MISTAKES)
def test_mistakes_are_named(call: Any, words: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        refused(call, (TypeError, ValueError, OSError, LookupError, UserWarning), words)
