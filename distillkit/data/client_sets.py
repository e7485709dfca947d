"""Client views: one set a client."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import torch
from torch import Tensor

from distillkit.data._allocation import parts_of
from distillkit.sets import Images, LabeledImages, StoredImages, as_set

__all__ = ["clients"]


@overload
def clients(data: StoredImages, partition: Sequence[Tensor]) -> list[StoredImages]: ...
@overload
def clients(data: Images, partition: Sequence[Tensor]) -> list[LabeledImages]: ...
def clients(data: Images | StoredImages, partition: Sequence[Tensor]) -> list[StoredImages] | list[LabeledImages]:
    """Cut a set into one set a client, to federate it; each keeps the classes and the normalisation.

    A client's number stands in its set's `info`.

    Args:
        data: the set that the partition was made for. Clients of a `StoredImages` are such too: nothing is read.
        partition: one index tensor int [n_i] a client, as the functions of `distillkit.data.partition` return. A
            client may hold nothing; images of nobody are allowed.

    Raises:
        ValueError: no clients, an index outside the set, or an image given twice.
    """
    whole: Any = data if isinstance(data, StoredImages) else as_set(data, name="data")
    partition = parts_of(partition, len(whole))
    given = torch.cat([indices.cpu() for indices in partition])
    if len(given) != len(given.unique()):
        raise ValueError(f"partition must give no image twice, but {len(given) - len(given.unique())} are given again")
    return [
        whole[indices].replace(info={**whole.info, "client": number, "clients": len(partition)})
        for number, indices in enumerate(partition)
    ]
