from __future__ import annotations

import hashlib
import random
import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distillkit import rng
from distillkit.rng import STATE_BYTES, as_generator, derive, generator_from_bytes
from tests.refused import refused

keys = st.lists(st.one_of(st.integers(-(2**70), 2**70), st.text(max_size=5)), max_size=4)


def first(generator: torch.Generator) -> list[int]:
    return torch.randint(2**62, (3,), generator=generator).tolist()


@given(st.integers(), keys, st.integers(), keys)
def test_different_keys_give_different_streams(
    seed: int, parts: list[int | str], other_seed: int, other: list[int | str]
) -> None:
    same = (seed, parts) == (other_seed, other)
    assert (first(derive(seed, *parts)) == first(derive(other_seed, *other))) == same


def test_keys_are_delimited() -> None:
    streams = [derive(0, 1, 2), derive(0, 12), derive(0, "1", "2"), derive(0, "1, 2"), derive(0, 1, "2"), derive(0)]
    assert len({tuple(first(g)) for g in streams}) == len(streams)


def test_numpy_and_tensor_integers_equal_python_integers() -> None:
    wanted = first(derive(3, 4, "x"))
    assert first(derive(np.int64(3), np.int32(4), "x")) == wanted  # type: ignore[arg-type]
    assert first(derive(3, torch.tensor(4), "x")) == wanted  # type: ignore[arg-type]


@pytest.mark.parametrize("parts", [(1.5,), (0, 1.0), (0, None), (0, b"a"), ("0",)])
def test_unsupported_keys_are_refused(parts: tuple[object, ...]) -> None:
    with pytest.raises(TypeError):
        derive(*parts)  # type: ignore[arg-type]


def words_of(generator: torch.Generator) -> list[int]:
    """Return the 624 words of a Mersenne Twister in torch's 5056 bytes: after 24 bytes, eight bytes each."""
    return list(struct.unpack_from("=624Q", generator.get_state().numpy().tobytes(), 24))


def test_stream_is_the_mersenne_twister_of_the_hash_of_the_keys() -> None:
    state = [*struct.unpack("<624I", hashlib.shake_256(b"(0, 1, 'purpose')").digest(2496))]
    state[0] |= 1 << 31
    generator, reference = derive(0, 1, "purpose"), random.Random()
    assert words_of(generator) == state
    reference.setstate((3, (*state, 624), None))
    wanted = [(reference.getrandbits(32) & (2**24 - 1)) / 2**24 for _ in range(2000)]  # torch keeps 24 bits of a word
    assert torch.rand(2000, generator=generator).tolist() == wanted
    assert torch.rand(2, generator=derive(0, 1, "purpose")).tolist() == [0.22910332679748535, 0.4680759310722351]


@given(st.integers(-(2**70), 2**70), st.integers(0, 69))
def test_every_bit_of_a_seed_counts(seed: int, bit: int) -> None:
    assert first(derive(seed)) != first(derive(seed ^ (1 << bit)))
    assert first(as_generator(5)) != first(as_generator(5 + 2**32))


@pytest.mark.parametrize(("one", "other"), [(30602, 54651), (11534, 89064), (124341, 126833)])
def test_streams_do_not_collide_in_32_bits(one: int, other: int) -> None:
    """The first pairs whose BLAKE2b digests agree in the 32 bits that `manual_seed` would keep."""
    assert words_of(derive(0, "client", one)) != words_of(derive(0, "client", other))
    assert first(derive(0, "client", one)) != first(derive(0, "client", other))


def test_state_uses_all_bytes_and_zeros_are_harmless() -> None:
    refused(lambda: generator_from_bytes(bytes(2495)), ValueError, "entropy must be 2496 bytes, got 2495")
    assert len(set(torch.rand(1000, generator=generator_from_bytes(bytes(STATE_BYTES))).tolist())) > 1
    for i in (3, 4, 1250, 2495):
        other = bytearray(STATE_BYTES)
        other[i] = 1
        assert words_of(generator_from_bytes(bytes(other))) != words_of(generator_from_bytes(bytes(STATE_BYTES)))


def test_another_layout_of_the_state_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = [(n, *rng._LAYOUT.fields[n][:1]) for n in ("seed", "next", "left", "seeded", "words", "normals")]  # type: ignore[index]
    rng._require_layout.cache_clear()
    monkeypatch.setattr(rng, "_LAYOUT", np.dtype(fields))
    for _ in range(2):
        refused(lambda: derive(0), RuntimeError, r"torch .* does not store CPU generators")


def test_generator_is_returned_itself_and_advanced() -> None:
    generator = torch.Generator().manual_seed(1)
    assert as_generator(generator) is generator
    assert first(as_generator(generator)) != first(as_generator(generator))


def test_integer_gives_a_new_generator_each_time_without_the_global_state(global_rng_untouched: None) -> None:
    assert first(derive(3, "x")) == first(derive(3, "x"))
    assert first(as_generator(7)) == first(as_generator(7)) == first(derive(7))
    assert first(as_generator(-7)) != first(as_generator(7))
    assert len({tuple(first(as_generator(seed))) for seed in (7, -7, 7 + 2**32)}) == 3
    assert first(as_generator(np.int64(7))) == first(as_generator(7))  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", [True, 1.0, "1", None])
def test_invalid_seeds_are_refused(seed: object) -> None:
    refused(lambda: as_generator(seed), TypeError, r"generator must be an int seed or a torch\.Generator, got")


def test_generator_of_another_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Elsewhere(torch.Generator):
        device = torch.device("cuda", 0)

    refused(lambda: as_generator(Elsewhere()), ValueError, "generator must be on the CPU")
