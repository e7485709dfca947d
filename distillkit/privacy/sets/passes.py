"""The passes of `condense_private` and the share of the budget that each gets."""

from __future__ import annotations

from dataclasses import dataclass

from distillkit._utils import check
from distillkit.training import Protocol, require_protocol

__all__ = ["Passes"]


@dataclass(frozen=True)
class Passes:
    """Number of passes of `condense_private`, and how they split the Gaussian budget (sum of 1 / sigma^2).

    Each pass releases class sums and fits images to them. A pass starts from the images of the pass before, whose mean
    embedding is the centre of its unit vectors. The passes after the first share the rest of the budget equally.

    Args:
        count: number of passes, the first included, at least 2.
        histogram_share: share of the budget for the class histogram, in (0, 0.5]. Not used if class sizes are public.
        first_share: share of the budget for the first pass, in [0, 0.5]. 0 skips it, and smooth noise is the centre.
        first_num_networks, first_steps: `num_networks` and `steps` of the first pass.
        train: protocol for training the networks of every later pass on the set of the pass before
            (`TrainedNetworks`); `networks` must then sample from `RandomNetworks`. None: untrained networks throughout.
            Trained networks embed far better where the noise is small, as with thousands of records per class; where
            it is large they learn the noise.

    Raises:
        TypeError, ValueError: values out of range.
    """

    count: int = 2
    histogram_share: float = 0.05
    first_share: float = 0.2
    first_num_networks: int = 5
    first_steps: int = 100
    train: Protocol | None = None

    def __post_init__(self) -> None:
        check.positive_int(self.count, "count", least=2)
        check.real_number(self.histogram_share, "histogram_share", above=0.0, most=0.5)
        check.real_number(self.first_share, "first_share", least=0.0, most=0.5)
        check.positive_int(self.first_num_networks, "first_num_networks")
        check.positive_int(self.first_steps, "first_steps", least=0)
        if self.train is not None:
            require_protocol(self.train)
