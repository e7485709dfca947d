"""FedReg: local steps that forget less of the global model, thanks to projections based on generated images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from distillkit._utils.options import Fraction, Positive, PositiveInt
from distillkit.networks._dropout import seed_dropout
from fl.averaging import AddOn, Local, Settings, Step
from fl.averaging.addon import overrides
from fl.averaging.step import restored
from fl.batches import batch_at, shuffled_indices
from fl.message import Tensors

__all__ = ["FedReg"]


@dataclass(frozen=True)
class FedReg(AddOn):
    """FedReg (Xu et al., "Acceleration of Federated Learning with Alleviated Forgetting in Local Training", ICLR 2022).

    Local steps forget less of the global model's knowledge, because each client generates images that represent it.

    From its own images a client generates two kinds of images, by `iterations` signed gradient steps that raise the
    received model's loss on their labels. Pseudo images (large steps, into other classes) are labeled with the received
    model's softmax, which carries its knowledge. Perturbed images (small steps) keep their true labels. Then each local
    step

    1. takes the gradient at gamma w + (1 - gamma) w_t instead of at w, and takes the SGD step with it; 2. takes the
    gradients g_s on pseudo and g_p on perturbed images at (w + w_t) / 2, and removes from the drift w - w_t its
    component along g_s, then along g_p, if that component raises the loss of these images to first order.

    These operations and their order are those of the authors' code (Zoesgithub/FedReg: `step_func` in
    FedUtils/fed/fedreg.py, `FSGM` in FedUtils/models/utils.py), which averages clients uniformly (`weights="uniform"`).
    The batches of generated images are made once a round and used in turn, so they are not derived from the images of
    the current step. Images are not clamped to the range of pixels; the code clamps a tensor that it then discards.

    Deviations. The optional privacy mask of the code is not implemented. Batch statistics never change in the code,
    which computes every gradient on copies; here step 1 updates them as in FedAvg, and step 2 does not. On a CPU,
    pseudo and perturbed images are the same tensor in the code; on a GPU they are two tensors, as here.

    Args:
        gamma: weight of the local model in step 1, in [0, 1]; the code's settings are 0.5, or 0.25 to 0.4.
        eta: step size for the pseudo images, in normalized pixels; the code uses 0.1 on CIFAR and 0.2 on MNIST.
        eta_perturbed: step size for the perturbed images; None: eta / 100, as in the code.
        iterations: number of gradient steps that make an image; the code uses 10.
    """

    key = "FedReg"
    gamma: Fraction = 0.5
    eta: Positive = 0.1
    eta_perturbed: Positive | None = None
    iterations: PositiveInt = 10

    single_label = True

    def check(self, settings: Settings, addons: Sequence[AddOn]) -> None:
        """Refuse momentum, Adam, and add-ons that require an update to be a sum of gradients."""
        if settings.optimizer.name != "sgd" or settings.momentum:
            raise ValueError(
                "FedReg's projections are defined for plain SGD, give optimizer='sgd' and momentum=0: momentum "
                f"undoes them, got optimizer={settings.optimizer.name!r}, momentum={settings.momentum:g}"
            )
        for addon in addons:
            if overrides(addon, "correct_gradient") or overrides(addon, "scale_update"):
                raise ValueError(
                    f"FedReg cannot be combined with {addon.name}: its update is not a sum of gradients; leave one out"
                )

    def gradient(self, step: Step, compute: Callable[[], Tensors]) -> Tensors:
        """Return the gradient at gamma w + (1 - gamma) w_t, in place of the gradient at w (step 1)."""
        local, shared = step.local, step.local.shared_parameters()
        with restored(shared.values()):
            with torch.no_grad():
                for name, param in shared.items():
                    param.copy_(self.gamma * param + (1 - self.gamma) * local.start[name])
            return compute()

    def after_step(self, step: Step) -> None:
        """Remove from the drift the components that raise the loss on pseudo, then on perturbed images (step 2)."""
        local, scratch = step.local, step.local.scratch(self)
        names = [n for n in step.trained if n in local.start]
        if not names:
            return
        if not scratch:
            scratch["batches"], scratch["copy"] = self._generated(local), local.new_network()
            seed_dropout(scratch["copy"], local.generator(self, "dropout"))
        batches: list[tuple[Tensor, ...]] = scratch["batches"]
        pseudo, known, perturbed, labels = batches[local.steps % len(batches)]
        copy: nn.Module = scratch["copy"]
        places = dict(copy.named_parameters())
        with torch.no_grad():
            for name in names:
                places[name].copy_(0.5 * (step.trained[name] + local.start[name]))
        rest = [step.trained[n].detach() - local.start[n] for n in names]
        for images, targets in ((pseudo, known), (perturbed, labels)):
            loss = F.cross_entropy(copy(images), targets)
            found = torch.autograd.grad(loss, [places[n] for n in names], allow_unused=True, materialize_grads=True)
            raises = sum((r * g).sum() for r, g in zip(rest, found)) / (sum(g.square().sum() for g in found) + 1e-30)
            rest = [r - torch.as_tensor(raises).clamp_min(0) * g for r, g in zip(rest, found)]
        with torch.no_grad():
            for name, r in zip(names, rest):
                step.trained[name].copy_(local.start[name] + r)

    def _generated(self, local: Local) -> list[tuple[Tensor, ...]]:
        """Return batches of pseudo images with soft labels, and batches of perturbed images with their labels."""
        model, data = local.at(local.received), local.data
        small = self.eta / 100 if self.eta_perturbed is None else self.eta_perturbed
        found: list[tuple[Tensor, ...]] = []
        for index in shuffled_indices(len(data), local.settings.batch, local.generator(self, "order"), 1, None):
            local.client.check_running()
            batch = batch_at(data, index)
            images, labels = batch.images, batch.labels
            pseudo = self._raised(model, images, labels, self.eta)
            with torch.no_grad():
                known = model(pseudo).softmax(1)
            found.append((pseudo, known, self._raised(model, images, labels, small), labels))
        return found

    def _raised(self, network: nn.Module, images: Tensor, labels: Tensor, eta: float) -> Tensor:
        """Return images after signed gradient steps that raise the loss."""
        for _ in range(self.iterations):
            images = images.detach().requires_grad_()
            slope = torch.autograd.grad(F.cross_entropy(network(images), labels), images)[0]
            images = images.detach() + eta * slope.sign()
        return images
