"""Images and networks in double precision: tensors created by algorithms have the clients' dtype."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from distillkit import LabeledImages
from distillkit.networks import ConvNet
from fl import simulate
from fl.message import Message
from tests.fl.every_method import METHODS
from tests.fl.test_addon_combinations import Net, digits, federation


def double(data: LabeledImages) -> LabeledImages:
    return data.to(dtype=torch.float64)


def images_of(message: Message) -> list[Tensor]:
    return [value.images for _, value in message.items() if isinstance(value, LabeledImages)]


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_every_addon_and_method_runs_in_double_precision(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (Net, ConvNet):

        def doubled(self: Any, *given: Any, made: Any = kind.__init__, **named: Any) -> None:
            made(self, *given, **named)
            self.double()

        monkeypatch.setattr(kind, "__init__", doubled)
    method, test = METHODS[name](), double(digits()[100:110])
    held = [replace(h, train=double(h.train), test=double(h.test)) for h in federation()]  # type: ignore[arg-type]
    run = simulate(
        method, held, rounds=2, test=test, evaluate="all", seed=3, progress=False,
        server_data={"proxy": double(digits()[90:96]), "test": test}, **({"secret": 1} if method.private else {}),
    )  # fmt: skip
    assert [(row["failed"], row.get("failed_evaluation")) for row in run.rows] == [({}, None)] * 2
    assert {p.dtype for net in run.models.values() for p in net.parameters()} <= {torch.float64}
    assert {images.dtype for images in images_of(run.server.state)} <= {torch.float64}
