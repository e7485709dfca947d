"""Loading a run from its folder and repeating it to the same hash, also on a part of its records."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from distillkit import LabeledImages
from distillkit.condense import random_subset
from distillkit.data import Split, load_npz, partition
from distillkit.privacy import Ledger, compose
from distillkit.serialization import to_config
from distillkit.study import Condense, Study, Task
from distillkit.study._execution import PreparedRun, RunSpec
from distillkit.study.candidate import Job, OutOfTime
from distillkit.training import Protocol
from fl import CheckpointError, Classification, ClientDP, FedAvg, Filtered, RunFolder, simulate
from fl.addons import SCAFFOLD, Ditto, FedProx
from fl.message import Message
from fl.participants import Interrupted
from fl.study import Federated, NotRepeatable, load, outcome_hash, repeat
from tests.fl.every_method import METHODS, play
from tests.fl.federations import Tiny, federation, images, sum_history_again
from tests.fl.test_addon_combinations import addon, plain
from tests.refused import refused

HERE = [__name__, "tests.fl.federations", "tests.fl.test_addon_combinations"]
COUNT = 60


def pictures(seed: int = 0, count: int = COUNT) -> LabeledImages:
    rng = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 3
    return images(count, seed).replace(images=torch.randn(count, 1, 4, 4, generator=rng), labels=labels)


def load_data(seed: int = 0) -> Split:
    """A user's own loader."""
    return Split(pictures(seed), pictures(1, 12), ("a", "b", "c"))


def task(**options: Any) -> Task:
    deal = partial(partition.dirichlet, clients=4, alpha=1.0)
    return Task("made", load_data, **{"partition": deal, "factory": Tiny, "rounds": 2, "own_tests": 0.2, **options})


def scaffold(factory: Any, lr: float = 0.1) -> FedAvg:
    return FedAvg(SCAFFOLD(), FedProx(), factory=factory, lr=lr, steps=2, batch=4)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a finished run of a study."""
    out = tmp_path_factory.mktemp("study")
    candidates = {"SCAFFOLD": Federated(scaffold, settings={"lr": 0.05})}
    study = Study(out, task(participation=3, evaluate="all"), candidates, seeds=[3])
    study.run(progress=False, trial=False)
    return out / "made-scaffold-3"


def again(folder: Path, **how: Any) -> Any:
    return repeat(folder, **{"trust": HERE, "progress": False, **how})


def test_run_is_loaded(run: Path) -> None:
    found = load(run, trust=HERE)
    assert found.line["hash"] == found.hash
    assert [row["accuracy_clients"]["clients"] for row in found.rows] == [4, 4]
    assert found.seed == 3
    assert found.method.settings.lr == 0.05
    assert to_config(found.task) == to_config(task(participation=3, evaluate="all"))
    assert found.settings == {"lr": 0.05}
    [(name, network)] = found.models.items()
    saved = load_file(run / "checkpoint" / "model.safetensors")
    assert (name, network.training) == ("", False)
    assert all(torch.equal(value, saved[key]) for key, value in network.state_dict().items())
    assert sum(len(part) for part in found.assign().owners) == COUNT - sum(
        len(t or ()) for t in found.assign().own_tests
    )
    assert "2 rounds of FedAvg" in repr(found)


@pytest.mark.parametrize("how", [{}, {"workers": 2}], ids=str)
def test_run_repeats_to_the_same_hash_from_its_config_alone(run: Path, how: dict[str, Any], tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    for name in ("history.jsonl", "summary.json", "checkpoint"):  # nothing else of the folder is used
        path = tmp_path / "run" / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    found = again(tmp_path / "run", out=tmp_path / "again", **how)
    assert found.hash == load(run, trust=HERE).hash == found.line["hash"]
    assert found.config["data"] == load(run, trust=HERE).config["data"]
    assert found.folder == tmp_path / "again"


def test_keeping_all_records_is_the_run_and_half_keeps_the_owners(run: Path, tmp_path: Path) -> None:
    known = load(run, trust=HERE)
    whole = again(run, keep=range(COUNT))
    assert whole.hash == known.hash
    assert torch.equal(whole.kept, torch.arange(COUNT))
    keep = torch.randperm(COUNT, generator=torch.Generator().manual_seed(0))[: COUNT // 2]
    half = again(run, keep=keep, out=tmp_path / "half")
    assert half.hash != known.hash
    assert torch.equal(half.kept, keep)
    for mine, had in zip(half.assign().owners, known.assign().owners, strict=True):
        assert set(mine.tolist()) == set(had.tolist()) & set(keep.tolist())
    assert sum(len(t or ()) for t in half.assign().own_tests) == sum(len(t or ()) for t in known.assign().own_tests)
    assert again(tmp_path / "half").hash == again(tmp_path / "half", keep=keep).hash == half.hash  # it is a run, too
    assert again(tmp_path / "half", keep=range(COUNT)).hash == known.hash


def test_run_on_validation_data_is_repeated_on_it(run: Path, tmp_path: Path) -> None:
    known, whole = load(run, trust=HERE), task(own_tests=0.0)
    spec = RunSpec("tuned", "", "made", "SCAFFOLD", 3, {"lr": 0.05}, validation=True)
    tuned = PreparedRun(spec, whole, load_data(), known.candidate, known.method)
    assert tuned.execute(tmp_path, device="cpu", progress=False)["hash"] == again(tmp_path).hash


def personal(factory: Any) -> FedAvg:
    return FedAvg(Ditto(0.01, epochs=3), factory=factory, lr=0.3, batch=4)


def test_own_accuracy_is_that_of_the_personal_models(tmp_path: Path) -> None:
    Study(tmp_path, task(), {"Ditto": Federated(personal)}, seeds=[3]).run(progress=False, trial=False)
    known = load(tmp_path / "made-ditto-3", trust=HERE)
    last = known.rows[-1]
    assert last["accuracy_personal"]["mean"] != last["accuracy_clients"]["mean"]
    assert known.line["accuracy_own"] == last["accuracy_personal"]["mean"]
    assert known.line["accuracy_last"] == last["accuracy"]


def test_job_reaches_the_run_and_a_trial_takes_later_rounds_for_its_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first round has costs of its own, such as those of a query."""
    given: list[dict[str, Any]] = []
    rows = [{"seconds": 90.0, "bytes_up": 40, "bytes_down": 50}, {"seconds": 2.0, "bytes_up": 4, "bytes_down": 5}]

    def simulated(method: Any, clients: Any, **options: Any) -> Any:
        given.append({"method": method, "clients": clients, **options})
        if "out" in options:
            raise Interrupted("late")
        return SimpleNamespace(rows=rows)

    monkeypatch.setattr("fl.study.federated.simulate", simulated)
    options: dict[str, Any] = {"seed": 8, "workers": 2, "device": "device", "progress": True}
    part = {"validation": True, "keep": torch.arange(0, COUNT, 2)}
    more = {"deadline": 1e12, "cache": tmp_path}
    own = task(
        own_tests=0.0, partition=partial(partition.iid, clients=4), participation=3, evaluate="all", server_share=0.2
    )
    told = {"settings": {"rounds": 5}, "partition_seed": 3, "notes": {"b": 1}}
    job = Job("a", tmp_path, own, load_data(), **told, **options, **part, **more)
    method, candidate = protected(factory=Tiny, sigma=1.0), Federated(protected, transcript=True, delta=1e-4)
    cost = candidate.trial(method, job)
    assert (cost.bytes_up, cost.bytes_down, cost.seconds) == (44 + 3 * 4, 55 + 3 * 5, pytest.approx(6, abs=5))
    refused(lambda: candidate.run(method, job), OutOfTime, "^a: late$")
    folder = {"out": RunFolder(tmp_path, True, {"b": 1}, **more), "resume": True}
    options |= {"task": Classification(3), "participation": own.participation, "evaluate": "all", "method": method}
    allocation = own.assign(job.split, 3, **part)
    wanted = [*allocation.clients, allocation.test, *allocation.server.values()]
    for found, rounds in zip(given, ({"rounds": 2}, {"rounds": 5, **folder}), strict=True):
        sets = [*(c.train for c in found.pop("clients")), found.pop("test"), *found.pop("server_data").values()]
        assert [torch.equal(one.images, other.images) for one, other in zip(sets, wanted)] == [True] * 6
        assert found.pop("ledger").delta == 1e-4
        assert found == {**options, **rounds}


def test_records_stay_with_their_clients_under_another_seed(run: Path, tmp_path: Path) -> None:
    known = load(run, trust=HERE)
    other = again(run, seed=8, out=tmp_path / "other")
    assert (other.seed, other.partition_seed, other.line["seed"]) == (8, 3, 8)
    assert other.config["data"] == known.config["data"]
    assert again(tmp_path / "other").hash == other.hash != known.hash
    shadow = again(tmp_path / "other", keep=range(0, COUNT, 2), seed=9, out=tmp_path / "shadow")
    for mine, had in zip(shadow.assign().owners, known.assign().owners, strict=True):
        assert set(mine.tolist()) == {row for row in had.tolist() if row % 2 == 0}
    assert shadow.config["data"] == again(run, keep=range(0, COUNT, 2)).config["data"]
    assert again(tmp_path / "other", seed=3).hash == known.hash
    refused(lambda: again(run, seed=8, data=partial(load_data, 5)), NotRepeatable, "data: was")
    refused(lambda: again(run, seed=-1), ValueError, "seed must be at least 0")


def test_moved_images_are_given_and_must_be_the_same(run: Path, tmp_path: Path) -> None:
    known = load(run, trust=HERE)
    assert again(run, data=partial(load_data, 0)).hash == known.hash
    assert again(run, data=load_data()).hash == known.hash
    for keep in (None, [1, 2, 3]):
        other = partial(again, run, data=partial(load_data, 5), keep=keep)
        refused(other, NotRepeatable, r"data: was|data was .* pass data=")
    with pytest.raises(NotRepeatable, match=r"cannot be read: .*nowhere.* pass data="):
        again(run, data=partial(load_npz, tmp_path / "nowhere.npz"))


def test_interrupted_repetition_continues(run: Path, tmp_path: Path) -> None:
    found = again(run, out=tmp_path)
    (tmp_path / "summary.json").unlink()
    assert again(run, out=tmp_path).hash == found.hash
    refused(lambda: again(run, out=run), ValueError, "another folder than the run's")


@pytest.mark.filterwarnings("error")
def test_other_hash_is_warned_of_with_both_versions(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    rows = [json.loads(line) for line in (run / "history.jsonl").read_text(encoding="utf-8").splitlines()]
    rows[-1]["loss"] += 1e-9
    (tmp_path / "run" / "history.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    sum_history_again(tmp_path / "run")
    with pytest.warns(UserWarning, match=r"has the hash .* torch .* on cpu"):
        again(tmp_path / "run")
    again(run)


MODELS = (
    "FedAvg", "FedRep", "FedLGD", "FedDM", "SummedFedDM", "SummedFedDM warm", "FedProto of two", "VHL", "SharedPool",
)  # fmt: skip
"""Methods and add-ons whose global models are built in ways of their own."""


@pytest.mark.parametrize("name", MODELS)
def test_models_and_sets_of_every_method_are_loaded(name: str, tmp_path: Path) -> None:
    method = METHODS[name]() if name in METHODS else plain(addon(name))
    ran = play(method, rounds=1, out=tmp_path)
    found = load(tmp_path, trust=HERE)
    ran.server.state = Message.unchecked(dict(reversed([*ran.server.state.items()])))
    assert found.hash == outcome_hash(ran)
    assert found.models.keys() == ran.models.keys()
    for key, network in found.models.items():
        expected = ran.models[key].state_dict()
        assert all(torch.equal(value, expected[n]) for n, value in network.state_dict().items())
        assert not network.training
    assert found.sets.keys() == {k for k, v in ran.server.state.items() if isinstance(v, LabeledImages)}


# Runs of `simulate`, which do not know where their images came from.

HOW: dict[str, Any] = {"rounds": 2, "test": images(9, 7), "seed": 4, "participation": 2, "progress": False}


@pytest.mark.parametrize("longer", [False, True])
def test_run_of_simulate_is_repeated_on_given_images(longer: bool, tmp_path: Path) -> None:
    more: dict[str, Any] = {"out": tmp_path / "run", "server_threads": 2}
    if longer:
        more["min_replies"] = 2
        simulate(FedAvg(factory=Tiny, steps=2), federation(), **{**HOW, **more, "rounds": 1})
    ran = simulate(FedAvg(factory=Tiny, steps=2), federation(), resume=longer, **HOW, **more)
    with pytest.raises(NotRepeatable, match=r"does not record its task, .* repeat\(folder, clients=..., test=...\)"):
        again(tmp_path / "run")
    found = again(tmp_path / "run", clients=federation(), test=HOW["test"])
    known = load(tmp_path / "run", trust=HERE).config
    assert (found.hash, found.config) == (outcome_hash(ran), {**known, "rounds": 2})
    turned = partial(again, tmp_path / "run", clients=federation()[::-1], test=HOW["test"])
    refused(turned, NotRepeatable, r"data: was .*, now")
    refused(lambda: again(tmp_path / "run", clients=federation()), NotRepeatable, r"test: was \[9, .*, now None")
    refused(lambda: again(tmp_path / "run", test=HOW["test"]), ValueError, "test goes with clients")
    refused(lambda: again(tmp_path / "run", server_data={}), ValueError, "server_data goes with clients")
    kept, said = (
        partial(again, tmp_path / "run", clients=federation(), keep=[1]),
        "keep and data are for a run of a study",
    )
    refused(kept, ValueError, said)


@pytest.mark.parametrize("given", [False, True])
def test_seeded_private_run_repeats_to_the_same_hash(given: bool, tmp_path: Path) -> None:
    method = Filtered(FedAvg(factory=Tiny, steps=1, weights="uniform"), ClientDP(sigma=1.0, rate=0.5, clip=1.0))
    how: dict[str, Any] = {"seed": 4, "secret": 7, "out": tmp_path / "run", "progress": False}
    if given:
        how["ledger"] = Ledger(tmp_path / "ledger", delta=1e-4, budget=90.0, disjoint=False)
        how |= {"evaluate": "none", "out": RunFolder(tmp_path / "run", notes={"why": 1})}
    ran = simulate(method, federation(), rounds=2, **how)
    found = again(tmp_path / "run", clients=federation())
    assert (found.hash, found.config) == (outcome_hash(ran), load(tmp_path / "run", trust=HERE).config)
    refused(lambda: again(tmp_path / "run", clients=federation()[::-1]), NotRepeatable, "data: was")


def protected(*, factory: Any, sigma: float) -> Filtered:
    return Filtered(FedAvg(factory=factory, steps=1, weights="uniform"), ClientDP(sigma=sigma, rate=0.5, clip=1.0))


def test_private_run_of_a_study_charges_the_ledger_in_its_folder(tmp_path: Path) -> None:
    candidate = Federated(protected, settings={"sigma": 2.0}, delta=1e-4)
    study = Study(tmp_path, task(own_tests=0.0), {"DP": candidate}, seeds=[3])
    study.run(progress=False, trial=False)
    line, ledger = study.records()[0].line, Ledger(tmp_path / "made-dp-3" / "ledger.jsonl", delta=1e-4)
    assert (line["delta"], [event.round for event in ledger.events]) == (1e-4, [1, 2])
    assert line["epsilon"] == ledger.guarantee().epsilon == pytest.approx(compose([(2.0, 0.5, 2)], 1e-4).epsilon)


# What a folder does not say.


def test_method_that_cannot_be_rebuilt_is_given(tmp_path: Path) -> None:
    method = FedAvg(factory=lambda outputs: Tiny(outputs), steps=1)
    ran = simulate(method, federation(), out=tmp_path / "run", **HOW)
    refused(lambda: load(tmp_path / "run"), NotRepeatable, r"method.factory is a function .* Pass method=")
    assert load(tmp_path / "run", method=method).hash == outcome_hash(ran)
    found = again(tmp_path / "run", method=method, clients=federation(), test=HOW["test"])
    assert found.hash == outcome_hash(ran)
    other = FedAvg(factory=Tiny, steps=2)
    refused(
        lambda: load(tmp_path / "run", method=other), NotRepeatable, r"method must be that of the run in .*, got \{"
    )


@pytest.mark.parametrize(
    ("name", "value"), [("delta", 2), ("delta", float("nan")), ("delta", 0.0), ("transcript", "a"), ("transcript", 1)]
)
def test_options_of_a_candidate_are_checked(name: str, value: Any) -> None:
    refused(lambda: Federated(scaffold, **{name: value}), (TypeError, ValueError), f"{name} must be")


def test_folders_of_other_formats_are_refused(tmp_path: Path) -> None:
    simulate(FedAvg(factory=Tiny, steps=1), federation(), out=tmp_path, **HOW)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**config, "format": "distillkit.run/9"}), encoding="utf-8")
    refused(lambda: load(tmp_path), CheckpointError, "run/9")
    refused(lambda: load(tmp_path / "nowhere"), CheckpointError, "is missing")


def test_users_functions_require_trust(run: Path) -> None:
    refused(lambda: load(run), NotRepeatable, r"names 'tests.fl.federations:Tiny', .*trust=\['tests.fl.federations'\]")
    with pytest.raises(NotRepeatable, match=rf"task of the run .*trust=\['{__name__}'\]"):
        load(run, trust=["tests.fl.federations"]).task  # noqa: B018


def test_images_in_memory_are_stored_once_in_a_study(tmp_path: Path) -> None:
    kept = replace(task(), data=load_data())
    Study(tmp_path, kept, {"a": Federated(scaffold)}, seeds=[0]).run(progress=False, trial=False)
    files = list((tmp_path / "data").glob("*.safetensors"))
    assert len(files) == 2
    for path in files:
        assert path.samefile(tmp_path / "made-a-0" / "arguments" / path.name)
    shutil.move(tmp_path / "made-a-0", tmp_path / "alone")
    shutil.rmtree(tmp_path / "data")
    assert again(tmp_path / "alone").hash == load(tmp_path / "alone", trust=HERE).hash


def test_candidate_that_makes_a_set_is_repeated_too(tmp_path: Path) -> None:
    candidate = Condense(subset, num_networks=1, protocol=Protocol(epochs=1))
    Study(tmp_path, task(), {"random": candidate}, seeds=[1]).run(progress=False, trial=False)
    known = load(tmp_path / "made-random-1", trust=HERE)
    assert len(known.sets["set"]) == 6
    found = again(tmp_path / "made-random-1")
    assert found.hash == known.hash is not None
    assert torch.equal(found.sets["set"].images, known.sets["set"].images)
    assert again(tmp_path / "made-random-1", keep=range(0, COUNT, 2)).hash != known.hash


def subset(factory: Any) -> Any:
    return partial(random_subset, ipc=2)
