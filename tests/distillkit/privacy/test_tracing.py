"""Tracing of a function of one record: what is refused, with which words, and what the graph computes."""

from __future__ import annotations

import contextlib
import linecache
import random
import re
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from distillkit.networks._dropout import _drop, seed_dropout
from distillkit.privacy import BatchStatistics, NotCapturable, PrivacyError
from distillkit.privacy.capture import _tracing
from distillkit.privacy.capture._captured_function import CapturedFunction, capture
from distillkit.privacy.capture._tracing import MARKER, Stateless, held_beside_state
from distillkit.privacy.validation._private_records import apart_from_records, declare_records
from distillkit.rng import derive
from tests.refused import refused

aten = torch.ops.aten
Function = Callable[[Sequence[Tensor], Tensor], Tensor]
BESIDE = torch.zeros(4)
HELD: Any = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5), nn.LSTM(2, 2))
seed_dropout(HELD, torch.Generator())
HELD[0].kept = torch.zeros(2)


def captured(function: Function, *shared: Tensor, modules: Sequence[nn.Module] = ()) -> CapturedFunction:
    """Capture a function of tensors that are named w and b, the rest unnamed, and of a row of four numbers."""
    rows, call = [torch.zeros(3, 4)], lambda given, x: [function(given, x)]
    return capture(call, shared, rows, function_name="it", names=("w", "b"), modules=modules)


def wide(x: Tensor) -> Tensor:
    return x[None, :, None].expand(2, -1, -1)


def fail(words: str) -> Any:
    raise ValueError(words)


CHANGES = "it: a forward pass changes {} LINE, which would carry"
READS = "it reads values of an example or of a random draw ({}) LINE, and is not a fixed"
CHOOSES = "it chooses by the values of an example or of a random draw LINE, so it is not a fixed"
HALF = "it computes in torch.{} LINE: its rounding errors"
DRAWS = "it draws random numbers by aten.{} LINE, which cannot be drawn for each record"
USES = "it uses {} LINE, which {}"
FAILS = "it cannot be captured as a function of one example LINE: "
NORMALIZES = "it normalizes with the statistics of a batch LINE, so one record"
CLASSES = "it calls one_hot without a number of classes LINE, so the shape"
GLOBAL = "it draws from the global random state of NumPy or of `random`, so its draws"
REFUSED: dict[str, tuple[Function, str]] = {
    "first argument": (lambda s, x: s[0].add_(x.sum()), CHANGES.format("w")),
    "unnamed argument": (lambda s, x: s[2].add_(x.sum()), CHANGES.format("an argument")),
    "part": (lambda s, x: s[1].split(1)[1].add_(x.sum()), CHANGES.format("b")),
    "view": (lambda s, x: s[1].view(2, 2).t()[0].mul_(2), CHANGES.format("b")),
    "out": (lambda s, x: torch.add(x, 1, out=s[1]), CHANGES.format("b")),
    "beside": (lambda s, x: BESIDE.add_(x.sum()), CHANGES.format("a tensor outside it")),
    "layer": (lambda s, x: HELD[0].kept.add_(x.sum()), CHANGES.format("0.kept")),
    "list": (lambda s, x: torch._foreach_add_([torch.zeros(2), s[1]], [x[0], x[1]]), CHANGES.format("b")),
    "half": (lambda s, x: eval("x.half().float()", {"x": x}), HALF.format("float16")),  # the line is not in the string
    "quarter": (lambda s, x: x.to(torch.float8_e4m3fn).float(), HALF.format("float8_e4m3fn")),
    "half beside": (lambda s, x: torch._foreach_mul([x, s[3]], 2.0)[0], HALF.format("float16")),
    "number": (lambda s, x: x * x.sum().item(), READS.format("aten._local_scalar_dense.default")),
    "places": (lambda s, x: x.nonzero().sum() + x, READS.format("aten.nonzero.default")),
    "mask": (lambda s, x: x * x[None, x > 0].sum(), READS.format("aten.index.Tensor")),
    "branch": (lambda s, x: x if x.sum() > 0 else -x, CHOOSES),
    "comparison": (lambda s, x: x if torch.equal(x, s[0]) else -x, CHOOSES),
    "loop": (lambda s, x: x * sum(range(int(x.sum()))), CHOOSES),
    "statistics": (
        lambda s, x: torch.native_batch_norm(wide(x), None, None, s[0], s[1], True, 0.1, 1e-5)[0],
        CHANGES.format("running statistics"),
    ),
    "statistics by name": (
        lambda s, x: torch.native_batch_norm(
            wide(x), None, None, running_mean=s[0], running_var=s[1], training=True, momentum=0.1, eps=1e-5
        )[0],
        CHANGES.format("running statistics"),
    ),
    "statistics backwards": (
        lambda s, x: aten.native_batch_norm_backward(wide(x), wide(x), None, *s[:2], x, x, True, 1e-5, [True] * 3)[0],
        CHANGES.format("running statistics"),
    ),
    "F.batch_norm": (lambda s, x: F.batch_norm(wide(x), None, None, None, None, True), NORMALIZES),
    "F.batch_norm by name": (lambda s, x: F.batch_norm(wide(x), None, None, training=True), NORMALIZES),
    "torch.batch_norm": (lambda s, x: torch.batch_norm(wide(x), *[None] * 4, True, 0.1, 1e-5, False), NORMALIZES),
    "torch.batch_norm by name": (
        lambda s, x: torch.batch_norm(wide(x), *[None] * 4, training=True, momentum=0.1, eps=1e-5, cudnn_enabled=False),
        NORMALIZES,
    ),
    "permutation": (lambda s, x: x[torch.randperm(4)], DRAWS.format("randperm.default")),
    "exponential": (lambda s, x: x.clone().exponential_(), DRAWS.format("exponential_.default")),
    "rates": (lambda s, x: x.clone().bernoulli_(x.abs()), DRAWS.format("bernoulli_.Tensor")),
    "resized": (lambda s, x: x.clone().resize_(3), USES.format("aten.resize_.default", "may read memory")),
    "resized as": (lambda s, x: x.clone().resize_as_(x[:2]), USES.format("aten.resize_as_.default", "may read memory")),
    "set": (lambda s, x: x.clone().set_(x[:2].clone()), USES.format("aten.set_.source_Tensor", "may read memory")),
    "segments": (
        lambda s, x: torch.segment_reduce(x, "sum", lengths=x[:2].long(), unsafe=True),
        USES.format("aten.segment_reduce.default", "does not check its indices"),
    ),
    "segments backwards": (
        lambda s, x: aten._segment_reduce_backward(x[:2], x[:2], x, "sum", lengths=x[:2].long()),
        USES.format("aten._segment_reduce_backward.default", "does not check its indices"),
    ),
    "other operators": (
        lambda s, x: torch.ops.prims.sin(x),
        USES.format("the operator prims.sin.default", "is none of PyTorch's tensor operators"),
    ),
    "NumPy": (lambda s, x: x + torch.from_numpy(x.numpy()), f"{FAILS}RuntimeError: .numpy() is not supported"),
    "error": (lambda s, x: fail("  two\nlines"), f"{FAILS}ValueError: two"),
    "error without words": (lambda s, x: fail("  "), f"{FAILS}ValueError: no message"),
    "one_hot": (lambda s, x: F.one_hot(x.long()), CLASSES),
    "one_hot, -1": (lambda s, x: F.one_hot(x.long(), -1), CLASSES),
    "one_hot by name": (lambda s, x: F.one_hot(x.long(), num_classes=-1), CLASSES),
    "generator": (
        lambda s, x: x + torch.rand(4, generator=torch.Generator()),
        "it draws from a generator of its own LINE, which is not secret",
    ),
    "Python's numbers": (lambda s, x: x * random.random(), GLOBAL),
    "NumPy's numbers": (lambda s, x: x * np.random.rand(), GLOBAL),  # noqa: NPY002
    "NumPy's second normal number": (lambda s, x: x * np.random.randn(), GLOBAL),  # noqa: NPY002
    "whole block of NumPy": (lambda s, x: x * np.random.rand(312).sum(), GLOBAL),  # noqa: NPY002
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_captured_is_refused_with_its_line(name: str, global_rng_untouched: None) -> None:
    function, words = REFUSED[name]
    before: Any = np.random.get_state(legacy=False)  # noqa: NPY002
    cached = {**before, "state": {**before["state"], "pos": 7}, "has_gauss": 1, "gauss": 0.5}
    try:
        np.random.set_state(cached)  # noqa: NPY002
        python = random.getstate()
        shared = nn.Parameter(torch.zeros(4)), torch.ones(4), torch.zeros(4), torch.ones(2).half()
        with pytest.raises(PrivacyError) as caught:
            captured(function, *shared, modules=[HELD])
        assert random.getstate() == python
        np.testing.assert_equal(np.random.get_state(legacy=False), cached)  # noqa: NPY002
    finally:
        np.random.set_state(before)  # noqa: NPY002
    assert type(caught.value) is (BatchStatistics if words.startswith(("it: ", "it norm")) else NotCapturable)
    assert (caught.value.__cause__ is not None) == words.startswith(FAILS)
    pattern = re.escape(words).replace(r"\ LINE", r" \(test_tracing\.py:(\d+): (.*)\)")
    found = re.match(pattern, str(caught.value))
    assert found, str(caught.value)
    if found.groups():
        assert int(found[1]) in {line for f in (function, fail) for _, _, line in f.__code__.co_lines()}
        assert linecache.getline(__file__, int(found[1])).strip() == found[2]
    assert not BESIDE.any()
    assert not HELD[0].kept.any()


def marked(given: Sequence[Tensor], x: Tensor) -> Tensor:
    with torch.profiler.record_function("part"):
        return x * 2


ACCEPTED: dict[str, Function] = {
    "own memory": lambda s, x: x.mul_(2).add_(s[0].clone().fill_(3)),
    "own views": lambda s, x: torch.zeros(2, 4).index_fill_(0, torch.tensor(1), 2)[1].add_(x),
    "list": lambda s, x: torch._foreach_add([x, s[1]], 1.0)[0],
    "one_hot": lambda s, x: F.one_hot((x > 0).long(), 3) * 2.0,
    "one_hot by name": lambda s, x: F.one_hot((x > 0).long(), num_classes=2) / 3,
    "fixed statistics": lambda s, x: F.batch_norm(wide(x), s[0], s[1], None, None, False),
    "fixed statistics, operator": lambda s, x: torch.native_batch_norm(wide(x), None, None, *s, False, 0.1, 1e-5)[0],
    "profiler": marked,
    "fused LSTM": lambda s, x: torch.no_grad()(HELD[2])(x.view(2, 2))[0].flatten(),
    "fused attention": lambda s, x: F.scaled_dot_product_attention(*[x.view(1, 1, 2, 2)] * 3).flatten(),
    "seeded dropout": lambda s, x: x + 0 * HELD[1](x),
    "float64": lambda s, x: x.double() / 3,
    "no generator": lambda s, x: x + 0 * torch.rand(4, generator=None),
    "dtype by name": lambda s, x: x[torch.zeros(4, dtype=torch.int64)] + 0 * torch.rand(4),
    "marked generator": lambda s, x: x + 0 * torch.rand(4, generator=MARKER),
    "distribution": lambda s, x: torch.distributions.Categorical(logits=x).probs,
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_results_are_those_of_each_record_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", checked := name != "list")
    given, rows = [torch.rand(4), torch.rand(4) + 1], torch.randn(5, 4, generator=derive(0))
    before, function = [t.clone() for t in (*given, rows)], ACCEPTED[name]
    found = captured(function, *given, modules=[HELD])
    assert HELD[1].forward.func is _drop
    assert found.batched == (name != "list")
    assert not any("mkldnn" in operator for operator in found._forward.__code__.co_names)
    assert torch.backends.mkldnn.enabled
    (column,), (none,) = (found(given, some, generator=derive(1)) for some in (rows, rows[:0]))
    assert (none.shape, none.dtype) == ((0, *column.shape[1:]), column.dtype)
    torch.testing.assert_close(column, torch.stack([function([t.clone() for t in given], x.clone()) for x in rows]))
    assert all(torch.equal(a, b) for a, b in zip((*given, rows), before))
    assert torch.distributions.Distribution._validate_args == checked


def half_filled(given: Sequence[Tensor], x: Tensor) -> Tensor:
    buffer = torch.empty(8)
    buffer[:4] = x
    return x + buffer[4:]


MAKES: list[Function] = [
    half_filled, lambda s, x: x + torch.empty_like(x), lambda s, x: x + x.new_empty(2, 4)[1],
    lambda s, x: x[torch.empty(4, dtype=torch.int64)],
]  # fmt: skip


@pytest.mark.parametrize("make", MAKES)
def test_uninitialised_memory_is_zero(make: Function) -> None:
    """Memory without a value must be neither read nor left to chance: the graph may hold no such operator."""
    found, rows = captured(make), torch.ones(3, 4)
    assert not any(str(name).startswith(("empty", "new_empty")) for name in found._forward.__code__.co_names)
    assert torch.equal(found([], rows)[0], rows)


def test_the_global_random_state_must_change_in_three_traces() -> None:
    """Other threads may use it during one or two."""
    calls: list[int] = []

    def drawing(times: int) -> Function:
        calls.clear()
        return lambda s, x: x * (random.random() if calls.append(0) or len(calls) <= times else 1.0)  # type: ignore

    (column,) = captured(drawing(2))([], torch.ones(2, 4))
    assert torch.equal(column, torch.ones(2, 4))
    refused(lambda: captured(drawing(3)), NotCapturable, "draws from the global random state")


def test_graphs_are_refused_that_no_known_code_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, root = torch.fx.Graph(), nn.Module()
    graph.output(graph.get_attr("held"))
    root.held = torch.zeros(2).as_subclass(type("Own", (Tensor,), {}))  # type: ignore[assignment]
    made = torch.fx.GraphModule(root, graph)
    words = "^it uses a Own, which cannot be captured; use plain tensors only$"
    refused(lambda: _tracing._refuse_operators(made, [], {}, lambda **_: made, "it"), NotCapturable, words)
    for task in (-1, 0, 3):  # the number of a backward pass, or -1 outside one
        monkeypatch.setattr(_tracing, "current_backward", lambda t=task: t)
        _tracing._refuse_backward_draws("it", aten.mul.Tensor)
        with contextlib.nullcontext() if task == -1 else pytest.raises(NotCapturable, match="in the backward pass"):
            _tracing._refuse_backward_draws("it", aten.rand.default)


class Shared(nn.Module):
    """Network with a weight in two layers, buffers of both kinds and things beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("shift", torch.ones(4))
        self.register_buffer("scale", torch.full((4,), 2.0), persistent=False)
        self.items, self.queue, self.table, self.unique = [1], deque([1], maxlen=3), {"a": 1}, {1}
        self.last, self.pair, self.count, self.loop = None, (1,), 0, [1]
        self.loop.append(self.loop)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x) + self.shift) * self.scale


def test_state_is_replaced_at_every_place_during_the_call() -> None:
    network, x = Shared(), torch.randn(3, 4, generator=derive(0))
    before = dict(network.named_parameters()) | dict(network.named_buffers())
    call = Stateless(network, network, "it")
    assert call.names() == ["first.weight", "shift", "scale"] == list(before)
    weight, shift, scale = new = [torch.randn(t.shape, generator=derive(1)) for t in call.state()]
    torch.testing.assert_close(call.at(new, x), ((x @ weight.T + shift) @ weight.T) * scale)
    assert network.second.weight is network.first.weight
    assert all(a is b for a, b in zip(call.state(), before.values(), strict=True))


STORED: dict[str, Callable[[Any, Tensor], Any]] = {
    "items": lambda n, x: n.items.append([{"deep": (x,)}]),
    "queue": lambda n, x: n.queue.appendleft(x),
    "table": lambda n, x: n.table.update(b=x),
    "unique": lambda n, x: n.unique.add(x),
    "last": lambda n, x: setattr(n, "last", [x]),
    "pair": lambda n, x: setattr(n, "pair", (1, x)),
    "frozen": lambda n, x: setattr(n, "frozen", frozenset([x])),
    "fresh": lambda n, x: setattr(n, "fresh", x.detach()),
    "shift": lambda n, x: setattr(n, "shift", x + 1),
    "scale": lambda n, x: setattr(n, "scale", torch.zeros(4)),
    "first.weight": lambda n, x: setattr(n.first, "weight", nn.Parameter(x.expand(4, 4))),
    "first.kept": lambda n, x: [setattr(layer, "kept", x) for layer in (n.second, n.first)],
}


@pytest.mark.parametrize("place", STORED)
def test_what_a_call_stores_is_named_and_removed(place: str) -> None:
    network = Shared()

    def look() -> list[Any]:
        return [(id(table), name, id(value), repr(value)) for _, table, name, value in _tracing._attributes(network)]

    def function(x: Tensor) -> Tensor:
        STORED[place](network, x)
        return network(x)

    before, call = look(), Stateless(network, function, "it")
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.zeros(4)
    words = f"^it: a forward pass changes {place}, which would carry information past the clip; store nothing about"
    refused(lambda: call.at(call.state(), x), BatchStatistics, words)
    assert look() == before
    counting = Stateless(network, lambda x: setattr(network, "count", network.count + 1), "it")
    counting.at(call.state(), x)
    assert network.count == 1


def test_what_a_module_holds_beside_its_state_is_listed() -> None:
    network: Any = Shared()
    things = [object() for _ in range(7)]
    network.items, network.queue, network.table = [things[0]], deque([things[1]]), {1: things[2]}
    network.unique = {things[3]}
    network.pair, network.last, network.second.inner, network.plain = (things[4],), things[5], things[6], torch.zeros(2)
    network.rnn = nn.LSTM(2, 2)  # whose list of weights is part of its state
    held = held_beside_state(network)
    containers = [vars(network)[name] for name in ("items", "queue", "table", "unique", "pair", "plain")]
    assert all(any(one is other for other in held) for one in (*things, *containers, network.first))
    assert not any(one is other for one in (*network.parameters(), *network.buffers()) for other in held)
    network.shift.add_(1)
    assert all(a is b for a, b in zip(held, held_beside_state(network), strict=True))
    network.plain.add_(1)
    changed = [(a, b) for a, b in zip(held, held_beside_state(network), strict=True) if a is not b]
    assert changed == [(0, 1)]


def test_sizes_count_the_values_of_one_record() -> None:
    def function(given: Sequence[Tensor], x: Tensor) -> Tensor:
        torch.cat([x, x, x]).exp()  # unused
        y = x.reshape(2, 2) * given[0] + torch.rand(2, 2)  # after a copy and a view: four times four
        return y.sum(0) - 1  # two times two

    found = captured(function, torch.ones(2, 2))
    assert (found.activations, found.largest) == (20, 4)


@pytest.mark.parametrize(("factor", "batched"), [(1.0009, True), (1.0011, False), (None, False)])
def test_records_are_evaluated_one_by_one_where_a_batch_fails_or_differs(
    factor: Any, batched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record for which an operator fails has rows of zeros, and does not change a bit of the others."""
    real, weights = torch.func.vmap, torch.rand(4, 300)
    places = torch.tensor([[5, 0, 0, 0], [0.0, 1, 2, 3], [3, 3, 1, 0], [1, 2, 3, 0], [2, 2, 2, 2]])

    def looked_up(given: Sequence[Tensor], x: Tensor) -> list[Tensor]:
        table = (given[0] + 0 * x)[:, None]  # of each record, behind which another record's may lie
        return [0 * x, (F.embedding(x.long(), table).flatten() + torch.rand(4)) @ given[1]]

    with monkeypatch.context() as patched:
        scaled = lambda call, places: lambda *given: [factor * row for row in real(call, places)(*given)]  # noqa: E731
        patched.setattr(torch.func, "vmap", scaled)
        found = capture(looked_up, [torch.rand(4), weights], [places], function_name="it")
        assert captured(lambda s, x: x).batched == batched  # of noise, whose zeros would not differ
    assert found.batched == batched
    given = [torch.tensor([5.0, 6, 7, 8]), weights]
    (_, column), (_, usual) = (found(given, p, generator=derive(2)) for p in (places, places.clamp(max=3)))
    wanted = (given[0][places.clamp(max=3).long()] + torch.rand(5, 4, generator=derive(2))) @ weights
    torch.testing.assert_close(usual, wanted)
    assert torch.equal(column[1:], usual[1:])
    assert not column[0].any()


def test_a_function_must_work_for_some_record_of_noise() -> None:
    found = captured(lambda s, x: torch.arange(2.0)[(100 * x).long()])
    assert found([], torch.tensor([[0.0, 0.011, 0, 0]]))[0].tolist() == [[0, 1, 0, 0]]
    words = "^it fails on a noise record: IndexError: index 9 is out of bounds for dimension 0 with size 2$"
    refused(lambda: captured(lambda s, x: torch.arange(2.0)[9 + (100 * x).long()]), NotCapturable, words)
    look = lambda s, x, place: [s[0][place] * x]  # noqa: E731
    values, places = torch.arange(3.0), torch.tensor([[2, 1], [0, 2]])
    found = capture(look, [values], [torch.zeros(2), places], function_name="it")
    assert found([values], torch.tensor([2.0, 3]), places)[0].tolist() == [[4, 2], [0, 6]]
    words = r"^it has sparse gradients, as of nn.Embedding\(sparse=True\); use dense ones$"
    mixed = lambda given, x: [x, x.to_sparse()]  # noqa: E731
    refused(lambda: capture(mixed, [], [torch.zeros(3, 4)], function_name="it"), NotCapturable, words)


def test_lack_of_memory_is_an_error_and_results_share_no_memory() -> None:
    weight, rows = torch.ones(4, requires_grad=True), torch.zeros(3, 4, requires_grad=True)
    found = capture(lambda given, x: [given[0], x.double() + 1], [weight], [rows], function_name="it")
    for n in (0, 3):
        kinds = [(t.shape, t.dtype, t.requires_grad) for t in found([weight], rows[:n])]
        assert kinds == [((n, 4), torch.float32, False), ((n, 4), torch.float64, False)]
    assert all(a is not b for a, b in zip(found([weight], rows[:0]), found._outputs))
    first, _ = found([weight], rows)
    assert first.untyped_storage().data_ptr() != weight.untyped_storage().data_ptr()

    words = r"^it .* parameter or buffer of torch\.float32 \[4\] that is torch\.float64 \[3\] now; capture it"
    refused(lambda: found([torch.ones(3).double()], rows), ValueError, words)

    def full(*given: Tensor) -> Any:
        raise torch.OutOfMemoryError("no memory")

    for batched in (True, False):
        found.batched, found._forward = batched, full
        refused(lambda: found([weight], rows), torch.OutOfMemoryError, "no memory")


BESIDES = "^it uses the records themselves besides the one that it is given"


@pytest.mark.parametrize("name", ["w", "b", "an argument"])
def test_arguments_that_are_records_are_named(name: str) -> None:
    records, public = torch.zeros(3, 4), torch.ones(4)
    shared = [*[public] * ["w", "b", "an argument"].index(name), records[0]]
    with pytest.raises(NotCapturable, match=rf"{BESIDES} \({name} shares their memory\)"):
        capture(lambda given, x: [x], shared, [records], function_name="it", names=("w", "b"))


def test_constants_that_are_records_of_a_later_call_are_named() -> None:
    public, records, held = torch.ones(4), torch.zeros(3, 4), nn.Module()
    held.bank = records[1]  # type: ignore[assignment]
    found = captured(lambda s, x: x * public + held.bank, modules=[held])  # type: ignore[operator]

    @apart_from_records(content=False)
    def later() -> None:
        found.refuse_records()
        declare_records(records)
        found.refuse_records()

    refused(later, NotCapturable, rf"{BESIDES} \(bank shares their memory\), so every record")


@pytest.mark.parametrize("place", ["the variable array", "a tensor outside it"])
def test_copies_of_records_are_found_wherever_they_are(place: str) -> None:
    images = torch.rand(3, 1, 4, 4, generator=derive(0))
    array, constant = images[1:2].clone().numpy(), images[:1].clone()
    hidden: Any = weakref.ref(constant)
    reading: Function = lambda s, x: x * float(array.sum())  # noqa: E731
    if place == "a tensor outside it":
        reading = lambda s, x: x * hidden().sum()  # noqa: E731

    @apart_from_records()
    def capturing() -> None:
        declare_records(images)
        captured(reading)

    refused(capturing, NotCapturable, rf"^it holds a copy of a private record \({place}\), so a record")


Law = Callable[[int, torch.Generator], Tensor]


def coin(count: int, generator: torch.Generator, rate: float, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.rand(count, 40, generator=generator, dtype=dtype) < rate).to(dtype)


DRAWN: dict[str, tuple[Callable[[Tensor], Tensor], Law]] = {
    "rand": (lambda x: torch.rand(x.shape), lambda n, g: torch.rand(n, 40, generator=g)),
    "rand in float64": (
        lambda x: torch.rand(x.shape, dtype=torch.float64),
        lambda n, g: torch.rand(n, 40, generator=g, dtype=torch.float64),
    ),
    "strides": (lambda x: torch.rand(2, 20).as_strided((40,), (1,)), lambda n, g: torch.rand(n, 40, generator=g)),
    "rand_like": (lambda x: torch.rand_like(x), lambda n, g: torch.rand(n, 40, generator=g)),
    "uniform_": (lambda x: torch.empty_like(x).uniform_(1, 3), lambda n, g: 1 + 2 * torch.rand(n, 40, generator=g)),
    "randn": (lambda x: torch.randn(x.shape), lambda n, g: torch.randn(n, 40, generator=g)),
    "randn_like": (lambda x: torch.randn_like(x), lambda n, g: torch.randn(n, 40, generator=g)),
    "normal_": (lambda x: torch.empty_like(x).normal_(1, 2), lambda n, g: 1 + 2 * torch.randn(n, 40, generator=g)),
    "normal_ by name": (lambda x: x.clone().normal_(std=0.5), lambda n, g: 0.5 * torch.randn(n, 40, generator=g)),
    "bernoulli": (
        lambda x: torch.bernoulli(torch.full_like(x, 0.3).double()), lambda n, g: coin(n, g, 0.3, torch.float64),
    ),
    "bernoulli_": (lambda x: torch.empty_like(x).bernoulli_(0.4), lambda n, g: coin(n, g, 0.4)),
    "bernoulli_ of a half": (lambda x: torch.empty_like(x).bernoulli_(), lambda n, g: coin(n, g, 0.5)),
    "bernoulli of one rate": (lambda x: torch.bernoulli(x, 0.4), lambda n, g: coin(n, g, 0.4)),
    "dropout": (lambda x: F.dropout(x + 0.6, 0.4), lambda n, g: coin(n, g, 0.6)),
    "dropout of channels": (lambda x: F.dropout1d(x[:, None] + 0.6, 0.4)[:, 0], lambda n, g: coin(n, g, 0.6)),
    "randint": (lambda x: torch.randint(4, x.shape), lambda n, g: torch.randint(4, (n, 40), generator=g)),
    "randint from 2": (
        lambda x: torch.randint(2, 6, x.shape, dtype=torch.int32),
        lambda n, g: torch.randint(2, 6, (n, 40), generator=g).int(),
    ),
    "randint_like": (lambda x: torch.randint_like(x, 4), lambda n, g: torch.randint(4, (n, 40), generator=g).float()),
    "randint_like from 2": (
        lambda x: torch.randint_like(x, 2, 6), lambda n, g: torch.randint(2, 6, (n, 40), generator=g).float(),
    ),
}  # fmt: skip


@pytest.mark.parametrize("draw", DRAWN)
def test_draws_are_inputs_with_the_operators_distribution(draw: str, global_rng_untouched: None) -> None:
    """Each in its turn, from the generator that is passed, for every record or once for all."""
    function, law = DRAWN[draw]
    images = torch.zeros(8, 40)
    three = lambda shared, x: [torch.randn(2, 40), function(x), torch.rand(40)]  # noqa: E731
    found = capture(three, [], [images], function_name="it")
    assert found.draws
    refused(
        lambda: found([], images[:1]), ValueError, r"^it draws random numbers: pass generator=secret.generator\(\)$"
    )
    for common in (False, True):
        g, count = derive(0), 1 if common else 8
        wanted = torch.randn(count, 2, 40, generator=g), law(count, g), torch.rand(count, 40, generator=g)
        for ours, theirs in zip(found([], images, generator=derive(0), common=common), wanted, strict=True):
            torch.testing.assert_close(ours, theirs.expand_as(ours), rtol=0, atol=0)


def test_a_rate_of_zero_draws_no_one(monkeypatch: pytest.MonkeyPatch) -> None:
    images = torch.zeros(3, 4)
    for function in (torch.bernoulli, lambda x: torch.bernoulli(x, 0.0)):
        found = capture(lambda shared, x, f=function: [f(x)], [], [images], function_name="it")
        assert found.draws
        with monkeypatch.context() as patched:
            patched.setattr(torch, "rand", lambda *shape, generator, dtype=None: torch.zeros(shape, dtype=dtype))
            assert not found([], images, generator=derive(0))[0].any()
    assert not capture(lambda shared, x: [x], [], [images], function_name="it").draws
