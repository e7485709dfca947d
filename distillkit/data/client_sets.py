"""Division of a set into one set per client, given a partition."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

from torch import Tensor

from distillkit.data._allocation import as_index_tensors
from distillkit.sets import Images, LabeledImages, StoredImages, as_set


@overload
def clients(data: StoredImages, partition: Sequence[Tensor]) -> list[StoredImages]: ...
@overload
def clients(data: Images, partition: Sequence[Tensor]) -> list[LabeledImages]: ...
def clients(data: Images | StoredImages, partition: Sequence[Tensor]) -> list[StoredImages] | list[LabeledImages]:
    """Split a set into one set per client. Each client set keeps the classes and normalization of the whole set.

    The `info` of each client set records the index of the client and the number of clients.

    Args:
        data: the set to split. If it is a `StoredImages`, the client sets are `StoredImages` too, and no image is read.
        partition: one index tensor per client, int [n_i], as the functions of `distillkit.data.partition` return.
            Clients may be empty, and images may belong to no client.

    Raises:
        ValueError: there are no clients, an index is outside the set, or an image is assigned twice.
    """
    whole: Any = data if isinstance(data, StoredImages) else as_set(data, name="data")
    partition = as_index_tensors(partition, len(whole))
    return [
        whole[indices].replace(info={**whole.info, "client": number, "clients": len(partition)})
        for number, indices in enumerate(partition)
    ]
