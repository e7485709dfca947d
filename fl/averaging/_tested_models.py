"""Tests of the models that are trained by federated averaging of weights.

The server tests the global models; a client tests the global model, its personal model or both on its own images.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from distillkit._utils.batches import batch_indices
from distillkit.sets import LabeledImages
from fl.averaging._composition import check_update, from_slot
from fl.averaging._entries import Entries
from fl.averaging.addon import AddOn, slot_owner
from fl.averaging.local import Local, received_state
from fl.averaging.server import AveragingServer
from fl.averaging.settings import Settings, floating_buffers
from fl.message import Message, Tensors
from fl.method import Predictor
from fl.participants import Client


def global_models(server: AveragingServer, addons: Sequence[AddOn]) -> Mapping[str, Predictor]:
    """Return the global model of each architecture, to test or save it, by name of the architecture.

    A model is left out if some of its parameters stay with the clients. If only its batch-norm statistics stay with the
    clients, they are estimated on `server.data["calibration"]`; without this set, the model is left out.

    Args:
        server: server with the current weights.
        addons: the active add-ons. One of them may supply other weights to test (`AddOn.evaluation_model`).
    """
    found: dict[str, Predictor] = {}
    settings, classes = server.settings, server.task.num_classes
    for name, template in settings.networks.templates(classes).items():
        local_statistics = settings.buffers != "mean" and bool(floating_buffers(template))
        if settings.personal or (local_statistics and "calibration" not in server.data):
            continue
        tested = server.state[Entries.model]
        tested = from_slot(addons, "evaluation_model", server, default=tested, name="server.state[FedAvg.model]")
        net = server.network(name, server.weights(name, of=tested))
        if local_statistics:
            _estimate_statistics(net, server.data["calibration"].images)
        found[name] = Predictor(net.eval().requires_grad_(False), settings.tested_outputs(classes))
    return found


def evaluated_models(settings: Settings, addons: Sequence[AddOn]) -> list[str]:
    """Return the names of the models that a client tests on its own images: "global", "personal", or both.

    With parameters or statistics that stay it is "personal"; with a slot `personal_model`, both.
    """
    if slot_owner(addons, "personal_model"):
        return ["global", "personal"]
    return ["personal"] if settings.personal or settings.buffers == "local" else ["global"]


def evaluate_models(
    settings: Settings, addons: Sequence[AddOn], client: Client, message: Message, data: LabeledImages
) -> dict[str, Tensor]:
    """Test a client's models, whose names `evaluated_models` returns, and return `LabelTask.sums` by name.

    Args:
        settings: the method's options and its networks.
        addons: the active add-ons.
        client: client whose models are tested.
        message: message from the server, with the global model.
        data: test images.
    """
    received, slot = received_state(settings, client, message), slot_owner(addons, "personal_model")
    states: dict[str, Tensors] = dict.fromkeys(evaluated_models(settings, addons), received)
    if slot:
        own = slot.personal_model(Local(settings, client, message, addons))
        own = check_update(slot, "personal_model", own, received, "local.start", some=True)
        states["personal"] = {**received, **own}
    noised = any(a.private for a in addons) and slot is None
    ledger = client.ledger
    if "personal" in states and not noised and ledger is not None:
        ledger.void("its personal model, which has no noise, was tested and the result sent", client=client.id)
    sums: dict[str, Tensor] = {}
    for name, state in states.items():
        net = settings.networks.on(client, state).eval().requires_grad_(False)
        predictor = Predictor(net, settings.tested_outputs(client.task.num_classes))
        sums[name] = predictor.sums(data, client.task)
    return sums


@torch.no_grad()
def _estimate_statistics(network: nn.Module, images: Tensor) -> None:
    """Set a network's batch-norm statistics to their cumulative mean over chunks of 64 images.

    All other layers are in eval mode, so dropout is off and draws no random values.
    """
    network.eval()
    for norm in (m for m in network.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)):
        norm.reset_running_stats()
        norm.momentum = None
        norm.train()
    for rows in batch_indices(torch.arange(len(images)), 64, merge_single=True):
        network(images[int(rows[0]) : int(rows[-1]) + 1])
