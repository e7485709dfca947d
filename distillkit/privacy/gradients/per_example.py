"""Per-example gradients of a batch, by Opacus' hooks or by torch.func."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

from distillkit._utils import check
from distillkit.privacy.errors import BatchStatistics, PrivacyError
from distillkit.privacy.gradients._per_example_engines import ExampleGradients, GradientMode, Losses
from distillkit.privacy.validation._arguments import refuse_half_precision
from distillkit.privacy.validation._gradient_check import choose_engine

__all__ = ["per_example_gradients", "require_per_example"]


def require_per_example(network: nn.Module) -> None:
    """Refuse a network whose layers mix the examples of a batch, or that has no trainable parameters.

    This is a quick check of the layer types before private training. The network's computation is checked when it is
    trained; see `per_example_gradients`.

    Args:
        network: the network to train.

    Raises:
        BatchStatistics: the network has batch norm or running statistics; the message names the layers.
        PrivacyError: no parameter requires a gradient, or a parameter is in half precision.
    """
    found = [name or type(m).__name__ for name, m in network.named_modules() if keeps_statistics(m)]
    if found:
        raise BatchStatistics(
            f"layers {', '.join(found)} of {type(network).__name__} keep or use statistics of the batch, which no "
            "per-example clip bounds. Use norm='instance' or 'group', or convert a copy: without_batch_norm(network)"
        )
    if not any(p.requires_grad for p in network.parameters()):
        raise PrivacyError(
            f"{type(network).__name__} has no parameter that requires a gradient, so there is nothing to train; set "
            "requires_grad on the parameters to train"
        )
    for name, parameter in network.named_parameters():
        refuse_half_precision(parameter, f"parameter {name}")


def keeps_statistics(module: nn.Module) -> bool:
    """Return whether a layer uses or stores statistics of the batch, through which examples affect each other.

    Args:
        module: layer to check. The result is True for batch norm of any kind and for instance norm that tracks running
            statistics.
    """
    batch = isinstance(module, nn.modules.batchnorm._BatchNorm)
    return batch or (isinstance(module, nn.modules.instancenorm._InstanceNorm) and module.track_running_stats)


@contextmanager
def per_example_gradients(
    network: nn.Module,
    losses: Losses,
    *,
    public: Sequence[Tensor],
    chunk: int,
    sizes: Sequence[int] = (),
    trained: Mapping[str, nn.Parameter] | None = None,
    mode: GradientMode = "auto",
    engine: str | None = None,
) -> Iterator[ExampleGradients]:
    """Open a `with` block in which `gradients(images, labels)` returns the gradient of every example's own loss.

    A private optimiser needs these gradients, and autograd only returns their sum over a batch. When the block ends,
    the network is restored.

        def losses(images, labels):
            return F.cross_entropy(network(images), labels, reduction="none")
        with per_example_gradients(network, losses, public=(noise, some_labels), chunk=16) as gradients:
            rows = gradients(images, labels)     # for each trained parameter [n, *shape], n <= 16

    First, the network and the loss are *checked* on `public`, in the network's current mode and with its current
    parameters:

    - row i is the gradient of example i's loss alone, for every parameter, and does not change when the other examples
      are replaced;
    - no global random state is read or changed;
    - a forward pass changes no tensor of the network.

    `nn.Dropout` is disabled during the check, because the caller draws its masks from a secret generator. With hooks
    every forward pass has exactly `chunk` examples: a short batch is padded with copies whose rows are dropped. Only
    the checked batch size is therefore used; `sizes` are checked as well.

    There are three engines. Opacus' hooks support networks whose parameters all belong to layers that Opacus supports.
    Other networks use torch.func (vmap of grad): those with parameters outside of layers (a class token, a position
    embedding), `nn.MultiheadAttention`, or weights used outside their layer. If torch.func fails too, gradients are
    computed for one example at a time.

    Args:
        network: the network, in training mode.
        losses: function that evaluates `network` on tensors with n rows each (images, labels, ...) and returns n
            losses; only their sum is used.
        public: arguments of `losses` for a few examples (at least two) that are independent of the private data.
        chunk: public maximum number of examples per call.
        sizes: further batch sizes to check: all that the caller will use.
        trained: parameters to train, by their names in the network; all other parameters are frozen in the block.
            Default: all parameters that require a gradient.
        mode: "auto" for any engine, "hooks" for Opacus' hooks alone, or "func" for the other engines. If a network
            folds views or patches into the batch, hooks would clip each view or patch as an example: such a network is
            refused; use "func".
        engine: engine that an earlier check of the same code chose (`gradients.engine`); the check is then not
            repeated.

    Raises:
        BatchStatistics, NotSeparable, PrivacyError: the check fails; the message gives the place and a remedy.
    """
    require_per_example(network)
    check.positive_int(chunk, "chunk")
    check.one_of(mode, "mode", ("auto", "hooks", "func"))
    if engine is not None:
        check.one_of(engine, "engine", ("hooks", "vmap", "loop"))
    chosen = {n: p for n, p in network.named_parameters() if p.requires_grad} if trained is None else dict(trained)
    if not chosen:
        raise PrivacyError("trained names no parameter, so there are no gradients to compute; leave it out for all")
    frozen = [p for n, p in network.named_parameters() if p.requires_grad and n not in chosen]
    for parameter in frozen:
        parameter.requires_grad_(False)
    gradients = ExampleGradients(network, losses, chosen, chunk)
    try:
        gradients.engine = choose_engine(gradients, public, sizes, mode) if engine is None else engine
        yield gradients
    finally:
        gradients.close()
        for parameter in frozen:
            parameter.requires_grad_(True)
