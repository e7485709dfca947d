"""Audit of whole private runs of several steps, at rates below 1 and under the stated neighboring relation.

The runs are tested in two ways against their ledger: by `audit_claim` against the stated epsilons, and by tests of the
law that the charged events describe. Each way rejects a correct mechanism with probability at most 1e-4.
"""

from __future__ import annotations

import contextlib

import pytest

from distillkit.privacy import REPLACE_RECORD, NotAccountable
from tests.distillkit.privacy.audited_runs import Runs, condense_sets, own_mechanism, step_images, train


def check(runs: Runs) -> None:
    assert not (found := runs.audit()).refuted, str(found)
    assert runs.deviations() == {}


@pytest.mark.parametrize(
    ("sigma", "rate", "steps"),
    [(1.0, 0.1, 16), *(pytest.param(*case, marks=pytest.mark.slow) for case in [(0.7, 0.25, 8), (1.0, 1.0, 4)])],
)
def test_dp_sgd_of_several_steps_satisfies_its_claim(sigma: float, rate: float, steps: int) -> None:
    check(train(range(32), sigma=sigma, rate=rate, steps=steps))


def test_as_many_records_as_charged_are_drawn() -> None:
    """With little noise the sum over all records shows how many were drawn: a number that varies from step to step."""
    assert train(range(1), sigma=0.25, rate=0.25, steps=500).deviations() == {}


@pytest.mark.slow
def test_image_sgd_of_several_steps_satisfies_its_claim() -> None:
    check(step_images(range(64), sigma=0.7, rate=0.25, steps=8))


def test_condensed_set_satisfies_its_printed_claim() -> None:
    check(condense_sets(range(32)))


def test_replacing_a_record_needs_twice_the_noise_of_removing_it() -> None:
    check(own_mechanism(range(16), noise=2.0, charged=1.0, steps=4))
    wrong = own_mechanism(range(16), noise=2.0, charged=2.0, steps=4)  # the sensitivity of add/remove
    assert wrong.audit().refuted
    assert "noise" in wrong.deviations()


def test_dp_sgd_under_replace_one_is_refused_or_satisfies_its_claim() -> None:
    with contextlib.suppress(NotAccountable):
        check(train(range(16), sigma=1.0, rate=1.0, steps=4, relation=REPLACE_RECORD))
