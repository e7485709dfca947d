"""Refusals: the type of each error, and the remedy in its message."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset

from distillkit._utils.files import write_atomically
from distillkit.augment import CropFlip
from distillkit.condense import distribution_matching
from distillkit.networks import FixedNetwork, RandomNetworks
from distillkit.normalization import ZCA, Normalization
from distillkit.privacy import (
    Account,
    EmbeddingNetworks,
    Ledger,
    NotAccountable,
    NotSeparable,
    Passes,
    PrivacyError,
    PrivateInitialization,
    PrivateStatistics,
    PublicEmbedders,
    TrainedNetworks,
    condense_private,
    image_sgd,
    release,
    require_separable,
    separable,
    squared_distance,
    train_private,
)
from distillkit.privacy.accounting._ranges import check_clip
from distillkit.privacy.condensation import condense_private as condensation
from distillkit.privacy.validation._arguments import open_private_set, refuse_derived, refuse_large_delta
from distillkit.privacy.validation._independence import require_independent_losses, require_mean_objective
from distillkit.rng import derive
from distillkit.sets import LabeledImages, as_set
from distillkit.sets._validation import FOUND_CLASSES, FOUND_LABELS
from distillkit.training import Protocol
from tests.distillkit.privacy.options import grouped
from tests.refused import refused

Factory = Callable[[], nn.Module]


@pytest.fixture(params=["class_means", "image_sgd"])
def condense(request: pytest.FixtureRequest, toy_network: Factory) -> Callable[..., LabeledImages]:
    def run(images: Tensor | LabeledImages, labels: Tensor | None = None, **options: Any) -> LabeledImages:
        common = {"networks": RandomNetworks(toy_network), "ipc": 1, "steps": 1, "epsilon": 4.0} | options
        if request.param == "class_means":
            passes = {"num_networks": 1, "first_num_networks": 1, "first_steps": 1}
            return condense_private(images, labels, **grouped(**passes | common))
        return image_sgd(images, labels, **grouped(**{"size": 12, "rate": 1.0} | common))

    return run


def test_class_count_must_be_public(condense: Callable[..., LabeledImages], toy_set: LabeledImages) -> None:
    derived = LabeledImages(toy_set.images, toy_set.labels, normalization=toy_set.normalization)
    ledger = Ledger()
    for data in ((derived,), (derived[:0],), tuple(toy_set), (LabeledImages.concatenate([derived[:2], toy_set[2:]]),)):
        words = r"num_classes must be given: .* data\.replace\(num_classes=K\)"
        refused(lambda d=data: condense(*d, ledger=ledger), PrivacyError, words)
    assert ledger.events == ()
    assert condense(derived, num_classes=5).num_classes == 5
    assert condense(derived.replace(num_classes=3)).num_classes == 3
    for info, shown in (({"classes": "dataset"}, ()), ({}, ("a", "b", "c"))):  # names that were found are not released
        assert condense(toy_set.replace(class_names=("a", "b", "c"), info=info)).class_names == shown
    soft = toy_set.replace(labels=torch.eye(3, dtype=torch.float64).repeat(4, 1))
    refused(lambda: condense(soft), PrivacyError, "class indices.*labels.argmax")
    held, other = "init must hold 1 images .* class indices", toy_set.renormalize(Normalization((0.1,), (0.3,)))
    for init, words in ((soft[:3], held), (toy_set[[0, 1, 3]], held), (other, "different normalizations")):
        refused(lambda i=init: condense(toy_set, init=i), ValueError, words)


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64])
def test_embeddings_of_another_kind_are_refused_before_the_charge(
    dtype: torch.dtype, condense: Callable[..., LabeledImages], toy_set: LabeledImages
) -> None:
    class Odd(nn.Module):
        def features(self, images: Tensor) -> Tensor:
            return images.flatten(1).to(dtype)

        classifier = forward = features

    ledger, odd = Ledger(), FixedNetwork(Odd())
    refused(lambda: condense(toy_set, networks=odd, ledger=ledger), ValueError, f"floating embeddings .* got {dtype}")
    refused(lambda: distribution_matching(toy_set, networks=odd), ValueError, f"returns {dtype}")
    assert ledger.events == ()


REPEATED: dict[str, Callable[[LabeledImages], Any]] = {
    "index": lambda s: s[[0, 1, -len(s)]],
    "one image": lambda s: s[torch.zeros(20, dtype=torch.int64)][:9],
    "joined": lambda s: LabeledImages.concatenate([s[:2], s, s]),
    "subset": lambda s: as_set(Subset(s, [0, 2, 0])),
    "subset of arrays": lambda s: arrays(Subset(TensorDataset(*s), [0, 2, 0])),
    "joined arrays": lambda s: arrays(DataLoader(ConcatDataset([TensorDataset(*s)] * 2))),
}


def arrays(source: Any) -> LabeledImages:
    return as_set(source, num_classes=3, normalization=Normalization((0.5,), (0.5,)))


@pytest.mark.parametrize("name", REPEATED)
def test_records_that_count_several_times_are_refused(name: str, toy_set: LabeledImages) -> None:
    """A record that occurs k times adds k clips to a sum."""
    repeated = REPEATED[name](toy_set)
    refused(lambda: train_private(nn.Flatten(), repeated, size=9, sigma=1.0), PrivacyError, "repeated images")
    for data in (toy_set[[2, 0, 1]], LabeledImages.concatenate([toy_set[:2], toy_set[2:]])):
        assert "derived" not in data.info


WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "lr": (-1.0, ValueError, "lr"), "steps": (-1, ValueError, "steps"), "momentum": (1.0, ValueError, "momentum"),
    "chunk": (0, ValueError, "chunk"), "delta": (0.0, ValueError, "delta must"), "ipc": (0, ValueError, "ipc must be"),
    "epsilon": (0.0, ValueError, "epsilon must be greater than 0"),
    "ledger": (
        Ledger(delta=1e-6), ValueError, r"delta must equal the ledger's, 1e-06, got 1e-05: .* delta=1e-06, or .*=1e-05$"
    ),
    "ledger with a larger delta": (Ledger(delta=1e-4), ValueError, "delta must equal the ledger's, 0.0001, got 1e-05"),
    "init": (torch.zeros(3, 1, 4, 4), TypeError, "init must be 'noise' or a public LabeledImages, got Tensor"),
    "progress": ("no", TypeError, "progress must be True or False"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_refused_calls_are_not_charged(
    condense: Callable[..., LabeledImages], toy_set: LabeledImages, name: str
) -> None:
    value, error, words = WRONG[name]
    ledger = value if "ledger" in name else Ledger(delta=1e-5)
    refused(lambda: condense(toy_set, **{"ledger": ledger, name.split()[0]: value}), error, words)
    assert ledger.events == ()


@pytest.mark.parametrize("init", ["real", "statistics", "statistics-whole-set"])
def test_private_initial_images_are_refused(
    condense: Callable[..., LabeledImages], toy_set: LabeledImages, init: str
) -> None:
    ledger = Ledger()
    refused(
        lambda: condense(toy_set, init=init, ledger=ledger), PrivateInitialization, f"^init='{init}' .*init='noise'"
    )
    black = toy_set.replace(images=torch.cat([toy_set.images[:-1], torch.zeros_like(toy_set.images[:1])]))
    for real, shown in (
        (toy_set, toy_set[:3]),
        (toy_set, toy_set[:3].replace(images=toy_set.images[:3].mT)),
        (black, black[-3:].replace(images=torch.cat([torch.eye(4).expand(2, 1, 4, 4), black.images[[-1]]]))),
    ):
        with pytest.raises(PrivateInitialization, match="an image of the private set"):
            condense(real, init=shown, ledger=ledger)
    assert ledger.events == ()


@pytest.mark.parametrize("word", ["no", 0], ids=str)
def test_strings_are_no_declaration_of_public_values(word: Any) -> None:
    """As a truth value "no" would be true, and each of these a weaker guarantee than intended."""
    calls: dict[str, Callable[..., object]] = {
        "public": partial(Normalization.of, torch.rand(3, 1, 4, 4)), "disjoint": Ledger,
        "measured": partial(Normalization, (0.5,), (0.5,)),
        "classes_given": partial(LabeledImages, torch.rand(3, 1, 4, 4), [0, 1, 1]),
        "public_statistics": partial(open_private_set, torch.rand(3, 1, 4, 4), torch.arange(3), num_classes=3, delta=1),
    }  # fmt: skip
    for name, call in calls.items():
        refused(lambda n=name, c=call: c(**{n: word}), TypeError, f"^{name} must be True or False")


def test_sets_that_lost_their_guarantee_are_no_public_inputs(
    condense: Callable[..., LabeledImages], toy_set: LabeledImages, toy_network: Factory
) -> None:
    """Labels of another origin, such as a teacher that saw the records, end the guarantee of a released set."""
    released = condense(toy_set)
    lost = released.replace(labels=released.labels.flip(0))
    refused(lambda: condense(toy_set, init=lost), PrivacyError, "init must be public, .* labels of unknown origin")
    refused(lambda: condense(released), PrivacyError, r"were made from other records \((class_means|image_sgd)\)")
    refused(lambda: TrainedNetworks(toy_network, lost, Protocol(epochs=1)), PrivacyError, "data must be public")
    TrainedNetworks(toy_network, released, Protocol(epochs=1))
    again = condense(toy_set, init=released).info
    assert again["epsilon"] is not None
    remark = f"started from a set of epsilon {released.info['epsilon']:g}, which counts in addition"
    assert any(remark in one for one in again["remarks"])
    for epsilon, told in ((8, True), ("none", False)):  # as other programs may state it
        foreign = released.replace(info={**released.info, "epsilon": epsilon})
        assert any("started from" in one for one in condense(toy_set, init=foreign).info["remarks"]) == told
    assert condense(toy_set, init=released.to(dtype=torch.float32)).images.dtype == torch.float64


def test_statistics_of_the_private_images_are_refused(
    condense: Callable[..., LabeledImages], toy_set: LabeledImages
) -> None:
    pixels = toy_set.normalization.decode(toy_set.images)
    pixels = (pixels - pixels.min()) / (pixels.max() - pixels.min())
    measured = Normalization.of(pixels)
    leaky = LabeledImages(measured.encode(pixels), toy_set.labels, num_classes=3, normalization=measured)
    whitened = toy_set.replace(normalization=Normalization((0.5,), (0.25,), ZCA.fit(toy_set.images)))
    for bad, what in ((leaky, "mean and std were measured"), (whitened, "whitening was fitted")):
        words = f"^the set's {what} on .* every release of a private component .*measured=False"
        for one in (bad, bad[:0]):  # whatever the records
            refused(lambda b=one: condense(b), PrivateStatistics, words)
            call = partial(train_private, nn.Flatten(), one, size=9, sigma=1.0)
            refused(call, PrivateStatistics, f"^the set's {what} on .* every release of train_private shows")
            assert len(condense(one.renormalize(Normalization((0.5,), (0.5,))))) == 3
        public = replace(bad.normalization, measured=False)
        assert len(condense(bad.replace(normalization=public))) == 3
    assert len(condense(LabeledImages(pixels, toy_set.labels, num_classes=3))) == 3


@pytest.mark.filterwarnings("ignore:delta=")
@pytest.mark.parametrize("records", [5, 6])
def test_no_refusal_depends_on_the_number_of_records(
    condense: Callable[..., LabeledImages], toy_set: LabeledImages, toy_network: Factory, records: int
) -> None:
    """delta = 0.19 is between one over 5 records and one over 6. Only public sizes count."""
    data = toy_set[:records]
    sizes = torch.full((3,), 1.5)
    quick = grouped(networks=RandomNetworks(toy_network), num_networks=1, steps=1, first_num_networks=1, first_steps=1)
    assert len(condense_private(data, size=sizes, epsilon=4.0, delta=0.19, **quick))
    for public in ({"size": 6}, {"size": 600}):
        with pytest.raises(NotAccountable, match=rf"one over the number of records \(1/{public['size']}\)"):
            condense(data, delta=0.19, **public)
    with pytest.raises(NotAccountable, match=r"number of records \(1/6\)"):
        condense_private(data, size=2 * torch.ones(3), epsilon=4.0, delta=0.19, **quick)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 3)).double()
    train_private(model, data, size=5, sigma=1.0, steps=1, delta=0.19)
    with pytest.raises(NotAccountable, match=r"number of records \(1/6\)"):
        train_private(model, data, size=6, sigma=1.0, steps=1, delta=0.19)


@pytest.mark.filterwarnings("error")
def test_delta_is_compared_with_the_noised_size_after_the_fact(
    toy_set: LabeledImages, toy_network: Factory, monkeypatch: pytest.MonkeyPatch
) -> None:
    noised = torch.tensor([4.0, 4.0, 0.0])
    monkeypatch.setattr(condensation, "private_histogram", lambda *_, **__: noised)
    passes = Passes(first_num_networks=1, first_steps=1)
    options = {"networks": RandomNetworks(toy_network), "num_networks": 1, "steps": 1, "epsilon": 1e6, "passes": passes}
    with pytest.warns(UserWarning, match="^delta=0.125 is not below one over the .noised. number of records"):
        condense_private(toy_set, delta=1 / 8, **options)
    condense_private(toy_set, delta=0.12, **options)
    condense_private(toy_set, delta=0.2, size=4, **options)
    bright, linear = toy_set.images * 1000, nn.Sequential(nn.Flatten(), nn.Linear(16, 3)).double()
    condense_private(bright, toy_set.labels, num_classes=3, **options)  # no word about its pixels
    train_private(linear, bright, toy_set.labels, size=12, sigma=1.0, steps=1)


def test_non_separable_losses_are_refused(toy_set: LabeledImages, global_rng_untouched: None) -> None:
    def cosine_of_means(embedding: Tensor, means: Tensor) -> Tensor:
        return 1 - torch.cosine_similarity(embedding.mean(0), means.mean(0), 0)

    ledger = Ledger()
    cosine_of_means.separable = "no"  # type: ignore[attr-defined]
    call = partial(image_sgd, toy_set, size=12, sigma=1.0, loss=cosine_of_means, ledger=ledger)
    refused(call, NotSeparable, "cosine_of_means is not declared .* use condense_private")
    cosine_of_means.why = "its denominator is the norm of a batch mean"  # type: ignore[attr-defined]
    refused(lambda: require_separable(cosine_of_means), NotSeparable, "its denominator is the norm of a batch mean")
    words = "^cosine_of_means is declared .*one value per row"
    refused(lambda: require_separable(separable(cosine_of_means)), NotSeparable, words)
    squares = lambda e, m: (e - m).square().sum(1)  # noqa: E731
    sized = [lambda e, m, n=n: squares(e, m) + 1e-4 * (len(e) == n) for n in (2, 8, 16, 32, 64)]
    for mixing in (*sized, lambda e, m: squares(e, m) / e.norm(), lambda e, m: squares(e, m).flip(0),
                   lambda e, m: squares(e, m).cumsum(0), lambda e, m: 0 * squares(e, m)[:, None],
                   lambda e, m: squares(e, m).squeeze(), lambda e, m: squares(e, m) * torch.rand(1)):  # fmt: skip
        refused(lambda m=mixing: require_separable(separable(m)), NotSeparable, "depends on that row alone")
    words = "^<lambda> must return one value per row as a tensor, got float$"
    refused(lambda: require_separable(separable(lambda e, m: 0.0)), NotSeparable, words)
    named = SimpleNamespace(separable=True)  # cannot be called
    refused(lambda: require_separable(named), NotSeparable, "^SimpleNamespace is not declared as a sum .* examples, so")
    rows, labels = torch.randn(4, 3, generator=derive(0)), torch.tensor([0, 1, 2, 0])
    require_mean_objective(F.cross_entropy, 4e4 * rows.repeat(99, 1), labels.repeat(99))
    for slope in (1e-3, -1e-3, 3e-4, -3e-4, math.nan):
        scaled = lambda z, y, s=slope: F.cross_entropy(z, y, reduction="none") * (1 + s * len(z))  # noqa: E731
        mean, alone = (float(F.cross_entropy(rows, labels)) * (1 + slope * n) for n in (4, 1))
        words = f"objective of a batch is {mean:.5g}, but the mean over its single examples is {alone:.5g}"
        together = lambda z, y, f=scaled: f(z, y).mean()  # noqa: E731
        refused(lambda f=together: require_mean_objective(f, rows, labels), NotSeparable, words)
        words = "the losses of 4 examples in a batch differ"
        refused(lambda f=scaled: require_independent_losses(f, rows, labels), NotSeparable, words)
    refused(lambda: require_mean_objective(lambda z, y: z[0, :1], rows, labels), NotSeparable, r"one number.*got \[1\]")
    for loss, got in ((lambda z, y: z, r"shape \[4, 3\]"), (lambda z, y: 0.0, "got float; pass reduction='none'")):
        refused(lambda loss=loss: require_independent_losses(loss, rows, labels), NotSeparable, got)
    assert ledger.events == ()


def test_invalid_options_are_named(toy_set: LabeledImages, toy_network: Factory) -> None:
    networks = RandomNetworks(toy_network)
    refused(lambda: PublicEmbedders(networks, 1, like=toy_set, clip=-1.0), ValueError, "clip")
    refused(lambda: PublicEmbedders(networks, 1, like=toy_set, match="gradient"), ValueError, "match")
    refused(lambda: PublicEmbedders(networks, 0, like=toy_set), ValueError, "num_networks")
    black = CropFlip(Normalization((0.5,), (0.5,)))
    refused(lambda: PublicEmbedders(networks, 1, like=toy_set, augment=black), ValueError, "augment pads with black")
    for name, wrong in (("histogram_share", (0.0, 0.51)), ("first_share", (-0.1, 0.51)), ("count", (1,)),
                        ("first_num_networks", (0,)), ("first_steps", (-1,))):  # fmt: skip
        for value in wrong:
            refused(lambda n=name, v=value: Passes(**{n: v}), ValueError, name)
    for made in (EmbeddingNetworks.of, lambda network: EmbeddingNetworks(network).sampler_for(toy_set)):
        refused(lambda make=made: make(toy_network()), TypeError, r"pass FixedNetwork\(network\)")
    Passes(histogram_share=0.5, first_share=0.49, first_steps=0)
    refused(lambda: Passes(histogram_share=0.5, first_share=0.5), ValueError, "must be below 1, got 1")
    refused(lambda: Passes(train=Protocol), TypeError, "protocol must be")  # type: ignore[arg-type]
    assert [check_clip(clip) for clip in (1e-12, 1e30)] == [1e-12, 1e30]
    for clip in (0.0, 9e-13, 1.1e30, math.nan):
        refused(lambda c=clip: PublicEmbedders(networks, 1, like=toy_set, clip=c), ValueError, "clip")
    for size, words in (
        (torch.ones(4), "hold 3 positive numbers, one per class, got [1.0, 1.0, 1.0, 1.0]"),
        (torch.ones(3, 1), "be one positive number, or one per class, got [[1.0], [1.0], [1.0]]"),
        (torch.tensor(3.0), "be one positive number, or one per class, got 3.0"),
        (torch.tensor([1.0, 0.0, 1.0]), "be one positive number, or one per class, got [1.0, 0.0, 1.0]"),
        (0, "be at least 1, got 0"),
    ):
        with pytest.raises(ValueError, match=f"^size must {re.escape(words)}$"):
            condense_private(toy_set, epsilon=1.0, networks=networks, size=size)
    steps: list[Callable[..., Any]] = [partial(image_sgd, networks=networks), partial(train_private, toy_network())]
    ledger = Ledger()
    for option in ({"rate": 0.0}, {"steps": 0}, {"size": 0}, {"lr": -1.0}, {"sigma": -1.0}, {"clip": 0.0},
                   {"delta": 0.0}, {"progress": "no"}):  # fmt: skip
        for call in steps:
            with pytest.raises((TypeError, ValueError), match=f"^{next(iter(option))} must"):
                call(images=toy_set, **{"size": 12, "sigma": 1.0, "ledger": ledger} | option)
    call = partial(condense_private, toy_set, epsilon=1.0, networks=networks, passes=2, ledger=ledger)
    refused(call, TypeError, "^passes must be a Passes")
    call = partial(image_sgd, toy_set, size=12, sigma=1.0, ledger=ledger, callback=lambda step: None)
    refused(call, TypeError, "callback is called as")
    assert ledger.events == ()


def test_how_a_set_was_made_is_found_at_any_depth() -> None:
    for found, words in (
        ({"hold_out": "random"}, "hold-out by position"), ({"classes": FOUND_CLASSES}, "must be declared"),
        ({"classes": FOUND_LABELS}, "must be declared"),
    ):  # fmt: skip
        for info in (found, {"z": 0, "a": {"b": found}}, {"z": {}, "a": [1, {}, found]}, {"a": ({"b": [found]},)}):
            refused(lambda i=info: refuse_derived(i, "these"), PrivacyError, f"these .*{words}")
    refused(lambda: refuse_derived({"derived": "class_means"}, "it"), PrivacyError, r"^it must .* \(class_means\)")
    refuse_derived({"hold_out": "content", "classes": "given", "derived": ""})


@pytest.mark.parametrize(("side", "depth"), [((2, 9), 1), ((4, 7), 2), ((9, 8), 3), ((32, 16), 3)])
def test_default_networks_fit_the_images(side: tuple[int, int], depth: int) -> None:
    like = LabeledImages(torch.zeros(2, 2, *side, dtype=torch.float64), torch.tensor([0, 1]), num_classes=5)
    network = EmbeddingNetworks().sampler_for(like).draw(derive(0))
    layers = [m.out_channels for m in network.modules() if isinstance(m, nn.Conv2d)]  # type: ignore[attr-defined]
    assert layers == [128] * depth
    logits = network(like.images)  # type: ignore[operator]
    assert (logits.shape, logits.dtype) == ((2, 5), torch.float64)
    one = EmbeddingNetworks().sampler_for(like.replace(labels=0 * like.labels, num_classes=1)).draw(derive(0))
    assert one(like.images).shape == (2, 2)  # type: ignore[operator]


@pytest.mark.parametrize("size", [1, 10, 1000])
def test_delta_must_be_below_one_over_the_size(size: int) -> None:
    refuse_large_delta(size, 0.999 / size)
    refuse_large_delta(0, 0.999)
    for delta in (1 / size, 1.001 / size):
        words = f"delta must be below one over the number of records \\(1/{size}\\), got {delta:g}"
        refused(lambda d=delta: refuse_large_delta(size, d), NotAccountable, words)


def test_sums_means_rounds_and_folders_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    sums = torch.full((1, 2, 3), torch.inf)
    refused(lambda: release(sums, sigma=1.0, sensitivity=1.0, ledger=Ledger()), ValueError, "sums must be finite")
    for shape in ([1, 3], [2, 1]):
        words = re.escape(f"of embedding, [2, 3], got {shape}")
        refused(lambda s=shape: squared_distance(torch.ones(2, 3), torch.ones(s)), ValueError, words)
    refused(lambda: separable(lambda embedding: embedding), TypeError, "loss is called as")
    refused(lambda: Account(Ledger(), round=-1), ValueError, "round must be at least 0")
    refused(lambda: Ledger(tmp_path), IsADirectoryError, f"path must be a file, but {tmp_path} is a folder")
    (tmp_path / "file").touch()
    for write in (Ledger, partial(write_atomically, data="")):
        refused(lambda write=write: write(tmp_path / "file" / "x"), NotADirectoryError, "folder of .* is a file")
