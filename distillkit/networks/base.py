"""What every component asks of a network: an embedding, and a classifier on top of it."""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from distillkit.rng import as_generator

__all__ = ["Network", "NetworkFactory", "build", "frozen", "initialize", "split"]

NetworkFactory = Callable[[], nn.Module]


class Network(Protocol):
    """An `nn.Module` whose forward is `classifier(features(images))`.

    `features` maps images [N, C, H, W] to embeddings [N, d]; `classifier` maps those to logits [N, K].
    """

    def features(self, images: Tensor) -> Tensor:
        """Embeddings [N, d] of images [N, C, H, W]."""
        ...

    def classifier(self, embedding: Tensor) -> Tensor:
        """Logits [N, K] of embeddings [N, d]."""
        ...

    def __call__(self, images: Tensor) -> Tensor:
        """Logits [N, K] of images [N, C, H, W]."""
        ...


class SplitNetwork(nn.Module):
    """A network whose embedding is what reaches one of its modules, the classifier (see `split`)."""

    def __init__(self, model: nn.Module, name: str) -> None:
        super().__init__()
        self.model = model
        self._name = name

    def features(self, images: Tensor) -> Tensor:
        """Run the model; return the classifier's input, flattened to [N, d]."""
        return self.outputs(images)[0]

    def outputs(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Embeddings [N, d] and logits [N, K] from one run."""
        seen: list[Tensor] = []

        def note(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            seen.append(inputs[0])

        hook = self.model.get_submodule(self._name).register_forward_pre_hook(note)
        try:
            logits = self.model(images)
        finally:
            hook.remove()
        if len(seen) != 1:
            raise ValueError(f"classifier {self._name!r} ran {len(seen)} times in one forward, want exactly once")
        return seen[0].flatten(1), logits

    def classifier(self, embedding: Tensor) -> Tensor:
        """Logits of embeddings [N, d]."""
        return self.model.get_submodule(self._name)(embedding)

    def forward(self, images: Tensor) -> Tensor:
        """Logits of images."""
        return self.model(images)


def _has_split(model: nn.Module) -> bool:
    # A method: torchvision's VGG, MobileNet and DenseNet have submodules of these names, which are no such split.
    return callable(getattr(type(model), "features", None)) and callable(getattr(model, "classifier", None))


def split(model: nn.Module, classifier: str | None = None) -> Network:
    """Give any classifier network the `features` / `classifier` split.

    Args:
        model: a network that has the split already (a method `features` and a `classifier`) is returned as it is.
        classifier: the name of the module whose input is the embedding (as in `model.named_modules()`).
            Default: the last `nn.Linear`, as in torchvision's ResNets. What follows it must be nothing:
            the logits must be its output.

    The wrapper shares the model's parameters under the prefix `model.`.

    Raises:
        TypeError: not an `nn.Module`.
        ValueError: no such module, or no `nn.Linear` to choose.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    if classifier is None:
        if _has_split(model):
            return cast(Network, model)
        linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
        if not linear:
            raise ValueError(
                f"{type(model).__name__} has no nn.Linear to take as classifier; name one of its modules: "
                "split(model, classifier='...')"
            )
        classifier = linear[-1]
    elif classifier not in dict(model.named_modules()) or not classifier:
        names = ", ".join(name for name, _ in model.named_children())
        raise ValueError(f"{type(model).__name__} has no module {classifier!r}; its children are {names}")
    return cast(Network, SplitNetwork(model, classifier))


def _linear_like(module: nn.Module, generator: torch.Generator) -> None:
    weight, bias = cast(Tensor, module.weight), cast("Tensor | None", module.bias)
    weight.copy_(nn.init.kaiming_uniform_(torch.empty(weight.shape, device="cpu"), a=math.sqrt(5), generator=generator))
    if bias is not None:
        fan_in = nn.init._calculate_fan_in_and_fan_out(weight)[0]
        bound = 1 / math.sqrt(fan_in) if fan_in else 0.0
        bias.copy_(torch.empty(bias.shape, device="cpu").uniform_(-bound, bound, generator=generator))


_LINEAR_LIKE = (
    *(nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)
_CONSTANT = (nn.GroupNorm, nn.LayerNorm, nn.RMSNorm, nn.PReLU, nn.modules.batchnorm._NormBase)


def _attention(module: nn.MultiheadAttention, generator: torch.Generator) -> None:
    for name, parameter in module.named_parameters(recurse=False):
        drawn = torch.zeros(parameter.shape, device="cpu")
        if name.startswith("bias_"):
            nn.init.xavier_normal_(drawn, generator=generator)
        elif name.endswith("weight"):
            nn.init.xavier_uniform_(drawn, generator=generator)
        parameter.copy_(drawn)


@torch.no_grad()
def initialize(model: nn.Module, generator: int | torch.Generator) -> nn.Module:
    """Re-draw all parameters of `model` in place, from `generator` alone; return the model.

    The distributions are PyTorch's own defaults: Kaiming uniform with a = sqrt(5) for linear and convolution
    weights, uniform +-1/sqrt(fan_in) for their biases, N(0, 1) for embeddings, Xavier for attention, and constants
    for norms (running statistics are reset) and PReLU. For a network of our own the draws are those of its
    constructor after `torch.manual_seed`; torchvision's constructors draw from other distributions, which this
    function does not know. A module with parameters of its own that is none of these must have a method
    `initialize(generator)`. Buffers other than running statistics stay as they are.

    Raises:
        TypeError: a module that this function does not know how to draw (it is named, with the remedy).
    """
    generator = as_generator(generator)
    for name, module in model.named_modules():
        own = getattr(module, "initialize", None)
        parameters = {key for key, _ in module.named_parameters(recurse=False)}
        if callable(own):
            own(generator)
        elif isinstance(module, _LINEAR_LIKE) and parameters | {"bias"} == {"weight", "bias"}:
            _linear_like(module, generator)
        elif isinstance(module, nn.Embedding):
            module.weight.copy_(torch.empty(module.weight.shape, device="cpu").normal_(generator=generator))
            if module.padding_idx is not None:
                module.weight[module.padding_idx].zero_()
        elif isinstance(module, nn.MultiheadAttention):
            _attention(module, generator)
        elif isinstance(module, _CONSTANT):
            module.reset_parameters()
        elif parameters:
            raise TypeError(
                f"cannot re-draw {name or 'the model'} ({type(module).__name__}): it has parameters of its own; "
                "give it a method initialize(generator)"
            )
    return model


_construction = threading.RLock()


def build(factory: NetworkFactory, generator: int | torch.Generator) -> nn.Module:
    """Call `factory()` and draw its parameters from `generator`; the global random state is left as it was.

    Raises:
        TypeError: the factory does not return an `nn.Module`, or see `initialize`.
    """
    with _construction, torch.random.fork_rng(devices=[]):
        model = factory()
    if not isinstance(model, nn.Module):
        raise TypeError(f"factory must return an nn.Module, got {type(model).__name__}")
    return initialize(model, generator)


def frozen(model: nn.Module) -> nn.Module:
    """A deep copy of `model` whose parameters ask for no gradient (input gradients cost half as much)."""
    twin = copy.deepcopy(model)
    return twin.requires_grad_(False)
