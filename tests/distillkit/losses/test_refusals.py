"""Whatever is wrong with one argument of a loss is refused with an error that names the argument."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from distillkit import losses

ROWS, OTHER = torch.ones(3, 4), torch.zeros(3, 4)
LABELS, IMAGES = torch.tensor([0, 1, 0]), torch.ones(2, 3, 4, 4)

not_a_tensor = st.sampled_from([None, 1.0, "rows", [[1.0]]])
whole_numbers = st.sampled_from([torch.ones(3, 4, dtype=torch.long), torch.ones(3, 4, dtype=torch.bool)])
matrix = not_a_tensor | whole_numbers | st.sampled_from([torch.ones(4), torch.ones(3, 4, 1), torch.ones(0, 4)])
optional_matrix = matrix.filter(lambda value: value is not None)
narrow = st.just(torch.ones(3, 2))
unequal = narrow | st.just(torch.ones(2, 4))
images = not_a_tensor | st.sampled_from([IMAGES.long(), IMAGES[0], IMAGES[:0], IMAGES[None]])
label_values = [torch.tensor([0.0, 1.0, 0.0]), torch.tensor([0, 1]), torch.tensor([0, 1, -1]), torch.ones(3, 1).long()]
labels = not_a_tensor | st.sampled_from(label_values)
optional_labels = labels.filter(lambda value: value is not None)
too_large = st.just(torch.tensor([0, 1, 9]))
not_a_number = st.sampled_from([None, "1", True, math.nan, math.inf, -math.inf])
positive = not_a_number | st.floats(max_value=0, allow_nan=False)
optional_positive = positive.filter(lambda value: value is not None)
at_least_zero = not_a_number | st.floats(max_value=-1e-3, allow_nan=False)
count = st.sampled_from([0, -1, 2.0, "5", True, None])
choice = st.sampled_from(["", "batchmean", "cosine", None, 3])
tensor_lists = st.sampled_from(
    [[], [ROWS, ROWS], [None], [ROWS.long()], [ROWS[:2]], [1.0]],
)
model = st.sampled_from([None, "resnet", ROWS]) | st.just(nn.Linear(2, 2)) | st.just(nn.InstanceNorm2d(3))

KD = {"student_logits": ROWS, "teacher_logits": OTHER}
BAD_KD = {"student_logits": matrix | unequal, "teacher_logits": matrix | unequal}
JS = {"p_logits": ROWS, "q_logits": OTHER}
BAD_JS = {"p_logits": matrix | unequal, "q_logits": matrix | unequal, "reduction": choice}
SUPCON = {"embeddings": ROWS, "labels": LABELS, "other_embeddings": ROWS, "other_labels": LABELS}

CASES: list[tuple[Callable[..., Any], dict[str, Any], dict[str, st.SearchStrategy]]] = [
    (
        losses.supervised_contrastive,
        SUPCON,
        {
            "embeddings": matrix,
            "labels": labels,
            "other_embeddings": matrix | narrow,
            "other_labels": labels,
            "temperature": positive,
            "empty": choice,
            "reduction": choice | st.just("none"),
        },
    ),
    (losses.SupervisedContrastive, {}, {"temperature": positive, "empty": choice, "reduction": choice}),
    (
        losses.model_contrastive,
        {"embeddings": ROWS, "global_embeddings": ROWS, "previous_embeddings": ROWS},
        {
            "embeddings": matrix | unequal,
            "global_embeddings": matrix | unequal,
            "previous_embeddings": matrix | unequal,
            "temperature": positive,
            "reduction": choice,
        },
    ),
    (
        losses.class_means,
        {"embeddings": ROWS, "labels": LABELS, "num_classes": 2},
        {"embeddings": matrix, "labels": labels | too_large, "num_classes": count},
    ),
    (
        losses.mean_embedding_distance,
        {"real": ROWS, "synthetic": ROWS, "real_labels": LABELS, "synthetic_labels": LABELS, "num_classes": 2},
        {
            "real": matrix,
            "synthetic": matrix | narrow,
            "real_labels": labels | too_large,
            "synthetic_labels": labels | too_large,
            "num_classes": st.sampled_from([0, -1, 1]),
            "reduction": choice | st.just("mean"),
        },
    ),
    (
        losses.rbf_mmd,
        {"x": ROWS, "y": ROWS},
        {
            "x": matrix,
            "y": matrix | narrow,
            "bandwidth": optional_positive,
            "kernels": count,
            "multiplier": positive,
        },
    ),
    (losses.RBFMMD, {}, {"bandwidth": optional_positive, "kernels": count, "multiplier": positive}),
    (
        losses.gradient_distance,
        {"gradients": [ROWS], "targets": [ROWS]},
        {"gradients": tensor_lists, "targets": tensor_lists, "metric": choice, "eps": at_least_zero},
    ),
    (
        losses.knowledge_distillation,
        KD,
        BAD_KD | {"temperature": positive, "reduction": choice},
    ),
    (losses.KnowledgeDistillation, {}, {"temperature": positive, "reduction": choice}),
    (losses.binary_distillation, KD, BAD_KD | {"temperature": positive, "reduction": choice}),
    (losses.jensen_shannon, JS, BAD_JS),
    (
        losses.clamped_disagreement,
        JS,
        BAD_JS | {"low": positive, "high": not_a_number | st.sampled_from([0.01, 0.0, 1.5])},
    ),
    (
        losses.total_variation,
        {"images": IMAGES},
        {"images": images, "order": st.sampled_from([0, 3, "l1", None]), "reduction": choice},
    ),
    (
        losses.deepinversion_variation,
        {"images": IMAGES},
        {"images": images, "order": st.sampled_from([0, 3, "l1", None])},
    ),
    (losses.image_l2, {"images": IMAGES}, {"images": images, "reduction": choice}),
    (
        losses.BatchNormPrior,
        {"network": nn.BatchNorm2d(3)},
        {"network": model, "first_multiplier": at_least_zero},
    ),
    (
        losses.proximal,
        {"parameters": [ROWS], "reference": [ROWS], "mu": 0.1},
        {"parameters": tensor_lists, "reference": tensor_lists, "mu": at_least_zero},
    ),
    (
        losses.feature_decorrelation,
        {"embeddings": ROWS},
        {"embeddings": matrix, "variant": choice, "eps": positive},
    ),
    (
        losses.prototype_distance,
        {"embeddings": ROWS, "labels": LABELS, "prototypes": torch.ones(2, 4)},
        {
            "embeddings": matrix,
            "labels": labels | too_large,
            "prototypes": matrix | narrow,
            "present": st.sampled_from([[True, False], torch.ones(2), torch.ones(3).bool(), "all"]),
            "reduction": choice | st.just("none"),
        },
    ),
    (losses.clip_logit_norm, {"logits": ROWS}, {"logits": matrix, "max_norm": positive}),
]
PAIRS = [(function, valid, name, bad) for function, valid, table in CASES for name, bad in table.items()]


def test_every_public_loss_is_in_the_table():
    assert {function.__name__ for function, _, _ in CASES} == set(losses.__all__)
    for function, valid, _ in CASES:
        function(**valid)


@pytest.mark.parametrize(
    ("function", "valid", "name", "bad"), PAIRS, ids=[f"{function.__name__}-{name}" for function, _, name, _ in PAIRS]
)
@given(data=st.data())
def test_invalid_argument_is_refused_by_name(function, valid, name, bad, data):
    value = data.draw(bad)
    with pytest.raises((TypeError, ValueError)) as refusal:
        function(**{**valid, name: value})
    assert re.search(rf"\b{name}\b", str(refusal.value))
