"""ShadowScores: design, folder, equal results for any workers, and evaluation on each shadow as target."""

from __future__ import annotations

import math
import re
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import t as student
from torch import Tensor, nn

from attacks import clopper_pearson, ppv, roc
from attacks.membership import SHADOW_ATTACKS, Cost, Pipeline, ShadowScores, halves, leave_one_out, lira, rmia
from attacks.membership._workers import Job, fit_shadows
from attacks.membership.pipeline import model_scorer, stable_logit
from attacks.membership.shadow_models import estimate_cost, run_shadows
from attacks.statistics import OperatingPoint, Rate
from distillkit._utils.files import write_tensors
from distillkit.locking import InUse
from distillkit.networks import ConvNet, build
from distillkit.rng import derive
from distillkit.study import worker_pool
from tests.attacks.membership.importable_fit import IMAGES, fit, unfit, unfitted
from tests.refused import refused

LABELS = torch.arange(20) % 2
POPULATION = (torch.rand(6, 1, 4, 4, generator=derive(1)), torch.arange(6) % 2)


def pipeline(run: Any = fit, **changes: Any) -> Pipeline:
    return Pipeline(run, IMAGES, LABELS, **{"population": POPULATION, "tag": "mean", **changes})


def drawn(seed: int, count: int = 12, records: int = 60, effect: float = 1.0) -> ShadowScores:
    """Return scores of shadows without training: records with their own means, models with their own shift."""
    inside, g = halves(count, records, seed), derive(seed, "scores")
    own = torch.randn(records, generator=derive(3), dtype=torch.float64)
    scores = own + torch.randn(count, records, generator=g, dtype=torch.float64) + effect * inside
    return ShadowScores(inside, {"model": scores}, {"model": torch.randn(count, 30, generator=g, dtype=torch.float64)})


def same(a: ShadowScores, b: ShadowScores) -> bool:
    kinds = ((a.scores, b.scores), (a.population, b.population))
    return torch.equal(a.inside, b.inside) and all(torch.equal(x[n], y[n]) for x, y in kinds for n in x)


# The design.


@given(st.integers(1, 6), st.integers(4, 25), st.integers(0, 1000))
def test_halves_are_balanced_and_independent_of_the_target(pairs: int, records: int, seed: int) -> None:
    inside = halves(2 * pairs, records, seed)
    assert inside.sum(0).tolist() == [pairs] * records
    assert set(inside.sum(1).tolist()) <= {records // 2, (records + 1) // 2}
    assert torch.equal(inside[::2], ~inside[1::2])
    assert torch.equal(halves(2 * pairs + 4, records, seed)[: 2 * pairs], inside)
    if pairs > 2 and len({tuple(row.tolist()) for row in inside}) == len(inside):
        rest = ShadowScores(inside, {"s": torch.zeros(inside.shape)}).without(1)
        assert rest.inside.sum(0).tolist() == [pairs - 1] * records


def test_every_half_is_equally_likely() -> None:
    """Two records are together in a half with probability (n/2 - 1) / (n - 1)."""
    inside = halves(4000, 6, 0)[::2].double()
    assert not torch.equal(inside, halves(4000, 6, 1)[::2].double())
    together = (inside.T @ inside) / 2000
    assert (together[~torch.eye(6, dtype=torch.bool)] - 0.5 * 2 / 5).abs().max() < 0.05
    assert (inside.mean(0) - 0.5).abs().max() < 0.05
    sizes = halves(800, 5, 0)[::2].sum(1)  # of an odd number, either half of a pair is the larger one
    assert set(sizes.tolist()) == {2, 3}
    assert abs(float((sizes == 3).double().mean()) - 0.5) < 0.1


def test_balance_that_reveals_the_target_is_refused() -> None:
    """Every record in exactly half of the shadows, as in public releases of LiRA, but not in pairs: the rest has a
    record once less often if the target has it, and counting finds all members."""
    keep = torch.rand(8, 40, generator=derive(5)).argsort(0) < 4
    scores = {"s": torch.randn(8, 40, generator=derive(6))}
    assert roc(-keep[1:].sum(0).double(), keep[0]).auc == 1.0
    for own, times in ((keep, "3 times and another one 4"), (torch.cat([~keep[:1], keep[1:]]), "4 .* another one 3")):
        refused(lambda own=own: ShadowScores(own, scores).target(0, "s"), ValueError, f"shadow 0 {times} times, which")
    free = torch.rand(8, 40, generator=derive(7)) < 0.5
    assert len(ShadowScores(free, scores).target(0, "s").inside) == 7
    for own in (True, False):  # of members alone, or of others, equal numbers reveal nothing
        inside = torch.tensor([[own, own, not own, not own], [True, True, False, True], [False] * 4])
        assert len(ShadowScores(inside, {"s": torch.zeros(3, 4)}).without(0)) == 2
    counting = leave_one_out(drawn(0), {"counting": lambda t: -t.inside.sum(0).double()}, fpr=0.1, progress=False)
    assert (counting["counting"].auc.value, counting["counting"].auc.high) == (0.5, 0.5)


# Running it.


def test_shadows_contain_the_pipelines_scores() -> None:
    found = run_shadows(pipeline(), 4, seed=3, progress=False)
    seeds: list[int] = []

    def spy(indices: Tensor, seed: int) -> Any:
        seeds.append(seed)
        return fit(indices, seed)

    again = run_shadows(pipeline(spy), 4, seed=3, progress=False)
    assert same(found, again)
    assert len(set(seeds)) == 4
    assert all(0 <= s < 2**31 for s in seeds)
    for number in range(4):
        scorers = fit(found.inside[number].nonzero().flatten(), seeds[number])
        assert torch.equal(found.scores["model"][number], scorers["model"](IMAGES, LABELS).double())
        assert torch.equal(found.population["scores.both"][number], scorers["scores.both"](*POPULATION).double())
    assert torch.equal(found.labels if found.labels is not None else LABELS - 1, LABELS)
    assert not same(found, run_shadows(pipeline(spy), 4, seed=4, progress=False))
    assert len(set(seeds)) == 8


def test_number_of_workers_changes_nothing() -> None:
    alone = run_shadows(pipeline(), 4, progress=False)
    assert same(alone, run_shadows(pipeline(), 4, workers=3))
    with worker_pool(1) as pool:
        pool.submit(torch.set_num_threads, 2).result()
        assert same(alone, run_shadows(pipeline(), 4, executor=pool, progress=False))
        assert pool.submit(torch.get_num_threads).result() == 1


def test_failure_cancels_the_other_calls_of_an_executor_and_leaves_it_open() -> None:
    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(ValueError, match="no shadow fits") as caught:
            run_shadows(pipeline(unfit), 20, executor=pool, progress=False)
        assert caught.value.__notes__ == ["raised in shadow 0"]
        assert pool.submit(int).result() == 0
        assert len(unfitted) < 10
        unfitted.clear()
        jobs = [Job(number, halves(2, 20, 0)[0], number) for number in range(20)]
        made = fit_shadows(
            pipeline(lambda indices, seed: unfit(indices, seed) if seed else fit(indices, seed)), jobs, 1, pool
        )
        next(made)
        made.close()  # as an error of the caller does
        assert pool.submit(int).result() == 0
        assert len(unfitted) < 10


def test_interrupted_run_resumes_and_shadows_can_be_added(tmp_path: Path) -> None:
    calls: list[int] = []

    def fragile(indices: Tensor, seed: int) -> Any:
        calls.append(seed)
        if len(calls) == 4:
            raise RuntimeError("power cut")
        return fit(indices, seed)

    with pytest.raises(RuntimeError, match="power cut") as caught:
        run_shadows(pipeline(fragile), 6, out=tmp_path, progress=False)
    assert caught.value.__notes__ == ["raised in shadow 3"]
    kept = list(tmp_path.glob("shadow-0000?.safetensors"))
    assert len(kept) >= 3
    calls.clear()
    found = run_shadows(pipeline(fragile), 6, out=str(tmp_path), progress=False)
    assert len(calls) == 6 - len(kept)
    assert same(found, run_shadows(pipeline(), 6, progress=False))
    calls[:] = [0] * 10
    more = run_shadows(pipeline(fragile), 8, out=tmp_path, progress=False)
    assert len(calls) == 12
    assert torch.equal(more.scores["model"][:6], found.scores["model"])
    assert same(run_shadows(pipeline(fragile), 4, out=tmp_path), run_shadows(pipeline(), 4))
    assert len(calls) == 12


def test_shadows_in_progress_during_a_failure_are_kept(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no shadow fits") as caught:
        run_shadows(pipeline(unfit), 4, progress=False)
    assert caught.value.__notes__ == ["raised in shadow 0"]
    raised = threading.Event()

    def one_fails(indices: Tensor, seed: int) -> Any:
        if seed == bad:
            raised.set()
            raise RuntimeError("out of memory")
        if seed == slow:
            assert raised.wait(10)
        return fit(indices, seed)

    seeds: list[int] = []
    run_shadows(pipeline(lambda indices, seed: (seeds.append(seed), fit(indices, seed))[1]), 4, progress=False)
    bad, slow = seeds[2], seeds[1]
    with pytest.raises(RuntimeError, match="out of memory"):
        run_shadows(pipeline(one_fails), 4, out=tmp_path, workers=2, progress=False)
    assert not (tmp_path / "shadow-00002.safetensors").exists()
    (tmp_path / "shadow-00001.safetensors").rename(tmp_path / "shadow-00009.safetensors")  # is made last, or ignored
    for missing in ((), (0, 1, 3)):
        for number in missing:
            (tmp_path / f"shadow-0000{number}.safetensors").unlink()
        assert same(run_shadows(pipeline(), 4, out=tmp_path), run_shadows(pipeline(), 4))


def test_folder_of_another_design_is_refused(tmp_path: Path) -> None:
    run_shadows(pipeline(), 4, out=tmp_path, progress=False)
    other = IMAGES.clone()
    other[0, 0, 0, 0] += 1
    changed = [
        (pipeline(tag="median"), 0, "tag 'mean', here 'median'"),
        (pipeline(), 1, "seed 0, here 1"),
        (Pipeline(fit, other, LABELS, POPULATION, "mean"), 0, "data '"),
        (Pipeline(fit, IMAGES[:4], LABELS[:4], POPULATION, "mean"), 0, "records 20, here 4"),
        (pipeline(population=None), 0, "population 6, here 0"),
        (Pipeline(fit, IMAGES.view(20, 1, 2, 8), LABELS, POPULATION, "mean"), 0, "data '"),
        (Pipeline(fit, IMAGES, LABELS.flip(0), POPULATION, "mean"), 0, "data '"),
        (Pipeline(fit, IMAGES, LABELS, (POPULATION[0].mT.requires_grad_(), POPULATION[1]), "mean"), 0, "data '"),
        (Pipeline(fit, IMAGES, LABELS, (POPULATION[0], POPULATION[1].flip(0)), "mean"), 0, "data '"),
    ]
    for one, seed, said in changed:
        for call in (run_shadows, estimate_cost):
            words = f"of another design .*{said}.*use another folder, or the pipeline and seed of its first call$"
            with pytest.raises(ValueError, match=words):
                call(one, 4, out=tmp_path, seed=seed)
    (tmp_path / "design.json").unlink()
    refused(lambda: run_shadows(pipeline(), 4, out=tmp_path), ValueError, r"holds shadows but no design\.json")
    for text, said in (
        ("{half", r"has a damaged design\.json \(Expecting property name"), ("3", r"damaged design\.json \('int'"),
        ("{}", "another design .format None, here 'distillkit shadow 1'; records None, here 20; "),
    ):  # fmt: skip
        (tmp_path / "design.json").write_text(text, encoding="utf-8")
        refused(lambda: run_shadows(pipeline(), 4, out=tmp_path), ValueError, said)


def test_damaged_shadow_is_named(tmp_path: Path) -> None:
    (tmp_path / "set.safetensors").touch()  # which is not one
    run_shadows(pipeline(), 4, out=tmp_path, progress=False)
    (tmp_path / "shadow-00002.safetensors").write_bytes(b"half")
    refused(lambda: run_shadows(pipeline(), 4, out=tmp_path), ValueError, r"shadow-00002\.safetensors is damaged")
    write_tensors(tmp_path / "shadow-00002.safetensors", {"scores.model": ZEROS}, {"format": "other", "seconds": "1"})
    words = r"is not a shadow's scores \(format 'other', want 'distillkit shadow 1'\)"
    refused(lambda: run_shadows(pipeline(), 4, out=tmp_path), ValueError, words)


def test_cost_estimate_runs_one_shadow_and_keeps_it(tmp_path: Path) -> None:
    calls: list[int] = []

    def counted(indices: Tensor, seed: int) -> Any:
        calls.append(seed)
        for call in (run_shadows, estimate_cost):
            refused(lambda call=call: call(pipeline(), 4, out=tmp_path), InUse, f"the folder of shadows {tmp_path} is")  # type: ignore[misc]
        time.sleep(0.05)
        return fit(indices, seed)

    cost = estimate_cost(pipeline(counted), 6, out=tmp_path, workers=2)
    assert (cost.missing, cost.workers, len(calls)) == (5, 2, 1)
    assert cost.seconds == pytest.approx(3 * cost.each)
    assert estimate_cost(pipeline(counted), 6, out=tmp_path).missing == 4
    run_shadows(pipeline(counted), 6, out=tmp_path, progress=False)
    assert len(calls) == len(set(calls)) == 6
    assert 0.05 < cost.each < 60
    done = estimate_cost(pipeline(counted), 6, out=tmp_path)
    assert (done, done.seconds, len(calls)) == (Cost(cost.each, 0, 1), 0, 6)
    assert str(Cost(3.1, 65, 2)) == "3.1 s per shadow: 65 more take at least 102 s with 2 at a time"


def test_fit_with_global_draws_is_seeded_or_warned_of() -> None:
    def careless(indices: Tensor, seed: int) -> Any:
        shift = torch.rand(())
        return {"model": lambda x, y: x.flatten(1).sum(1) + shift}

    before = torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        once, again = (run_shadows(pipeline(careless), 4, progress=False) for _ in range(2))
        assert torch.equal(torch.get_rng_state(), before)
        run_shadows(pipeline(), 4, workers=2, progress=False)
        list(fit_shadows(pipeline(careless), [Job(0, halves(4, 20, 0)[0], 0)], 2, None))  # of one alone
    assert same(once, again)
    assert len(once.scores["model"][:, 0].unique()) == 4
    with pytest.warns(UserWarning, match=r"global generator.*an executor or workers=1") as caught:
        run_shadows(pipeline(careless), 4, workers=2, progress=False)
    assert caught[0].filename == __file__
    assert not torch.equal(torch.get_rng_state(), before)  # several threads cannot seed it
    torch.set_rng_state(before)


def test_model_is_scored_in_eval_mode_and_in_chunks() -> None:
    network = nn.Sequential(build(lambda: ConvNet((1, 8, 8), 3, width=4, depth=1, norm="batch"), 0), nn.Dropout(0.5))
    images, labels = torch.randn(9, 1, 8, 8, generator=derive(0)), torch.arange(9) % 3
    network.train()
    network[1].eval()
    sizes: list[int] = []
    network.register_forward_pre_hook(lambda module, given: sizes.append(len(given[0])))
    whole = model_scorer(network, None)(images, labels)
    assert [m.training for m in network] == [True, False]
    assert torch.allclose(model_scorer(network, None, chunk=2)(images, labels), whole, atol=1e-6)
    assert sizes == [9, 2, 2, 2, 2, 1]
    assert torch.allclose(whole, network.eval()(images), atol=1e-6)
    assert torch.equal(model_scorer(network)(images, labels), stable_logit(network(images), labels))


@pytest.mark.parametrize("place", range(4))
def test_every_tensor_of_a_pipeline_stays_as_it_is(place: int) -> None:
    given = [IMAGES.clone(), LABELS.clone(), *(one.clone() for one in POPULATION)]

    def careless(indices: Tensor, seed: int) -> Any:
        found = fit(indices, seed)
        given[place].zero_()
        return found

    made = Pipeline(careless, *given[:2], population=(given[2], given[3]))
    refused(lambda: run_shadows(made, 4, progress=False), ValueError, "must not change the pipeline's images")


# Judging attacks.


def test_allowed_rate_of_one_calls_every_record_a_member() -> None:
    leave_one_out(drawn(1), {"t": SHADOW_ATTACKS["threshold"]}, fpr=1 / 30)  # the smallest
    [found] = leave_one_out(drawn(1), {"t": SHADOW_ATTACKS["threshold"]}, fpr=1.0, progress=False).values()
    assert {p.threshold for p in found.points} == {-math.inf}
    assert (found.tpr.value, found.fpr.value) == (1, 1)
    [tied] = leave_one_out(drawn(1), {"t": lambda t: torch.zeros(60)}, fpr=0.5, progress=False).values()
    assert {p.threshold for p in tied.points} == {math.inf}  # equal scores are all above a threshold, or none


def slow_interval(values: list[float], units: list[int], confidence: float) -> tuple[float, float, float]:
    """Return the mean and its cluster-robust interval."""
    mean, count = float(np.mean(values)), len(set(units))
    sums = [sum(v - mean for v, u in zip(values, units) if u == unit) for unit in set(units)]
    error = math.sqrt(count / (count - 1) * sum(one * one for one in sums)) / len(values)
    half = student.isf((1 - confidence) / 2, count - 1) * error
    return mean, max(0.0, mean - half), min(1.0, mean + half)


@pytest.mark.parametrize(("targets", "fpr"), [(8, 0.1), (7, 0.1), (8, math.nextafter(0.1, 0))])
def test_leave_one_out_equals_a_plain_loop(targets: int, fpr: float) -> None:
    """Target by target; the complement of the last one may be missing, and scores may be equal."""

    def tied(values: Tensor) -> Tensor:
        return values.mul(4).round() / 4 if targets == 7 else values

    whole = drawn(2, count=8, records=40)
    one = whole.only(torch.arange(8) < targets)
    attacks = {"LiRA": lambda target: tied(SHADOW_ATTACKS["LiRA offline"](target))}
    [found] = leave_one_out(one, attacks, fpr=fpr, confidence=0.9, progress=False).values()
    scores, inside, rows = one.scores["model"], one.inside, []
    for t in range(targets):
        rest = [s for s in range(targets) if s // 2 != t // 2]
        outside = []
        for judge in rest:
            left = [s for s in rest if s // 2 != judge // 2]
            outside += tied(lira(scores[judge], inside[left], scores[left]))[~inside[judge]].tolist()
        threshold = min(v for v in outside if sum(o >= v for o in outside) <= fpr * len(outside) + 1e-9)
        attack = tied(lira(scores[t], inside[rest], scores[rest]))
        hits, false = (int((attack >= threshold)[side].sum()) for side in (inside[t], ~inside[t]))
        rates = Rate.of(hits, int(inside[t].sum()), 0.9), Rate.of(false, int((~inside[t]).sum()), 0.9)
        assert found.points[t] == OperatingPoint(threshold, *rates, false < 10)
        rows.append([roc(attack, inside[t]).auc, *(rate.value for rate in rates)])
    for rate, values in zip((found.auc, found.tpr, found.fpr), zip(*rows)):
        wanted = slow_interval(list(values), [t // 2 for t in range(targets)], 0.9)
        assert (rate.value, rate.low, rate.high) == pytest.approx(wanted)
        assert rate.confidence == 0.9
    assert (found.nominal_fpr, found.few) == (fpr, False)
    shown = [f"{100 * r.value:.2g} % ({100 * r.low:.2g} to {100 * r.high:.2g})" for r in (found.tpr, found.fpr)]
    assert repr(found) == str(found) == f"TPR {shown[0]} at FPR {shown[1]}; AUC {found.auc} ({targets} targets)"


@pytest.mark.parametrize("missed", [False, True])
def test_few_hits_or_misses_have_an_interval_at_least_as_wide_as_a_count(missed: bool) -> None:
    """If nobody or everybody is called a member there is no spread, but no certainty either."""
    totals = set()
    for seed in range(60):
        one = drawn(seed, count=8, records=40, effect=0.0)
        attack, fpr = {"t": SHADOW_ATTACKS["threshold"]}, 0.945 if missed else 0.06
        found = leave_one_out(one, attack, fpr=fpr, confidence=0.9, progress=False)["t"]
        for estimate, rates in ((found.tpr, [p.tpr for p in found.points]), (found.fpr, [p.fpr for p in found.points])):
            total = sum(rate.hits for rate in rates)
            low, high = clopper_pearson(total, 160, 0.9) if min(total, 160 - total) < 10 else (1.0, 0.0)
            value, *ends = slow_interval([rate.value for rate in rates], [t // 2 for t in range(8)], 0.9)
            wanted = (value, min(low, ends[0]), max(high, ends[1]))
            assert (estimate.value, estimate.low, estimate.high) == pytest.approx(wanted)
        totals.add(160 - total if missed else total)
        assert (found.few, ", few false positives" in str(found)) == (total < 10, total < 10)
    assert {9, 10} <= totals


def test_bars_end_at_their_total(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended, told = [], list[str]()

    @contextmanager
    def counted(total: int, name: str, *, done: int = 0, **options: Any) -> Iterator[Any]:
        steps: list[None] = []
        yield SimpleNamespace(update=lambda: steps.append(None), set_postfix_str=told.append)
        ended.append((name, total, done + len(steps), *options.values()))

    for name in ("shadow_models", "leave_one_out"):
        monkeypatch.setattr(sys.modules[f"attacks.membership.{name}"], "bar", counted)
    made = [run_shadows(pipeline(), count, out=tmp_path, progress=count == 8) for count in (4, 8)]
    for shown in (True, False):
        leave_one_out(made[1], {"a": lambda t: t.scores, "b": lambda t: -t.scores}, fpr=0.2, progress=shown)
    assert ended == [
        ("shadows", 4, 4, "shadow", False), ("shadows", 8, 8, "shadow", True),
        ("attacks", 8, 8, "round", True), ("attacks", 8, 8, "round", False),  # two attacks on four pairs
    ]  # fmt: skip
    assert told[0] == f"{estimate_cost(pipeline(), 4, out=tmp_path).each:.3g} s each"


def test_more_attacks_widen_the_intervals() -> None:
    one = drawn(3)
    alone = leave_one_out(one, {"a": SHADOW_ATTACKS["threshold"]}, fpr=0.1, progress=False)["a"]
    several = leave_one_out(one, fpr=0.1, progress=False)
    assert set(several) == set(SHADOW_ATTACKS)
    assert several["threshold"].tpr.confidence == pytest.approx(1 - 0.05 / 5)
    assert several["threshold"].auc.low < alone.auc.low
    assert several["threshold"].auc.value == alone.auc.value
    also = leave_one_out(one, {"a": SHADOW_ATTACKS["threshold"]}, fpr=0.1, also_tried=4, progress=False)["a"]
    assert also.tpr == several["threshold"].tpr
    bare = ShadowScores(one.inside, one.scores)
    assert set(leave_one_out(bare, fpr=0.1, progress=False)) == {"threshold", "LiRA offline", "LiRA online"}
    distances = ShadowScores(one.inside, {"set": one.scores["model"]}, {"set": one.population["model"]})
    assert "RMIA offline" not in leave_one_out(distances, scorer="set", fpr=0.1, progress=False)
    for prior in (0.01, 0.5):
        assert alone.ppv(prior).value == ppv(alone.tpr.value, alone.fpr.value, prior)
    s, z = one.scores["model"], one.population["model"]
    two = ShadowScores(one.inside, {"a": 0 * s, "model": s}, {"a": 0 * z, "model": z}, torch.arange(60))
    for number in (0, 3):
        rest = torch.arange(12) // 2 != number // 2
        shared = s[number], one.inside[rest], s[rest]
        for online, way in ((False, "offline"), (True, "online")):
            target = two.target(number, "model")
            assert torch.equal(target.labels, torch.arange(60))  # type: ignore[arg-type]
            assert torch.equal(SHADOW_ATTACKS["threshold"](target), s[number])
            wanted = rmia(*shared, z[number], z[rest], online=online), lira(*shared, online=online)
            for name, scores in zip((f"RMIA {way}", f"LiRA {way}"), wanted):
                assert torch.equal(SHADOW_ATTACKS[name](target), scores)
    again = ShadowScores(one.inside[[0, 1, 0, 4, 6]], {"model": one.scores["model"][:5]})
    assert torch.equal(again.without(0).inside, one.inside[[4, 6]])  # the third model reveals them, too
    shown = "inside=bool [12, 60], scores={'model': float64 [12, 60]}, population={}, labels=None)"
    assert repr(bare) == f"ShadowScores({shown}"
    assert repr(bare.target(0, "model")).startswith("Target(scores=float64 [60], inside=bool [10, 60], ")
    low = ShadowScores(one.inside, {"model": s.float().requires_grad_()}, {"model": z.half()})
    assert same(low, ShadowScores(one.inside, {"model": s.float().double()}, {"model": z.half().double()}))
    assert low.scores["model"].dtype == low.population["model"].dtype == torch.float64
    assert not low.scores["model"].requires_grad


# Refusals.


HALVES, ZEROS, ROWS = halves(4, 6, 0), torch.zeros(4, 6), torch.arange(60)
NAMED = r"{'a\d+': \(20,\)}"


def ran(run: Any, **options: Any) -> object:
    return run_shadows(pipeline(run), 4, **options)


def judged(attack: Any = SHADOW_ATTACKS["threshold"], scores: ShadowScores | None = None, **given: Any) -> object:
    return leave_one_out(scores or drawn(0), **{"attacks": {"a": attack}, "fpr": 0.1, **given})


def scorers(value: Any) -> Any:
    return lambda indices, seed: {"model": lambda x, y: value(x)}


REFUSALS: list[tuple[Callable[[], object], str]] = [
    *((lambda given=given: pipeline(*given[:-1], **given[-1]), words) for *given, words in (
        (nn.Flatten(), {}, "fit must be a function of indices and seed that trains a network, got a network"),
        (lambda indices: {}, {}, r"fit is called as fit\(indices, seed\)"), (fit, {"tag": 3}, "tag must be a string"),
        (fit, {"population": IMAGES}, "population must be 2 tensors, images and labels, got 20"),
        (fit, {"population": (LABELS, LABELS)}, r"population \(its images\) must be"),
        (fit, {"population": (IMAGES, LABELS[:3])}, r"population \(its labels\) must have one entry .* got 3 for 20"),
    )),
    (lambda: Pipeline(fit, IMAGES[:3], LABELS[:3]), "images must be at least 4 to be split in halves, got 3"),
    (lambda: Pipeline(fit, IMAGES, LABELS[:3]), "labels must have one entry per image: got 3 for 20"),
    (lambda: halves(5, 10, 0), "count must be even because shadows come in pairs of complements, got 5"),
    *((lambda call=call, one=one: call(one), f"^{name} must be .*, got {one:g}$") for call, name, *wrong in (
        (lambda x: halves(x, 10, 0), "count", 1), (lambda x: halves(4, x, 0), "records", 3),
        (lambda x: halves(4, 10, x), "seed", -1), (lambda x: run_shadows(pipeline(), x), "count", 2),
        (lambda x: run_shadows(pipeline(), 4, workers=x), "workers", 0),
        (lambda x: estimate_cost(pipeline(), 4, workers=x), "workers", 0),
        (lambda x: judged(fpr=x), "fpr", 0.0, 1.5), (lambda x: judged(confidence=x), "confidence", 0.0, 1.0),
        (lambda x: judged(also_tried=x), "also_tried", -1), (lambda x: judged(progress=x), "progress", 1),
        (lambda x: run_shadows(pipeline(), 4, progress=x), "progress", 1), (drawn(0).without, "number", -1, 12),
        (lambda x: model_scorer(nn.Flatten(), chunk=x), "chunk", 0),
    ) for one in wrong),
    (lambda: run_shadows(pipeline(), 4, executor="cluster"), "executor must be a concurrent.futures.Executor"),
    (lambda: run_shadows(pipeline(), 4, out=3), "out must be a path, as a string or a pathlib.Path, got int"),
    (lambda: ran(lambda i, s: fit(i, s), executor=worker_pool(1)), "picklable fit, .*lambda.* leave executor out for"),
    *((lambda found=found: ran(lambda i, s: found), f"fit must {words}") for found, words in (
        (None, "return scorers by name.* got NoneType"), ({}, "return scorers by name.* got an empty mapping"),
        ({"a": 3}, "map names to functions .* got 'a': 3"), ({3: len}, "map names to functions .* got 3: <built-in"),
    )),
    *((lambda one=one: ran(scorers(lambda x: x.new_zeros(one))), rf"\[20\] or \[20, d\], got {re.escape(str(one))}\n")
        for one in ([3], [21], [20, 2, 2], [])),
    (lambda: ran(scorers(lambda x: x[:, 0, 0, 0].int())), "result of fit's scorer 'model' must be a floating tensor"),
    (lambda: ran(scorers(lambda x: x[:, 0, 0, 0] / 0)), "result of fit's scorer 'model' must be finite, but 20 of 20"),
    (lambda: ran(lambda i, s: {f"a{s}": lambda x, y: x[:, 0, 0, 0]}), f"{NAMED} in shadow 0 and {NAMED} in shadow 1"),
    (lambda: ran(lambda i, s: {"a": lambda x, y: x[:, 0, 0, : 1 + s % 3]}), "return the same scorers every time"),
    *((lambda given=given: model_scorer(*given), words) for *given, words in (
        (fit, "network must be an nn.Module"), (nn.Flatten(), lambda x: x, r"called as score\(logits, labels\)"),
        (nn.Flatten(), nn.Flatten(), "score must be a function of logits and labels, got a network"),
    )),
    (lambda: model_scorer(nn.Flatten(), lambda x, y: x[:3, 0])(IMAGES, LABELS), r"score must .*\[20, d\], got \[3\]"),
    *((lambda given=given: ShadowScores(*given), words) for *given, words in (
        (HALVES, {}, "scores must hold at least one"), (HALVES, [ZEROS], "scores must map names to values, got list"),
        (HALVES, {"a": ZEROS}, [ZEROS], "population must map names to values, got list"),
        (HALVES, {"a": ZEROS[:, :5]}, r"scores\['a'\] must be \[4, 6\] or more, got \[4, 5\]"),
        (HALVES, {"a": ZEROS[..., None, None]}, r"scores\['a'\] must be \[4, 6\] or more, got \[4, 6, 1, 1\]"),
        (HALVES, {"a": ZEROS[..., None][..., :0]}, r"scores\['a'\] must be \[4, 6\] or more, got \[4, 6, 0\]"),
        (HALVES, {"a": ZEROS / 0}, r"scores\['a'\] must be finite"), (ZEROS, {"a": ZEROS}, "inside must be a bool"),
        (HALVES[:, :0], {"a": ZEROS}, r"inside must be .* neither empty, got \[4, 0\]"),
        (HALVES[0], {"a": ZEROS}, r"inside must be .* neither empty, got \[6\]"),
        (HALVES, {"a": ZEROS}, {"b": ZEROS}, r"scorers of scores, \['a'\], got \['b'\]"),
        (HALVES, {"a": ZEROS}, {}, LABELS, "labels must have one entry per image: got 20 for 6"),
        (HALVES, {"a": ZEROS}, {"a": ZEROS, "b": ZEROS}, r"population must have .*\['a'\], got \['b'\]"),
        (HALVES, {"a": ZEROS}, {"a": ZEROS[1:]}, r"population\['a'\] must be \[4\] or more, got \[3, 6\]"),
        (HALVES, {"a": ZEROS}, {"a": ZEROS[:, :0]}, r"population\['a'\] must be .* \[4, 0\]"),
    )),
    *((lambda kept=kept: drawn(0).only(kept), rf"kept must be a bool tensor \[12\] that keeps .*, got {got}$")
        for kept, got in ((HALVES[0], r"torch.bool \[6\]"), (torch.zeros(12), r"torch.float32 \[12\]"),
            (torch.zeros(12) > 0, r"torch.bool \[12\]"), ([True] * 12, "list"))),
    (lambda: ShadowScores(HALVES[:2], {"a": ZEROS[:2]}).target(0, "a"), "besides 0 and its complement, got 2 in total"),
    (lambda: drawn(0).target(0, "set"), "scorer must be one of 'model', got 'set'"),
    *((lambda attack=attack: judged(attack), rf"attacks\['a'\]{words}") for attack, words in (
        (lambda t: t.scores / 0, " must be finite, but 60"), (lambda: None, r" is called as attacks\['a'\]\(target\)"),
        (lambda t: t.scores[:3], r" must give one score per record, \[60\], got \[3\]"),
        (lambda t: t.scores[:, None], r" must give one score per record, \[60\], got \[60, 1\]"),
    )),
    (lambda: judged(scores=drawn(0, records=61), fpr=0.0329), "1/30, .* got 0.0329"),
    *((lambda n=name: judged(lambda t: getattr(t, n).zero_().sum() + t.scores, replace(drawn(0), labels=0 + ROWS)),
        "attacks must not change their targets in place") for name in ("scores", "population_scores", "labels")),
    (lambda: judged(scorer="s"), "scorer must be one of 'model', got 's'"),
    (lambda: judged(scores=drawn(0, count=4)), "shadows must be at least three pairs, .* got 4"),
    (lambda: judged(attacks={}), "attacks must hold at least one attack"),
    (lambda: judged(attacks=[len]), "attacks must map names to values, got list"),
    (lambda: judged(SHADOW_ATTACKS["RMIA online"], replace(drawn(0), population={})), "RMIA needs a population"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "said"), REFUSALS, ids=range(len(REFUSALS)))
def test_invalid_arguments_are_named(call: Callable[[], object], said: str) -> None:
    refused(call, (TypeError, ValueError), said)
