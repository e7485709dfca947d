"""Random initialization of the parameters of networks from a generator."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator
from typing import cast

import torch
from torch import Tensor, nn

from distillkit._utils import check
from distillkit.networks._base import require_network
from distillkit.rng import as_generator

Redraw = Callable[[nn.Module, torch.Generator], object]


@torch.no_grad()
def init_linear(module: nn.Module, generator: torch.Generator | None) -> None:
    """Initialize the weight and bias of a linear or convolution layer.

    The layer's attribute `kaiming` selects the distribution of the weight: "normal" for N(0, 2 / fan_out), or "uniform"
    with variance 2 / fan_in, both with a bias of 0. Without this attribute, PyTorch's default distributions are used.
    """
    weight, bias = cast(Tensor, module.weight), cast("Tensor | None", module.bias)
    drawn, kaiming = torch.empty(weight.shape, device="cpu"), getattr(module, "kaiming", "")
    if kaiming == "normal":
        nn.init.kaiming_normal_(drawn, mode="fan_out", nonlinearity="relu", generator=generator)
    else:
        nn.init.kaiming_uniform_(drawn, a=0 if kaiming else math.sqrt(5), generator=generator)
    weight.copy_(drawn, non_blocking=True)
    if bias is not None and kaiming:
        bias.zero_()
    elif bias is not None:
        fan_in = nn.init._calculate_fan_in_and_fan_out(weight)[0]
        bound = 1 / math.sqrt(fan_in) if fan_in else 0.0
        drawn = torch.empty(bias.shape, device="cpu").uniform_(-bound, bound, generator=generator)
        bias.copy_(drawn, non_blocking=True)


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
        parameter.copy_(drawn, non_blocking=True)


_turn = threading.RLock()


@contextlib.contextmanager
def seeded_global_rng(seed: int) -> Iterator[None]:
    """Seed the global generator during a `with` block and restore its state afterwards."""
    # Without an accelerator, `torch.manual_seed` records three tracebacks per call for missing devices.
    seed_all = torch.manual_seed if torch.accelerator.is_available() else torch.default_generator.manual_seed
    with _turn, torch.random.fork_rng(devices=[]):
        seed_all(seed)
        yield


def draw_seed(generator: torch.Generator) -> int:
    """Draw an int seed from a generator, whose state advances."""
    return int(torch.randint(2**62, (), generator=generator))


def _reset(module: nn.Module, generator: torch.Generator) -> bool:
    """Call a module's `reset_parameters`, to initialize the parameters of the module itself, not of its children.

    Return True if the call has set all of these parameters. Otherwise restore their values and return False.
    """
    own = list(module.parameters(recurse=False))
    before = [parameter.clone() for parameter in own]
    for parameter in own:
        parameter.fill_(torch.nan)
    with seeded_global_rng(draw_seed(generator)):
        cast(Callable[[], object], module.reset_parameters)()
    complete = not any(bool(parameter.isnan().any()) for parameter in own)
    if not complete:
        for parameter, value in zip(own, before, strict=True):
            parameter.copy_(value)
    return complete


def init_own_parameters(module: nn.Module, generator: torch.Generator) -> bool:
    """Initialize the parameters that belong to the module itself, not to its children.

    Return False if no rule for initializing this kind of module is known.
    """
    own = getattr(module, "initialize", None)
    parameters = {key for key, _ in module.named_parameters(recurse=False)}
    if callable(own):
        own(generator)
    elif isinstance(module, _LINEAR_LIKE) and parameters | {"bias"} == {"weight", "bias"}:
        init_linear(module, generator)
    elif isinstance(module, nn.Embedding):
        module.weight.copy_(torch.empty(module.weight.shape, device="cpu").normal_(generator=generator))
        if module.padding_idx is not None:
            module.weight[module.padding_idx].zero_()
    elif isinstance(module, nn.MultiheadAttention):
        _attention(module, generator)
    elif isinstance(module, _CONSTANT):
        module.reset_parameters()
    elif parameters:
        return callable(getattr(module, "reset_parameters", None)) and _reset(module, generator)
    return True


@torch.no_grad()
def initialize(network: nn.Module, generator: int | torch.Generator, redraw: Redraw | None = None) -> nn.Module:
    """Redraw all parameters of a network in place from a generator and return the network.

    `RandomNetworks` calls this function for every draw, and `build` calls it once. The distributions are PyTorch's
    defaults: Kaiming uniform with a = sqrt(5) for linear and convolution weights, uniform +-1/sqrt(fan_in) for their
    biases, N(0, 1) for embeddings, Xavier for attention, and constants for norms (running statistics are reset) and
    PReLU. With a seed s, a network of this package gets the same values as if it is constructed after
    `torch.manual_seed(s)`. The constructors of torchvision's networks draw from other distributions; use `KeepInit` to
    keep their values. Any other module that has parameters outside its submodules is initialized by its method
    `initialize(generator)` or, without this method, by `reset_parameters()`. Buffers other than running statistics are
    unchanged.

    Args:
        network: any `nn.Module`.
        generator: int seed, or a CPU generator, whose state advances.
        redraw: function `redraw(network, generator)` that is called last, with gradients disabled. It sets the
            parameters for which no rule above applies, such as a class token, position embeddings or layer scales. It
            may change any other parameters.

    Raises:
        TypeError: `redraw` is None, and no rule above applies to a module. The message contains the module's name and
            lists the remedies.
        ValueError: a parameter is lazy, or on the device "meta".
    """
    require_network(network, "network")
    check.with_values(network)
    if redraw is not None:
        check.callable_with(redraw, "redraw", ["network", "generator"], "a function that sets parameters in place")
    with torch.device("cpu"):  # every parameter is drawn there, whatever the default device
        generator = as_generator(generator)
    unknown = [(name, module) for name, module in network.named_modules() if not init_own_parameters(module, generator)]
    if redraw is not None:
        with seeded_global_rng(draw_seed(generator)):
            redraw(network, generator)
    elif unknown:
        name, module = unknown[0]
        raise TypeError(
            f"cannot redraw {name or 'the network'} ({type(module).__name__}): it has its own parameters; add a "
            "method initialize(generator), keep the constructor's weights with KeepInit(factory), or pass "
            "redraw=lambda network, generator: ... where available. FixedNetwork(network) and "
            "NetworkBall(network, radius) accept any network"
        )
    return network
