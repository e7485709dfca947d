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
    """Refuse a network whose layers mix the examples of a batch, or that has nothing to train.

    This is a quick look at the layers before private training. What the layers do not show is checked when the network
    is trained; see `per_example_gradients`.

    Args:
        network: the network to train.

    Raises:
        BatchStatistics: batch norm, or running statistics; the message names the layers.
        PrivacyError: no parameter requires a gradient, or one is in half precision.
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
        module: a layer: batch norm of any kind, or instance norm that tracks running statistics, gives True.
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
    the network is as it was.

        def losses(images, labels):
            return F.cross_entropy(network(images), labels, reduction="none")
        with per_example_gradients(network, losses, public=(noise, some_labels), chunk=16) as gradients:
            rows = gradients(images, labels)     # for each trained parameter [n, *shape], n <= 16

    First, network and loss are *checked* on `public`, in the mode the network is in, with these parameters:

    - row i is the gradient of example i's loss alone, for every parameter, and does not change when the other examples
      are replaced;
    - no global random state is read or changed;
    - a forward pass changes no tensor of the network.

    `nn.Dropout` is disabled during the check, because the caller draws its masks from a secret generator. With hooks
    every forward pass has exactly `chunk` examples: a short batch is padded with copies whose rows are dropped. The
    checked batch size is therefore the only one that is used; `sizes` are checked as well.

    There are three engines. Opacus' hooks support networks whose parameters all belong to layers that Opacus knows.
    Other networks use torch.func (vmap of grad): those with parameters outside of layers (a class token, a position
    embedding), `nn.MultiheadAttention`, or weights used outside their layer. If torch.func fails too, gradients are
    computed one example after the other.

    Args:
        network: the network, in training mode.
        losses: losses [n] of tensors with n rows each (images, labels, ...), by `network`; only their sum counts.
        public: such tensors for a few examples (at least two) that are independent of the private data.
        chunk: the most examples at once, a public number.
        sizes: further batch sizes to check: those that the caller will use.
        trained: the parameters to train, by their names in the network; all others are frozen in the block. Default:
            all that require a gradient.
        mode: "auto"; "hooks" or "func" to allow one kind of engine alone. Hooks would treat every view or patch that
            the network folds into the batch as an example and clip each: such a network is refused; use "func".
        engine: the result of an earlier check of the same code (`gradients.engine`), which is then not repeated.

    Raises:
        BatchStatistics, NotSeparable, PrivacyError: the check fails; the message says where, and the remedy.
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
