"""Client views: one set a client."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from distillkit.sets import LabeledImages

__all__ = ["clients"]


def clients(data: LabeledImages, partition: Sequence[Tensor]) -> list[LabeledImages]:
    """Cut a set into one set a client; each keeps the classes and the normalisation, and says its number in `info`.

    Args:
        data: the set that the partition was made for.
        partition: one index tensor int [n_i] a client, as the functions of `distillkit.data.partition` return. A
            client may hold nothing; images of nobody are allowed.

    Raises:
        ValueError: no clients, an index outside the set, or an image given twice.
    """
    if not partition:
        raise ValueError("partition must have at least one client, got none")
    given = torch.cat([torch.as_tensor(indices, dtype=torch.long).cpu() for indices in partition])
    if len(given) and not 0 <= int(given.min()) <= int(given.max()) < len(data):
        raise ValueError(
            f"partition must hold indices in [0, {len(data)}), got {int(given.min())} to {int(given.max())}; "
            "was it made for another set?"
        )
    if len(given) != len(given.unique()):
        raise ValueError(f"partition must give no image twice, but {len(given) - len(given.unique())} are given again")
    return [
        data[indices].replace(info={**data.info, "client": number, "clients": len(partition)})
        for number, indices in enumerate(partition)
    ]
