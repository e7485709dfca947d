from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from distillkit._utils.display import as_png, short_repr


@dataclass
class Result:
    images: Tensor
    labels: Tensor
    scores: Mapping[str, Tensor]
    parts: tuple[Tensor, ...]
    made_by: Callable[..., Tensor]
    steps: int
    hidden: int = field(default=0, repr=False)

    __repr__ = short_repr


def test_tensors_are_shown_by_dtype_and_shape_unless_short() -> None:
    one = torch.zeros(2)
    made = Result(torch.zeros(2, 1, 4, 4), torch.arange(3), {"a": torch.ones(50).double()}, (one, one), torch.eye, 3)
    assert repr(made) == (
        "Result(images=float32 [2, 1, 4, 4], labels=[0, 1, 2], scores={'a': float64 [50]}, "
        "parts=([0.0, 0.0], [0.0, 0.0]), made_by=eye, steps=3)"
    )
    assert "parts=11 tensors" in repr(Result(one, one, {}, (one,) * 11, torch.eye, 3))


def test_empty_result_has_no_image() -> None:
    with pytest.raises(ValueError, match="an empty set has no picture"):
        as_png([])
