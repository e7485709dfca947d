"""Source of the noise and the Poisson draws of every mechanism."""

from __future__ import annotations

import math
import secrets
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from distillkit._utils import check
from distillkit.rng import STATE_BYTES, derive, generator_from_bytes

__all__ = ["Secret", "as_secret"]

_BITS = 53


class Secret:
    """Source of noise: the operating system's entropy, or a seed.

    Every random draw on which a privacy claim relies comes from a `Secret`: noise, the choice of records for a step,
    and the masks of dropout layers. Without a seed, all these draws come from the operating system's cryptographic
    generator (`secrets.token_bytes`), never from `torch.Generator`. A `torch.Generator` is a Mersenne Twister, and an
    adversary who knows all records but one could compute the state of the generator from the noise. With a seed, the
    draws are repeatable, and anyone who knows the seed knows the noise. The ledger then records that no guarantee
    holds: use seeds for tests, not for releases.

    Each record is chosen by comparing a uniform draw with the sample rate. The draw has 53 random bits, so the actual
    rate differs by at most 2^-53 from the rate that is accounted for. A Gaussian is the sum of four Box-Muller draws in
    float64, divided by two (Holohan and Braghin, "Secure random sampling in differential privacy", 2021, section 5.1).
    A single draw has gaps in its last bits that can reveal the value to which the noise was added (Mironov, CCS 2012).
    Four draws make that attack impractical; only a discrete mechanism rules it out.

    Args:
        seed: integer seed, or None for the operating system's entropy.

    Attributes:
        seeded: whether the draws come from a seed; if so, no guarantee holds.
        draws: number of noise tensors drawn so far.
        drawn: number of Gaussian values drawn so far for each standard deviation; an audit compares these counts with
            the ledger (`attacks.audit.audit_noise`).
    """

    def __init__(self, seed: int | None = None) -> None:
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
            raise TypeError(f"seed must be an int, or None for the system's entropy, got {type(seed).__name__}")
        self._generator = None if seed is None else derive(seed, "secret")
        self.draws = 0
        self.drawn: Counter[float] = Counter()

    @property
    def seeded(self) -> bool:
        """True if this source draws from a known seed. If so, releases with its noise have no privacy guarantee."""
        return self._generator is not None

    def uniform(self, count: int) -> Tensor:
        """Draw `count` independent uniform numbers in (0, 1): float64 [count] on the CPU, with 53 random bits each."""
        if self._generator is not None:
            whole = torch.randint(1 << _BITS, (count,), generator=self._generator)
        elif count:
            whole = torch.frombuffer(bytearray(secrets.token_bytes(8 * count)), dtype=torch.int64)
            whole = whole.bitwise_and((1 << _BITS) - 1)
        else:
            whole = torch.zeros(0, dtype=torch.int64)
        return (whole.double() + 0.5) * 2.0**-_BITS

    def generator(self) -> torch.Generator:
        """Return a new generator with a secret state, for augmentation and dropout.

        If their random draws were public, they would reveal a record's position in a batch.
        """
        if self._generator is None:
            return generator_from_bytes(secrets.token_bytes(STATE_BYTES))
        drawn = torch.randint(256, (STATE_BYTES,), dtype=torch.uint8, generator=self._generator)
        return generator_from_bytes(drawn.numpy().tobytes())

    def normal(self, shape: Sequence[int], std: float) -> Tensor:
        """Draw a tensor of Gaussian noise, N(0, std^2), float64 on the CPU.

        Args:
            shape: shape of the tensor.
            std: standard deviation, >= 0; 0 draws nothing and returns zeros.

        Raises:
            TypeError, ValueError: `std` has the wrong type or is out of range.
        """
        check.real_number(std, "std", least=0.0)
        if std == 0:
            return torch.zeros(tuple(shape), dtype=torch.float64)
        count = math.prod(shape)
        self.draws += 1
        self.drawn[std] += count
        radius = (-2 * self.uniform(2 * count).log()).sqrt().view(2, -1)
        angle = (2 * math.pi) * self.uniform(2 * count).view(2, -1)
        total = (radius * (angle.cos() + angle.sin())).sum(0)
        return (total * (std / 2)).view(tuple(shape))

    def poisson(self, count: int, rate: float) -> Tensor:
        """Draw the records of a step by Poisson sampling. Each record takes part independently.

        Args:
            count: number of records.
            rate: probability with which each record takes part, in [0, 1].

        Returns:
            Indices of the drawn records, int64 [m], ascending; m may be 0.

        Raises:
            TypeError, ValueError: `rate` has the wrong type or is out of range.
        """
        check.real_number(rate, "rate", least=0.0, most=1.0)
        return (self.uniform(count) < rate).nonzero().flatten()

    def __repr__(self) -> str:
        return "Secret(seeded, no guarantee)" if self.seeded else "Secret(operating system)"


def as_secret(secret: Secret | int | None) -> Secret:
    """Return the `Secret` for the option `secret` of a function or class that adds noise.

    Args:
        secret: a `Secret`, which is returned unchanged; None for the operating system's entropy; or an integer seed for
            repeatable tests, for which no guarantee holds.

    Raises:
        TypeError: `secret` has another type.
    """
    return secret if isinstance(secret, Secret) else Secret(secret)
