"""Training with a teacher's labels of every view, against plain code, and replays of stored labels."""

from __future__ import annotations

import copy
import json
import math
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from distillkit import LabeledImages, Normalization
from distillkit._utils.files import read_tensors, write_tensors
from distillkit.augment import DSA, CropFlip
from distillkit.evaluate import evaluate
from distillkit.fingerprint import tensor_fingerprint
from distillkit.labels import CutMix, Mixup, Relabel, StoredLabels, stored_soft_labels
from distillkit.labels._rows import stored_logits
from distillkit.labels._teacher import describe_teacher
from distillkit.networks import build
from distillkit.rng import as_generator, derive
from distillkit.serialization import from_config, to_config
from distillkit.training import Protocol, train
from tests.distillkit.labels.toys import CLASSES, convnet, stripes, trained_teacher, weights
from tests.refused import refused


def protocol(relabel: Any = None, **options: Any) -> Protocol:
    defaults: dict[str, Any] = {
        "epochs": 3, "lr": 0.01, "weight_decay": 0.1, "batch": 8, "optimizer": "adamw", "schedule": "half-cosine",
        "augment": DSA(), "relabel": relabel,
    }  # fmt: skip
    return Protocol(**{**defaults, **options})


def plain_training(student: nn.Module, teacher: nn.Module, images: Tensor, options: Protocol, seed: int) -> None:
    """Train with torch's AdamW and KL divergence on whole batches, with views drawn as documented."""
    relabel = options.relabel
    assert isinstance(relabel, Relabel)
    groups: list[dict[str, Any]] = [
        {"params": [p for p in student.parameters() if p.ndim > 1]},
        {"params": [p for p in student.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=options.lr, weight_decay=options.weight_decay)
    seed = int(torch.randint(2**62, (), generator=as_generator(seed)))
    t = relabel.temperature
    student.train()
    for epoch in range(options.epochs):
        for group in optimizer.param_groups:
            group["lr"] = options.lr * (1 + math.cos(math.pi * epoch / options.epochs / 2)) / 2
        order = torch.randperm(len(images), generator=derive(seed, epoch, "order"))
        for number, index in enumerate(order.split(options.batch)):
            generator = derive(seed, epoch, number, "view")
            x = images[index]
            if options.augment is not None:
                x = options.augment(x, generator, siamese=False)
            if relabel.mix is not None:
                x = relabel.mix(x, generator).images
            with torch.no_grad():
                logits = teacher(x)
                logits = (logits - logits.max(1, keepdim=True).values).half().to(images.dtype)
                least = logits.topk(relabel.top_k or CLASSES).values[:, -1:]
                logits = logits.masked_fill(logits < least, -torch.inf)
            loss = F.kl_div((student(x) / t).log_softmax(1), (logits / t).softmax(1), reduction="batchmean")
            optimizer.zero_grad()
            (loss * (t**2 if relabel.scale_loss else 1)).backward()
            optimizer.step()


@pytest.mark.usefixtures("global_rng_untouched")
@pytest.mark.parametrize("norm", ["instance", "batch"])
@pytest.mark.parametrize(("mix", "top_k"), [(None, 1), (CutMix(), 2), (Mixup(), None)])
def test_relabeled_training_equals_plain_code_for_any_chunk(norm: str, mix: Any, top_k: int | None) -> None:
    data, teacher = stripes(21).to(dtype=torch.float64), trained_teacher().double()
    before = weights(teacher).clone()
    options = protocol(Relabel(teacher, temperature=3.0, mix=mix, top_k=top_k, scale_loss=not top_k))
    slow = build(lambda: convnet(norm), 0).double()
    plain_training(slow, teacher.eval(), data.images, options, 7)
    for chunk in (3, None):
        fast = train(build(lambda: convnet(norm), 0).double(), data, options, generator=7, chunk=chunk)
        assert torch.allclose(weights(fast), weights(slow), rtol=0, atol=1e-9)
    assert torch.equal(weights(teacher), before)
    assert not any(p.grad is not None and p.grad.any() for p in teacher.parameters())


@pytest.mark.parametrize("top_k", [None, 1, 2, CLASSES, 5])
@pytest.mark.parametrize(("mix", "norm", "dropout"), [(CutMix(0.7, 0.6), "batch", 0.0), (Mixup(0.3), "instance", 0.5)])
def test_replayed_training_equals_online_relabeling_to_the_bit(
    tmp_path: Path, top_k: int | None, mix: Any, norm: str, dropout: float
) -> None:
    data, teacher = stripes(21), trained_teacher()
    relabel = Relabel(teacher, temperature=4.0, mix=mix, top_k=top_k, scale_loss=norm == "batch")
    online = protocol(relabel, batch=8)
    stored = stored_soft_labels(data, online, generator=11, progress=False)
    seed = int(torch.randint(2**62, (), generator=as_generator(11)))
    facts = (stored.epochs, stored.num_classes, stored.mix, stored.temperature, stored.scale_loss, stored.seed)
    assert facts == ((0, 1, 2), CLASSES, mix, 4.0, norm == "batch", seed)
    assert stored.made_with == {
        "images": tensor_fingerprint([data.images]), "batch": 8, "augment": repr(DSA()), "mix": repr(mix),
        "teacher": describe_teacher(teacher) | {"path": None},
    }  # fmt: skip
    kept = min(top_k or CLASSES, CLASSES)
    assert stored.logits.dtype == torch.float16
    assert list(stored.logits.shape) == [3, 21, kept]
    assert stored.bytes == 3 * 21 * kept * (2 if kept == CLASSES else 3)
    stored.save(tmp_path / "labels.safetensors")
    loaded = StoredLabels.load(tmp_path / "labels.safetensors")
    for field in fields(StoredLabels):
        one, two = (getattr(labels, field.name) for labels in (stored, loaded))
        assert torch.equal(one, two) and one.dtype == two.dtype if isinstance(one, Tensor) else one == two, field.name
    tensors = [t for t in (stored.logits, stored.classes) if t is not None]
    assert loaded.record() == {
        "stored": tensor_fingerprint(tensors), "epochs": 3, "top_k": kept, "bytes": stored.bytes, "temperature": 4.0,
        "scale_loss": norm == "batch", "seed": seed, **stored.made_with,
    }  # fmt: skip
    assert repr(loaded) == f"StoredLabels(3 epochs of 21 images, {kept} of 3 logits, {stored.bytes} bytes)"
    first = train(build(lambda: convnet(norm, dropout), 0), data, online, generator=11)
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.fill_(float("nan"))  # the replay has no use for the teacher
    for labels in (stored, loaded):
        replayed = replace(online, relabel=labels)
        again = train(build(lambda: convnet(norm, dropout), 0), data, replayed, generator=11)
        assert torch.equal(weights(first), weights(again))


def unchanged(images: Tensor, generator: torch.Generator, siamese: bool) -> Tensor:
    return images


class Near(nn.Module):
    """Teacher whose logits fall with the distance of a class from the class in the first pixel."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.classes = classes

    def forward(self, images: Tensor) -> Tensor:
        return -((images[:, 0, 0, :1] * self.classes - torch.arange(self.classes) + 0.2).abs())


@pytest.mark.parametrize(("classes", "size"), [(256, 1), (257, 4), (300, 4)])
def test_stored_classes_are_exact_however_many_classes_there_are(tmp_path: Path, classes: int, size: int) -> None:
    labels = torch.arange(classes - 21, classes)
    images = (labels / classes).view(-1, 1, 1, 1).expand(-1, 1, 8, 8).clone()
    data = LabeledImages(images, labels, num_classes=classes)
    online = protocol(Relabel(Near(classes), top_k=3), augment=unchanged, epochs=1)
    stored = stored_soft_labels(data, online, progress=False)
    assert stored.made_with["augment"] == f"{__name__}.unchanged"  # without its address
    assert stored.classes is not None
    assert stored.classes.element_size() == size
    assert stored.bytes == 21 * 3 * (2 + size)
    assert stored_logits(torch.tensor([[0.0, 1e6]]), None)[0].tolist() == [[-60000, 0]]  # not infinite
    wanted = Near(classes)(images).topk(3).indices
    assert torch.equal(stored.classes[0].long(), wanted)
    stored.save(tmp_path / "labels.safetensors")
    views = StoredLabels.load(tmp_path / "labels.safetensors").batches(images, online.view_options, 0, 0)
    for x, rows in views:
        assert rows.shape[1] == classes
        assert torch.equal(rows.argmax(1), (x[:, 0, 0, 0] * classes).round().long())


def test_pruned_labels_replay_kept_epochs_and_draw_the_others() -> None:
    data = stripes(21)
    online = protocol(relabel := Relabel(trained_teacher(), mix=CutMix()), epochs=12)
    stored = stored_soft_labels(data, online, epochs=[7, 2], generator=0, progress=False)
    assert (stored.epochs, stored.record()["epochs"]) == ((2, 7), 2)
    options = online.view_options
    seen = [torch.cat([x for x, _ in stored.batches(data.images, options, 99, epoch)]) for epoch in range(12)]
    kept = [torch.equal(x, seen[2]) for x in seen]
    assert [a or torch.equal(x, seen[7]) for a, x in zip(kept, seen, strict=True)] == [True] * 12
    assert kept[2]
    assert not kept[7]
    assert 1 < sum(kept) < 11
    pairs = ((stored, 99), (relabel, stored.seed))
    rows = [torch.cat([y for _, y in r.batches(data.images, options, seed, 7)]) for r, seed in pairs]
    assert torch.equal(*rows)
    train(build(convnet, 0), data, replace(online, relabel=stored))
    for wrong in ([], [12], [12, 2], [-1], [3, -1]):
        told = re.escape(f"numbers in [0, 12), at least one, got {sorted(wrong)}")
        words = "at least 0, got -1" if -1 in wrong else told
        refused(lambda e=wrong: stored_soft_labels(data, online, epochs=e), ValueError, f"^epochs must be {words}$")
    refused(lambda: stored_soft_labels(data, online, epochs=7), TypeError, "epochs must be numbers of epochs.*got int")


def test_stored_labels_refuse_other_images_and_options() -> None:
    data = stripes(21)
    online = protocol(Relabel(trained_teacher(), mix=CutMix(), top_k=2))
    stored = stored_soft_labels(data, online, progress=False)
    replayed, free = replace(online, relabel=stored), replace(online, relabel=replace(stored, made_with={}))
    other = data.replace(images=data.images.clone())
    other.images[-1, 0, -1, -1] += 0.001
    changed = {"other views: they were made with images=": (other, replayed),
               "other views: they were made with batch=8, got 7": (data, replace(replayed, batch=7)),
               ".*with augment=": (data, replace(replayed, augment=CropFlip(data.normalization))),
               ".*with mix=CutMix.*got Mixup": (data, replace(online, relabel=replace(stored, mix=Mixup()))),
               "21 images, but data has 20": (data[:20], free),
               "3 classes, but the data has 4": (data.replace(num_classes=4), free)}  # fmt: skip
    for words, (images, options) in changed.items():
        network = build(lambda n=images.num_classes: nn.Sequential(nn.Flatten(), nn.Linear(64, n)), 0)
        refused(lambda n=network, i=images, o=options: train(n, i, o), ValueError, f"stored labels of {words}")
    for count, classes in ((22, 3), (21, 2)):
        call = lambda n=count, k=classes: free.relabel.require(stripes(n).images, k, online.view_options)  # noqa: E731
        refused(call, ValueError, f"has {count if classes == 3 else classes}$")
    train(build(convnet, 0), data, free)
    for bare in (protocol(), protocol(Relabel(None))):
        refused(lambda p=bare: stored_soft_labels(data, p), ValueError, "must relabel views with a teacher")
    wrong = stripes(60).replace(labels=stripes(60).labels.roll(1))
    for pool, name in ((wrong, "pool"), (None, "small")):
        with pytest.raises(ValueError, match=f"of 60 images of {name}"):
            stored_soft_labels(wrong if pool is None else data, online, pool=pool)
    refused(lambda: stored_soft_labels(data, online, pool=3), TypeError, "^pool must be")  # type: ignore[arg-type]
    refused(
        lambda: stored_soft_labels(data[:0], online, pool=data), ValueError, "^small must .* image, got an empty set$"
    )
    other = data.replace(normalization=Normalization([0.5], [0.5]))
    with pytest.raises(ValueError, match=r"small and pool have different normalizations: pixels .* and mean \(0\.5\)"):
        stored_soft_labels(data, protocol(Relabel(trained_teacher())), pool=other)


def test_records_hold_a_teacher_by_fingerprint_and_path(tmp_path: Path) -> None:
    data, teacher = stripes(60), trained_teacher()
    assert repr(Relabel(None)) == "Relabel(None, temperature=20, mix=None)"
    assert repr(Relabel(None, top_k=2)) == "Relabel(None, temperature=20, mix=None, top_k=2)"
    relabel = Relabel(teacher, 2.5, CutMix(), 2, True, "teacher.pt")
    assert repr(relabel) == f"Relabel(ConvNet, temperature=2.5, mix={CutMix()}, top_k=2, scale_loss=True)"
    assert relabel.record() == {
        "teacher": {**describe_teacher(teacher), "path": "teacher.pt"}, "temperature": 2.5, "mix": repr(CutMix()),
        "top_k": 2, "scale_loss": True,
    }  # fmt: skip
    bare = {"teacher": None, "temperature": 2.5, "mix": None, "top_k": None, "scale_loss": False}
    assert replace(relabel.without_teacher(), mix=None, top_k=None, scale_loss=False).record() == bare
    assert relabel.without_teacher() == Relabel(None, 2.5, CutMix(), 2, True)
    options = protocol(Relabel(teacher, mix=CutMix(), path="teacher.pt"), epochs=1)
    result = evaluate(data, data, convnet, num_networks=1, protocol=options, real=stripes(90, 4))
    assert [row.labels for row in result.rows] == ["per view", "per view"]
    record = json.loads(json.dumps(result.record()))["protocol"]["relabel"]
    assert record == options.relabel.record()
    twin = copy.deepcopy(teacher)
    assert describe_teacher(twin) == {"class": "ConvNet", "fingerprint": record["teacher"]["fingerprint"]}
    for changed in (next(twin.parameters()), next(twin.buffers())):
        before = describe_teacher(twin)
        changed.data.flatten()[0] += 1
        assert describe_teacher(twin)["fingerprint"] != before["fingerprint"]
    one, two = (describe_teacher(nn.ParameterDict({name: torch.ones(1)})) for name in ("a", "b"))
    assert one["fingerprint"] != two["fingerprint"]
    config = json.loads(json.dumps(to_config(options, store=tmp_path)))
    again = from_config(config, store=tmp_path)
    assert again.record() == options.record()
    assert (tmp_path / f"{record['teacher']['fingerprint']}.safetensors").exists()
    labels = stored_soft_labels(data, options, progress=False)
    replayed = replace(options, relabel=labels)
    assert json.loads(json.dumps(replayed.record()))["relabel"] == labels.record()
    assert evaluate(data, data, convnet, num_networks=1, protocol=replayed).rows[0].labels == "per view"


def test_teacher_is_required_and_must_fit() -> None:
    data = stripes(12)
    for call in (lambda p: train(build(convnet, 0), data, p), lambda p: evaluate(data, data, convnet, protocol=p)):
        refused(lambda c=call: c(protocol(Relabel(None))), ValueError, r"with_teacher\(teacher\)")
    with pytest.raises(ValueError, match="teacher must return 3 logits"):
        train(build(convnet, 0), data, protocol(Relabel(nn.Sequential(nn.Flatten(), nn.Linear(64, 2)))))
    with pytest.raises(TypeError, match="teacher must be an nn.Module, got the class ConvNet"):
        Relabel(type(convnet()))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"relabel must be None or Relabel\(teacher\), got ConvNet$"):
        Protocol(relabel=trained_teacher())  # type: ignore[arg-type]
    for mix, came in ((CutMix, "the class CutMix"), (0, "int")):
        for call in (lambda m=mix: Relabel(None, mix=m), lambda m=mix: Protocol(mix=m)):
            refused(call, TypeError, rf"mix must be None, CutMix\(\) or Mixup\(\), got {came}$")
    refused(lambda: Protocol(mix=CutMix(), relabel=Relabel(None)), ValueError, "mix must be None with relabel")
    refused(lambda: Protocol().with_teacher(trained_teacher()), ValueError, "must relabel to have a teacher")


def no_classes(count: int, kept: int, dtype: torch.dtype = torch.uint8, fill: int = 0) -> Tensor:
    return torch.full((count, 3, kept), fill, dtype=dtype)


@pytest.mark.parametrize(("tensors", "facts", "words"), [
    ({"logits": torch.zeros(2, 3, 2)}, {}, "logits torch.float32 [2, 3, 2] do not fit 2 epochs"),
    ({"logits": torch.zeros(1, 3, 2).half(), "classes": no_classes(1, 2)}, {}, "[1, 3, 2] do not fit 2 epochs"),
    ({"logits": torch.zeros(2, 3).half()}, {}, "logits torch.float16 [2, 3] do not fit 2 epochs"),
    ({"logits": torch.full((2, 3, 2), math.nan).half()}, {}, "logits must be finite, for at least one epoch"),
    ({"logits": torch.full((2, 3, 2), -math.inf).half()}, {}, "logits must be finite, for at least one epoch"),
    ({"logits": torch.zeros(0, 3, 2).half(), "classes": no_classes(0, 2)}, {"epochs": []}, "for at least one epoch"),
    ({"logits": None}, {}, "KeyError('logits')"),
    ({"classes": None}, {}, "2 logits of 3 classes need their class indices"),
    ({"classes": no_classes(2, 1)}, {}, "classes torch.uint8 [2, 3, 1] do not fit logits [2, 3, 2]"),
    ({"classes": no_classes(2, 2, torch.float16)}, {}, "classes torch.float16 [2, 3, 2] do not fit logits [2, 3, 2]"),
    ({"classes": no_classes(2, 2, torch.uint16)}, {}, "NotImplementedError"),
    ({"classes": torch.arange(12).view(2, 3, 2)}, {}, "classes must be in [0, 3), got up to 11"),
    ({"classes": no_classes(2, 2, torch.int8, 3)}, {}, "classes must be in [0, 3), got up to 3"),
    ({"classes": no_classes(2, 2, torch.int8, -1)}, {}, "classes must be in [0, 3), got up to -1"),
    ({"logits": torch.zeros(2, 3, 4).half(), "classes": no_classes(2, 4)}, {}, "[2, 3, 4] do not fit logits [2, 3, 4]"),
    ({"logits": torch.zeros(2, 3, 0).half(), "classes": no_classes(2, 0)}, {}, "[2, 3, 0] do not fit logits [2, 3, 0]"),
    ({"more": torch.zeros(1)}, {}, "it has other tensors: more"),
    ({}, {"epochs": [3, 1]}, "logits torch.float16 [2, 3, 2] do not fit 2 epochs"),
    ({}, {"epochs": [3, 3]}, "logits torch.float16 [2, 3, 2] do not fit 2 epochs"),
    ({}, {"epochs": [1.5, 3.0]}, "epochs must be an int"),
    ({}, {"epochs": [-1, 3]}, "epochs must be at least 0, got -1"),
    ({}, {"epochs": None}, "TypeError"),
    ({}, {"num_classes": "3"}, "num_classes"),
    ({}, {"temperature": 0}, "temperature"),
    ({}, {"seed": None}, "seed"),
    ({}, {"seed": -1}, "seed must be at least 0"),
    ({}, {"mix": ["Cutout", {}]}, "KeyError('Cutout')"),
    ({}, {"mix": ["Mixup", {"alpha": -1}]}, "alpha"),
    ({}, {"mix": ["Mixup", {"alpha": 10**400}]}, "alpha must be finite"),
    ({}, {"extra": 1}, "extra"),
])  # fmt: skip
def test_contradicting_files_of_labels_are_refused(tensors: Any, facts: Any, words: str, tmp_path: Path) -> None:
    path = tmp_path / "labels.safetensors"
    for count, classes in ((0, 3), (3, 2), (3, 3)):  # labels of no images are none the less labels
        logits = torch.zeros(2, count, 2).half()
        StoredLabels(logits, no_classes(2, 2)[:, :count], (1, 3), classes, Mixup(), 1.0, False, 0, {}).save(path)
        loaded = StoredLabels.load(path)
        assert torch.equal(loaded.logits, logits)
        assert loaded.epochs == (1, 3)
    found, metadata = read_tensors(path, kind="distillkit.StoredLabels/1", content="labels")
    kept = {name: value for name, value in (found | tensors).items() if value is not None}
    write_tensors(path, kept, metadata | {"facts": json.dumps(json.loads(metadata["facts"]) | facts)})
    refused(lambda: StoredLabels.load(path), ValueError, f"^{re.escape(str(path))} is damaged: .*{re.escape(words)}")


@pytest.mark.parametrize("error", [AttributeError, OverflowError])
def test_no_error_of_a_damaged_file_escapes(error: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = StoredLabels(no_classes(1, 3, torch.float16), None, (0,), 3, Mixup(), 1.0, False, 0, {})
    stored.save(path := tmp_path / "labels.safetensors")
    monkeypatch.setattr("distillkit.labels.stored_labels.Mixup", Mock(side_effect=error("odd")))
    refused(lambda: StoredLabels.load(path), ValueError, rf"is damaged: {error.__name__}\('odd'\)$")
