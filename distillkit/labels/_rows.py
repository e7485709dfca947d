"""Conversion of logits to half precision for storage, and of stored logits to soft labels."""

from __future__ import annotations

import torch
from torch import Tensor

_LEAST = -60000.0  # above -65504, the smallest number in half precision


def stored_logits(logits: Tensor, top_k: int | None) -> tuple[Tensor, Tensor | None]:
    """Convert logits to half precision, after subtracting the largest logit of each row.

    Args:
        logits: float [N, K].
        top_k: number k of largest logits to keep in each row. None keeps all K logits.

    Returns:
        The kept logits, [N, k], and the class index of each, int64 [N, k]. If all logits are kept, they are in the
        order of the classes, and None is returned instead of the class indices.
    """
    values = (logits - logits.amax(1, keepdim=True)).clamp_min(_LEAST)
    if top_k is None or top_k >= logits.shape[1]:
        return values.half(), None
    values, index = values.topk(top_k, dim=1)
    return values.half(), index


def label_rows(values: Tensor, index: Tensor | None, classes: int, temperature: float, dtype: torch.dtype) -> Tensor:
    """Convert logits that `stored_logits` returned to soft labels, float [N, K].

    Classes whose logits were not kept get probability 0.

    Args:
        values: logits in half precision, [N, k].
        index: class index of each logit, int64 [N, k]. None if all logits were kept; column k is class k.
        classes: number of classes, K.
        temperature: temperature of the softmax.
        dtype: dtype of the soft labels.
    """
    rows = (values.to(dtype) / temperature).softmax(1)
    return rows if index is None else rows.new_zeros(len(rows), classes).scatter_(1, index, rows)
