"""The gradient of each example of a batch: by Opacus' hooks where they serve, else by torch.func."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

from distillkit._utils import check
from distillkit.privacy.errors import BatchStatistics, PrivacyError
from distillkit.privacy.gradients._engines import ExampleGradients, GradientMode, Losses
from distillkit.privacy.validation._arguments import refuse_half_precision
from distillkit.privacy.validation._gradient_check import choose_engine

__all__ = ["per_example_gradients", "require_per_example"]


def require_per_example(network: nn.Module) -> None:
    """Refuse a network in which examples of a batch meet by design, or in which there is nothing to train.

    The quick look at a network before private training, by its layers. What cannot be read off its layers is tried when
    it is trained; see `per_example_gradients`.

    Args:
        network: the network that shall be trained.

    Raises:
        BatchStatistics: batch norm, or running statistics; the message names the layers.
        PrivacyError: no parameter asks for a gradient, or one is in half precision.
    """
    found = [name or type(m).__name__ for name, m in network.named_modules() if keeps_statistics(m)]
    if found:
        raise BatchStatistics(
            f"layers {', '.join(found)} of {type(network).__name__} keep or use statistics of the batch, which no "
            "per-example clip bounds; take norm='instance' or 'group', or convert a copy: without_batch_norm(network)"
        )
    if not any(p.requires_grad for p in network.parameters()):
        raise PrivacyError(
            f"{type(network).__name__} has no parameter that asks for a gradient, so there is nothing to train; set "
            "requires_grad on those that shall learn"
        )
    for name, parameter in network.named_parameters():
        refuse_half_precision(parameter, f"parameter {name}")


def keeps_statistics(module: nn.Module) -> bool:
    """Whether a layer uses or remembers statistics of the batch, by which examples meet.

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
    how: GradientMode = "auto",
    engine: str | None = None,
) -> Iterator[ExampleGradients]:
    """A `with` block in which `gradients(images, labels)` gives the gradient of every example's own loss.

    What a private optimiser needs and autograd does not give: not the sum over a batch but its terms. When the block
    ends no trace is left on the network.

        def losses(images, labels):
            return F.cross_entropy(network(images), labels, reduction="none")
        with per_example_gradients(network, losses, public=(noise, some_labels), chunk=16) as gradients:
            rows = gradients(images, labels)     # for each trained parameter [n, *shape], n <= 16

    Before `gradients` is handed out it is *tried* on `public`, in the mode the network is in, with these very
    parameters: the law is that row i is the gradient of example i's loss alone, for every parameter, and stays what it
    is when the other examples are replaced; that no global random state is read or moved; that a forward pass changes
    no tensor of the network. `nn.Dropout` is set aside for it (it multiplies by draws of a generator that the caller
    hides), all else runs as it will. With hooks every forward pass has exactly `chunk` examples, a short batch is
    filled up with copies that are dropped: so the batch size that is tried is the only one that is ever used, `sizes`
    are tried besides.

    There are three ways. Opacus' hooks serve networks whose parameters all belong to layers that Opacus knows. A
    network with parameters of its own (a class token, a position embedding), `nn.MultiheadAttention`, weights that are
    used outside their layer: these go through torch.func (vmap of grad), or if that fails through one example after the
    other. The cost, in ordinary steps of the same 64 records on a CPU core (`tests/benchmarks/bench_per_example.py`):
    a ConvNet-3 of width 64 takes 2.5 by hooks, 1.9 by vmap, 2.5 by the loop; a ViT of four layers, width 64, 1.9 by
    vmap, 3.5 by the loop; ResNet-18, whose ordinary step at 32x32 is short for its 11 million weights, 31 and 23.

    Args:
        network: the network, in training mode.
        losses: losses [n] of tensors with n rows each (images, labels, ...), by `network`; only their sum counts.
        public: such tensors of a few examples (two at least) that owe nothing to private data.
        chunk: the most examples at once, a public number.
        sizes: further batch sizes to try it at, those that the caller will use.
        trained: the parameters that are trained, by their names in the network; all others are frozen meanwhile.
            Default: all that ask for a gradient.
        how: "auto"; "hooks" or "func" to allow one way alone. Hooks see a view or patch that is folded into the batch
            as an example of its own, and clip each: such a network is refused, and "func" is its remedy.
        engine: the outcome of a former trial of the same code (`gradients.engine`), which is then not repeated.

    Raises:
        BatchStatistics, NotSeparable, PrivacyError: the law does not hold; the message says of what, and the remedy.
    """
    require_per_example(network)
    check.positive_int(chunk, "chunk")
    check.one_of(how, "how", ("auto", "hooks", "func"))
    if engine is not None:
        check.one_of(engine, "engine", ("hooks", "vmap", "loop"))
    chosen = {n: p for n, p in network.named_parameters() if p.requires_grad} if trained is None else dict(trained)
    if not chosen:
        raise PrivacyError("trained names no parameter, so there is nothing to take gradients of; leave it out for all")
    frozen = [p for n, p in network.named_parameters() if p.requires_grad and n not in chosen]
    for parameter in frozen:
        parameter.requires_grad_(False)
    gradients = ExampleGradients(network, losses, chosen, chunk)
    try:
        gradients.engine = choose_engine(gradients, public, sizes, how) if engine is None else engine
        yield gradients
    finally:
        gradients.close()
        for parameter in frozen:
            parameter.requires_grad_(True)
