"""Unusual calls of all public names of `fl`: refused by name, warned of, or accepted for a reason given here."""

from __future__ import annotations

import tempfile
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

import fl
import fl.addons
import fl.filters
import fl.methods
from distillkit import LabeledImages, Normalization
from distillkit.privacy import Ledger
from distillkit.rng import derive
from fl import ClientDP, FedAvg, Filtered, Keyring, Message, Registry, RunFolder, SecureSums, history, simulate
from fl.addons import RobustMean
from fl.aggregation import Aggregator
from fl.averaging import Output
from fl.batches import Batch, Phase, shuffled_indices
from fl.filters import SetQuality
from fl.filters.client_dp import Adaptive
from fl.method import Predictor
from fl.methods import FedLGD, FedProto, FedRep, PrivateFedDM, SingleImage, SummedFedDM
from fl.networks import Networks
from fl.study import load, outcome_hash
from tests.fl.federations import Tiny, images, with_label_rows
from tests.fl.test_addon_combinations import OPTIONS
from tests.odd_calls import Call, Listed, table_tests
from tests.refused import refused


@cache
def clients() -> tuple[LabeledImages, ...]:
    return tuple(images(9 + k, seed=k) for k in range(3))


@cache
def data() -> LabeledImages:
    return images(12, 9)


PICTURE = torch.arange(3 * 64).reshape(3, 8, 8)[:1].to(torch.uint8)
POOL = torch.arange(6 * 16).reshape(6, 1, 4, 4).to(torch.uint8)


def outcome_of_run(method: Any, held: Any = None, **options: Any) -> str | None:
    """Run two rounds and return the error, if any. A failed reply counts, because its reason is no refusal."""
    how: dict[str, Any] = {"rounds": 2, "test": data(), "progress": False, **options}
    sets = {"proxy": data(), "validation": data(), "test": data()}
    return finished(simulate(method, list(held or clients()), server_data=sets, **how))


def finished(run: Any) -> str | None:
    for row in run.rows:
        if row["failed"]:
            return f"clients fail: {row['failed']}"
        for name in ("accuracy", "loss"):
            if row[name] is not None and not 0 <= row[name] < float("inf"):
                return f"{name} is {row[name]}"
    for name, net in run.models.items():
        if not all(bool(torch.isfinite(p).all()) for p in net.parameters()):
            return f"model {name!r} holds NaN or Inf"
    return None


def with_addon(addon: Any) -> str | None:
    private = {"weights": "uniform"} if addon.private or isinstance(addon, RobustMean) else {}
    return outcome_of_run(FedAvg(addon, factory=Tiny, lr=0.05, steps=2, batch=4, **private))


FAST: dict[str, Any] = {"factory": Tiny, "ipc": 1, "steps": 2, "server_epochs": 1, "server_batch": 8, "batch_real": 4}
SHARED: dict[str, Any] = {"keep": 3, "steps": 1, "batch": 4, "selection": {"kmeans_share": 0.0}}
NOISE: dict[str, Any] = {"source": "gaussian", "classes": 3, "per_class": 2, "options": {"base": 2}}

ADDONS: dict[str, dict[str, Any]] = {
    **OPTIONS,
    "DPSGD": {"sigma": 1.0, "rate": 0.5, "size": 9, "chunk": 4},
    "ClientDrift": {"every": 1},
    "FedCOG": {"start_round": 2, "images": 3, "steps": 1, "batch": 4, "weight": 0.5},
    "NaiveVHL": NOISE,
    "RobustMean": {"attackers": 1, "rule": "trimmed"},
    "SharedImage": {"image": PICTURE, "count": 4, "size": 4, "crops": {"flip": 0.5}, **SHARED},
    "SharedPool": {"pool": POOL, **SHARED},
    "VFA": {"per_class": 1},
    "VFTL": {**NOISE, "epochs": 1, "batch": 4},
    "VHL": {**NOISE, "batch": 4},
}


def secretly(**options: Any) -> Any:
    return simulate(private(), list(clients()), rounds=1, progress=False, **options)


def plain(**options: Any) -> FedAvg:
    return FedAvg(**{"factory": Tiny, "lr": 0.05, "batch": 4, **options})


def filtered(method: Any, one: Any) -> Filtered:
    return Filtered(method, one)


def message(values: Any) -> str:
    return repr(Message(values))


def private(**options: Any) -> Filtered:
    return Filtered(plain(weights="uniform"), ClientDP(**{"sigma": 1.0, "rate": 1.0, "clip": 1.0, **options}))


@cache
def keyring() -> tuple[Keyring, tempfile.TemporaryDirectory[str]]:
    """Return a keyring of all clients in a folder that exists as long as this process."""
    folder = tempfile.TemporaryDirectory()
    return Keyring(folder.name), folder


def run_secure(sums: SecureSums) -> str | None:
    """Run with a method that has the clients' keys; a server's own method has no keyring."""
    return outcome_of_run(Filtered(plain(max_samples=100), sums)) if sums.keyring is not None else None


TRIED = ("method", "rounds", "min_replies", "seed", "workers", "server_threads", "device", "resume", "transcript",
         "progress")  # fmt: skip
CALLS: dict[str, Call] = {
    **{name: Call(getattr(fl.addons, name), partial(dict, **options), with_addon) for name, options in ADDONS.items()},
    "simulate": Call(
        simulate,
        lambda: {
            "method": plain(), "clients": list(clients()), "rounds": 1, "test": data(), "task": fl.Classification(3),
            "server_data": {"validation": data()}, "participation": 2, "evaluate": "drawn", "progress": False,
        },
        finished,
    ),
    "simulate a share": Call(
        simulate, lambda: {"method": plain(), "clients": list(clients()), "rounds": 1, "participation": 0.5}, finished,
        skip=("clients", *TRIED),
    ),
    "simulate rows": Call(
        simulate,
        lambda: {
            "method": plain(), "clients": [with_label_rows(c) for c in clients()], "rounds": 1,
            "task": fl.MultiLabel(3), "test": with_label_rows(data()),
        },
        finished, skip=("participation", *TRIED),
    ),
    "simulate privately": Call(secretly, lambda: {"ledger": Ledger(), "secret": 1, "evaluate": "none"}, finished),
    "FedAvg": Call(
        FedAvg,
        lambda: {
            "factory": Tiny, "lr": 0.05, "momentum": 0.5, "optimizer": "sgd", "epochs": 1, "batch": 4,
            "augment": flipped, "objective": torch.nn.CrossEntropyLoss(), "weights": "samples", "buffers": "mean",
            "personal": ("classifier.*",), "predict": "real", "max_samples": 1e6,
            "initial": {"classifier.bias": torch.zeros(3)},
        },
        outcome_of_run,
    ),
    "ClientOptimizer": Call(
        fl.ClientOptimizer, lambda: {"name": "sgd", "weight_decay": 0.1, "lr_decay": 0.9, "state": "round"},
        lambda optimizer: outcome_of_run(plain(optimizer=optimizer)),
    ),
    "FedAvg in phases": Call(plain, lambda: {"phases": (Phase(steps=1),), "assign": None}, outcome_of_run),
    "FedAvg steps": Call(plain, lambda: {"steps": 1}, outcome_of_run),
    "FedAvg several": Call(
        plain, lambda: {"factory": {"a": Tiny, "b": Tiny}, "assign": {0: "a", 1: "b", 2: "a"}}, outcome_of_run,
    ),
    "FedAvg addons": Call(
        lambda addon: FedAvg(addon, factory=Tiny), lambda: {"addon": fl.addons.FedProx(0.1)}, outcome_of_run,
    ),
    "Phase": Call(Phase, lambda: {"epochs": 1, "train": "*"}, lambda p: outcome_of_run(plain(phases=[p]))),
    "Phase steps": Call(
        Phase, lambda: {"steps": 1}, lambda p: outcome_of_run(plain(phases=[p])), skip=("epochs", "train"),
    ),
    "FedDM": Call(fl.FedDM, lambda: {**FAST, "augment": siamese}, outcome_of_run),
    "Real": Call(fl.Real, lambda: dict(FAST), outcome_of_run),
    "FedProto": Call(FedProto, lambda: {"factory": Tiny, "batch": 4}, outcome_of_run),
    "PrivateFedDM": Call(
        PrivateFedDM,
        lambda: {
            **{k: v for k, v in FAST.items() if k != "batch_real"}, "sigma": 1.0, "num_networks": 1,
            "sizes": (4.0, 4.0, 4.0), "least": 0.0, "warm": False, "clip": 1.0, "mechanism": "class_means", "lr": 1.0,
            "public_statistics": True,
        },
        outcome_of_run,
    ),
    "SummedFedDM": Call(
        SummedFedDM,
        lambda: {
            **{k: v for k, v in FAST.items() if k != "batch_real"}, "sigma": 1.0, "num_networks": 1, "sigma_sizes": 1.0,
            "least": 0.0, "noise": "full",
        },
        outcome_of_run,
    ),
    "FedLGD": Call(
        FedLGD,
        lambda: {
            "factory": Tiny, "ipc": 1, "anchors": 1, "weight": 1.0, "selected": (2,), "condense_steps": 1,
            "refine_steps": 1, "match_steps": 1, "init": "noise", "joined": "always", "anchors_init": "noise",
            "augment": None, "weights": "uniform", "batch": 4, "regulariser": "contrastive",
        },
        outcome_of_run,
    ),
    "FedRep": Call(
        FedRep,
        lambda: {"factory": Tiny, "head": "classifier.*", "head_epochs": 1, "body_epochs": 1, "weights": "uniform"},
        outcome_of_run,
    ),
    "SingleImage": Call(
        SingleImage,
        lambda: {
            "image": PICTURE, "factory": Tiny, "shared": {"count": 4, "size": 4, **SHARED}, "epochs": 1, "batch": 4,
        },
        outcome_of_run,
    ),
    "ClippedCrossEntropy": Call(
        fl.methods.ClippedCrossEntropy, dict, lambda loss: outcome_of_run(plain(objective=loss)),
    ),
    "ClientDP": Call(private, lambda: {"sigma": 1.0, "rate": 1.0, "clip": 1.0}, outcome_of_run),
    "SetQuality": Call(lambda **o: Filtered(plain(), SetQuality(**o)), lambda: {"on": "test"}, outcome_of_run),
    "ClientDP clips": Call(
        private, lambda: {"clip": {FedAvg.update: 1.0}, "adaptive": Adaptive(sigma=2.0)}, outcome_of_run,
    ),
    "SecureSums": Call(
        SecureSums,
        lambda: {
            "registry": keyring()[0].registry(3), "keyring": keyring()[0], "threshold": 2,
            "bounds": {FedAvg.update: 8.0}, "bits": 40,
        },
        run_secure,
    ),
    "Registry": Call(Registry, lambda: {"keys": {k: f"{k:064x}" for k in range(3)}}),
    "Keyring": Call(Keyring, lambda: {"folder": Path("keys")}),
    "Adaptive": Call(Adaptive, lambda: {"sigma": 2.0}, lambda adaptive: outcome_of_run(private(adaptive=adaptive))),
    "Filtered": Call(
        filtered, lambda: {"method": plain(weights="uniform"), "one": ClientDP(1.0, 1.0, 1.0)}, outcome_of_run,
    ),
    "ClientData": Call(
        fl.ClientData, lambda: {"train": clients()[0], "test": data()},
        lambda held: outcome_of_run(plain(), [*clients(), held]),
    ),
    "Classification": Call(
        fl.Classification, lambda: {"num_classes": 3}, lambda task: outcome_of_run(plain(), task=task),
    ),
    "MultiLabel": Call(
        fl.MultiLabel, lambda: {"num_classes": 3},
        lambda task: finished(simulate(plain(), [with_label_rows(c) for c in clients()], rounds=1, task=task)),
    ),
    "RunFolder": Call(RunFolder, lambda: {"path": "run", "transcript": True, "notes": {"a": 1}}),
    "Networks": Call(
        Networks, lambda: {"factory": Tiny, "extra": 1}, lambda held: None if held.first("", 3, 0) else "no weights",
    ),
    "shuffled_indices": Call(
        lambda **given: list(shuffled_indices(**given)),
        lambda: {"count": 5, "batch": 2, "generator": derive(0), "epochs": 1, "steps": 3},
    ),
    "Entry": Call(fl.Entry, lambda: {"rule": "mean"}),
    "Message": Call(message, lambda: {"values": {FedAvg.update: {"w": torch.zeros(2)}}}),
}  # fmt: skip


def flipped(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return x.flip(3)


def siamese(x: torch.Tensor, generator: torch.Generator, **_: Any) -> torch.Tensor:
    return x


ENGINE, METHODS = "a record that the engine, add-ons or methods make", "a record that `FedAvg` makes"
NOT_CALLED = {
    **dict.fromkeys(("CheckpointError", "NoUsableReply"), "an error"),
    **dict.fromkeys(("Client", "Server", "Run", "Batch", "AggregatedReplies", "Predictor", "EntrySpec"), ENGINE),
    **dict.fromkeys(("evaluation_spec", "AveragingServer", "Local", "Step", "Output", "Settings"), METHODS),
    **dict.fromkeys(("Method", "Filter", "AddOn", "ServerAdaptive"), "an abstract base"),
    **dict.fromkeys(("Schema", "Tensors", "Factory", "LabelTask"), "a type"),
    "history": "a module",
    "require_full_models": "for an add-on's `check`, with what that is given",
}
"""Public names without odd calls, and why."""

OFF = "with 0 it is not installed, as its docstring says"
AS_IT_STARTS = "no step: the images stay as they start, which is a control"
ONE = "one image is a set"
DEFAULT = "None is the default"
ANY = "any 8-bit numbers are a picture"
PYTHON = "Python names the function and the keyword that it lacks"
ACCEPTED: Listed = {
    ("RunFolder", "path", "*"): "a folder of any name is made; an empty one is the working directory",
    ("RunFolder", "notes", "unknown"): "notes hold any names",
    ("Anchors", "ipc", "zero"): OFF,
    ("Condensed", "ipc", "zero"): OFF,
    ("FedLGD", "ipc", "zero"): OFF,
    ("FedLGD", "anchors", "zero"): OFF,
    ("FedDF", "steps", "zero"): OFF,
    ("VFTL", "epochs", "zero"): OFF,
    ("*", "selected", "empty"): "rounds of distillation: none",
    ("Anchors", "steps", "zero"): AS_IT_STARTS,
    ("Condensed", "*steps", "zero"): AS_IT_STARTS,
    ("FedLGD", "*_steps", "zero"): AS_IT_STARTS,
    ("FedCOG", "steps", "zero"): AS_IT_STARTS,
    ("RobustMean", "attackers", "zero"): "nobody is taken for false, and nothing is cut away",
    ("*", "warm_rounds", "zero"): "no first rounds that are otherwise",
    ("*", "seed", "zero"): "a seed like any other",
    ("*", "secret", "zero"): "a seed like any other",
    ("SharedImage", "image", "one row"): "the picture has one channel, which is what is left",
    ("SharedImage", "image", "negated"): ANY,
    ("SingleImage", "image", "one row"): "the picture has one channel, which is what is left",
    ("SingleImage", "image", "negated"): ANY,
    ("SharedPool", "pool", "negated"): ANY,
    ("SharedPool", "pool", "huge"): ANY,
    ("simulate*", "clients", "one of them: empty"): "a client without images is recorded as `empty` and not asked",
    ("ClientData", "*", "empty"): "a client may have no images, and no test images",
    ("simulate*", "*", "*one row"): ONE,
    ("ClientData", "*", "one row"): ONE,
    ("simulate privately", "*", "None"): DEFAULT,
    ("FedAvg ?*", "*", "None"): DEFAULT,
    ("SummedFedDM", "least", "None"): DEFAULT,
    ("ClientDP clips", "adaptive", "None"): DEFAULT,
    ("ClientDP clips", "clip", "number"): "the norm of `FedAvg.update`",
    ("Keyring", "folder", "string"): "a path",
    ("Message", "values", "None"): DEFAULT,
    ("shuffled_indices", "count", "zero"): "a set without images has batches without images",
    ("shuffled_indices", "epochs", "zero"): "no pass",
    ("Networks", "extra", "zero"): "no outputs beside the classes",
    ("shuffled_indices", "steps", "zero"): "no step",
    ("shuffled_indices", "steps", "None"): "then the passes count",
    ("*", "personal", "empty"): "no parameter is personal",
}
"""(name, argument, corruption) -> why such a call is right."""

OTHERWISE: Listed = {
    ("SharedImage", "crops", "unknown"): PYTHON,
    ("SingleImage", "shared", "unknown"): PYTHON,
    ("SharedPool", "pool", "one row"): "`keep`, which is more than the pool then holds",
    ("FedAvg several", "factory", "class"): "`assign`: a class is one factory, and needs none",
    ("FedAvg addons", "addon", "class"): "the class; add-ons are given by position",
    ("FedRep", "head", "unknown"): "`personal`, the option of `FedAvg` that the head is, and the pattern",
    ("ClientData", "train", "*"): "the client, by its number",
}
"""(name, argument, corruption) -> what such a call's refusal names instead of the argument."""


def test_every_public_name_is_called_or_has_a_reason() -> None:
    public = {n for module in (fl, fl.addons, fl.methods, fl.filters) for n in module.__all__}
    called = {name.split()[0] for name in CALLS}
    assert public - called - set(NOT_CALLED) == set()
    assert set(NOT_CALLED) <= public


test_odd_calls_are_refused_warned_of_or_accepted = table_tests(
    CALLS, ACCEPTED, OTHERWISE, lambda name: ("accepted", "warned")
)


def rows_of_run() -> list[dict[str, Any]]:
    return simulate(plain(), list(clients()), rounds=1, test=data(), progress=False).rows


def changes_its_row(row: dict[str, Any]) -> None:
    row["failed"] = None


def total(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits, labels, reduction="sum")


def named(*names: str) -> LabeledImages:
    return data().replace(class_names=names)


def cog(decoder: Any) -> FedAvg:
    addon = fl.addons.FedCOG(start_round=1, images=3, steps=1, decoder=decoder)
    return FedAvg(addon, factory=Tiny, steps=1, batch=4)


def nans(images: torch.Tensor, generator: torch.Generator, siamese: bool = False) -> torch.Tensor:
    return images * torch.nan


def run_with_test_row(row: int, others: int = 2) -> Any:
    """Test on new images and then an image of the second client, in another normalization."""
    first, second, new = images(12, seed=0), images(12, seed=1), images(others, seed=2)
    test = LabeledImages.concatenate([new, second[[row]]]).renormalize(Normalization((0.5,), (0.5,)))
    twice = LabeledImages.concatenate([second, second])
    parts = [data.renormalize(Normalization((0.5,), (0.5,))) for data in (first, twice)]
    return simulate(plain(), parts, rounds=1, test=test, progress=False)


NAN = {"classifier.bias": torch.full((3,), torch.nan)}
MISTAKES: list[tuple[Any, str]] = [
    (lambda: history.accuracy_last(rows_of_run()[0]), "rows must be the rows of a history.* got dict"),
    (lambda: history.accuracy_best([{"round": 1}]), r"rows\[0\] must be a row.* has no 'accuracy'"),
    (lambda: history.rounds_to("history.jsonl", 0.5), "rows must be the rows of a history.* got str"),
    (lambda: history.best_seed_mean(rows_of_run()), r"runs\[0\] must be the rows of a history"),
    (lambda: outcome_hash(rows_of_run()), "run must be the Run that simulate returns, got list"),
    (lambda: RunFolder("a", notes={"b": torch.zeros(1)}), "notes must be a mapping of JSON values"),
    (lambda: Batch(torch.zeros(1), 3), "labels must be a Tensor, got int"),  # type: ignore[arg-type]
    (lambda: Batch(torch.zeros(1), torch.zeros(1), 3), "columns must map names"),  # type: ignore[arg-type]
    (lambda: Networks({}), "factory must hold at least one architecture"),
    (lambda: Output(None, torch.zeros(1)), "embedding must be a Tensor, got NoneType"),  # type: ignore[arg-type]
    (lambda: Predictor(3), "network must be an nn.Module, got int"),  # type: ignore[arg-type]
    (lambda: Aggregator({}).fold(0, Message({FedAvg.samples: 1.0})), "not an entry that the method declares"),
    (lambda: load(None), "folder must be a path"),  # type: ignore[arg-type]
    (lambda: Registry.read(None), "path must be a path"),  # type: ignore[arg-type]
    (lambda: Registry({k: f"{k:064x}" for k in range(2)}).write(Path(__file__).parent), "is a folder; give the path"),
    (lambda: Keyring(__file__), "folder must be a folder, but .* is a file"),
    (lambda: RunFolder("a", cache=__file__), "cache must be a folder, but .* is a file"),
    (lambda: outcome_of_run(plain(factory=lambda n: Tiny(n).requires_grad_(False))), "factory.* parameters to train"),
    (
        lambda: outcome_of_run(plain(augment=lambda x, g: torch.cat([x[:1], x[1:] * torch.nan]))),
        "augment must return finite images",
    ),
    (lambda: outcome_of_run(plain(initial=NAN)), r"initial\['classifier.bias'\] must be finite"),
    (lambda: outcome_of_run(plain(objective=lambda y, t: total(y, t) * torch.nan)), "objective must return a finite"),
    (lambda: outcome_of_run(plain(objective=total)), "objective must return the mean over the batch"),
    (
        lambda: outcome_of_run(cog(lambda shape, latent: None)),
        r"FedCOG: decoder must make a network from the shape \(1, 4, 4\) and the length 256: ",
    ),
    (lambda: outcome_of_run(cog(lambda shape, latent: torch.nn.Linear(latent, 7))), "parametrize must give images"),
    (lambda: with_addon(fl.addons.VHL(**NOISE, augment=lambda x, g: x[:1])), "VHL: augment must return"),
    (lambda: with_addon(fl.addons.Anchors(ipc=1, selected=(9,), steps=1)), r"Anchors: selected=\(9,\) names no round"),
    (lambda: fl.addons.Condensed(factory=Tiny), "factory is called as factory"),
    (lambda: fl.addons.SharedImage(PICTURE * 0, count=4, size=4, **SHARED), "image has equal pixels everywhere"),
    (
        lambda: simulate(plain(), [named("a", "b", "c")], rounds=1, server_data={"proxy": named("c", "b", "a")}),
        r"server_data\['proxy'\] does not fit .* another order",
    ),
    (lambda: outcome_of_run(plain(objective=torch.nn.NLLLoss())), "NLLLoss takes log-probabilities"),
    (lambda: with_addon(fl.addons.VHL(**NOISE, augment=nans)), "^VHL: augment must return finite images"),
    (lambda: outcome_of_run(fl.FedDM(factory=Tiny, ipc=1, augment=nans)), "augment must return finite images"),
    (lambda: run_with_test_row(0), "1 of 3 images of test are also among the clients' training images"),
    (lambda: run_with_test_row(11, 600), "1 of 256 images of test are also among the clients' training images"),
]


@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize(("call", "words"), MISTAKES)
def test_mistakes_are_named(call: Any, words: str) -> None:
    refused(call, (TypeError, ValueError, OSError, UserWarning, fl.NoUsableReply), words)


def test_rows_are_safe_from_functions_of_the_user() -> None:
    run = simulate(plain(), list(clients()), rounds=1, on_round=changes_its_row, progress=False)
    assert run.rows[0]["failed"] == {}


def test_damaged_files_of_a_run_are_named(tmp_path: Path) -> None:
    simulate(plain(), list(clients()), rounds=1, out=tmp_path, progress=False)
    (tmp_path / "history.jsonl").write_bytes(b"")
    refused(lambda: load(tmp_path, method=plain()), fl.CheckpointError, r"history\.jsonl")
    keys = Keyring(tmp_path / "keys")
    keys.enroll(0)
    (tmp_path / "keys/0/identity").write_bytes(b"x")
    refused(lambda: keys.enroll(0), ValueError, "identity must hold a key of 32 bytes, got 1")
