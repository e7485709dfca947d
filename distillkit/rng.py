"""Random generators that are passed or derived, never global."""

from __future__ import annotations

import hashlib
import operator

import torch

__all__ = ["as_generator", "derive"]


def as_generator(seed: int | torch.Generator) -> torch.Generator:
    """Return `seed` itself if it is a generator, else a new CPU generator seeded with the integer.

    Every component that draws takes `generator: int | torch.Generator`. An integer makes the call a pure
    function of its arguments; a generator is advanced by the call. Generators live on the CPU, because CUDA
    draws differ between devices; draws are moved to the device of the data.

    Raises:
        TypeError: `seed` is neither.
        ValueError: the generator does not live on the CPU.
    """
    if isinstance(seed, torch.Generator):
        if seed.device.type != "cpu":
            raise ValueError(f"generator must live on the CPU (draws are moved to the data), got {seed.device}")
        return seed
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"generator must be an int seed or a torch.Generator, got {type(seed).__name__}")
    return derive(seed)


def derive(seed: int, *keys: int | str) -> torch.Generator:
    """Return a CPU generator that is a pure function of `(seed, *keys)`.

    The keys are hashed with BLAKE2b, so `derive(0, 1, 2)` and `derive(0, 12)` are unrelated streams and adding
    a purpose never shifts the draws of another one. In `fl` the keys are (round, client, purpose).

    Raises:
        TypeError: a seed that is not an integer, or a key that is neither an integer nor a string.
    """
    parts = (operator.index(seed), *(key if isinstance(key, str) else operator.index(key) for key in keys))
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    generator = torch.Generator()
    generator.manual_seed(int.from_bytes(digest, "little") >> 1)
    return generator
