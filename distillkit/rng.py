"""Random generators that are passed or derived, never global."""

from __future__ import annotations

import functools
import hashlib
import operator
import sys
from collections.abc import Sequence

import numpy as np
import torch

__all__ = ["STATE_BYTES", "as_generator", "derive", "generator_of"]

_WORDS = 624
STATE_BYTES = 4 * _WORDS
"""How many bytes the state of a generator takes in: 624 words of 32 bits."""

_LAYOUT = np.dtype(
    [("seed", "u8"), ("left", "i4"), ("seeded", "i4"), ("next", "u8"), ("words", "u8", _WORDS), ("normals", "V40")]
)
"""torch's CPU generator as bytes: the words of MT19937 in 64 bits each, and normal draws kept back, here none
(ATen/CPUGeneratorImpl.cpp, `CPUGeneratorImplState`)."""


def as_generator(seed: int | torch.Generator) -> torch.Generator:
    """The generator that a component draws from: `seed` itself if it is one, else a new one seeded with the integer.

    Every component that draws takes `generator: int | torch.Generator`. An integer, of any size, makes the call a pure
    function of its arguments (it is `derive(seed)`, so other draws than `torch.Generator().manual_seed(seed)`, which
    keeps 32 bits of it); a generator is advanced by the call. Generators live on the CPU, because CUDA draws differ
    between devices; draws are moved to the device of the data.

    Raises:
        TypeError: `seed` is neither.
        ValueError: the generator does not live on the CPU.
    """
    if isinstance(seed, torch.Generator):
        if seed.device.type != "cpu":
            raise ValueError(f"generator must live on the CPU (draws are moved to the data), got {seed.device}")
        return seed
    try:
        whole = None if isinstance(seed, bool) else operator.index(seed)
    except TypeError:
        whole = None
    if whole is None:
        raise TypeError(f"generator must be an int seed or a torch.Generator, got {type(seed).__name__}")
    return derive(whole)


def derive(seed: int, *keys: int | str) -> torch.Generator:
    """A generator for one purpose: a CPU generator that is a pure function of `(seed, *keys)`.

    The keys are hashed with SHAKE-256 to all 19968 bits of the generator's state, so that `derive(0, 1, 2)` and
    `derive(0, 12)`, or seeds 5 and 5 + 2**32, are unrelated streams and adding a purpose never shifts the draws of
    another one. (`manual_seed` would keep 32 bits: of 77,000 streams two would be the same with probability 1/2.)
    In `fl` the keys are (round, client, purpose).

    The streams are those of a Mersenne Twister: statistically sound, but who sees 624 words of one knows the rest.
    Noise that a privacy claim rests on comes from `distillkit.privacy.Secret`.

    Raises:
        TypeError: a seed that is not an integer, or a key that is neither an integer nor a string.
        RuntimeError: this version of torch keeps the state of its generators otherwise (see `generator_of`).
    """
    parts = (operator.index(seed), *(key if isinstance(key, str) else operator.index(key) for key in keys))
    return generator_of(hashlib.shake_256(repr(parts).encode()).digest(STATE_BYTES))


def generator_of(entropy: bytes) -> torch.Generator:
    """A CPU generator whose whole state is given: for a secret, or a hash.

    `entropy` is `STATE_BYTES` (2496) bytes, uniformly random or a hash.

    The same bytes give the same draws on every machine. As in the authors' `init_by_array`, the first word's top bit is
    set, because a state of zeros would give zeros for ever.

    Raises:
        ValueError: another number of bytes.
        RuntimeError: torch's own `manual_seed` leaves another state than the one this function would write, so the
            layout has changed; draws that differ between versions in silence would be worse.
    """
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
    """Compare a state that torch seeds with the same one made here (Matsumoto and Nishimura's `init_genrand`)."""
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
            f"torch {torch.__version__} ({sys.byteorder}-endian) keeps the state of its CPU generators otherwise than "
            "distillkit knows (MT19937 in 5056 bytes), so seeded draws would not be the same as elsewhere; install a "
            "version of torch that distillkit was tested with, and report this one"
        )
