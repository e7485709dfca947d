"""Functions of tasks: losses, counts, test results and their metrics."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import precision_recall_fscore_support
from torch import nn
from torch.nn import functional as F

from distillkit import LabeledImages
from fl import Classification, FedAvg, MultiLabel, simulate
from fl.averaging.addon import AddOn
from fl.engine.history import global_metrics
from fl.method import Predictor, evaluation_batch_size
from fl.task import clients_accuracy
from tests.fl.federations import Tiny, federation
from tests.refused import refused


def test_complement_of_a_histogram() -> None:
    counts = torch.tensor([5, 1, 3])
    assert Classification(3).complement(counts, 6).tolist() == [1, 1, 1, 1, 2, 2]
    rows = MultiLabel(3).complement(counts, 6)
    assert torch.equal(rows, F.one_hot(torch.tensor([1, 1, 1, 1, 2, 2]), 3).float())
    for task in (Classification(3), MultiLabel(3)):
        assert len(task.complement(torch.tensor([4, 4, 4]), 6)) == 0


def test_distillation_is_the_loss_towards_the_teacher_minus_entropy() -> None:
    """Its gradient equals that of the task's loss with the teacher's outputs as labels, so both have one scale."""
    generator = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(4, 3, generator=generator, dtype=torch.float64) for _ in range(2))
    student.requires_grad_()
    for task, answers in ((Classification(3), teacher.softmax(1)), (MultiLabel(3), teacher.sigmoid())):
        (got,) = torch.autograd.grad(task.distill(student, teacher), student)
        (want,) = torch.autograd.grad(task.loss(student, answers), student)
        assert torch.allclose(got, want, atol=1e-12)
        assert float(task.distill(teacher, teacher)) == pytest.approx(0.0, abs=1e-12)
    wide = torch.cat([student, torch.ones(4, 2)], 1)
    assert torch.equal(MultiLabel(3).distill(wide, wide + 1), MultiLabel(3).distill(student, student + 1))


def test_counts_noted_by_clients_are_summed_in_the_history() -> None:
    class Noting(AddOn):
        def after_training(self, local: Any, update: Any, reply: Any) -> None:
            if local.round == 2:
                local.client.notes["small"] = int(len(local.data) < 20)

    run = simulate(FedAvg(Noting(), factory=Tiny), federation(), rounds=2, progress=False)
    assert "noted" not in run.rows[0]
    assert run.rows[1]["noted"] == {"small": 3}


@given(st.integers(1, 12), st.integers(0, 10_000))
def test_sums_of_any_test_set_pass_and_a_changed_count_fails(n: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, 5, generator=generator)  # two virtual classes
    labels = torch.randint(3, (n,), generator=generator)
    rows = (torch.rand(n, 3, generator=generator) < 0.5).float()
    bound: list[tuple[Any, torch.Tensor, list[int]]] = [
        (Classification(3), Classification(3).sums(logits, labels), [0, 1, 3, 4, 5, 9, 10, 11]),
        (MultiLabel(3), MultiLabel(3).sums(logits, rows), [0, 1, 6, 7, 8, 9, 10, 11]),
    ]
    for task, sums, exact in bound:
        task.check_sums(sums)
        wrong = [(i, by) for i in exact for by in (-1.0, 1.0, 0.5, 7.0)]
        wrong += [(i, -100.0) for i in range(12)] + [(i, 0.5) for i in range(12) if i != 2] + [(0, 2.0**60)]
        for place, by in wrong:
            other = sums.clone()
            other[place] += by
            with pytest.raises(ValueError, match=r"cannot be correct|whole numbers|are correct, but"):
                task.check_sums(other)
        with pytest.raises(ValueError, match="cannot be correct"):
            task.check_sums(torch.zeros(12, dtype=torch.float64))


@pytest.mark.parametrize("count", [1, 2, 9, 10, 19, 20, 25])
def test_accuracies_of_clients_are_summarised(count: int) -> None:
    """Population deviation, and the mean of the worst tenth, rounded down but at least one client."""
    values = [((7 * k) % count) / count for k in range(count)]
    found = clients_accuracy(values)
    worst = sorted(values)[: max(1, count // 10)]
    wanted = {"mean": statistics.fmean(values), "std": statistics.pstdev(values), "worst10": statistics.fmean(worst)}
    assert found == {**{name: pytest.approx(value) for name, value in wanted.items()}, "clients": count}


@pytest.mark.parametrize(
    ("call", "words"),
    [(lambda: clients_accuracy([]), "at least one client's accuracy"),
     (lambda: clients_accuracy([0.5, 80.0]), r"accuracies\[1\] must be in \[0, 1\]"),
     (lambda: Classification(3).loss(torch.zeros(4).long(), torch.rand(4, 3)), r"logits must be floats \[N, 3 or"),
     (lambda: Classification(3).loss(torch.rand(4, 3), torch.zeros(5).long()), r"labels must be int64 \[4\]"),
     (lambda: Classification(3).loss(torch.rand(4, 5), torch.rand(4, 3)), r"labels must be \[4, 5\]"),
     (lambda: MultiLabel(3).loss(torch.rand(4, 5), torch.zeros(4).long()), r"labels must be \[4, 3\]"),
     (lambda: Classification(3).sums(torch.rand(4, 5), torch.arange(4)), "labels must be below num_classes=3")],
)  # fmt: skip
def test_other_logits_labels_and_accuracies_are_named(call: Any, words: str) -> None:
    refused(call, ValueError, words)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), min_size=1, max_size=12))
def test_sums_count_answers_of_each_class(pairs: list[tuple[int, int]]) -> None:
    """An output beyond the classes, as of an add-on, is a wrong answer of no class."""
    guesses, labels = (torch.tensor(side) for side in zip(*pairs))
    sums = Classification(3).sums(2.0 * F.one_hot(guesses, 4).float(), labels)
    of = range(3)
    cells = [[sum(g == y == k for g, y in pairs) for k in of], [sum(g == k != y for g, y in pairs) for k in of],
             [sum(y == k != g for g, y in pairs) for k in of]]  # fmt: skip
    assert sums[3:].view(3, 3).tolist() == cells
    assert sums[:2].tolist() == [len(pairs), sum(cells[0])]
    Classification(3).check_sums(sums)


@given(st.integers(1, 9), st.integers(0, 10_000), st.booleans())
def test_results_equal_those_of_sklearn(n: int, seed: int, silent: bool) -> None:
    """Also for classes that nothing has, or that are never predicted; outputs beyond the classes are ignored."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, 6, generator=generator)
    logits[:, 2] = -1.0 if silent else logits[:, 2]
    rows = (torch.rand(n, 4, generator=generator) < 0.4).float()
    sums, says = MultiLabel(4).sums(logits, rows), (logits[:, :4] > 0).int()
    metrics = MultiLabel(4).metrics(sums)
    loss = F.binary_cross_entropy_with_logits(logits[:, :4].double(), rows.double())
    assert metrics.pop("loss") == pytest.approx(float(loss))
    assert metrics.pop("accuracy") == pytest.approx(float((says == rows).double().mean()))
    wanted = {}
    for prefix, average in (("c", "macro"), ("o", "micro")):
        p, r, _, _ = precision_recall_fscore_support(rows, says, average=average, zero_division=0)
        wanted |= {f"{prefix}_precision": p, f"{prefix}_recall": r, f"{prefix}_f1": 2 * p * r / (p + r or 1)}
    assert metrics == pytest.approx(wanted)
    labels = torch.randint(4, (n,), generator=generator)
    found = Classification(4).metrics(Classification(4).sums(logits, labels))
    assert found["loss"] == pytest.approx(float(F.cross_entropy(logits.double(), labels)))
    assert found["accuracy"] == pytest.approx(float((logits.argmax(1) == labels).double().mean()))
    for task, values in ((Classification(4), labels), (MultiLabel(4), rows)):
        data = LabeledImages(logits.view(n, 6, 1, 1), values, num_classes=4)
        whole, parts = (Predictor(nn.Flatten()).sums(data, task, chunk) for chunk in (None, 2))
        assert torch.allclose(parts, whole)
        assert torch.allclose(whole, task.sums(logits, values))


@pytest.mark.parametrize(
    ("shape", "device", "wanted"),
    [((1, 8, 8), "cpu", 256), ((3, 40, 32), "cpu", 128), ((3, 64, 128), "cpu", 32), ((1, 512, 512), "cpu", 1),
     ((1, 999, 999), "cpu", 1), ((3, 224, 224), "cuda", 64), ((3, 32, 32), "cuda", 256)],
)  # fmt: skip
def test_a_batch_of_a_test_is_the_largest_power_of_two_that_fits(shape: Any, device: str, wanted: int) -> None:
    assert evaluation_batch_size(shape, torch.device(device)) == wanted


def test_metrics_of_several_models_are_averaged() -> None:
    """Each architecture counts alike, whatever its number of clients."""
    task, labels = Classification(2), torch.tensor([0, 0, 1, 1])
    logits = {"a": torch.eye(2)[labels], "b": torch.eye(2)[[0, 1, 1, 0]], "c": torch.eye(2)[[0, 1, 0, 0]]}
    sums = {name: task.sums(z, labels) for name, z in logits.items()}
    found, each = global_metrics(sums, task), [task.metrics(one) for one in sums.values()]
    assert found["accuracy_by"] == {"a": 1.0, "b": 0.5, "c": 0.25}
    assert found["accuracy"] == pytest.approx(1.75 / 3)
    assert found["loss"] == pytest.approx(statistics.fmean(one["loss"] for one in each))
    assert global_metrics({"": sums["b"]}, task) == task.metrics(sums["b"])
    assert global_metrics({}, task) == {}
