"""Source of the noise and the Poisson draws of every mechanism."""

from __future__ import annotations

import importlib.util
import math
import secrets
from collections import Counter

import torch
from torch import Tensor

from distillkit._utils import check
from distillkit.privacy._sealed import Sealed
from distillkit.privacy.accounting._ranges import power_of_two
from distillkit.privacy.capture._captured_function import require_no_own_code
from distillkit.rng import STATE_BYTES, derive, generator_from_bytes

_BITS = 53

_UNIT, _DISCRETE_UNIT = 2.0**-20, 2.0**-48
"""Units of released values and of the discrete Gaussian, relative to the standard deviation."""


class Secret(Sealed):
    """Source of noise: the operating system's entropy, or a seed.

    Every random draw on which a privacy claim relies comes from a `Secret`: noise, the choice of records for a step,
    and the masks of dropout layers. Without a seed, all these draws come from the operating system's cryptographic
    generator (`secrets.token_bytes`), never from `torch.Generator`. A `torch.Generator` is a Mersenne Twister, and an
    adversary who knows all records but one could compute the state of the generator from the noise. With a seed, the
    draws are repeatable, and anyone who knows the seed knows the noise. The ledger then records that no guarantee
    holds: use seeds for tests, not for releases. The class has no subclasses, and its methods cannot be replaced on an
    object, because every stated epsilon relies on them.

    Each record is chosen by comparing a uniform draw with the sample rate. The draw has 53 random bits, so the actual
    rate differs by at most 2^-53 from the rate that is accounted for.

    **Noise lies on a public grid.** Data plus float64 noise would reveal the data in its last bits (Mironov, "On
    significance of the least significant bits for differential privacy", CCS 2012). `add_noise` therefore publishes
    multiples of a public unit only: 2^-20 times the standard deviation, rounded down to a power of two. With real
    numbers, the release is the rounded result of the Gaussian mechanism. Rounding is post-processing, so the
    accountants hold unchanged. *The limit:* noise in float64 is not ideal. A draw is the sum of four Box-Muller draws
    of 53-bit uniforms, divided by two (Holohan and Braghin, "Secure random sampling in differential privacy", 2021,
    section 5.1). About 2^32 such numbers share a multiple of the unit, so its probability is off by a factor of about 1
    +- 2^-32; and no draw exceeds 12.2 standard deviations, where the tail has less than 1e-33.

    With `discrete=True`, the noise is the discrete Gaussian of OpenDP (`pip install "distillkit[opendp]"`), drawn in
    exact arithmetic on a grid of 2^-48 standard deviations, before the rounding. For data on this grid (histograms, and
    `class_sums` up to sigma 128), the mechanism then has no numerical limit: the discrete Gaussian has at most the
    Renyi divergence of the Gaussian (Canonne, Kamath and Steinke, "The discrete Gaussian for differential privacy",
    NeurIPS 2020), and at this scale the same curve of epsilon and delta beyond float64. Other data are rounded to the
    grid, which adds up to sqrt(d) 2^-48 standard deviations to the sensitivity of d numbers. A value costs about 25
    microseconds, and 0.2 without the option: 10 seconds for the 400,000 values of `condense_private` with 20 networks,
    but seconds per step of DP-SGD.

    Args:
        seed: integer seed, or None for the operating system's entropy.
        discrete: whether to draw the noise from OpenDP's discrete Gaussian, which has no seed.

    Attributes:
        seeded: whether the draws come from a seed; if so, no guarantee holds.
        draws: number of noise tensors drawn so far.
        drawn: number of Gaussian values drawn so far for each standard deviation; an audit compares these counts with
            the ledger (`attacks.audit.audit_noise`).
    """

    __slots__ = ("_discrete", "_generator", "drawn", "draws")

    def __init__(self, seed: int | None = None, *, discrete: bool = False) -> None:
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
            raise TypeError(f"seed must be an int, or None for the system's entropy, got {type(seed).__name__}")
        if check.boolean(discrete, "discrete"):
            if seed is not None:
                raise ValueError(f"discrete noise has no seed, got seed={seed}: leave out the seed or discrete=True")
            if importlib.util.find_spec("opendp") is None:
                raise ImportError('discrete=True needs OpenDP: pip install "distillkit[opendp]"')
        self._discrete = discrete
        self._generator = None if seed is None else derive(seed, "secret")
        self.draws = 0
        self.drawn: Counter[float] = Counter()

    @property
    def seeded(self) -> bool:
        """True if this source draws from a known seed. If so, releases with its noise have no privacy guarantee."""
        return self._generator is not None

    def uniform(self, count: int) -> Tensor:
        """Draw `count` independent uniform numbers in (0, 1]: float64 [count] on the CPU, with 53 random bits each."""
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

    def add_noise(self, values: Tensor, std: float) -> Tensor:
        """Return `values` plus Gaussian noise N(0, std^2), rounded to a public grid.

        The grid is the multiples of 2^(floor(log2(std)) - 20). Publish only the result. If you add noise to your own
        sums, use this method, so that no low bits of the sums remain; see the class for the mechanism and its limit.

        Args:
            values: private values of any shape: floats, or counts, which are exact below 2^53.
            std: standard deviation, >= 0; 0 draws nothing and returns the values unrounded.

        Returns:
            The noised values, float64 on the device of `values`.

        Raises:
            NotCapturable, PrivacyError: `values` is of a subclass of tensors, or a torch mode is active.
            TypeError, ValueError: `values` is not a real tensor, or `std` has the wrong type or is out of range.
        """
        std = check.real_number(std, "std", least=0.0)
        if check.instance(values, Tensor, "values", "a torch.Tensor").is_complex():
            raise TypeError(f"values must be real, got {values.dtype}: noise its real and imaginary parts separately")
        require_no_own_code([values], "values")
        values = values.detach().double()
        if std == 0:
            return values.clone()
        self.draws += 1
        self.drawn[std] += values.numel()
        unit, fine = power_of_two(std) * _UNIT, power_of_two(std) * _DISCRETE_UNIT
        if self._discrete:
            values, noise = (values / fine).round_() * fine, self._integers(values.numel(), std / fine) * fine
        else:
            noise = self._gaussians(values.numel()) * (std / 2)
        whole = (values / unit).round_()
        rest = noise.view(values.shape).to(values.device).add_(values - whole * unit)
        return rest.div_(unit).round_().add_(whole).mul_(unit)

    def _gaussians(self, count: int) -> Tensor:
        """Draw `count` Gaussians of variance 4, each as a sum of four, float64."""
        radius = (-2 * self.uniform(2 * count).log()).sqrt().view(2, -1)
        angle = (2 * math.pi) * self.uniform(2 * count).view(2, -1)
        return (radius * (angle.cos() + angle.sin())).sum(0)

    @staticmethod
    def _integers(count: int, std: float) -> Tensor:
        """Draw `count` discrete Gaussians on the integers, which float64 holds exactly."""
        from opendp.domains import atom_domain, vector_domain
        from opendp.measurements import make_gaussian
        from opendp.metrics import l2_distance
        from opendp.mod import enable_features

        enable_features("contrib")
        draw = make_gaussian(vector_domain(atom_domain(T="i64")), l2_distance(T="f64"), scale=std)
        return torch.tensor(draw([0] * count), dtype=torch.float64)

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
        rate = check.real_number(rate, "rate", least=0.0, most=1.0)
        return (self.uniform(count) < rate).nonzero().flatten()

    def __repr__(self) -> str:
        if self.seeded:
            return "Secret(seeded, no guarantee)"
        return "Secret(operating system, discrete)" if self._discrete else "Secret(operating system)"


def as_secret(secret: Secret | int | None) -> Secret:
    """Return the `Secret` for the option `secret` of a function or class that adds noise.

    Args:
        secret: a `Secret`, which is returned unchanged; None for the operating system's entropy; or an integer seed for
            repeatable tests, for which no guarantee holds.

    Raises:
        TypeError: `secret` has another type.
    """
    if secret is not None and not isinstance(secret, int | Secret):
        raise TypeError(f"secret must be a Secret, an int seed for tests, or None, got {type(secret).__name__}")
    return secret if isinstance(secret, Secret) else Secret(secret)
