"""The trial of per-example gradients on public examples: each row is one example's own, or the network is refused."""

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
from distillkit.privacy.gradients._engines import ExampleGradients, UnsupportedLayer, folded_batch_message
from distillkit.privacy.validation._side_effects import forbid_side_effects
from distillkit.rng import derive

__all__ = ["choose_batch_sizes", "choose_engine"]

_TRIES = 3
_PIXELS = 128 * 32 * 32


def choose_batch_sizes(images: Tensor, expected: float, chunk: int | None) -> tuple[int, list[int]]:
    """How many examples go through the network at once, and other batch sizes to try it on; from public numbers alone.

    The default of `chunk` in private training. A batch is filled up to a multiple of the first: on a CPU that is a
    quarter of what is expected, so that few rows are wasted, on an accelerator all that is likely to be drawn.

    Args:
        images: give device, height and width, and nothing else.
        expected: how many records a step is expected to draw, rate * size.
        chunk: an upper bound instead of the default by device and image size.

    Returns:
        The `chunk` and the `sizes` of `per_example_gradients`.
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


def choose_engine(gradients: ExampleGradients, public: Sequence[Tensor], sizes: Sequence[int], how: str) -> str:
    """Try a network's per-example gradients on public examples, and say which way of finding them is right for it.

    The first in which every row is one example's own: "hooks", "vmap" or "loop". Tried in float64 where the network can
    be run so, because there rounding cannot be mistaken for a difference, and once more, coarsely, in its own type;
    else in its own type alone, where a trial that fails is repeated on other examples before it counts.

    Args:
        gradients: the collector, whose ways are tried.
        public: tensors of at least two public examples, as the losses take them.
        sizes: batch sizes at which a batch's loss is compared with the sum of its examples' own, besides the chunk.
        how: which ways are allowed: "auto", "hooks" or "func".

    Raises:
        BatchStatistics, NotSeparable, PrivacyError: see `per_example_gradients`.
    """
    examples = list(public)
    if len(examples[0]) < 2:
        raise ValueError(f"public must hold at least two examples, got {len(examples[0])}: one cannot meet another")
    double = [e.double() if e.is_floating_point() else e for e in examples] if examples[0].device.type != "mps" else []
    if double:
        try:
            with _in_float64(gradients.network):
                engine = _GradientCheck(gradients, double, sizes, how).run()
            if examples[0].dtype != torch.float64:
                _GradientCheck(gradients, examples, sizes, how).confirm(engine)
            return engine
        except (RuntimeError, TypeError):  # a type that is written into the network, or a real fault: see below
            gradients.close()
    for attempt in range(_TRIES):
        noise = torch.randn(examples[0].shape, generator=derive(attempt, "try")).to(examples[0])
        try:
            return _GradientCheck(gradients, [examples[0] + 0.1 * attempt * noise, *examples[1:]], sizes, how).run()
        except PrivacyError:
            if attempt + 1 == _TRIES:
                raise
    raise AssertionError


@contextmanager
def _in_float64(network: nn.Module) -> Iterator[None]:
    held = [t for t in (*network.parameters(), *network.buffers()) if t.is_floating_point()]
    before = [t.data for t in held]
    try:
        for tensor in held:
            tensor.data = tensor.data.double()
        yield
    finally:
        for tensor, data in zip(held, before):
            tensor.data = data


class _GradientCheck:
    """One trial in one type. `examples` are a few; larger batches hold them several times, in random places."""

    def __init__(self, gradients: ExampleGradients, examples: list[Tensor], sizes: Sequence[int], how: str) -> None:
        self.gradients, self.examples, self.sizes, self.how = gradients, examples, sizes, how
        self.what = f"the network {type(gradients.network).__name__}"
        eps = torch.finfo(examples[0].dtype).eps
        self.tolerance, self.strict = eps**0.5, eps**0.75
        self.count, self.folded = 0, cast("tuple[str, int, int] | None", None)

    def run(self) -> str:
        network, device = self.gradients.network, self.examples[0].device
        with no_dropout(network):
            with forbid_side_effects(self.what, network, device=device), self._watching_rows():
                each = self._look_at_each()
                self.values = torch.stack([self._value(self._at(i)) for i in each])
                self._totals()
            return self._engine()

    def confirm(self, engine: str) -> None:
        """Refuse rows that are right in float64 but not, by far, in the network's own type."""
        self.gradients.close()
        self.tolerance = 0.05
        with no_dropout(self.gradients.network):
            with forbid_side_effects(self.what, self.gradients.network, device=self.examples[0].device):
                self._look_at_each()
                wrong = self._wrong(engine) if engine != "loop" else ""
            if wrong:
                raise BatchStatistics(
                    f"{self.what}: parameter {wrong} gets gradients in {self.examples[0].dtype} that are not those of "
                    "single examples, though they are in float64; every example must be treated by itself"
                )

    def _look_at_each(self) -> list[Tensor]:
        each = [torch.tensor([i]) for i in range(len(self.examples[0]))]
        rows = [self.gradients.alone(*self._at(i)) for i in each]
        self.alone = [torch.stack(column) for column in zip(*rows)]
        return each

    @contextmanager
    def _watching_rows(self) -> Iterator[None]:
        """Note a layer in training that is given more or fewer rows than there are examples."""
        ours = {id(p): n for n, p in self.gradients.trained.items()}

        def note(name: str, module: nn.Module, inputs: tuple[object, ...]) -> None:
            rows = inputs[0].shape[:1] if inputs and isinstance(inputs[0], Tensor) else ()
            if rows != (self.count,):
                self.folded = self.folded or (name, rows[0] if rows else 0, self.count)

        handles = []
        for module in self.gradients.network.modules():
            names = [ours[id(p)] for p in module.parameters(recurse=False) if id(p) in ours]
            if names:
                handles.append(module.register_forward_pre_hook(partial(note, names[0])))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _at(self, index: Tensor) -> list[Tensor]:
        self.count = len(index)
        return [e.index_select(0, index.to(e.device)) for e in self.examples]

    @torch.no_grad()
    def _value(self, examples: list[Tensor]) -> Tensor:
        return self.gradients.loss_rows(*examples).sum().double()

    def _index(self, size: int) -> Tensor:
        return torch.randint(len(self.examples[0]), (size,), generator=derive(size, "try"))

    def _totals(self) -> None:
        """A batch's loss, and its gradient at the size that is used, are the sums of its examples' own."""
        for size in sorted({*self.sizes, self.gradients.chunk}):
            index = self._index(size)
            own, place = self.values[index], index.to(self.values.device)
            value = self._value(self._at(index))
            off = not bool((value - own.sum()).abs() <= self.tolerance * own.abs().sum())
            if size == self.gradients.chunk and not off:
                whole = self.gradients.alone(*self._at(index))
                wanted = [rows[place].sum(0) for rows in self.alone]
                scale = sum(float(rows[place].flatten(1).norm(dim=1).sum()) for rows in self.alone)
                off = not all(float((w - t).norm()) <= self.tolerance * scale for w, t in zip(whole, wanted))
                off |= not self._heeds_no_seed(index)
            if off:
                raise BatchStatistics(
                    f"{self.what} or its loss makes something else of an example when it stands in a batch of {size}, "
                    "so one record changes more than its own contribution; every example must be treated by itself, "
                    "whatever the others are and however many"
                )

    def _heeds_no_seed(self, index: Tensor) -> bool:
        found = []
        for seed in (0, 1):
            with torch.random.fork_rng(devices=[]):
                torch.set_rng_state(derive(seed, "global").get_state())
                found.append(self._value(self._at(index)))
        return bool((found[0] - found[1]).abs() <= self.tolerance * self.values[index].abs().sum())

    def _engine(self) -> str:
        unserved = self.gradients.unknown_to_hooks()
        if self.how != "func" and not unserved:
            if self.folded is not None:
                raise PrivacyError(folded_batch_message(*self.folded))
            try:
                with forbid_side_effects(self.what, self.gradients.network, device=self.examples[0].device):
                    unserved = self._wrong("hooks")
                if not unserved:
                    return "hooks"
            except UnsupportedLayer as parameter:
                unserved = str(parameter)
            except RuntimeError:  # from inside a rule for a layer
                unserved = next(iter(self.gradients.trained))
            self.gradients.close()
        if self.how == "hooks":
            raise PrivacyError(
                f"{self.what}: parameter {unserved} has a gradient but none per example by Opacus' hooks; use it in "
                "its layer's forward alone, in a layer that Opacus knows, or allow gradients='auto' (slower)"
            )
        try:
            with forbid_side_effects(self.what, self.gradients.network, device=self.examples[0].device):
                if not self._wrong("vmap"):
                    return "vmap"
        except RuntimeError:  # no batching rule, or control flow by values
            pass
        return "loop"

    def _wrong(self, engine: str) -> str:
        """The first parameter whose rows are not its examples' own, at any place, whatever the others are; or ""."""
        collect = self.gradients.by_hooks if engine == "hooks" else self.gradients.by_vmap
        # A call of vmap shows the network batches of one, however many there are.
        size = self.gradients.chunk if engine == "hooks" else min(8, self.gradients.chunk)
        index = self._index(size)
        wanted = [rows[index.to(rows.device)] for rows in self.alone]
        plain, others = self._at(index), self._at(index.flip(0))
        others[0] = 30 * others[0].flip(0) + 1
        kept = (torch.randperm(size, generator=derive(size, "kept")) % 2 == 0).to(plain[0].device)
        rows = collect(*plain)
        if wrong := self._apart(rows, wanted, self.tolerance):
            return wrong
        for keep in (kept, ~kept) if size > 1 else ():
            mixed = collect(*(torch.where(keep.view(-1, *[1] * (a.ndim - 1)), a, b) for a, b in zip(plain, others)))
            ours, before = [r[keep] for r in mixed], [r[keep] for r in rows]
            if wrong := self._apart(ours, before, self.strict):
                return wrong
        return ""

    def _apart(self, ours: list[Tensor], wanted: list[Tensor], tolerance: float) -> str:
        norms = [w.flatten(1).norm(dim=1) for w in wanted]
        whole = torch.stack(norms).norm(dim=0)
        floor = torch.maximum(0.1 * whole, 0.01 * whole.max())
        for name, a, b, norm in zip(self.gradients.trained, ours, wanted, norms):
            if not bool(((a - b).flatten(1).norm(dim=1) <= tolerance * torch.maximum(norm, floor)).all()):
                return name
        return ""
