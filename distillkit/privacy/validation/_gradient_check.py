"""Check of per-example gradients on public examples: every row must be the gradient of one example's own loss."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from distillkit.chunking import chunk_size
from distillkit.networks._dropout import no_dropout
from distillkit.privacy.errors import BatchStatistics, PrivacyError
from distillkit.privacy.gradients._per_example_engines import ExampleGradients, UnsupportedLayer, folded_batch_message
from distillkit.privacy.validation._side_effects import forbid_side_effects
from distillkit.rng import derive

__all__ = ["choose_batch_sizes", "choose_engine"]

_TRIES = 3
_PIXELS = 128 * 32 * 32


def choose_batch_sizes(images: Tensor, expected: float, chunk: int | None) -> tuple[int, list[int]]:
    """Choose the number of examples per pass, and other batch sizes to check, from public numbers alone.

    This is the default of `chunk` in private training. Every batch is padded to a multiple of the number of examples
    per pass. On a CPU this number is about a quarter of the expected batch size, so that few rows are wasted. On an
    accelerator it is a likely upper bound of the batch size.

    Args:
        images: images with the device, height and width to use; their values are not used.
        expected: expected number of records in a step, rate * size.
        chunk: upper bound of the number of examples per pass; None for a default that depends on device and image size.

    Returns:
        The arguments `chunk` and `sizes` of `per_example_gradients`.
    """
    likely = max(1, math.ceil(expected + 3 * math.sqrt(expected)))
    most = chunk_size(images)
    if chunk is not None:
        count = min(chunk_size(images, chunk), likely)
    elif images.device.type == "cpu":
        count = min(most, likely, max(8, 1 << max(0, int(expected / 4).bit_length() - 1)))
    else:
        count = min(most, likely)
    largest = max(count, min(likely, most))
    few = largest * (largest + 1) * images.shape[2] * images.shape[3] <= _PIXELS
    sizes = range(2, largest + 1) if few else (2, 3, 5, 8, largest // 2, largest - 1, round(expected), largest)
    return count, sorted({size for size in sizes if 2 <= size <= largest} - {count})


def choose_engine(gradients: ExampleGradients, public: Sequence[Tensor], sizes: Sequence[int], mode: str) -> str:
    """Return the first engine whose per-example gradients are correct on public examples.

    If the network supports float64, the check runs in float64, where rounding cannot be mistaken for a difference. It
    then runs again, with a coarse tolerance, in the network's own type. Otherwise the check runs in that type alone,
    and a failed check is repeated on other examples before the network is refused.

    Args:
        gradients: function object that computes the per-example gradients.
        public: arguments of the losses for at least two public examples.
        sizes: batch sizes, in addition to the chunk, for which the loss of a batch must equal the sum of its examples'
            losses.
        mode: name of the allowed engines: "auto", "hooks" or "func".

    Returns:
        "hooks", "vmap" or "loop".

    Raises:
        BatchStatistics, NotSeparable, PrivacyError: see `per_example_gradients`.
    """
    examples = list(public)
    if len(examples[0]) < 2:
        raise ValueError(f"public must hold at least two examples, got {len(examples[0])}: mixing needs two")
    double = [e.double() if e.is_floating_point() else e for e in examples] if examples[0].device.type != "mps" else []
    if double:
        try:
            with _in_float64(gradients.network):
                engine = _GradientCheck(gradients, double, sizes, mode).run()
            if examples[0].dtype != torch.float64:
                _GradientCheck(gradients, examples, sizes, mode).confirm(engine)
            return engine
        except (RuntimeError, TypeError):  # the network needs its own type, or has a real fault: see below
            gradients.close()
    for attempt in range(_TRIES):
        noise = torch.randn(examples[0].shape, generator=derive(attempt, "try")).to(examples[0])
        try:
            return _GradientCheck(gradients, [examples[0] + 0.1 * attempt * noise, *examples[1:]], sizes, mode).run()
        except PrivacyError:
            if attempt + 1 == _TRIES:
                raise
    raise AssertionError


@contextmanager
def _in_float64(network: nn.Module) -> Iterator[None]:
    tensors = [t for t in (*network.parameters(), *network.buffers()) if t.is_floating_point()]
    before = [t.data for t in tensors]
    try:
        for tensor in tensors:
            tensor.data = tensor.data.double()
        yield
    finally:
        for tensor, data in zip(tensors, before):
            tensor.data = data


class _GradientCheck:
    """Check in one number type, on a few `examples`, which larger batches repeat at random positions."""

    def __init__(self, gradients: ExampleGradients, examples: list[Tensor], sizes: Sequence[int], mode: str) -> None:
        self.gradients, self.examples, self.sizes, self.mode = gradients, examples, sizes, mode
        self.network, self.device = gradients.network, examples[0].device
        self.what = f"the network {type(self.network).__name__}"
        eps = torch.finfo(examples[0].dtype).eps
        self.tolerance, self.strict = eps**0.5, eps**0.75
        self.count, self.folded = 0, cast("tuple[str, int, int] | None", None)

    def run(self) -> str:
        with no_dropout(self.network):
            with forbid_side_effects(self.what, self.network, device=self.device), self._record_folding():
                single = self._compute_single_gradients()
                self.losses = torch.stack([self._loss_sum(self._batch(i)) for i in single])
                self._check_batches()
            return self._first_correct_engine()

    def confirm(self, engine: str) -> None:
        """Refuse rows that are correct in float64 but far from correct in the network's own type."""
        self.gradients.close()
        self.tolerance = 0.05
        with no_dropout(self.network):
            with forbid_side_effects(self.what, self.network, device=self.device):
                self._compute_single_gradients()
                wrong = self._wrong_parameter(engine) if engine != "loop" else ""
            if wrong:
                raise BatchStatistics(
                    f"{self.what}: the gradients of parameter {wrong} in {self.examples[0].dtype} are not those of "
                    "single examples, though they are in float64; treat every example independently"
                )

    def _compute_single_gradients(self) -> list[Tensor]:
        single = [torch.tensor([i]) for i in range(len(self.examples[0]))]
        rows = [self.gradients.alone(*self._batch(i)) for i in single]
        self.alone = [torch.stack(column) for column in zip(*rows)]
        return single

    @contextmanager
    def _record_folding(self) -> Iterator[None]:
        """Record the first trained layer whose input has more or fewer rows than there are examples."""
        trained = {id(p): n for n, p in self.gradients.trained.items()}

        def record(name: str, module: nn.Module, inputs: tuple[object, ...]) -> None:
            rows = inputs[0].shape[:1] if inputs and isinstance(inputs[0], Tensor) else ()
            if rows != (self.count,):
                self.folded = self.folded or (name, rows[0] if rows else 0, self.count)

        handles = []
        for module in self.network.modules():
            names = [trained[id(p)] for p in module.parameters(recurse=False) if id(p) in trained]
            if names:
                handles.append(module.register_forward_pre_hook(partial(record, names[0])))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _batch(self, index: Tensor) -> list[Tensor]:
        self.count = len(index)
        return [e.index_select(0, index.to(e.device)) for e in self.examples]

    @torch.no_grad()
    def _loss_sum(self, examples: list[Tensor]) -> Tensor:
        return self.gradients.loss_rows(*examples).sum().double()

    def _index(self, size: int) -> Tensor:
        return torch.randint(len(self.examples[0]), (size,), generator=derive(size, "try"))

    def _check_batches(self) -> None:
        """Check that a batch's loss is the sum over its examples; at the chunk size, check the gradient too."""
        for size in sorted({*self.sizes, self.gradients.chunk}):
            index = self._index(size)
            own, place = self.losses[index], index.to(self.losses.device)
            total = self._loss_sum(self._batch(index))
            wrong = not bool((total - own.sum()).abs() <= self.tolerance * own.abs().sum())
            if size == self.gradients.chunk and not wrong:
                whole = self.gradients.alone(*self._batch(index))
                wanted = [rows[place].sum(0) for rows in self.alone]
                scale = sum(float(rows[place].flatten(1).norm(dim=1).sum()) for rows in self.alone)
                wrong = not all(float((w - t).norm()) <= self.tolerance * scale for w, t in zip(whole, wanted))
                wrong |= not self._ignores_global_seed(index)
            if wrong:
                raise BatchStatistics(
                    f"{self.what} or its loss treats an example differently in a batch of {size}, so one record "
                    "changes more than its own contribution; treat every example independently of the others and of "
                    "their number"
                )

    def _ignores_global_seed(self, index: Tensor) -> bool:
        totals = []
        for seed in (0, 1):
            with torch.random.fork_rng(devices=[]):
                torch.set_rng_state(derive(seed, "global").get_state())
                totals.append(self._loss_sum(self._batch(index)))
        return bool((totals[0] - totals[1]).abs() <= self.tolerance * self.losses[index].abs().sum())

    def _first_correct_engine(self) -> str:
        unsupported = self.gradients.unknown_to_hooks()
        if self.mode != "func" and not unsupported:
            if self.folded is not None:
                raise PrivacyError(folded_batch_message(*self.folded))
            try:
                with forbid_side_effects(self.what, self.network, device=self.device):
                    unsupported = self._wrong_parameter("hooks")
                if not unsupported:
                    return "hooks"
            except UnsupportedLayer as parameter:
                unsupported = str(parameter)
            except RuntimeError:  # from inside Opacus' rule for a layer
                unsupported = next(iter(self.gradients.trained))
            self.gradients.close()
        if self.mode == "hooks":
            raise PrivacyError(
                f"{self.what}: Opacus' hooks compute no per-example gradient of parameter {unsupported}. Use the "
                "parameter only in its layer's forward, in a layer that Opacus supports, or allow gradients='auto' "
                "(slower)"
            )
        try:
            with forbid_side_effects(self.what, self.network, device=self.device):
                if not self._wrong_parameter("vmap"):
                    return "vmap"
        except RuntimeError:  # no batching rule, or control flow that depends on values
            pass
        return "loop"

    def _wrong_parameter(self, engine: str) -> str:
        """Return the first parameter with a row that is not its example's own gradient in every batch; or ""."""
        collect = self.gradients.by_hooks if engine == "hooks" else self.gradients.by_vmap
        # vmap passes batches of one to the network, however many examples there are.
        size = self.gradients.chunk if engine == "hooks" else min(8, self.gradients.chunk)
        index = self._index(size)
        wanted = [rows[index.to(rows.device)] for rows in self.alone]
        plain, others = self._batch(index), self._batch(index.flip(0))
        others[0] = 30 * others[0].flip(0) + 1
        kept = (torch.randperm(size, generator=derive(size, "kept")) % 2 == 0).to(plain[0].device)
        rows = collect(*plain)
        if wrong := self._differing_parameter(rows, wanted, self.tolerance):
            return wrong
        for keep in (kept, ~kept) if size > 1 else ():
            mixed = collect(*(torch.where(keep.view(-1, *[1] * (a.ndim - 1)), a, b) for a, b in zip(plain, others)))
            ours, before = [r[keep] for r in mixed], [r[keep] for r in rows]
            if wrong := self._differing_parameter(ours, before, self.strict):
                return wrong
        return ""

    def _differing_parameter(self, rows: list[Tensor], wanted: list[Tensor], tolerance: float) -> str:
        norms = [w.flatten(1).norm(dim=1) for w in wanted]
        whole = torch.stack(norms).norm(dim=0)
        least = torch.maximum(0.1 * whole, 0.01 * whole.max())
        for name, a, b, norm in zip(self.gradients.trained, rows, wanted, norms):
            if not bool(((a - b).flatten(1).norm(dim=1) <= tolerance * torch.maximum(norm, least)).all()):
                return name
        return ""
