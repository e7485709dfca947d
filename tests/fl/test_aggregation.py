from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distillkit import LabeledImages, Normalization
from fl import aggregation
from fl.aggregation import Aggregator, BadReply, EntrySpec, Schema, check_reply
from fl.message import Entry, Message
from tests.refused import refused


class E:
    count = Entry[float]("sum")
    rows = Entry[torch.Tensor]("sum")
    group = Entry[dict]("mean", by=count)
    plain = Entry[float]("mean")
    table = Entry[torch.Tensor]("mean", by=rows)
    fixed = Entry[torch.Tensor]("mean")
    top = Entry[dict]("max")
    head = Entry[str]("first")
    pool = Entry[LabeledImages]("union")
    stack = Entry[torch.Tensor]("union")
    small = Entry[torch.Tensor]("sum")


ENTRIES: dict[str, Entry[Any]] = {e.key: e for e in vars(E).values() if isinstance(e, Entry)}


PAIR = LabeledImages(torch.zeros(2, 1, 2, 2), torch.arange(2), num_classes=3)


def schema_of(reply: Message | None) -> Schema:
    """Return the schema that a reply satisfies."""
    return {key: EntrySpec(value) for key, value in (reply or Message()).items()}


def aggregate(*replies: Message) -> Any:
    reducer = Aggregator(ENTRIES)
    for client, reply in enumerate(replies):
        reducer.fold(client, check_reply(reply, ENTRIES, schema_of(reply)))
    return reducer.result()


@given(st.lists(st.tuples(st.floats(0.1, 50), st.floats(-5, 5), st.floats(-5, 5)), min_size=1, max_size=5))
def test_weighted_mean_equals_numpy(values: list[tuple[float, float, float]]) -> None:
    replies = [
        Message({E.count: n, E.group: {"w": torch.tensor([a, b], dtype=torch.float64)}, E.plain: a})
        for n, a, b in values
    ]
    result = aggregate(*replies)
    total = sum(n for n, _, _ in values)
    want = [sum(n * v[i] for n, *v in values) / total for i in (0, 1)]
    assert torch.allclose(result[E.group]["w"], torch.tensor(want, dtype=torch.float64), rtol=1e-12, atol=1e-12)
    mean = pytest.approx(sum(a for _, a, _ in values) / len(values), rel=1e-12, abs=1e-12)
    assert (result.replace(E.plain, 9.0)[E.plain], result[E.plain]) == (9.0, mean)
    assert result.weight(E.group, "w") == pytest.approx(total)
    assert result[E.count] == pytest.approx(total)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.int64])
def test_aggregation_does_not_modify_replies(dtype: torch.dtype) -> None:
    """Sums are accumulated in place, but never in the memory of a reply, which may be a client's own."""
    replies = [Message({E.fixed: torch.ones(3, dtype=dtype), E.small: torch.ones(3, dtype=dtype)}) for _ in range(3)]
    if dtype != torch.int64:
        assert torch.equal(aggregate(*replies)[E.fixed], torch.ones(3, dtype=dtype))
    assert aggregate(*(Message({E.small: r[E.small]}) for r in replies))[E.small].tolist() == [3, 3, 3]
    assert all(torch.equal(r[e], torch.ones(3, dtype=dtype)) for r in replies for e in (E.fixed, E.small))


@pytest.mark.parametrize("last", [1.0, 0.25])
def test_per_row_weights_apply_and_rows_without_weight_are_zero(last: float) -> None:
    replies = [
        Message({E.rows: torch.tensor([2.0, 0.0, last]), E.table: torch.tensor([[1.0], [5.0], [3.0]])}),
        Message({E.rows: torch.tensor([6.0, 0.0, 0.0]), E.table: torch.tensor([[5.0], [7.0], [9.0]])}),
    ]
    result = aggregate(*replies)
    assert result[E.table].tolist() == [[4.0], [0.0], [3.0]]
    assert result.weight(E.table).tolist() == [8.0, 0.0, last]


def test_group_is_reduced_over_the_replies_that_have_the_key() -> None:
    replies = [
        Message({E.count: 1.0, E.group: {"a/w": torch.tensor([2.0])}}),
        Message({E.count: 3.0, E.group: {"b/w": torch.tensor([5.0])}}),
        Message({E.count: 1.0, E.group: {"a/w": torch.tensor([4.0])}}),
    ]
    result = aggregate(*replies)
    assert {n: t.item() for n, t in result[E.group].items()} == {"a/w": 3.0, "b/w": 5.0}
    assert (result.weight(E.group, "a/w"), result.weight(E.group, "b/w")) == (2.0, 3.0)


def test_sum_of_small_integers_does_not_overflow() -> None:
    for count in (1, 200):
        many = aggregate(*(Message({E.small: torch.tensor([1], dtype=torch.int8)}) for _ in range(count)))
        assert (many[E.small].tolist(), many[E.small].dtype) == ([count], torch.int64)


def test_max_first_and_union_reduce_as_declared() -> None:
    sets = [
        LabeledImages(torch.full((n, 1, 2, 2), float(n)), torch.zeros(n, dtype=torch.long), num_classes=2)
        for n in (1, 2)
    ]
    replies = [
        Message({E.top: {"n": torch.tensor(3)}, E.head: "one", E.pool: sets[0], E.stack: torch.tensor([[1.0, 2.0]])}),
        Message({E.top: {"n": torch.tensor(9)}, E.head: "two", E.pool: sets[1], E.stack: torch.tensor([[3.0, 4.0]])}),
    ]
    result = aggregate(*replies)
    torch.testing.assert_close(result[E.top]["n"], torch.tensor(9))
    assert result[E.head] == "one"
    assert result[E.pool].columns["client"].tolist() == [0, 1, 1]
    assert result[E.pool].images[:, 0, 0, 0].tolist() == [1.0, 2.0, 2.0]
    assert result[E.stack].tolist() == [[1.0, 2.0], [3.0, 4.0]]
    groups = [Message({E.stack: {n: torch.ones(1) * k for n in names}}) for k, names in enumerate(("a", "ab", "bc"))]
    assert {n: t.tolist() for n, t in aggregate(*groups)[E.stack].items()} == {"a": [0, 1], "b": [1, 2], "c": [2]}


@given(st.lists(st.integers(0, 50), min_size=1, max_size=5))
def test_mean_of_integers_is_computed(values: list[int]) -> None:
    result = aggregate(*[Message({E.plain: v}) for v in values])
    assert result[E.plain] == pytest.approx(sum(values) / len(values), rel=1e-12)


def test_entry_that_no_client_sent_is_absent_with_weight_zero() -> None:
    result = aggregate(Message({E.plain: 1.0}))
    assert E.group not in result
    assert result.weight(E.group) == 0
    assert result.get(E.group, {}) == {}


def test_sums_use_float64() -> None:
    big, small = torch.tensor([1e8]), torch.tensor([1.0])
    result = aggregate(*[Message({E.fixed: t}) for t in (big, small, small, -big)])
    assert result.sum(E.fixed).item() == 2.0


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("piece", [1, 7, 1000])
def test_chunked_sum_of_a_large_tensor_is_bitwise_equal(
    piece: int, layout: torch.memory_format, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aggregation, "_PIECE", piece)
    generator = torch.Generator().manual_seed(piece)
    values = [torch.randn(5, 3, 4, 2, generator=generator).contiguous(memory_format=layout) for _ in range(4)]
    kept = [value.clone() for value in values]
    weights = [0.3, 7.0, 1e-3, 2.5]
    found = aggregate(*[Message({E.count: w, E.group: {"a": v}}) for w, v in zip(weights, values, strict=True)])
    total = torch.zeros(5, 3, 4, 2, dtype=torch.float64)
    for value, weight in zip(kept, weights, strict=True):
        total = total + value.double() * weight
    assert torch.equal(found.sum(E.group)["a"], total)
    assert all(map(torch.equal, values, kept))


@pytest.mark.parametrize(("reply", "why"), [
    (None, "sent nothing"), (Message(), "sent nothing"),
    (Message.unchecked({"Other.x": 1.0}), "is not an entry that the method declares"),
    (Message({E.plain: float("nan")}), "NaN or Inf"),
    (Message({E.count: 1.0, E.group: {"w": torch.tensor([float("inf")])}}), r"E\.group\[w\] holds NaN"),
    (Message({E.count: 1.0, E.group: {"w": torch.tensor([1, 2])}}), "integers have no mean"),
    (Message({E.group: {"w": torch.tensor([1.0])}}), r"weighted by E\.count, which is missing"),
    (Message({E.count: -1e4, E.group: {"w": torch.ones(2)}}), r"E\.count must lie in \[0, 1e\+06\]"),
    (Message({E.count: 1e308, E.group: {"w": torch.ones(2)}}), r"E\.count must lie in"),
    (Message.unchecked({"E.count": 10**400, "E.group": {"w": torch.ones(2)}}), "64 bits"),
    (Message({E.rows: torch.tensor([1.0, -431.0]), E.table: torch.ones(2, 3)}), r"E\.rows must lie in"),
    (Message({E.rows: torch.ones(3), E.table: torch.ones(2, 3)}), "3 weights, but E.table has another number of rows"),
    (Message({E.rows: torch.ones(2, 1), E.table: torch.ones(2, 3)}), "must be a number, or a vector"),
    (Message({E.rows: torch.ones(2).bool(), E.table: torch.ones(2, 3)}), "must be a number, or a vector|no sum"),
    (Message.unchecked({"E.rows": {"a": torch.ones(2)}, "E.table": torch.ones(2, 3)}), "must be a number, or a vector"),
    (Message({E.rows: torch.ones(2), E.table: torch.tensor(1.0)}), "has another number of rows"),
    (Message.unchecked({"E.rows": torch.ones(2), "E.table": 1.0}), "has another number of rows"),
    (Message({E.top: {"n": torch.tensor([True])}}), "has no max"),
    (Message({E.stack: torch.tensor(1.0)}), "has no rows to concatenate"),
    (Message.unchecked({"E.plain": "text"}), "is a str, which has no mean"),
    (Message.unchecked({"E.plain": PAIR}), "is a LabeledImages, which has no mean"),
])  # fmt: skip
def test_bad_replies_are_refused_with_the_reason(reply: Message | None, why: str) -> None:
    refused(lambda: check_reply(reply, ENTRIES, schema_of(reply)), BadReply, why)


def test_replies_must_match_the_expected_schema() -> None:
    like = {"E.group": EntrySpec({"w": torch.zeros(2)}), "E.count": EntrySpec(1.0)}
    good = Message({E.count: 1.0, E.group: {"w": torch.ones(2)}})
    assert check_reply(good, ENTRIES, like) is good
    for group, why in (
        ({"w": torch.ones(3)}, "has shape"),
        ({"w": torch.ones(2, dtype=torch.float64)}, "has dtype"),
        ({"v": torch.ones(2)}, "lacks"),
        ({"w": torch.ones(2), "v": torch.ones(2)}, "unknown"),
    ):
        with pytest.raises(BadReply, match=why):
            check_reply(Message({E.count: 1.0, E.group: group}), ENTRIES, like)
    refused(lambda: check_reply(Message({E.count: 1.0}), ENTRIES, like), BadReply, r"E\.group is missing")
    with pytest.raises(BadReply, match="is a str, want a dict"):
        check_reply(Message.unchecked({"E.count": 1.0, "E.group": "no"}), ENTRIES, like)


def test_sets_must_match_the_expected_space_and_size() -> None:
    empty = LabeledImages(torch.empty(0, 1, 2, 2), torch.empty(0, dtype=torch.long), num_classes=3)
    like = {"E.pool": EntrySpec(empty, max_rows=2)}

    def pool(n: int, **options: Any) -> Message:
        data = {"num_classes": 3, **options}
        return Message({E.pool: LabeledImages(torch.zeros(n, 1, 2, 2), torch.zeros(n, dtype=torch.long), **data)})

    check_reply(pool(2), ENTRIES, like)
    noted = {"E.pool": EntrySpec(empty.replace(columns={"seen": torch.empty(0, 2)}), max_rows=2)}
    for column, why in ((torch.zeros(2, 2), ""), (torch.zeros(2), "shape"), (torch.zeros(2, 2).int(), "dtype")):
        check = partial(check_reply, pool(2, columns={"seen": column}), ENTRIES, noted)
        refused(check, BadReply, f"E.pool column seen has {why}") if why else check()
    with pytest.raises(BadReply, match=r"must have the columns \['seen'\]; too many or missing: \['seen'\]"):
        check_reply(pool(2), ENTRIES, noted)
    refused(lambda: check_reply(pool(3), ENTRIES, like), BadReply, "3 rows, at most 2")
    with pytest.raises(BadReply, match="different normalizations"):
        check_reply(pool(1, normalization=Normalization((0.5,), (0.5,))), ENTRIES, like)
    refused(lambda: check_reply(pool(1, num_classes=4), ENTRIES, like), BadReply, "class counts")
