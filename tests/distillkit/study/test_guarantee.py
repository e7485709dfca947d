"""The guarantee of a study composes all runs on the same images: tuning runs, seeds, failed runs, other tasks."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from distillkit import LabeledImages
from distillkit.condense import random_subset
from distillkit.data import Split
from distillkit.normalization import Normalization
from distillkit.privacy import ADD_OR_REMOVE_CLIENT, ADD_OR_REMOVE_RECORD, Event, Ledger, compose
from distillkit.study import Condense, Study
from distillkit.study._guarantee import CHOSEN, DIVIDED, EXACT, OTHERS, study_guarantee, total_guarantee
from distillkit.study._records import write_json
from distillkit.training import Protocol
from tests.distillkit.study.test_study import task
from tests.refused import refused

SIGMA = 4.0
SHORT: dict[str, Any] = {"num_networks": 1, "protocol": Protocol(epochs=1)}
PLAIN = Condense(lambda factory: partial(random_subset, ipc=1), **SHORT)


def charged(real: LabeledImages, *, ledger: Ledger, generator: Any, sigma: float, fails: bool = False) -> LabeledImages:
    ledger.spend(Event("a test", sigma=sigma))
    ledger.add_remark("a remark")
    if fails:
        raise FloatingPointError("the images diverged")
    return random_subset(real, ipc=1, generator=generator)


def private(**settings: Any) -> Condense:
    return Condense(lambda factory, **chosen: partial(charged, **chosen), **SHORT, **settings)


def test_every_run_on_the_images_counts_also_tuning_and_failed_runs(tmp_path: Path) -> None:
    """Three configurations with two tuning seeds, one of which always fails, and three final runs: nine charges."""
    search = [{"sigma": SIGMA}, {"sigma": SIGMA, "fails": True}, {"sigma": 2 * SIGMA}]
    plain = replace(PLAIN, search=[{}, {}, {}])
    refused(lambda: replace(plain, rule="own"), ValueError, "rule must be one of 'last', got 'own'")
    control = private(settings={"sigma": 3 * SIGMA}, like="A", seeds=[1])
    candidates = {"A": private(search=search), "B": plain, "C": control}
    study = Study(tmp_path, task(), candidates, seeds=(0, 1), tune_seeds=(100, 101))
    study.run(trial=False, progress=False)
    charges = sorted(e.sigma for p in tmp_path.rglob("ledger.jsonl") for e in Ledger(p).events)
    assert len(charges) == 3 * 2 + 3
    total = study.guarantee(next(iter(study.design.tasks)))
    assert total.epsilon == pytest.approx(compose([(sigma, 1.0, 1) for sigma in charges], 1e-5).epsilon)
    assert total.epsilon > 2 * max(study.records(), key=lambda r: r.line["epsilon"] or 0).line["epsilon"]
    assert total.remarks[:2] == ("the releases of 9 runs together, tuning runs included", EXACT)
    assert EXACT in str(study.table())
    choice = next(iter(json.loads((tmp_path / "choice.json").read_text(encoding="utf-8"))["tasks"].values()))
    assert (choice["A"]["not_private"], "not_private" in choice["B"]) == (EXACT, False)
    lines = [json.loads(path.read_text(encoding="utf-8")) for path in tmp_path.glob("tuning/*/summary.json")]
    tuning = [line["epsilon_remarks"][-1] for line in lines if line.get("noise")]
    assert tuning == [EXACT] * 4  # two configurations that did not fail
    assert [r.line["epsilon_remarks"] for r in study.records() if r.line["method"] != "B"] == [["a remark", CHOSEN]] * 3
    assert any("8 further runs on the same images have no ledger" in remark for remark in total.remarks)
    assert f"epsilon {total.epsilon:.4g}" in str(study.table())


def test_a_later_charge_counts_and_other_images_are_named(tmp_path: Path) -> None:
    """The second task holds the same records in another normalization, which no description shows."""
    first = task("a")
    assert isinstance(first.data, Split)
    train, test = (data.renormalize(Normalization((0.2,), (0.5,))) for data in (first.data.train, first.data.test))
    second = replace(first, name="b", data=Split(train, test, ("a", "b")))
    study = Study(tmp_path, [first, second], {"A": private(settings={"sigma": SIGMA}), "B": PLAIN}, seeds=(0,))
    study.run(trial=False, progress=False)
    path = next(tmp_path.glob("a*/ledger.jsonl"))
    Ledger(path).spend(Event("again", SIGMA))
    assert not any(CHOSEN in record.line.get("epsilon_remarks", []) for record in study.records())
    total = study.guarantee("a")
    assert total.epsilon == pytest.approx(compose([(SIGMA, 1.0, 2)], 1e-5).epsilon)
    assert OTHERS.format(1) in total.remarks


def test_study_without_private_runs_has_no_guarantee_and_no_note(tmp_path: Path) -> None:
    study = Study(tmp_path, task(), {"B": PLAIN}, seeds=(0,))
    study.run(trial=False, progress=False)
    name = next(iter(study.design.tasks))
    refused(lambda: study.guarantee(name), ValueError, "has no ledger")
    refused(lambda: study.guarantee("another"), ValueError, "task must be one of")
    assert "private images" not in str(study.table())


def of(*events: Event, **options: Any) -> Ledger:
    ledger = Ledger(**options)
    ledger.spend(*events)
    return ledger


def test_a_record_may_belong_to_another_client_in_every_run() -> None:
    """Each client of a run is charged once, but one record meets the client with most charges in both runs."""
    one = of(Event("m", SIGMA, client=0), Event("m", SIGMA, client=1, count=3))
    other = of(Event("m", SIGMA, client=0, count=3), Event("m", SIGMA, client=1), Event("m", 2 * SIGMA))
    total = total_guarantee([one, other])
    assert total.epsilon == pytest.approx(compose([(SIGMA, 1.0, 6), (2 * SIGMA, 1.0, 1)], 1e-5).epsilon)
    shared = Event("m", SIGMA)  # charged to all clients with the sigma of a single client's charge
    for single in (one, of(shared, replace(shared, client=0)), of(*one.events, disjoint=False)):
        assert total_guarantee([single]).epsilon == pytest.approx(single.epsilon())
    assert total_guarantee([of(Event("m", SIGMA), delta=1e-6), of(Event("m", SIGMA))]).delta == 1e-5


@pytest.mark.parametrize("last", [(1, "a"), (0, "b")])
@pytest.mark.parametrize("relation", [ADD_OR_REMOVE_RECORD, ADD_OR_REMOVE_CLIENT])
@pytest.mark.parametrize("plain", [True, False])
def test_clients_of_several_seeds_have_no_joint_epsilon(
    relation: str, last: tuple[int, str], plain: bool, tmp_path: Path
) -> None:
    write_json(tmp_path / "other" / "config.json", {"seed": 0, "notes": {"validation": True}})  # not of a study
    for number, (seed, name) in enumerate(((0, "a"), (0, "a"), last)):
        notes = {"task": {"with": {"data": 1, "name": name}}, "validation": number == 0 and not plain}
        repeated = {"seed": 9, "notes": {**notes, "partition_seed": 0}}
        config = {"seed": seed, "notes": notes} if number or plain else repeated
        write_json(tmp_path / str(number) / "config.json", config)
        Ledger(tmp_path / str(number) / "ledger.jsonl").spend(Event("m", SIGMA, relation=relation))
        total: Any = study_guarantee(tmp_path, "1")
        joint = DIVIDED.format(2) if number == 2 and "client" in relation else ""
        assert (total.reason, total.epsilon is None) == (joint, joint != "")
        assert ["in 2 ways" in total.reason, total.epsilon is None] == 2 * [number == 2 and "client" in relation]
        together = f"the releases of {number + 1} runs together"
        assert total.remarks[:2] == ((together,) if plain else (f"{together}, tuning runs included", EXACT))
        assert total.nominal == pytest.approx(compose([(SIGMA, 1.0, number + 1)], 1e-5).epsilon)


def test_seeded_noise_and_mixed_relations_leave_no_guarantee() -> None:
    event = Event("m", SIGMA)
    seeded = of(replace(event, seeded=True))
    client = of(replace(event, relation=ADD_OR_REMOVE_CLIENT))
    for ledgers, divisions in (([of(event), seeded], 1), ([of(event), seeded], 2), ([seeded, client], 2)):
        total = total_guarantee(ledgers, divisions=divisions)
        assert "seeded" in total.reason
        assert (total.epsilon, total.reason) == (None, seeded.guarantee().reason)
        assert total.nominal == pytest.approx(compose([(SIGMA, 1.0, 2)], 1e-5).epsilon)
    for divisions in (1, 2):
        mixed = total_guarantee([of(event), client], divisions=divisions)
        assert (mixed.epsilon, "one epsilon cannot cover" in mixed.reason) == (None, True)


def test_joint_guarantee_states_what_it_covers_and_assumes() -> None:
    ledgers = [of(), of(Event("m", SIGMA)), of(Event("m", SIGMA))]
    for number, ledger in enumerate(ledgers):
        ledger.add_remark(f"of run {number // 2}")
        ledger.assume(f"entry {number}", ["size"])
    total, tuned = total_guarantee(ledgers), total_guarantee(ledgers, 4, tuned=True, others=5)
    single = ledgers[2].guarantee()
    assert (total.delta, total.relation, total.accountant) == (single.delta, single.relation, single.accountant)
    assert [total.assumptions[f"entry {number}"] for number in range(3)] == [("size",)] * 3
    assert total.remarks == ("the releases of 3 runs together", "of run 0", "of run 1")
    assert tuned.remarks == (
        "the releases of 3 runs together, tuning runs included", EXACT, OTHERS.format(5),
        "4 further runs on the same images have no ledger, so nothing bounds what they reveal", *total.remarks[1:],
    )  # fmt: skip
