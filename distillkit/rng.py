"""Random generators that are passed in or derived from a seed. The global generators are never used."""

from __future__ import annotations

import functools
import hashlib
import operator
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from distillkit._utils import check

__all__ = ["STATE_BYTES", "as_generator", "derive", "generator_from_bytes"]

_WORDS = 624
STATE_BYTES = 4 * _WORDS
"""Number of bytes in a generator's state: 624 words of 32 bits."""

_LAYOUT = np.dtype(
    [("seed", "u8"), ("left", "i4"), ("seeded", "i4"), ("next", "u8"), ("words", "u8", _WORDS), ("normals", "V40")]
)
"""Memory layout of torch's CPU generator: the words of MT19937 in 64 bits each, and cached normal draws, empty here
(ATen/CPUGeneratorImpl.cpp, `CPUGeneratorImplState`).
"""


def as_generator(seed: int | torch.Generator) -> torch.Generator:
    """Return the generator that a component draws from: the given generator, or a new one for an integer seed.

    Every random component has an argument `generator: int | torch.Generator`. If you pass an integer of any size, the
    component uses `derive(seed)`, and its result is a pure function of its arguments. The draws differ from those of
    `torch.Generator().manual_seed(seed)`, which uses only 32 bits of the seed. If you pass a generator, the component
    advances it. Generators must be on the CPU, because CUDA draws differ between devices; the draws are moved to the
    device of the data.

    Args:
        seed: integer seed, or a CPU generator.

    Raises:
        TypeError: `seed` is neither an integer nor a generator.
        ValueError: the generator is not on the CPU, or PyTorch's default device is "meta".
    """
    check.default_device()
    if isinstance(seed, torch.Generator):
        if seed.device.type != "cpu":
            raise ValueError(f"generator must be on the CPU (draws are moved to the data), got {seed.device}")
        return seed
    whole = None if isinstance(seed, bool) else _whole(seed)
    if whole is None:
        raise TypeError(f"generator must be an int seed or a torch.Generator, got {type(seed).__name__}")
    return derive(whole)


def _whole(value: Any) -> int | None:
    """Return an integer of any type as an int, and anything else as None."""
    try:
        return operator.index(value)
    except TypeError:
        return None


def derive(seed: int, *keys: int | str) -> torch.Generator:
    """Derive a CPU generator for one purpose as a pure function of `(seed, *keys)`.

    SHAKE-256 hashes seed and keys to all 19968 bits of the generator's state. Different keys or seeds, such as
    `derive(0, 1, 2)` and `derive(0, 12)`, or seeds 5 and 5 + 2**32, therefore give unrelated streams of numbers. Adding
    a purpose does not change the draws for another purpose. `manual_seed` would not suffice, because it keeps 32 bits:
    among 77,000 streams, two coincide with probability 1/2. In `fl`, the keys are (round, client, purpose).

    The streams come from a Mersenne Twister. They are statistically sound, but anyone who sees 624 outputs can predict
    all later ones. For noise on which a privacy guarantee relies, use `distillkit.privacy.Secret`.

    Raises:
        TypeError: `seed` is not an integer, or a key is neither an integer nor a string.
        RuntimeError: this version of torch stores generator states in another layout (see `generator_from_bytes`).
    """
    parts = (_whole(seed), *(key if isinstance(key, str) else _whole(key) for key in keys))
    if None in parts:
        wrong = (seed, *keys)[parts.index(None)]
        raise TypeError(f"seed must be an int, and keys ints or strings, got {type(wrong).__name__}")
    return generator_from_bytes(hashlib.shake_256(repr(parts).encode()).digest(STATE_BYTES))


def generator_from_bytes(entropy: bytes) -> torch.Generator:
    """Return a CPU generator whose state consists of the given random bytes.

    The same bytes give the same draws on every machine. The top bit of the first word is set, because an all-zero state
    would only produce zeros. The reference implementation of the Mersenne Twister (`init_by_array`) does the same.

    Args:
        entropy: `STATE_BYTES` (2496) bytes, uniformly random or the output of a hash function.

    Raises:
        TypeError, ValueError: `entropy` is not bytes, or has another number of bytes.
        RuntimeError: this version of torch stores generator states in another layout, so draws would differ between
            versions.
    """
    if not isinstance(entropy, bytes | bytearray | memoryview):
        raise TypeError(f"entropy must be bytes, got {type(entropy).__name__}")
    if len(entropy) != STATE_BYTES:
        raise ValueError(f"entropy must be {STATE_BYTES} bytes, got {len(entropy)}")
    _require_layout()
    words = np.frombuffer(entropy, "<u4").astype(np.uint32)
    words[0] |= 1 << 31
    return _with_state(int.from_bytes(entropy[:8], "little"), words)


def _with_state(seed: int, words: Sequence[int] | np.ndarray) -> torch.Generator:
    state = np.zeros(1, _LAYOUT)
    state["seed"], state["left"], state["seeded"], state["words"] = seed, 1, 1, words
    generator = torch.Generator()
    generator.set_state(torch.from_numpy(state.view(np.uint8)))
    return generator


@functools.cache
def _require_layout() -> None:
    """Check that torch stores generator states in the layout that this module writes.

    A state that torch seeds is compared with the state that this module computes from the same seed by Matsumoto and
    Nishimura's `init_genrand`.
    """
    words = [5489]
    for i in range(1, _WORDS):
        words.append((1812433253 * (words[-1] ^ words[-1] >> 30) + i) & 0xFFFFFFFF)
    theirs = torch.Generator().manual_seed(words[0])
    try:
        same = torch.equal(_with_state(words[0], words).get_state(), theirs.get_state())
    except RuntimeError:
        same = False
    if not same:
        raise RuntimeError(
            f"torch {torch.__version__} ({sys.byteorder}-endian) does not store CPU generators in the layout that "
            "distillkit knows (MT19937 in 5056 bytes), so seeded draws would differ; install a version of torch that "
            "distillkit was tested with, and report this one"
        )
