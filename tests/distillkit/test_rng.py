from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distillkit.rng import as_generator, derive

keys = st.lists(st.one_of(st.integers(-(2**70), 2**70), st.text(max_size=5)), max_size=4)


def first(generator: torch.Generator) -> list[int]:
    return torch.randint(2**62, (3,), generator=generator).tolist()


@given(st.integers(-(2**70), 2**70), keys)
def test_a_stream_is_a_function_of_its_keys(seed: int, parts: list[int | str]) -> None:
    assert first(derive(seed, *parts)) == first(derive(seed, *parts))


@given(st.integers(), keys, st.integers(), keys)
def test_different_keys_are_different_streams(
    seed: int, parts: list[int | str], other_seed: int, other: list[int | str]
) -> None:
    same = (seed, parts) == (other_seed, other)
    assert (first(derive(seed, *parts)) == first(derive(other_seed, *other))) == same


def test_keys_are_not_glued_together() -> None:
    streams = [derive(0, 1, 2), derive(0, 12), derive(0, "1", "2"), derive(0, "1, 2"), derive(0, 1, "2"), derive(0)]
    assert len({tuple(first(g)) for g in streams}) == len(streams)


def test_numpy_and_tensor_integers_count_as_the_integer() -> None:
    wanted = first(derive(3, 4, "x"))
    assert first(derive(np.int64(3), np.int32(4), "x")) == wanted  # type: ignore[arg-type]
    assert first(derive(3, torch.tensor(4), "x")) == wanted  # type: ignore[arg-type]


@pytest.mark.parametrize("parts", [(1.5,), (0, 1.0), (0, None), (0, b"a"), ("0",)])
def test_other_keys_are_refused(parts: tuple[object, ...]) -> None:
    with pytest.raises(TypeError):
        derive(*parts)  # type: ignore[arg-type]


def test_the_stream_does_not_change_between_versions() -> None:
    assert derive(0, 1, "purpose").initial_seed() == 6061702192143924340


def test_a_generator_is_passed_through_and_advanced() -> None:
    generator = torch.Generator().manual_seed(1)
    assert as_generator(generator) is generator
    assert first(as_generator(generator)) != first(as_generator(generator))


def test_an_integer_gives_a_fresh_generator_each_time(global_rng_untouched: None) -> None:
    assert first(as_generator(7)) == first(as_generator(7)) == first(derive(7))
    assert first(as_generator(-7)) != first(as_generator(7))


@pytest.mark.parametrize("seed", [True, 1.0, "1", None])
def test_what_is_no_seed_is_refused(seed: object) -> None:
    with pytest.raises(TypeError, match=r"generator must be an int seed or a torch\.Generator, got"):
        as_generator(seed)  # type: ignore[arg-type]


def test_a_generator_of_another_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Elsewhere(torch.Generator):
        device = torch.device("cuda", 0)

    with pytest.raises(ValueError, match="generator must live on the CPU"):
        as_generator(Elsewhere())
