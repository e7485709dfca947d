"""Shared configuration: one intra-op thread, a deterministic hypothesis profile, and a guard on the global RNG."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)
settings.register_profile(
    "distillkit",
    deadline=None,
    max_examples=25,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("distillkit")


@pytest.fixture
def global_rng_untouched() -> Iterator[None]:
    """Fail the test if it consumed or reseeded a global random state."""
    before, before_numpy = torch.get_rng_state(), np.random.get_state(legacy=False)["state"]["key"].copy()  # noqa: NPY002
    yield
    assert torch.equal(before, torch.get_rng_state()), "the global torch random state was touched"
    after_numpy = np.random.get_state(legacy=False)["state"]["key"]  # noqa: NPY002
    assert (before_numpy == after_numpy).all(), "the global numpy random state was touched"
