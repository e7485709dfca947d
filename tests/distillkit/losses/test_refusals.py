"""Whatever is wrong with one argument of a loss is refused with an error that names the argument.

`tests/distillkit/test_odd_calls.py` tries unusual types; here are the bounds, and arguments that contradict each other.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

import pytest
import torch
from torch import nn

from distillkit import losses

ROWS, LABELS = torch.ones(3, 4), torch.tensor([0, 1, 0])
META = "got a tensor on the device 'meta'; move it to 'cpu' or 'cuda' first"
DIMENSIONS = {
    **dict.fromkeys(("embeddings", "real", "global_embeddings", "previous_embeddings"), "N, d"),
    **dict.fromkeys(("student_logits", "teacher_logits", "p_logits", "q_logits", "logits"), "N, K"),
    **{"other_embeddings": "M, d", "synthetic": "M, d", "x": "n, d", "y": "m, d", "prototypes": "K, d"},
    "images": "N, C, H, W",
}
VALID: dict[str, Any] = {
    **dict.fromkeys(DIMENSIONS, ROWS),
    **dict.fromkeys(("labels", "other_labels", "real_labels", "synthetic_labels"), LABELS),
    **dict.fromkeys(("gradients", "targets", "parameters", "reference"), (ROWS, ROWS)),
    **{"images": torch.ones(2, 3, 4, 4), "network": nn.BatchNorm2d(3), "num_classes": 2, "mu": 0},
    **{"prototypes": torch.ones(2, 4), "present": torch.ones(2).bool(), "temperature": 1e-6, "high": 1, "kernels": 1},
}
BOUNDS = (
    *((key, 0, "greater than 0, got 0") for key in ("bandwidth", "multiplier", "low", "max_norm")),
    *((key, -0.5, "at least 0, got -0.5") for key in ("mu", "first_multiplier")),
    *(("temperature", 9e-7, "at least 1e-06, got 9e-07"), ("kernels", 0, "at least 1, got 0")),
    *(("high", 0.01, "greater than 0.01, got 0.01"), ("high", 1.5, "at most 1, got 1.5")),
)
SAME_SHAPE = (
    *(("student_logits", "teacher_logits"), ("p_logits", "q_logits")),
    *(("embeddings", "global_embeddings"), ("embeddings", "previous_embeddings")),
)
WIDTHS = {"other_embeddings": "embeddings have", "synthetic": "real has", "y": "x has", "prototypes": "embeddings have"}
TOGETHER = (("other_embeddings", "other_labels"), ("real_labels", "synthetic_labels"))
ODD: dict[str, list[tuple[dict[str, Any], str]]] = {
    "feature_decorrelation": [({"eps": 0}, "eps must be greater than 0, got 0")],
    "gradient_distance": [
        ({"eps": -0.5}, "eps must be at least 0, got -0.5"),
        (
            {"gradients": [ROWS[0]], "targets": [ROWS[0]]},
            "gradients must have a tensor of 2 or more dimensions: 'row_cosine' ignores 1-D tensors",
        ),
    ],
    "rbf_mmd": [({"unbiased": True, "x": ROWS[:1]}, "unbiased needs at least 2 rows in x and in y, got 1 and 3")],
    "class_means": [({"num_classes": 0}, "num_classes must be at least 1, got 0")],
    "prototype_distance": [
        ({"present": torch.ones(2)}, "present must be a bool tensor [K], got torch.float32"),
        ({"present": torch.ones(3).bool()}, "present must have shape [2], got [3]"),
    ],
    "BatchNormPrior": [
        ({"network": 3}, "network must be an nn.Module, got int"),
        (
            {"network": nn.BatchNorm2d(3, device="meta")},
            "network must be one with values, but its parameters are on the device 'meta'; build it on 'cpu'",
        ),
        *(
            (
                {"network": network},
                "network must have a BatchNorm layer with running statistics, but "
                f"{type(network).__name__} has none; use a network with BatchNorm, or omit the prior",
            )
            for network in (nn.Sequential(nn.InstanceNorm2d(4)), nn.BatchNorm2d(3, track_running_stats=False))
        ),
    ],
}


def valid(name: str) -> dict[str, Any]:
    """Return valid values of the arguments: tensors, and options at their bounds."""
    return {key: VALID[key] for key in inspect.signature(getattr(losses, name)).parameters if key in VALID}


def cases_of_argument(name: str, key: str, kind: Any) -> Iterator[tuple[Any, str]]:
    if key in DIMENSIONS:
        right, shape = VALID[key], DIMENSIONS[key]
        yield 3, f"{key} must be a torch.Tensor [{shape}], got int"
        yield right.long(), f"{key} must be floating point, got torch.int64"
        yield right.to("meta"), f"{key} must have values, {META}"
        yield right[0], f"{key} must have {right.ndim} dimensions [{shape}], got shape {list(right.shape[1:])}"
        yield right[:, :0], f"{key} must not be empty, got shape {[len(right), 0, *right.shape[2:]]}"
    if key in WIDTHS:
        yield torch.ones(3, 2), f"{key} must have 4 columns as {WIDTHS[key]}, got 2"
    if key.endswith("labels"):
        yield torch.tensor([0, 1]), f"{key} must have one entry per image: got 2 for 3 images"
        yield torch.tensor([0, 1, -1]), f"{key} must be at least 0, got -1"
        if name in ("class_means", "mean_embedding_distance", "prototype_distance"):
            yield torch.tensor([0, 2, 1]), f"{key} must be below num_classes=2, got 2"
    if get_origin(kind) is Literal:
        yield "odd", f"{key} must be one of {', '.join(map(repr, get_args(kind)))}, got 'odd'"
    if kind is bool:
        yield "no", f"{key} must be True or False, got 'no'"
    if key in ("gradients", "targets", "parameters", "reference"):
        yield list, f"{key} must be tensors, one per network parameter, got type"
        yield 3, f"{key} must be tensors, one per network parameter, got int"
        yield [ROWS, None], f"{key}[1] must be a floating torch.Tensor, got NoneType"
        yield [ROWS, ROWS.long()], f"{key}[1] must be a floating torch.Tensor, got torch.int64"
        yield [ROWS, ROWS.to("meta")], f"{key}[1] must have values, {META}"
    yield from ((value, f"{key} must be {words}") for bounded, value, words in BOUNDS if bounded == key)


def cases() -> Iterator[tuple[str, dict[str, Any], str]]:
    for name in losses.__all__:
        parameters = inspect.signature(getattr(losses, name), eval_str=True).parameters
        for key, parameter in parameters.items():
            yield from ((name, {key: v}, words) for v, words in cases_of_argument(name, key, parameter.annotation))
        for first, second in (pair for pair in SAME_SHAPE if pair[1] in parameters):
            for odd in (torch.ones(3, 2), torch.ones(2, 4)):
                words = f"{first} and {second} must have the same shape, got [3, 4] and {list(odd.shape)}"
                yield name, {second: odd}, words
        for first, second in (pair for pair in TOGETHER if pair[0] in parameters):
            for key in (first, second):
                yield name, {key: None}, f"{first} and {second} must be given together, got only one of them"
        for first, second in (("gradients", "targets"), ("parameters", "reference")):
            if first in parameters:
                for odd in ([], [ROWS]):
                    words = f"{first} and {second} must have equal lengths > 0, got {len(odd)} and "
                    yield name, {first: odd, second: odd * 2}, words + str(2 * len(odd))
                yield name, {second: [ROWS, ROWS[:2]]}, f"{first}[1] has shape [3, 4], {second}[1] has [2, 4]"
        yield from ((name, changes, words) for changes, words in ODD.get(name, ()))


@pytest.mark.parametrize("name", losses.__all__)
def test_valid_arguments_are_accepted(name: str) -> None:
    getattr(losses, name)(**valid(name))


@pytest.mark.parametrize(("name", "changes", "words"), [*cases()])
def test_invalid_argument_is_refused_by_name(name: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError)) as refusal:
        getattr(losses, name)(**{**valid(name), **changes})
    assert str(refusal.value) == words
