"""FedReg: local training that uses generated images to forget less of what the global model has learned."""

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


@dataclass(frozen=True)
class FedReg(AddOn):
    """FedReg (Xu et al., "Acceleration of Federated Learning with Alleviated Forgetting in Local Training", ICLR 2022).

    Local steps forget less of the global model's knowledge, because each client generates images that represent this
    knowledge.

    A client generates two kinds of images from its own images. It changes the pixels by `iterations` signed gradient
    steps that raise the received model's loss on the true labels. Pseudo images come from large steps, so that they
    look like other classes to the model. Their labels are the received model's softmax outputs, which represent its
    knowledge. Perturbed images come from small steps and keep their true labels.

    Let w be the weights in training and w_t the received weights. Each local step has two parts:

    1. Compute the gradient at gamma w + (1 - gamma) w_t instead of at w, and use it for the SGD step from w.
    2. Let w now be the weights after part 1. Compute two gradients at (w + w_t) / 2: g_s of the loss on pseudo images,
       and g_p of the loss on perturbed images. If (w - w_t) . g_s > 0, the weight change w - w_t raises the loss on
       pseudo images to first order. In this case, remove from w - w_t its component along g_s. Then do the same test
       and removal with g_p instead of g_s.

    These operations and their order are those of the authors' code (Zoesgithub/FedReg: `step_func` in
    FedUtils/fed/fedreg.py, `FSGM` in FedUtils/models/utils.py). That code gives all clients the same weight in the
    average, as `FedAvg(weights="uniform")` does. The generated images are made once per round, in batches. The steps
    use these batches one after the other. A step's pseudo and perturbed images are therefore in general not made from
    the real images on which the step trains. As in the code, images are not clamped to the range of pixels (the code
    computes a clamped tensor, but never uses it).

    Deviations. The optional privacy mask of the code is not implemented. The code computes every gradient on a copy of
    the network, so the network's batch-norm statistics never change; here, part 1 of a step updates them as in FedAvg.
    On a CPU, pseudo and perturbed images are the same tensor in the code; on a GPU they are two tensors, as here.

    Args:
        gamma: weight of w in part 1, in [0, 1]; the settings in the code are between 0.25 and 0.5.
        eta: step size for the pseudo images: the amount by which a step changes each normalized pixel value; the code
            uses 0.1 on CIFAR and 0.2 on MNIST.
        eta_perturbed: step size for the perturbed images; None: eta / 100, as in the code.
        iterations: number of gradient steps for each image; the code uses 10.
    """

    gamma: Fraction = 0.5
    eta: Positive = 0.1
    eta_perturbed: Positive | None = None
    iterations: PositiveInt = 10

    single_label = True

    def check(self, settings: Settings, addons: Sequence[AddOn]) -> None:
        """Refuse momentum, Adam, and add-ons that change gradients or rescale updates."""
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
        """Return the gradient of the loss at the weights gamma w + (1 - gamma) w_t.

        w are the current weights, w_t the received weights, and gamma is an option of the class. `compute` returns the
        gradient at the weights that the network has when it is called.
        """
        local, shared = step.local, step.local.shared_parameters()
        with restored(shared.values()):
            with torch.no_grad():
                for name, param in shared.items():
                    param.copy_(self.gamma * param + (1 - self.gamma) * local.start[name])
            return compute()

    def after_step(self, step: Step) -> None:
        """Remove from the weight change w - w_t the components that raise the loss on the client's generated images.

        w are the current weights, w_t the received weights. The component along the gradient of the loss on pseudo
        images is removed first, and then the component along the gradient of the loss on perturbed images. The class
        explains these two kinds of generated images.
        """
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
        """Generate a pseudo image and a perturbed image from each of the client's images, in batches.

        Each batch is a tuple: pseudo images, their soft labels, perturbed images, and their class indices.
        """
        model, data = local.at(local.received), local.data
        small = self.eta / 100 if self.eta_perturbed is None else self.eta_perturbed
        found: list[tuple[Tensor, ...]] = []
        order = local.generator(self, "order")
        for index in shuffled_indices(len(data), local.settings.batch, order, 1, None, like=data.images):
            local.client.check_running()
            batch = batch_at(data, index)
            images, labels = batch.images, batch.labels
            pseudo = self._raised(model, images, labels, self.eta)
            with torch.no_grad():
                known = model(pseudo).softmax(1)
            found.append((pseudo, known, self._raised(model, images, labels, small), labels))
        return found

    def _raised(self, network: nn.Module, images: Tensor, labels: Tensor, eta: float) -> Tensor:
        """Return the images after signed gradient steps of size `eta` that raise the network's loss.

        The option `iterations` is the number of steps.
        """
        for _ in range(self.iterations):
            images = images.detach().requires_grad_()
            slope = torch.autograd.grad(F.cross_entropy(network(images), labels), images)[0]
            images = images.detach() + eta * slope.sign()
        return images
