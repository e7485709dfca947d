"""Optimization of images so that their parameter gradient matches a given target gradient."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from distillkit._utils import check
from distillkit._utils.progress import bar
from distillkit._utils.provenance import provenance
from distillkit.condense._parameter_gradient import Metric, distance_to_target
from distillkit.condense._pixel_descent import PixelDescent
from distillkit.condense._state import Progress, Resume
from distillkit.fingerprint import network_fingerprint, set_fingerprint, tensor_fingerprint
from distillkit.networks._base import Network, require_network
from distillkit.networks._validation import check_network
from distillkit.sets import LabeledImages, as_set
from distillkit.sets._devices import on_device
from distillkit.sets._info import derived_info


@on_device()
@torch.enable_grad()
def fit_to_gradient(
    network: nn.Module,
    synthetic: LabeledImages,
    target: Mapping[str, Tensor] | Sequence[Tensor],
    *,
    steps: int = 500,
    lr: float = 1.0,
    momentum: float = 0.5,
    metric: Metric = "row_cosine",
    chunk: int | None = None,
    callback: Callable[[Progress], object] | None = None,
    resume: Resume | None = None,
    device: torch.device | str | None = None,
    progress: bool = True,
) -> LabeledImages:
    """Optimize images so that their parameter gradient matches a given target, as FedLGD's server does.

    Each step reduces D(grad CE(all synthetic images), target), over all classes together, by SGD with momentum on the
    pixels. The target may be computed from the parameters of a model before and after training, as (before - after) /
    lr. This is the server step of Huang et al., "Federated learning on virtual heterogeneous data with local-global
    dataset distillation" (FedLGD, TMLR 2024), Eq. 5.

    Args:
        network: network whose parameter gradients are matched. A copy in eval mode is used; the network itself is never
            changed.
        synthetic: initial set. Its labels, class indices or soft labels, do not change.
        target: target gradient, one tensor per parameter of the network: a sequence in the order of
            `network.parameters()`, or a mapping by the names in `network.named_parameters()`. Parameters that are
            absent from a mapping are not matched.
        steps: number of optimization steps.
        lr: step size on the pixels.
        momentum: momentum of SGD, in [0, 1).
        metric: distance D between gradients; see `losses.matching.gradient_distance`. The default ignores the scale of
            the target.
        chunk: number of images per pass through the network; the default depends on device and image size.
        callback: function that is called with a `Progress` after each step.
        resume: a state from `Progress.state()`, or the path of a file written by `save_state`. Pass the other
            arguments again. `steps` includes the steps already taken.
        device: device that computes, or "auto"; results return to the device of `network`. Default: nothing moves.
        progress: whether to show a progress bar.

    Returns:
        A set with the optimized images and the labels of `synthetic`, but without its `columns` (further data of each
        image), which describe the initial images.

    Raises:
        TypeError, ValueError: an argument is invalid, or the target's names or shapes differ from those of the
            parameters.
        FloatingPointError: the loss or the images are not finite.
    """
    steps = check.positive_int(steps, "steps", least=0)
    lr = check.learning_rate(lr)
    synthetic = as_set(synthetic, name="synthetic")
    twin = copy.deepcopy(check.with_values(require_network(network))).eval().requires_grad_(True)
    if not len(synthetic):
        raise ValueError("synthetic must hold at least one image, got an empty set")
    check_network(twin, synthetic.images, classes=synthetic.num_classes, more=True)
    parameters, targets = _match_targets(twin, target)
    arguments = {"method": "gradient matching to a target", "metric": metric}

    def identity() -> dict[str, Any]:
        data, aim = set_fingerprint(synthetic), tensor_fingerprint(targets)
        return {"data": data, "target": aim, "network": network_fingerprint(twin, synthetic.images)}

    run = PixelDescent(
        synthetic.images.detach().clone(), lr=lr, momentum=momentum, steps=steps, arguments=arguments, seed=0,
        resume=resume, identity=identity, callback=callback,
    )  # fmt: skip

    def distance(images: Tensor) -> tuple[Tensor, Tensor]:
        net = cast(Network, twin)
        return distance_to_target(net, parameters, images, synthetic.labels, targets, metric=metric, chunk=chunk)

    with bar(steps, "gradient matching", progress=progress, done=run.done) as shown:
        for _ in run.remaining_steps():
            run.report(run.step(distance), shown)
    info = {**synthetic.info, **arguments, "lr": run.lr, "momentum": run.momentum, "steps": steps, **provenance()}
    info = derived_info(info, [synthetic.info], arguments["method"], "a target gradient of unknown origin")
    return synthetic.replace(images=check.converged(run.images, "lr"), columns={}, info=info)


def _match_targets(
    network: nn.Module, target: Mapping[str, Tensor] | Sequence[Tensor]
) -> tuple[list[nn.Parameter], list[Tensor]]:
    """Check the target gradients, and return the parameters for which `target` has a gradient, and these gradients."""
    named = dict(network.named_parameters())
    if not isinstance(target, Mapping):
        target = check.sequence(target, "target", "tensors, one per parameter, if not a mapping")
    if not len(target):
        raise ValueError("target must hold at least one tensor, got none")
    if not isinstance(target, Mapping):
        target = list(target)
        if len(target) != len(named):
            raise ValueError(f"target must hold a tensor for each of the {len(named)} parameters, got {len(target)}")
        target = dict(zip(named, target))
    if unknown := sorted(map(str, set(target) - set(named))):
        raise ValueError(f"target has entries that are no parameters of the network: {', '.join(unknown)}")
    targets = []
    for name, value in target.items():
        if not isinstance(value, Tensor) or value.shape != named[name].shape:
            came = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"target for {name} must be a tensor {list(named[name].shape)}, got {came}")
        check.has_values(value, f"target for {name}")
        if not bool(torch.isfinite(value).all()):
            raise ValueError(f"target for {name} must be finite, got NaN or Inf")
        targets.append(value.detach().to(named[name]))
    return [named[name] for name in target], targets
