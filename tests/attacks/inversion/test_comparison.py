"""Defences match their definition and the attacker's model of them; the comparison ignores the truth."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from attacks import align, psnr
from attacks.inversion import (
    ClassMeans,
    Clip,
    DefendedMessage,
    Gradient,
    Noise,
    Reconstruction,
    ReplayableMessage,
    Sparsify,
    compare_messages,
    invert_message,
)
from distillkit.networks import ConvNet, build
from distillkit.normalization import Normalization
from distillkit.rng import derive
from tests.attacks.inversion.images import pictures

SHAPE = (1, 8, 8)
NET: nn.Module = build(lambda: ConvNet(SHAPE, 5, width=8, depth=1, norm="none", activation="tanh"), 0)
LABELS = torch.tensor([1, 4])


def whole(message: Sequence[Tensor]) -> Tensor:
    return torch.cat([t.flatten() for t in message])


MESSAGES = st.integers(0, 1000).map(
    lambda seed: tuple(torch.randn(s, generator=derive(seed, i)).double() for i, s in enumerate([(3, 4), (5,), (1, 2)]))
)


@given(MESSAGES, st.sampled_from([0.1, 1.0, 100.0]))
def test_clip_bounds_the_norm_and_keeps_the_direction(message: tuple[Tensor, ...], bound: float) -> None:
    a, b = whole(message), whole(Clip(bound)(message))
    assert float(b.norm()) <= bound * (1 + 1e-9)
    assert float(F.cosine_similarity(a, b, dim=0)) == pytest.approx(1, abs=1e-5)
    if float(a.norm()) <= bound:
        assert torch.equal(a, b)
    else:
        assert float(b.norm()) == pytest.approx(bound, rel=1e-9)
    assert Clip(bound)([torch.zeros(2)])[0].tolist() == [0, 0]


@given(MESSAGES, st.floats(0.01, 1.0))
def test_sparsifying_keeps_the_largest_entries_of_all_tensors(message: tuple[Tensor, ...], share: float) -> None:
    sent = Sparsify(share)(message)
    assert [t.shape for t in sent] == [t.shape for t in message]
    a, b = whole(message), whole(sent)
    kept = b != 0
    assert int(kept.sum()) == -int(-share * len(a) // 1)
    assert torch.equal(a[kept], b[kept])
    assert bool(kept.all()) or float(a[kept].abs().min()) >= float(a[~kept].abs().max())


def test_noise_has_its_standard_deviation_and_repeats() -> None:
    zeros = [torch.zeros(100, 100), torch.zeros(10_000)]
    added = Noise(0.3, seed=1)(zeros)
    assert float(whole(added).std()) == pytest.approx(0.3, rel=0.03)
    assert float(torch.corrcoef(torch.stack([t.flatten() for t in added]))[0, 1].abs()) < 0.05
    assert torch.equal(whole(Noise(0.3, seed=1)(zeros)), whole(added))
    torch.testing.assert_close(Noise(0.3, seed=1)([zeros[0].double()])[0].float(), added[0])
    assert not torch.equal(whole(Noise(0.3, seed=2)(zeros)), whole(added))
    assert Noise(0.3).expected(zeros, added) == tuple(zeros)


def test_messages_are_kept_without_their_graph() -> None:
    sent = [number * torch.ones_like(p).requires_grad_() for number, p in enumerate(NET.parameters())]
    means = ClassMeans([torch.flatten], [torch.ones(3, 2).requires_grad_()])
    for message in (Gradient(NET, sent), ReplayableMessage(sent, lambda x, y: sent, 5), means):
        assert not any(t.requires_grad for t in message.observed)


class Reversed:
    def __call__(self, message: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return tuple(-t for t in message)

    def expected(self, message: Sequence[Tensor], observed: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return self(message)


class Told(Gradient):
    def replay(self, images: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        return self.observed


def test_labels_are_read_from_the_sent_message() -> None:
    sent = Gradient.of(NET, pictures(1), LABELS[:1])
    told = DefendedMessage(Told(NET, sent.observed), Reversed())
    assert torch.equal(told.replay(pictures(1), LABELS[:1])[0], sent.observed[0])
    sent.ordered = True
    defended = DefendedMessage(sent, Reversed())
    assert (defended.ordered, defended.count_classes(pictures())) == (True, 5)
    wrong = Gradient(NET, [-t for t in sent.observed]).read_labels(1, pictures()).tolist()
    assert defended.read_labels(1, pictures()).tolist() == wrong != [1]
    assert DefendedMessage(defended, Reversed()).read_labels(1, pictures()).tolist() == [1]
    with pytest.warns(UserWarning, match="no images were found"):
        assert invert_message(defended, SHAPE, scale=-1, steps=1).labels.tolist() == [1]


@pytest.mark.parametrize("defences", [(Clip(0.1),), (Sparsify(0.2),), (Clip(0.1), Sparsify(0.5)), ()], ids=str)
def test_private_images_reproduce_the_message(defences: Any) -> None:
    """An attacker who knows the defence has loss 0 at the private images."""
    sent = Gradient.of(NET, pictures(), LABELS)
    before, message = sent.observed, DefendedMessage(sent, *defences)
    assert sent.observed is before
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(message.replay(pictures(), LABELS), message.observed))


def test_comparison_equals_inversions_scored_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The restart with the smallest loss counts; images are paired before they are aligned."""
    truth, noise = pictures(3), torch.randn(3, *SHAPE, generator=derive(1))
    odd = truth.clone()
    odd[0, 0, 0, :2] = torch.tensor([1.005, -0.005])  # clamped, like the pixels of a decoded normalization
    found = {
        "a": Reconstruction((0.5 * truth + 0.3 + 0.02 * noise)[[2, 0, 1]], torch.tensor([7, 1, 4]), (3.0, 0.00125)),
        "b": Reconstruction((truth + 0.3 * noise).clamp(0, 1), torch.tensor([1, 1, 1]), (0.5, 2.0)),
    }
    sent = {name: Gradient.of(NET, truth[:n], torch.zeros(n).long()) for n, name in enumerate(found, 1)}
    asked = []

    def search(message: Any, shape: Any, count: int, **options: Any) -> Reconstruction:
        asked.append((shape, count, options))
        return found[next(name for name in sent if sent[name] is message)]

    monkeypatch.setattr("attacks.inversion.comparison.invert_message", search)
    space = Normalization((0.0,), (0.5,))
    table = compare_messages(sent, 2 * odd, torch.tensor([4, 1, 1]), restarts=2, normalization=space)
    assert asked == [(SHAPE, 3, {"restarts": 2, "normalization": space})] * 2
    lines = []
    for row, (name, one), order in zip(table.rows, found.items(), ([1, 2, 0], [0, 1, 2]), strict=True):
        paired = one.images[order]
        plain, aligned = psnr(paired, odd.clamp(0, 1)), psnr(align(paired, odd.clamp(0, 1)), odd.clamp(0, 1))
        assert (row.psnr, row.aligned) == (tuple(plain.tolist()), tuple(aligned.tolist()))
        assert (row.name, row.labels, row.loss) == (name, 2 / 3, min(one.losses))
        cells = [f"{float(v.mean()):.1f} ({float(v.max()):.1f})" for v in (plain, aligned)]
        lines.append([name, *cells, "67", f"{min(one.losses):.2g}"])
    shown = [[cell.strip() for cell in line.split("|")[1:-1]] for line in str(table).split("\n")]
    assert shown[0] == ["message", "PSNR dB (best)", "aligned dB (best)", "labels %", "loss"]
    assert shown[2:] == [*lines, ["nothing found", "", f"{table.guess:.1f}", "", ""]]
    flat = odd.clamp(0, 1).mean((1, 2, 3), keepdim=True).expand(3, *SHAPE)
    assert table.guess == pytest.approx(float(psnr(flat, odd.clamp(0, 1)).mean()))


SENT = Gradient.of(NET, pictures(), LABELS)
FALLING = torch.linspace(0.5, -0.015, 128).view(2, *SHAPE)
HALF: Any = SimpleNamespace(observed=SENT.observed, replay=SENT.replay)
BAD: list[tuple[Any, str]] = [
    (lambda: Clip(0), "max_norm must be"),
    (lambda: Noise(-1.0), "std must be"),
    (lambda: Sparsify(0.0), "share must be"),
    (lambda: DefendedMessage(NET), "message must be an ObservedMessage, .* got ConvNet$"),  # type: ignore[arg-type]
    (lambda: DefendedMessage(SENT, Sparsify(0.5), Clip(1e-300)), "the result of the defence Clip must not be"),
    (lambda: DefendedMessage(HALF, Clip(1.0)), "got SimpleNamespace, which has no ordered, count_classes, read_labels"),
    (lambda: compare_messages({"a": HALF}, pictures(), LABELS), r"messages\['a'\] must be an ObservedMessage"),
    (lambda: DefendedMessage(Gradient, Clip(1.0)), "got the class Gradient, which has no observed$"),  # type: ignore[arg-type]
    (lambda: DefendedMessage(type("Sent", (Gradient,), {"observed": ()})), "got the class Sent$"),
    (lambda: DefendedMessage(SENT, Clip(1.0), Clip), "defences must be Defences, .* got type"),  # type: ignore[arg-type]
    (lambda: DefendedMessage(SENT, torch.clone), "defences must be Defences, .* got builtin"),  # type: ignore[arg-type]
    (lambda: DefendedMessage(SENT, SimpleNamespace(expected=len)), "defences must .* got SimpleNamespace"),  # type: ignore[arg-type]
    (lambda: compare_messages({"a": SENT}, FALLING, LABELS), r"in \[0, 1\] .* got -0.015 to 0.5 with normalization="),
    (lambda: compare_messages({"a": SENT}, pictures() * 0 + 1.015, LABELS), r"images must be pixels in \[0, 1\]"),
    (lambda: compare_messages({}, pictures(), LABELS), "messages must hold at least one message"),
    (lambda: compare_messages({"a": SENT}, pictures(), LABELS, shape=SHAPE, count=2), "include count, shape"),
    (lambda: compare_messages({"a": SENT}, pictures()[0], LABELS), "images must have 4 dimensions"),
    (lambda: compare_messages({"a": SENT}, pictures(), LABELS, normalization=None), "normalization must be a Norm"),  # type: ignore[arg-type]
    (lambda: ReplayableMessage(SENT.observed, SENT.replay, 5, ordered=1), "ordered must be True or False"),  # type: ignore[arg-type]
    (lambda: compare_messages({"a": SENT}, pictures(), LABELS[:1]), "labels must have one entry per image"),
]


@pytest.mark.parametrize(("call", "said"), BAD, ids=range(len(BAD)))
def test_invalid_arguments_are_named(call: Any, said: str) -> None:
    with pytest.raises((TypeError, ValueError), match=said):
        call()


def test_errors_name_the_message() -> None:
    odd = ReplayableMessage(SENT.observed, SENT.replay, 5, ordered=True)
    assert odd.ordered
    for kind, steps, name in ((ValueError, 1, "odd"), (TypeError, "1", "even")):
        with pytest.raises(kind, match="labels must be given" if steps == 1 else "steps must") as error:
            compare_messages({"even": SENT, "odd": odd}, pictures(), LABELS, steps=steps)
        assert error.value.__notes__ == [f"in the message {name!r}"]
