"""Schemas of replies (types, shapes and ranges of their values), and the check of a reply against its schema."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from distillkit._utils import check
from distillkit.sets import LabeledImages
from fl.message import Entry, Message, Value, check_value

MAX_WEIGHT = 1e6
"""Largest weight that one reply may claim, unless its schema gives another maximum. This number is public."""

_LARGEST = 1e300

_GROWTH = 1e4
"""Largest absolute value of a float if the schema gives no range, as a multiple of 1 + the example's largest value."""


_RATIO = 100.0
"""Largest ratio of a tensor or set to the median over the replies of an exchange, unless its schema gives another."""


class BadReply(ValueError):
    """Error: a client's reply does not match its schema or cannot be aggregated.

    The engine leaves the client out of the round. The error message names the entry of the reply (a named value, see
    `Entry`) and the reason.
    """


@dataclass(frozen=True)
class EntrySpec:
    """Specification of one entry of a reply. `Method.expect` returns a mapping from entry keys to specifications.

    Every reply is compared with this mapping, its schema, before it is used, so a client cannot send anything that the
    server does not expect. Values that are not finite are always refused.

    Attributes:
        value: an example value. A tensor must have the shape and dtype of the example, and a dict of tensors also the
            same names. An image set may have any number of images, but must have the normalization, classes, image
            shape, dtypes, additional columns (`LabeledImages.columns`) and `info` of the example. Usually, the
            example has no additional columns, and its `info` is empty.
        max_rows: maximum number of images of a set, or of rows of a tensor. The first dimension of a tensor may then
            differ from the example.
        same_rows_as: another entry of the same reply, which must have the same number of rows.
        max_per_class: maximum number of images of one class in a set.
        minimum, maximum: smallest and largest allowed number. In an image set, they apply to the pixels and to the
            values in additional columns. By default, the clients' weights for an average (see `Entry.by`) must be in
            [0, `MAX_WEIGHT`]. The magnitude of all other floats must be at most 10,000 times (1 + the largest value of
            the example, such as the server's state). Other integers have no limits.
        max_norm: maximum l2 norm of the entry's numbers, taken as one vector. It replaces the default limit.
        max_ratio: largest ratio of the entry's root mean square to the median over the replies, if at least four came
            and the server sees each of them (no secure sums, no private method). Default: 100 for sets and tensors of
            floats; other values are not compared.
        nonnegative: in a dict of tensors, the names of the tensors whose numbers must be >= 0, such as variances.
        optional: whether a reply without the entry is valid.
        max_unit: largest unit of a grid to which a filter, such as `SecureSums`, may round the entry. A method whose
            clients share the noise sets it, because coarse rounding could remove the noise.

    Raises:
        TypeError, ValueError: an attribute has the wrong type, or no reply could match.
    """

    value: Value
    max_rows: int | None = None
    same_rows_as: Entry[Any] | None = None
    max_per_class: int | None = None
    minimum: float = -math.inf
    maximum: float = math.inf
    max_norm: float = math.inf
    max_ratio: float | None = None
    nonnegative: Collection[str] = ()
    optional: bool = False
    max_unit: float = math.inf

    def __post_init__(self) -> None:
        if not isinstance(self.value, Tensor | dict | LabeledImages | float | int | str):
            raise TypeError(
                "value must be an example: a tensor, a dict of tensors, a LabeledImages, a number or a string, got "
                f"{type(self.value).__name__}"
            )
        for name in ("max_rows", "max_per_class"):
            if getattr(self, name) is not None:
                check.positive_int(getattr(self, name), name, least=0)
        for name in ("minimum", "maximum", "max_norm", "max_ratio", "max_unit"):
            number = getattr(self, name)
            if name == "max_ratio" and number is None:
                continue
            if isinstance(number, bool) or not isinstance(number, Real) or math.isnan(number):
                raise TypeError(f"{name} must be a number, got {number!r}")
        if self.minimum > self.maximum or self.max_norm < 0:
            raise ValueError(
                "minimum must be at most maximum, and max_norm at least 0, got "
                f"{self.minimum}, {self.maximum} and {self.max_norm}"
            )
        if isinstance(self.nonnegative, str):
            raise TypeError(f"nonnegative must be a list of names, got {self.nonnegative!r}")
        if self.same_rows_as is not None and not isinstance(self.same_rows_as, Entry):
            raise TypeError(f"same_rows_as must be an Entry, got {type(self.same_rows_as).__name__}")

    @property
    def ratio(self) -> float | None:
        """`max_ratio` or its default; None if replies are not compared in this entry."""
        if self.max_ratio is not None:
            return self.max_ratio
        parts = [part for _, part in value_parts(self.value)]
        return _RATIO if any(isinstance(part, Tensor) and part.is_floating_point() for part in parts) else None

    @property
    def limit(self) -> float:
        """Largest magnitude of a float without a range."""
        if math.isfinite(self.max_norm):
            return self.max_norm
        parts = [torch.as_tensor(part) for _, part in value_parts(self.value)]
        peaks = [max(abs(v.item()) for v in part.detach().aminmax()) for part in parts if part.numel()]
        return _GROWTH * (1 + max(peaks, default=0.0))

    @staticmethod
    def finite(value: Value) -> EntrySpec:
        """Return the specification of an entry that may have floats of any finite magnitude, such as the loss of a
        diverged model.

        Args:
            value: an example of the entry's value, which determines its type, shapes and dtypes (see
                `EntrySpec.value`).
        """
        return EntrySpec(value, max_norm=_LARGEST, max_ratio=math.inf)


Schema = dict[str, EntrySpec]
"""Specifications of the entries of a reply, by key. A reply with any other entry is refused."""


def check_reply(reply: object, entries: Mapping[str, Entry[Any]], schema: Schema) -> Message:
    """Return the reply if it has exactly the entries of the schema, each of the right form, finite and in range.

    The engine calls this function for every reply, before any other code reads the reply.

    Args:
        reply: object to check, from any client.
        entries: entries that the method declares, by key.
        schema: specification of each entry of this reply, by key.

    Raises:
        BadReply: the reply is not valid; the message names the first defect.
    """
    if reply is None or (isinstance(reply, Message) and len(reply) == 0):
        raise BadReply("sent nothing")
    if not isinstance(reply, Message):
        raise BadReply(f"sent a {type(reply).__name__}, want a Message")
    values = dict(reply.items())
    weights = {e.by.key for e in entries.values() if e.by is not None}
    for key, value in values.items():
        if key not in entries:
            raise BadReply(f"{str(key)[:80]} is not an entry that the method declares")
        if key not in schema:
            raise BadReply(f"{key} is not expected: add it to the schema of this reply in `expect`")
        try:
            check_value(key, value)
        except (TypeError, ValueError) as error:
            raise BadReply(str(error)) from error
    for key, like in schema.items():
        if key in values:
            _check_like(key, values[key], like, values)
        elif not like.optional:
            raise BadReply(f"{key} is missing")
    for key, value in values.items():
        like = schema[key]
        minimum, maximum = like.minimum, like.maximum
        if key in weights:
            minimum, maximum = max(minimum, 0.0), maximum if math.isfinite(maximum) else MAX_WEIGHT
        bounded = math.isfinite(minimum) and math.isfinite(maximum)
        limit = math.inf if bounded else like.limit
        for name, part in value_parts(value):
            label = f"{key}[{name}]" if name else key
            remedy = "; the method sets the largest weight (max_samples)" if key in weights else ""
            least = max(minimum, 0.0) if name in like.nonnegative else minimum
            _check_range(label, part, least, maximum, limit, remedy)
        _check_norm(key, value, like.max_norm)
        _check_rule(entries[key], value, values)
    return reply


def _check_like(key: str, got: Value, like: EntrySpec, values: Mapping[str, Value]) -> None:
    want = like.value
    if isinstance(want, Tensor) and isinstance(got, Tensor):
        _check_tensor(key, got, want, like.max_rows)
    elif isinstance(want, dict) and isinstance(got, dict):
        missing, extra = sorted(set(want) - set(got)), sorted(n[:80] for n in set(got) - set(want))
        if missing or extra:
            wrong = {"lacks": missing[:3], "has unknown": extra[:3]}
            raise BadReply(f"{key} {' and '.join(f'{what} {names}' for what, names in wrong.items() if names)}")
        for name, tensor in got.items():
            _check_tensor(f"{key}[{name}]", tensor, want[name], like.max_rows)
    elif isinstance(want, LabeledImages) and isinstance(got, LabeledImages):
        _check_set(key, got, want, like)
    elif isinstance(want, float) and isinstance(got, float | int):
        pass  # a float with a whole value may arrive as an int
    elif type(want) is not type(got):
        raise BadReply(f"{key} is a {type(got).__name__}, want a {type(want).__name__}")
    if like.same_rows_as is not None:
        other = values.get(like.same_rows_as.key)
        count, wanted = _rows(got), _rows(other)
        if count is None or count != wanted:
            raise BadReply(f"{key} must have as many rows as {like.same_rows_as.key}, got {count} and {wanted}")


def _rows(value: object) -> int | None:
    """Return the first dimension of a tensor, or the number of images of a set; None for any other value."""
    if isinstance(value, Tensor):
        return len(value) if value.ndim else None
    return len(value) if isinstance(value, LabeledImages) else None


def _check_tensor(name: str, got: Tensor, want: Tensor, rows: int | None) -> None:
    if got.dtype != want.dtype:
        raise BadReply(f"{name} has dtype {got.dtype}, want {want.dtype}")
    shapes = (got.shape[1:], want.shape[1:]) if rows is not None else (got.shape, want.shape)
    if got.ndim != want.ndim or shapes[0] != shapes[1]:
        raise BadReply(f"{name} has shape {list(got.shape)}, want {list(want.shape)}")
    if rows is not None and len(got) > rows:
        raise BadReply(f"{name} has {len(got)} rows, at most {rows} are allowed")


def _check_set(key: str, got: LabeledImages, want: LabeledImages, like: EntrySpec) -> None:
    try:
        got.replace()  # repeats the checks of the constructor, because a set can be changed after construction
        want.require_compatible(got)
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise BadReply(f"{key}: {error}") from error
    maximum = len(got) if like.max_rows is None else like.max_rows
    _check_tensor(f"{key} images", got.images, want.images, maximum)
    _check_tensor(f"{key} labels", got.labels, want.labels, maximum)
    if set(got.columns) != set(want.columns):
        shown = [str(n)[:80] for n in sorted(set(got.columns) ^ set(want.columns))]
        raise BadReply(f"{key} must have the columns {sorted(want.columns)}; too many or missing: {shown[:3]}")
    for name, column in got.columns.items():
        _check_tensor(f"{key} column {name}", column, want.columns[name], maximum)
    if got.info != want.info:
        shown = [str(n)[:80] for n in got.info]
        raise BadReply(f"{key} carries info ({', '.join(shown[:3])}), which is not expected: send `replace(info={{}})`")
    if like.max_per_class is not None and len(got) and int(got.counts().max()) > like.max_per_class:
        raise BadReply(
            f"{key} has {int(got.counts().max())} images of one class, at most {like.max_per_class} are allowed"
        )


def value_parts(value: Value) -> Iterator[tuple[str, Tensor | float]]:
    """Yield name and value of each part of an entry's value that is checked against `EntrySpec.minimum` and `maximum`.

    The parts of a dict are its tensors, and the parts of an image set are its images and columns. A single tensor or
    number is one part with the name "". A string has no such part.
    """
    if isinstance(value, dict):
        yield from value.items()
    elif isinstance(value, LabeledImages):
        yield "images", value.images
        yield from value.columns.items()
    elif isinstance(value, Tensor | float | int):
        yield "", value


def _check_range(label: str, part: Tensor | float, minimum: float, maximum: float, limit: float, remedy: str) -> None:
    if isinstance(part, Tensor):
        if not part.numel() or part.dtype == torch.bool:
            return
        low, high = (v.item() for v in part.detach().aminmax())  # one pass; NaN is in both
    else:
        low = high = part
    if not (math.isfinite(low) and math.isfinite(high)):
        raise BadReply(f"{label} holds NaN or Inf")
    if isinstance(part, float) or (isinstance(part, Tensor) and part.is_floating_point()):
        minimum, maximum = max(minimum, -limit), min(maximum, limit)
    if low < minimum or high > maximum:
        shown = f"{low:g}" if low == high else f"{low:g} to {high:g}"
        raise BadReply(f"{label} must lie in [{minimum:g}, {maximum:g}], got {shown}{remedy if high > maximum else ''}")


def l2_norm(value: Value) -> tuple[float, int]:
    """Return the l2 norm of all numbers of an entry's value, taken as one vector, and their count."""
    norms, count = [0.0], 0
    for _, part in value_parts(value):
        numbers = torch.as_tensor(part, dtype=torch.float64).detach()
        norms.append(float(torch.linalg.vector_norm(numbers)))
        count += numbers.numel()
    return math.hypot(*norms), count


def _check_norm(key: str, value: Value, max_norm: float) -> None:
    if max_norm < math.inf and (norm := l2_norm(value)[0]) > max_norm:
        raise BadReply(f"{key} has the norm {norm:.3g}, at most {max_norm:.3g} is allowed: the client has diverged")


def _check_rule(entry: Entry[Any], value: Value, values: Mapping[str, Value]) -> None:
    """Raise BadReply if the entry's aggregation rule cannot be applied to its value.

    If the entry is weighted, the entry with the weights (`entry.by`) must be in the reply and fit the value.
    """
    key, rule = entry.key, entry.rule
    if rule == "first":
        return
    if isinstance(value, str) or (isinstance(value, LabeledImages) and rule != "union"):
        raise BadReply(f"{key} is a {type(value).__name__}, which has no {rule}")
    tensors = [t for _, t in value_parts(value) if isinstance(t, Tensor)]
    for tensor in tensors if rule != "union" else ():
        if rule == "mean" and not tensor.is_floating_point():
            raise BadReply(f"{key} is {tensor.dtype}: integers have no mean (use max, sum or first)")
        if tensor.dtype == torch.bool:
            raise BadReply(f"{key} is {tensor.dtype}, which has no {rule}")
    if rule == "union" and any(t.ndim == 0 for t in tensors):
        raise BadReply(f"{key} has no rows to concatenate")
    if entry.by is None:
        return
    if entry.by.key not in values:
        raise BadReply(f"{key} is weighted by {entry.by.key}, which is missing")
    weight = values[entry.by.key]
    if isinstance(weight, float | int) or (isinstance(weight, Tensor) and weight.ndim == 0):
        return
    if not isinstance(weight, Tensor) or weight.ndim != 1 or weight.dtype == torch.bool:
        raise BadReply(
            f"{entry.by.key} holds the weights of {key}: it must be a number, or a vector with one number per row"
        )
    if not tensors or any(t.ndim == 0 or len(t) != len(weight) for t in tensors):
        raise BadReply(f"{entry.by.key} has {len(weight)} weights, but {key} has another number of rows")
