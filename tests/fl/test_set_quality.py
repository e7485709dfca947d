"""Measurements of synthetic sets and updates against real images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from distillkit.networks import ConvNet, initialize
from distillkit.rng import derive
from distillkit.serialization import from_config, to_config
from distillkit.training import Protocol, accuracy, train
from fl import FedAvg, FedDM, Filtered, simulate
from fl.addons import VHL, Anchors
from fl.filters import SetQuality
from fl.participants import Server
from tests.fl.federations import Tiny, federation, images
from tests.fl.invariances import assert_same
from tests.refused import refused

POOL = images(260, 77)  # more than the 256 of one forward pass
HOW: dict[str, Any] = {"server_data": {"pool": POOL}, "seed": 3, "progress": False}


def averaging(*addons: Any, **options: Any) -> FedAvg:
    return FedAvg(*addons, factory=Tiny, lr=0.1, **{"steps": 2, "batch": 6, **options})


def anchors() -> FedAvg:
    return averaging(Anchors(ipc=2, selected=(1, 2), steps=20, lr=5.0))


def condensing() -> FedDM:
    return FedDM(factory=Tiny, ipc=2, steps=3, batch_real=8, server_epochs=2, server_batch=8, server_lr=0.05)


METHODS: dict[str, tuple[Any, Any]] = {
    "FedAvg": (averaging, None), "FedLGD's anchors": (anchors, Anchors.anchors), "FedDM": (condensing, FedDM.images),
    "VHL's further outputs": (lambda: averaging(VHL(classes=3, per_class=4, options={"width": 8})), None),
}  # fmt: skip


def row_distance(a: list[Tensor], b: list[Tensor]) -> float:
    """Compute the mean of 1 - cosine row by row."""
    rows = [(r, s) for g, t in zip(a, b) if g.ndim > 1 for r, s in zip(g.flatten(1), t.flatten(1))]
    return sum(1 - float(r @ s / (r.norm() * s.norm())) if r.any() and s.any() else 1.0 for r, s in rows) / len(rows)


def gradient(state: dict[str, Tensor], data: Any) -> list[Tensor]:
    network = Tiny(len(state["classifier.bias"]))
    network.load_state_dict(state)
    F.cross_entropy(network.eval()(data.images)[:, :3], data.labels).backward()
    return [p.grad for p in network.parameters() if p.grad is not None]


class Watched(SetQuality):
    """Keep the weights, the set and the split of every round."""

    seen: list[Any] = []  # noqa: RUF012

    def after_receive(self, server: Server, before: Server, method: Any) -> None:
        models = [{n: t.clone() for n, t in one.state[method.model].items()} for one in (before, server)]
        made = None if self.entry is None else server.state[self.entry]
        self.seen.append((models, made, self._split(server, made)))
        super().after_receive(server, before, method)


@pytest.mark.parametrize("name", METHODS)
def test_column_equals_its_definition(name: str) -> None:
    make, entry = METHODS[name]
    Watched.seen = []
    run = simulate(Filtered(make(), Watched(entry, on="pool", per_class=4)), federation(), rounds=2, **HOW)
    for row, ((old, new), made, (sample, rest)) in zip(run.rows, Watched.seen, strict=True):
        old, new = ({n.split(":")[-1]: t for n, t in state.items()} for state in (old, new))
        update = [old[n] - new[n] for n, _ in Tiny(3).named_parameters()]
        sets = {"update": update, "sample": gradient(old, sample), "real": gradient(old, rest)}
        pairs = [("update", "real"), ("sample", "real"), ("sample", "update")]
        if made is not None:
            sets["set"] = gradient(old, made)
            pairs += [("set", "real"), ("set", "update")]
        want = {f"{a}_{b}": pytest.approx(row_distance(sets[a], sets[b]), abs=1e-4) for a, b in pairs}
        assert row["set_quality"] == want
        assert len(sample) + len(rest) == len(POOL)
        most = [4] * 3 if made is None else made.labels.bincount(minlength=3).tolist()
        halves = (POOL.labels.bincount() // 2).tolist()
        assert sample.labels.bincount(minlength=3).tolist() == [min(m, h) for m, h in zip(most, halves, strict=True)]
        assert len(old["classifier.bias"]) == (6 if name.startswith("VHL") else 3)
    first, second = (sample.images for _, _, (sample, _) in Watched.seen)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("name", METHODS)
def test_run_is_unchanged_and_nothing_more_is_sent(name: str) -> None:
    make, entry = METHODS[name]
    plain = simulate(make(), federation(), rounds=2, **HOW)
    watched = simulate(Filtered(make(), SetQuality(entry, on="pool", every=2)), federation(), rounds=2, **HOW)
    assert_same(plain, watched)
    assert [(r["up"], r["down"]) for r in plain.rows] == [(r["up"], r["down"]) for r in watched.rows]
    assert ["set_quality" in row for row in watched.rows] == [False, True]


def test_judge_is_a_network_trained_on_the_real_images() -> None:
    run = simulate(Filtered(condensing(), SetQuality(FedDM.images, on="pool", judge=5)), federation(), rounds=2, **HOW)
    judge = ConvNet((1, 4, 4), 3, width=32, depth=2)
    initialize(judge, derive(3, "SetQuality", "judge"))
    order = derive(3, "SetQuality", "judge's order")
    train(judge, POOL, Protocol(epochs=5, batch=64), generator=order, progress=False)
    assert run.rows[-1]["set_quality"]["named"] == pytest.approx(accuracy(judge, run.server.state[FedDM.images]))


def test_resumed_run_has_the_same_column(tmp_path: Path) -> None:
    method = Filtered(condensing(), SetQuality(FedDM.images, on="pool", judge=1))
    whole = simulate(method, federation(), rounds=3, **HOW)
    simulate(method, federation(), rounds=1, out=tmp_path, **HOW)
    resumed = simulate(method, federation(), rounds=3, out=tmp_path, resume=True, **HOW)
    assert [r["set_quality"] for r in resumed.rows] == [r["set_quality"] for r in whole.rows]


def test_config_is_rebuilt_with_its_entry() -> None:
    again = from_config(to_config(SetQuality(FedDM.images, on="pool", judge=2)))
    assert again == SetQuality(FedDM.images, on="pool", judge=2)
    assert again.entry is FedDM.images


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"needs real images on the server: server_data=\{'proxy'"):
        simulate(Filtered(averaging(), SetQuality()), federation(), rounds=1, **HOW)
    refused(lambda: SetQuality(per_class=0), ValueError, "per_class")
    personal = Filtered(averaging(personal="classifier.*"), SetQuality(on="pool"))
    with pytest.raises(ValueError, match="needs one global model, FedAvg has 0 here"):
        simulate(personal, federation(), rounds=1, **HOW)
