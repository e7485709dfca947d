"""Whatever is wrong with one argument of a loss is refused with an error that names the argument.

`tests/distillkit/test_odd_calls.py` tries unusual types, and `test_refusals.py` compares the messages; here are the
bounds, and arguments that contradict each other.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distillkit import losses
from tests.refused import refused

ROWS, LABELS, IMAGES = torch.ones(3, 4), torch.tensor([0, 1, 0]), torch.ones(2, 3, 4, 4)
SECOND = (torch.ones(3, 2),)
TWIN = (*SECOND, torch.ones(2, 4))
LABEL = (torch.tensor([0, 1]), torch.tensor([0, 1, -1]))
LISTS = ([ROWS, ROWS], [ROWS.long()], [ROWS[:2]])
BAD: dict[str, Sequence[Any]] = {
    **dict.fromkeys(("embeddings", "real", "x", "logits"), (ROWS.long(),)),
    "images": (IMAGES.long(),),
    **dict.fromkeys(("other_embeddings", "synthetic", "y", "prototypes"), SECOND),
    **dict.fromkeys(("student_logits", "teacher_logits", "p_logits", "q_logits"), TWIN),
    **dict.fromkeys(("global_embeddings", "previous_embeddings"), TWIN),
    **dict.fromkeys(("labels", "other_labels", "real_labels", "synthetic_labels"), LABEL),
    **dict.fromkeys(("temperature", "bandwidth", "multiplier", "low", "max_norm"), (0, -1.0)),
    **dict.fromkeys(("mu", "first_multiplier"), (-1e-3,)),
    **dict.fromkeys(("gradients", "targets", "parameters", "reference"), LISTS),
    "high": [0.01, 0.0, 1.5],
    "order": [0, 3, "l1"],
    "eps": [-1e-3],
    "network": [nn.Linear(2, 2), nn.InstanceNorm2d(3)],
    "present": [torch.ones(2), torch.ones(3).bool()],
}
CLASSES = ("class_means", "mean_embedding_distance", "prototype_distance")
VALID: dict[str, Any] = {
    **dict.fromkeys(BAD, ROWS),
    **dict.fromkeys(("labels", "other_labels", "real_labels", "synthetic_labels"), LABELS),
    **dict.fromkeys(("gradients", "targets", "parameters", "reference"), (ROWS,)),
    **{"images": IMAGES, "network": nn.BatchNorm2d(3), "num_classes": 2, "mu": 0.1, "prototypes": torch.ones(2, 4)},
    "max_norm": 1.0,
}


def valid(function: Callable[..., Any]) -> dict[str, Any]:
    """Return valid values of all arguments without a default."""
    needed = [n for n, p in inspect.signature(function).parameters.items() if p.default is p.empty]
    return {name: VALID[name] for name in needed}


def cases() -> Iterator[tuple[str, str, Any]]:
    for name in losses.__all__:
        for argument in inspect.signature(getattr(losses, name)).parameters:
            odd = BAD.get(argument, ())
            yield from ((name, argument, v) for v in odd)
            if argument.endswith("labels") and name in CLASSES:
                yield name, argument, torch.tensor([0, 1, 9])


@pytest.mark.parametrize("name", losses.__all__)
def test_valid_arguments_are_accepted(name: str) -> None:
    getattr(losses, name)(**valid(getattr(losses, name)))


@pytest.mark.parametrize(("name", "argument", "value"), [*cases()])
def test_invalid_argument_is_refused_by_name(name: str, argument: str, value: Tensor) -> None:
    function = getattr(losses, name)
    refused(lambda: function(**{**valid(function), argument: value}), (TypeError, ValueError), rf"\b{argument}\b")
