"""Checks that add-ons and the training objective do not break the privacy guarantee of DP-SGD on the clients."""

from __future__ import annotations

import torch

from distillkit.privacy.validation._independence import require_mean_objective
from fl._noise_images import empty_set, noise_set
from fl.averaging import AddOn, AveragingServer
from fl.averaging.addon import overrides

_DERIVED = {
    "answer": "asks the clients for statistics of their data, which have no noise",
    "dataset": "trains on a set derived from the private images without noise",
    "extra_records": "adds records to the private set, so that other records are drawn than those accounted for",
    "extra_batches": "adds images of its own to every step, whose gradient no per-example clip covers",
}
_BESIDE_A_TERM = ("correct_gradient", "after_step", "scale_update", "after_training")


def unsound(addon: AddOn) -> str:
    """Return the reason why an add-on would leak private data in spite of DP-SGD, or "" if it would not.

    The reason completes the sentence "DPSGD cannot be combined with X, which ...".
    """
    for hook, why in _DERIVED.items():
        if overrides(addon, hook) and (hook != "answer" or addon.has_query):
            return why
    if addon.data_access == "batch":
        return "reads the images of a batch together, or more (data_access = 'batch'): no clip bounds one record's part"
    beside = [hook for hook in _BESIDE_A_TERM if overrides(addon, hook)]
    if addon.data_access == "example" and beside:
        return f"reads private examples (data_access = 'example') and fills {beside[0]!r}: only a loss can be clipped"
    return ""


def refuse_mixing_objective(server: AveragingServer, generator: torch.Generator) -> None:
    """Refuse a training loss whose value for a batch is not the mean over the examples. It is tested on random logits.

    Args:
        server: server of the run, with the task and the method's options, which determine the loss.
        generator: generator of the logits and of noise images, whose labels are used.

    Raises:
        NotSeparable: the loss of a batch differs from the mean over its examples.
    """
    data = noise_set(server.task, empty_set(server), generator)
    logits = torch.randn(len(data), server.outputs, generator=generator).to(data.images.device)
    require_mean_objective(server.settings.objective_of(server.task), logits, data.labels)
