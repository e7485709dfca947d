"""Accuracy of local models on a common test set before aggregation."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from distillkit import Normalization
from fl.addons import FedAvgM, LocalAccuracy, NaiveVHL, SharedPool
from fl.averaging.addon import AddOn
from tests.fl.federations import Tiny, images
from tests.fl.test_client_drift import TEST, Peek, play
from tests.refused import refused


@pytest.mark.golden("LocalAccuracy", source="Ye et al., ICLR 2024, section 6.4, Fig. 2b")
@pytest.mark.parametrize("beside", [(), (NaiveVHL(classes=3, per_class=4, options={"width": 8}), FedAvgM(0.5))])
def test_accuracy_is_that_of_every_trained_model_with_batch_statistics(beside: tuple[AddOn, ...]) -> None:
    trained: dict[tuple[int, int], Any] = {}

    class Compare(AddOn):
        def read_reply(self, server: Any, reply: Any, out: Any) -> None:
            state = server.trained(reply).network.state_dict()
            found = [net.state_dict() for _, net in list(trained.values())]  # clients' threads add theirs meanwhile
            assert any(all(torch.allclose(t, net[n], atol=1e-6) for n, t in state.items()) for net in found)

    run = play(LocalAccuracy(), Peek(trained), Compare(), *beside, rounds=3)
    for row in run.rows:
        nets = [trained[row["round"], k][1] for k in row["drawn"]]
        want = torch.tensor([float((n(TEST.images)[:, :3].argmax(1) == TEST.labels).double().mean()) for n in nets])
        found = row["accuracy_locals"]
        assert found["clients"] == 3
        assert found["mean"] == pytest.approx(float(want.mean()))
        assert found["std"] == pytest.approx(float(want.std(correction=0)), abs=1e-6)
        assert found["worst10"] == pytest.approx(float(want.min()))


def test_column_exists_only_in_its_rounds_and_with_weights() -> None:
    assert ["accuracy_locals" in row for row in play(LocalAccuracy(every=2), rounds=3).rows] == [False, True, False]
    pool = SharedPool((255 * TEST.pixels()).to(torch.uint8), keep=5, steps=1, batch=4, rate=0.5)
    run = play(LocalAccuracy(), pool, rounds=4)
    assert ["accuracy_locals" in row for row in run.rows] == [True, True, False, True]


def test_missing_test_set_is_an_error() -> None:
    with pytest.warns(UserWarning, match="LocalAccuracy changes nothing before round 4, and the run has 3"):
        play(LocalAccuracy(every=4), rounds=3)


def test_refusals() -> None:
    for rule in ("local", "drop"):
        said = "LocalAccuracy runs .* but their batch statistics stay with the clients"
        refused(lambda r=rule: play(LocalAccuracy(), buffers=r), ValueError, said)
        play(LocalAccuracy(), buffers=rule, factory=Tiny, rounds=1)
    refused(lambda: play(LocalAccuracy(), data={"other": TEST}), ValueError, "server_data={'test'")
    for wrong in (TEST.replace(normalization=Normalization((0.5,), (0.5,))), images(0, 1)):
        said = r"server_data\['test'\] (does not fit|has no images)"
        refused(lambda d=wrong: play(LocalAccuracy(), data={"test": d}), ValueError, said)
    for wrong in (TEST.replace(num_classes=9), TEST.replace(labels=torch.eye(3)[TEST.labels])):
        said = r"server_data\['test'\] must have labels as the clients have"
        refused(lambda d=wrong: play(LocalAccuracy(), data={"test": d}), ValueError, said)
