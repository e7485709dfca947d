"""Clipped gradients of a batch by Opacus' hooks: per-sample gradients, or their factors for ghost clipping."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from distillkit._utils import check
from distillkit._utils.eval_mode import preserve_modes
from distillkit.networks._dropout import undraw_dropout
from distillkit.privacy.capture._captured_function import require_alike, require_plain, require_unchanged
from distillkit.privacy.capture._pytorch import TorchDispatchMode, tree_leaves
from distillkit.privacy.errors import BatchStatistics, NotCapturable, NotSeparable, PrivacyError
from distillkit.privacy.gradients.per_example import (
    ExampleGradients,
    chunk_for,
    per_example_gradients,
    require_per_example,
)
from distillkit.privacy.gradients.private_gradient import OuterProducts, PrivateGradient
from distillkit.privacy.ledger import Ledger
from distillkit.privacy.validation._arguments import refuse_half_precision
from distillkit.rng import derive

__all__ = ["GRADIENTS", "OpacusGradients", "clipped_gradients", "note_opacus"]

GRADIENTS = ("captured", "opacus", "opacus-ghost")
"""Ways to compute clipped gradients: by a captured graph of one record, or by Opacus on batches."""

_REMARK = (
    "gradients={!r} ran the network and its loss on batches: epsilon assumes that row i of what any layer or the loss "
    "gets and returns depends on record i alone (nothing mixes or reorders records), and that no line of their code "
    "keeps values of a record or depends on how often it runs"
)

BatchLosses = Callable[..., Tensor]
"""`losses(network, images, labels, ...)` returns the loss of each of n examples, float [n]."""

_RECORDS = 3
"""Number of noise records on which Opacus' gradients are compared with those of autograd."""

_PIXELS = (2, 3)
"""Places in `_trials` of the batches of pixels in [0, 1], on which every gradient must be finite."""

_TURN = threading.RLock()
"""Lock of the global random state, from which layers such as dropout draw."""


class OpacusGradients:
    """Source of clipped gradients that runs the network on whole batches, with Opacus' hooks on its layers.

    The hooks are on a copy of the network that shares its parameters, so the network itself is not changed. Before use,
    Opacus' gradients are compared with those of autograd, one record after another, on batches of three records of
    noise: uniform in [0, 1], normal, and of both kinds, also with labels of two classes. Normal noise is left out if
    the gradients of its single records are not finite. This shows most layers that mix records, but not all: that no
    layer does is an assumption of the guarantee. The code of network and loss sees
    private batches. If it fails for a batch, its records are evaluated one by one; a record for which it fails counts
    as zero.

    With ghost clipping, the gradients of a float32 linear layer that gets one vector of each record are kept as outer
    products of its inputs and the gradients of its outputs. Their norms and their clipped sum are computed from these
    two factors, so that the sum is clipped by the norms of what it adds, whatever the layer computes.

    Papers: Opacus, Yousefpour et al. (2021); ghost clipping: Li et al., "Large language models can be strong
    differentially private learners" (ICLR 2022), section 4; without a second backward pass: Bu et al.,
    "Differentially private optimization on large model at small cost" (ICML 2023).

    Args:
        network: network in the modes in which it is trained; batch norm must be frozen and in eval mode.
        losses: function of (network, images, labels, ...) that returns n losses, one per record.
        like: sample arguments of `losses` after the network, of which only shapes, dtypes and device are used.
        trained: parameters to train, by their names in the network.
        ghost: whether to use ghost clipping.

    Raises:
        BatchStatistics, NotCapturable, NotSeparable, PrivacyError: the network or the loss is refused; the message
            names the layer and a remedy.
    """

    def __init__(
        self,
        network: nn.Module,
        losses: BatchLosses,
        like: Sequence[Tensor],
        *,
        trained: Mapping[str, nn.Parameter],
        ghost: bool,
    ) -> None:
        from opacus.grad_sample import GradSampleModule

        self._name, self._losses, self._trained = type(network).__name__, losses, dict(trained)
        self._twin = _shared_copy(network, self._trained, self._name)
        own = dict(self._twin.named_parameters())
        self._own = [own[name] for name in self._trained]
        self._device = self._own[0].device
        require_plain([*self._own, *like], f"the network {self._name}")
        _refuse_unsupported(self._twin, self._name)
        try:
            hooks = GradSampleModule(self._twin, loss_reduction="sum")
        except NotImplementedError as error:
            raise NotCapturable(f"Opacus has no per-sample gradients for {self._name}: {error}. {_REMEDY}") from None
        if ghost:
            known = hooks.GRAD_SAMPLERS
            hooks.GRAD_SAMPLERS = {**known, nn.Linear: partial(_linear_gradients, known[nn.Linear])}
        self._like = [(e.shape[1:], e.dtype) for e in like]
        self._draws, self._activations, self._sizes = False, 1, [0]
        self._compare(network, like)

    def chunk_size(self, expected: float, chunk: int | None = None) -> int:
        """Return the number of records for one call of `add_to`, so that memory suffices.

        Args:
            expected, chunk: arguments of `ExampleGradients.chunk_size`.
        """
        return chunk_for(self._activations + sum(self._sizes), max(self._sizes), self._device, expected, chunk)

    def add_to(self, private: PrivateGradient, *examples: Tensor, generator: torch.Generator | None = None) -> None:
        """Add the clipped gradients of n records to the sum of a step.

        Args:
            private, examples, generator: arguments of `ExampleGradients.add_to`.
        """
        require_alike(examples, self._like, f"the network {self._name}")
        require_plain([*self._trained.values(), *examples], f"the network {self._name}")
        like = [(own.shape, own.dtype) for own in self._own]
        require_unchanged([*self._trained.values()], like, f"the network {self._name}")
        count, examples = len(examples[0]), tuple(e.detach() for e in examples)  # no gradients for the caller's tensors
        if not count:
            return
        for own, parameter in zip(self._own, self._trained.values()):
            own.data = parameter.data  # an optimizer may have given the parameter a new tensor
        with self._random_state(generator), self._plainly():
            try:
                private.add(self._rows(examples))
            except torch.OutOfMemoryError:
                raise
            except Exception:  # the error depends on private values, so it may not be shown
                for i in range(count):
                    with suppress(Exception):
                        private.add(self._rows([e[i : i + 1] for e in examples]))
        self._clear()

    def _forward(self, examples: Sequence[Tensor]) -> Tensor:
        """Return the losses of the records; Opacus' hooks keep the inputs of the layers."""
        self._clear()
        losses = self._losses(self._twin, *examples)
        if not isinstance(losses, Tensor) or losses.shape != examples[0].shape[:1]:
            got = f"shape {list(losses.shape)}" if isinstance(losses, Tensor) else type(losses).__name__
            raise NotSeparable(f"the loss must give one value for each example [n], got {got}")
        return losses

    def _rows(self, examples: Sequence[Tensor]) -> list[Tensor | OuterProducts]:
        """Return the gradients of the records, one entry for each parameter."""
        self._forward(examples).sum().backward()
        found: list[Tensor | OuterProducts | None] = [own.grad_sample for own in self._own]  # type: ignore[attr-defined]
        shapes = [(len(examples[0]), *own.shape) for own in self._own]
        rows = [own.new_zeros(()).expand(s) if g is None else g for own, s, g in zip(self._own, shapes, found)]
        if [g.shape for g in rows] != shapes:
            raise NotSeparable(f"gradients have shapes {[list(g.shape) for g in rows]}, not {shapes}")
        return rows

    def _clear(self) -> None:
        """Remove what Opacus' hooks stored in the copy of the network."""
        for module in self._twin.modules():
            for name in ("activations", "max_batch_len"):
                vars(module).pop(name, None)
        for own in self._own:
            own.grad = own.grad_sample = None  # type: ignore[attr-defined]
            own._forward_counter = 0  # type: ignore[attr-defined]
            vars(own).pop("_current_grad_sample", None)

    @contextmanager
    def _random_state(self, generator: torch.Generator | None) -> Iterator[None]:
        """Draw random numbers of the network, such as dropout, from `generator` during a `with` block."""
        if not self._draws:
            yield
            return
        if generator is None:
            raise ValueError(f"{self._name} draws random numbers: pass generator=secret.generator()")
        with _TURN, self._forked():
            torch.set_rng_state(generator.get_state())
            if self._device.type == "cuda":
                torch.cuda.manual_seed(int(torch.randint(2**62, (), generator=generator)))
            try:
                yield
            finally:
                generator.set_state(torch.get_rng_state())

    @contextmanager
    def _plainly(self) -> Iterator[None]:
        """Compute gradients in full precision, without PyTorch's warning about hooks on the first layer."""
        with torch.autocast(self._device.type, enabled=False), torch.enable_grad(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Full backward hook is firing")
            yield

    def _forked(self) -> AbstractContextManager[None]:
        devices = [self._device] if self._device.type == "cuda" else []
        return torch.random.fork_rng(devices=devices)

    def _compare(self, network: nn.Module, like: Sequence[Tensor]) -> None:
        """Refuse a network or loss for which Opacus' gradients differ from those of single records, on `_trials`."""
        parameters = list(self._trained.values())
        buffers = {name: b.detach().clone() for name, b in network.named_buffers()}

        def wanted(noise: Sequence[Tensor]) -> list[Tensor]:
            sums = [self._losses(network, *(e[i : i + 1] for e in noise)).sum() for i in range(_RECORDS)]
            rows = [torch.autograd.grad(s, parameters, allow_unused=True, materialize_grads=True) for s in sums]
            return [torch.stack(column) for column in zip(*rows)]

        with preserve_modes(network), preserve_modes(self._twin), _TURN, self._forked(), self._plainly():
            try:
                trials = _trials(like)
                with torch.no_grad():
                    shapes = [t.shape for t in tree_leaves(network(trials[0][0])) if isinstance(t, Tensor)]
                classes = any(len(s) == 2 and s[1] > 1 for s in shapes)
                for number, noise in enumerate(trials if classes else trials[:-2]):
                    state = self._rng_state()
                    rows = wanted(noise)
                    if not self._draws and not torch.equal(state, self._rng_state()):
                        self._draws = True  # compare without dropout: layers with parameters must stay in training mode
                        for module in (*network.modules(), *self._twin.modules()):
                            if not any(p.requires_grad for p in module.parameters(recurse=False)):
                                module.training = False
                        rows = wanted(noise)
                    if not all(bool(torch.isfinite(row).all()) for row in rows):
                        if number in _PIXELS:
                            raise NotCapturable(
                                f"{self._name}: the gradient of a single record is not finite for noise images in "
                                "[0, 1], so Opacus' gradients cannot be compared with it. Mend the network or its "
                                "loss, or use gradients='captured', where such a record counts as zero"
                            )
                        continue  # the network expects pixels in [0, 1]
                    with _Watch(self._name) as watch:
                        self._forward(noise)
                    self._activations = max(self._activations, watch.values // _RECORDS)
                    self._refuse_different(rows, noise)
            except PrivacyError:
                raise
            except Exception as error:
                why = f"{type(error).__name__}: {str(error).partition('. ')[0]}"
                raise NotCapturable(
                    f"Opacus' hooks fail on {self._name} or its loss, on {_RECORDS} records of noise ({why}). {_REMEDY}"
                ) from error
            finally:
                self._clear()
        changed = [n for n, b in network.named_buffers() if n not in buffers or not torch.equal(b, buffers[n])]
        with torch.no_grad():
            for name, buffer in network.named_buffers():
                if name in buffers:
                    buffer.copy_(buffers[name])
        if changed:
            raise BatchStatistics(
                f"{self._name} writes to the buffer {changed[0]} during a forward pass, so it keeps values computed "
                "from private records; remove the buffer, or write to it outside of training"
            )

    def _refuse_different(self, wanted: Sequence[Tensor], noise: Sequence[Tensor]) -> None:
        rows = self._rows(noise)
        self._sizes = [0 if isinstance(g, OuterProducts) else own.numel() for own, g in zip(self._own, rows)]
        most = 1e-3 * torch.stack([r.double().norm() for r in wanted]).norm()
        for name, given, row in zip(self._trained, rows, wanted):
            dense = given.dense() if isinstance(given, OuterProducts) else given
            if not bool((dense.double() - row.double()).norm() <= most):
                raise BatchStatistics(
                    f"{self._name}: the gradients of {_RECORDS} noise records in a batch differ from those of single "
                    f"records (parameter {name}). A layer or the loss mixes the records of a batch, uses parameters of "
                    f"another layer, or draws random numbers outside of dropout. {_REMEDY}"
                )

    def _rng_state(self) -> Tensor:
        state = torch.get_rng_state()
        if self._device.type != "cuda":
            return state
        return torch.cat([state, torch.cuda.get_rng_state(self._device)])


def _trials(like: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return batches of noise: normal, of both kinds, uniform in [0, 1]; and the last two with labels 0 and 1."""
    generator = derive(0, "capture")
    normal = [torch.randn(_RECORDS, *e.shape[1:], generator=generator) for e in like]
    uniform = [torch.rand(_RECORDS, *e.shape[1:], generator=generator) for e in like]
    both = [torch.stack([n[0], u[0], n[1] / 4]) for n, u in zip(normal, uniform)]
    label = torch.arange(_RECORDS) % 2
    labels = [label.reshape(-1, *[1] * (e.ndim - 1)).expand(_RECORDS, *e.shape[1:]) for e in like]

    def typed(drawn: Sequence[Tensor], factor: int) -> list[Tensor]:
        return [(d if e.is_floating_point() else y * factor).to(e) for d, y, e in zip(drawn, labels, like)]

    return [typed(normal, 0), typed(both, 0), typed(uniform, 0), typed(uniform, 1), typed(both, 1)]


class _Watch(TorchDispatchMode):
    """Mode that counts the values that operators return, and refuses half precision.

    Attributes:
        values: number of values so far.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name, self.values = name, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, Tensor) and value.is_floating_point():
                refuse_half_precision(value, f"a value that {self._name} or its loss computes")
                self.values += value.numel()
        return result


def clipped_gradients(
    kind: str,
    network: nn.Module,
    losses: BatchLosses,
    like: Sequence[Tensor],
    *,
    trained: Mapping[str, nn.Parameter] | None = None,
) -> ExampleGradients | OpacusGradients:
    """Return a source of clipped gradients, whose method `add_to` adds those of n records to a `PrivateGradient`.

    Args:
        kind: one of `GRADIENTS`.
        network, losses, like: arguments of `OpacusGradients`.
        trained: parameters to train, by their names in the network. Default: all that require a gradient.
    """
    check.one_of(kind, "gradients", GRADIENTS)
    if kind == "captured":
        return per_example_gradients(network, partial(losses, network), like, trained=trained)
    require_per_example(network)
    chosen = {n: p for n, p in network.named_parameters() if p.requires_grad} if trained is None else trained
    with undraw_dropout(network):
        return OpacusGradients(network, losses, like, trained=chosen, ghost=kind == "opacus-ghost")


def note_opacus(ledger: Ledger, kind: str) -> None:
    """Record in the ledger what a guarantee assumes if Opacus computes the gradients.

    Args:
        ledger: ledger that is charged for the gradients.
        kind: one of `GRADIENTS`.
    """
    if kind != "captured":
        ledger.add_remark(_REMARK.format(kind))


_REMEDY = "Use gradients='captured', or change the layer"


def _shared_copy(network: nn.Module, trained: Mapping[str, nn.Parameter], name: str) -> nn.Module:
    """Return a copy of the network that shares its parameters' memory. Only the parameters `trained` need gradients."""
    chosen = {id(p) for p in trained.values()}
    memo: dict[int, object] = {
        id(p): nn.Parameter(p.detach(), requires_grad=id(p) in chosen) for p in network.parameters()
    }
    try:
        twin = copy.deepcopy(network, memo)
    except Exception as error:
        why = (str(error) or type(error).__name__).partition("\n")[0]
        raise NotCapturable(f"{name} cannot be copied for Opacus: {why}. {_REMEDY}") from error
    twin.training = True  # Opacus' validator and hooks demand the flag of the network and of the trained layers
    for module in twin.modules():
        if any(p.requires_grad for p in module.parameters(recurse=False)):
            module.training = True
        if vars(module).get("inplace"):  # hooks do not work on outputs that are changed in place
            vars(module)["inplace"] = False
    return twin


def _linear_gradients(
    dense: Callable[..., dict[nn.Parameter, Tensor]], layer: nn.Linear, activations: list[Tensor], backprops: Tensor
) -> dict[nn.Parameter, Tensor]:
    """Return gradients as Opacus' `dense` does; keep those of a weight that a record meets once as outer products."""
    weight, inputs = layer.weight, activations[0]
    single = inputs.ndim == backprops.ndim == 2 and inputs.dtype == backprops.dtype == torch.float32
    if not (weight.requires_grad and single) or weight._forward_counter > 1 or hasattr(weight, "_current_grad_sample"):  # type: ignore[attr-defined]
        return dense(layer, activations, backprops)
    weight._current_grad_sample = OuterProducts(backprops, inputs)  # type: ignore[attr-defined]
    return {} if layer.bias is None else {layer.bias: backprops}


def _refuse_unsupported(network: nn.Module, name: str) -> None:
    """Raise Opacus' refusals, with the names of the layers; and refuse layers that change their weights."""
    from opacus.validators import ModuleValidator

    for path, module in network.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
            raise NotCapturable(
                f"{path or name} ({type(module).__name__}) with max_norm changes its weights, without noise, for the "
                "records of a batch. Leave out max_norm"
            )
    errors = ModuleValidator.validate(network)
    if not errors:
        return
    found = [
        f"{path or name} ({type(module).__name__})"
        for path, module in network.named_modules()
        if any(p.requires_grad for p in module.parameters(recurse=False))
        and type(module) in ModuleValidator.VALIDATORS
        and ModuleValidator.VALIDATORS[type(module)](module)
    ]
    why = str(errors[0]).split(". ")[0]
    raise NotCapturable(
        f"Opacus does not support {', '.join(found) or name}: {why}. Freeze these layers, replace them in a copy by "
        "opacus.validators.ModuleValidator.fix(network), or use gradients='captured'"
    )
