"""Training with a teacher's labels of every view, against plain code, and replays of stored labels."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from distillkit import LabeledImages, Normalization
from distillkit._utils.files import read_tensors, write_tensors
from distillkit.augment import DSA, CropFlip
from distillkit.evaluate import evaluate
from distillkit.labels import CutMix, Mixup, Relabel, StoredLabels, stored_soft_labels
from distillkit.networks import build
from distillkit.rng import as_generator, derive
from distillkit.serialization import from_config, to_config
from distillkit.training import Protocol, train
from tests.distillkit.labels.toys import CLASSES, convnet, stripes, trained_teacher, weights


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
            loss = F.kl_div((student(x) / t).log_softmax(1), (logits / t).softmax(1), reduction="batchmean")
            optimizer.zero_grad()
            (loss * (t**2 if relabel.scale_loss else 1)).backward()
            optimizer.step()


@pytest.mark.usefixtures("global_rng_untouched")
@pytest.mark.parametrize("norm", ["instance", "batch"])
@pytest.mark.parametrize(("mix", "scaled"), [(None, False), (CutMix(), False), (Mixup(), True)])
def test_relabeled_training_equals_plain_code_for_any_chunk(norm: str, mix: Any, scaled: bool) -> None:
    data, teacher = stripes(21).to(dtype=torch.float64), trained_teacher().double()
    before = weights(teacher).clone()
    options = protocol(Relabel(teacher, temperature=4.0, mix=mix, scale_loss=scaled))
    slow = build(lambda: convnet(norm), 0).double()
    plain_training(slow, teacher.eval(), data.images, options, 7)
    for chunk in (3, None):
        fast = train(build(lambda: convnet(norm), 0).double(), data, options, generator=7, chunk=chunk)
        assert torch.allclose(weights(fast), weights(slow), rtol=0, atol=1e-9)
    assert torch.equal(weights(teacher), before)
    assert not any(p.grad is not None and p.grad.any() for p in teacher.parameters())


def test_relabeling_ignores_the_labels_of_the_set() -> None:
    data, options = stripes(12), protocol(Relabel(trained_teacher()))
    wrong = data.replace(labels=data.labels.flip(0).roll(1))
    one, two = (train(build(convnet, 0), part, options, generator=1) for part in (data, wrong))
    assert torch.equal(weights(one), weights(two))


@pytest.mark.parametrize("top_k", [None, 1, CLASSES, 5])
@pytest.mark.parametrize(("mix", "norm", "dropout"), [(CutMix(), "batch", 0.0), (Mixup(), "instance", 0.5)])
def test_replayed_training_equals_online_relabeling_to_the_bit(
    tmp_path: Path, top_k: int | None, mix: Any, norm: str, dropout: float
) -> None:
    data, teacher = stripes(21), trained_teacher()
    online = protocol(Relabel(teacher, temperature=4.0, mix=mix, top_k=top_k), batch=8)
    stored = stored_soft_labels(data, online, generator=11, progress=False)
    kept = min(top_k or CLASSES, CLASSES)
    assert stored.logits.dtype == torch.float16
    assert list(stored.logits.shape) == [3, 21, kept]
    assert stored.bytes == 3 * 21 * kept * (2 if kept == CLASSES else 3)
    stored.save(tmp_path / "labels.safetensors")
    loaded = StoredLabels.load(tmp_path / "labels.safetensors")
    first = train(build(lambda: convnet(norm, dropout), 0), data, online, generator=11)
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.fill_(float("nan"))  # the replay has no use for the teacher
    for labels in (stored, loaded):
        replayed = replace(online, relabel=labels)
        again = train(build(lambda: convnet(norm, dropout), 0), data, replayed, generator=11)
        assert torch.equal(weights(first), weights(again))


def test_rows_of_views_sum_to_one_and_keep_the_largest() -> None:
    data, teacher = stripes(21), trained_teacher()
    for top_k in (1, 2, 3):
        relabel = Relabel(teacher, temperature=2.0, mix=CutMix(), top_k=top_k)
        options = protocol(relabel).view_options
        for x, rows in relabel.batches(data.images, options, 3, 0):
            assert torch.allclose(rows.sum(1), torch.ones(len(rows)))
            assert torch.equal(rows.argmax(1), teacher(x).argmax(1))
            assert ((rows > 0).sum(1) == top_k).all()


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
    online = protocol(Relabel(Near(classes), top_k=3), augment=None, epochs=1)
    stored = stored_soft_labels(data, online, progress=False)
    assert stored.classes is not None
    assert stored.classes.element_size() == size
    assert stored.bytes == 21 * 3 * (2 + size)
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
    assert stored.epochs == (2, 7)
    options = online.view_options
    seen = [torch.cat([x for x, _ in stored.batches(data.images, options, 99, epoch)]) for epoch in range(12)]
    kept = [torch.equal(x, seen[2]) for x in seen]
    assert [a or torch.equal(x, seen[7]) for a, x in zip(kept, seen, strict=True)] == [True] * 12
    assert kept[2]
    assert not kept[7]
    assert 1 < sum(kept) < 11
    rows = [torch.cat([y for _, y in r.batches(data.images, options, stored.seed, 7)]) for r in (stored, relabel)]
    assert torch.equal(*rows)
    train(build(convnet, 0), data, replace(online, relabel=stored))
    for wrong in ([], [12], [-1]):
        with pytest.raises(ValueError, match="epochs"):
            stored_soft_labels(data, online, epochs=wrong)


def test_stored_labels_refuse_other_images_and_options() -> None:
    data = stripes(21)
    online = protocol(Relabel(trained_teacher(), mix=CutMix()))
    replayed = replace(online, relabel=stored_soft_labels(data, online, progress=False))
    other = data.replace(images=data.images + 0.001)
    changed = {"images": (other, replayed), "batch": (data, replace(replayed, batch=7)),
               "augment": (data, replace(replayed, augment=CropFlip(data.normalization)))}  # fmt: skip
    for name, (images, options) in changed.items():
        with pytest.raises(ValueError, match=f"stored labels of other views: .*{name}="):
            train(build(convnet, 0), images, options)
    with pytest.raises(ValueError, match="must relabel views with a teacher"):
        stored_soft_labels(data, protocol())
    with pytest.raises(ValueError, match="must relabel views with a teacher"):
        stored_soft_labels(data, protocol(Relabel(None)))
    wrong = stripes(60).replace(labels=stripes(60).labels.roll(1))
    with pytest.raises(ValueError, match="of 60 images of pool"):
        stored_soft_labels(data, online, pool=wrong)
    other = data.replace(normalization=Normalization([0.5], [0.5]))
    with pytest.raises(ValueError, match="small and pool have different normalizations"):
        stored_soft_labels(data, protocol(Relabel(trained_teacher())), pool=other)


def test_records_hold_a_teacher_by_fingerprint_and_path(tmp_path: Path) -> None:
    data, teacher = stripes(60), trained_teacher()
    options = protocol(Relabel(teacher, mix=CutMix(), path="teacher.pt"), epochs=1)
    result = evaluate(data, data, convnet, num_networks=1, protocol=options, real=stripes(90, 4))
    assert [row.labels for row in result.rows] == ["per view", "per view"]
    record = json.loads(json.dumps(result.record()))["protocol"]["relabel"]
    shown = {"mix": repr(CutMix()), "temperature": 20.0, "top_k": None, "scale_loss": False}
    assert {name: record[name] for name in shown} == shown
    assert Relabel(None).record()["mix"] is None
    assert record["teacher"]["path"] == "teacher.pt"
    assert record["teacher"]["class"] == "ConvNet"
    twin = copy.deepcopy(teacher)
    assert Relabel(twin).record()["teacher"]["fingerprint"] == record["teacher"]["fingerprint"]
    next(twin.parameters()).data.flatten()[0] += 1
    assert Relabel(twin).record()["teacher"]["fingerprint"] != record["teacher"]["fingerprint"]
    config = json.loads(json.dumps(to_config(options, store=tmp_path)))
    again = from_config(config, store=tmp_path)
    assert again.record() == options.record()
    assert (tmp_path / f"{record['teacher']['fingerprint']}.safetensors").exists()
    stored = stored_soft_labels(data, options, progress=False)
    told = json.loads(json.dumps(replace(options, relabel=stored).record()))["relabel"]
    counts = {"epochs": 1, "top_k": CLASSES, "bytes": stored.bytes, "temperature": 20.0, "scale_loss": False}
    assert counts.items() <= told.items()
    assert told["teacher"] == record["teacher"]


def test_teacher_is_required_and_must_fit() -> None:
    data = stripes(12)
    with pytest.raises(ValueError, match=r"with_teacher\(teacher\)"):
        train(build(convnet, 0), data, protocol(Relabel(None)))
    with pytest.raises(ValueError, match="teacher must return 3 logits"):
        train(build(convnet, 0), data, protocol(Relabel(nn.Sequential(nn.Flatten(), nn.Linear(64, 2)))))
    with pytest.raises(TypeError, match="teacher must be an nn.Module, got the class ConvNet"):
        Relabel(type(convnet()))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"relabel must be None or Relabel\(teacher\)"):
        Protocol(relabel=trained_teacher())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"mix must be None, CutMix\(\) or Mixup\(\), got the class CutMix"):
        Relabel(None, mix=CutMix)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="mix must be None with relabel"):
        Protocol(mix=CutMix(), relabel=Relabel(None))
    with pytest.raises(ValueError, match="must relabel to have a teacher"):
        Protocol().with_teacher(trained_teacher())


@pytest.mark.parametrize(
    ("tensors", "facts"),
    [
        ({"logits": torch.zeros(2, 2, 2)}, {}),
        ({"logits": torch.zeros(1, 2, 2).half()}, {}),
        ({"logits": torch.full((2, 2, 2), math.nan).half()}, {}),
        ({"logits": None}, {}),
        ({"classes": None}, {}),
        ({"classes": torch.zeros(2, 2, 1, dtype=torch.uint8)}, {}),
        ({"classes": torch.full((2, 2, 2), 3, dtype=torch.uint8)}, {}),
        ({"classes": torch.tensor([-1, 2, 2, 2, 2, 2, 2, 2], dtype=torch.int8).view(2, 2, 2)}, {}),
        ({"more": torch.zeros(1)}, {}),
        ({}, {"epochs": [3, 1]}),
        ({}, {"epochs": None}),
        ({}, {"num_classes": "3"}),
        ({}, {"temperature": 0}),
        ({}, {"seed": None}),
        ({}, {"seed": -1}),
        ({}, {"mix": ["Cutout", {}]}),
        ({}, {"mix": ["Mixup", {"alpha": -1}]}),
        ({}, {"extra": 1}),
    ],
)
def test_contradicting_files_of_labels_are_refused(tensors: Any, facts: Any, tmp_path: Path) -> None:
    logits, classes = torch.zeros(2, 2, 2).half(), torch.zeros(2, 2, 2, dtype=torch.uint8)
    stored = StoredLabels(logits, classes, (1, 3), 3, Mixup(), 1.0, False, 0, {})
    stored.save(path := tmp_path / "labels.safetensors")
    assert torch.equal(StoredLabels.load(path).logits, logits)
    found, metadata = read_tensors(path, kind="distillkit.StoredLabels/1", content="labels")
    kept = {name: value for name, value in (found | tensors).items() if value is not None}
    write_tensors(path, kept, metadata | {"facts": json.dumps(json.loads(metadata["facts"]) | facts)})
    with pytest.raises(ValueError, match="is damaged"):
        StoredLabels.load(path)
