from __future__ import annotations

import statistics
import sys
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matplotlib import colormaps
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from torch import Tensor

from distillkit import LabeledImages, Normalization, plot
from distillkit.losses import rbf_mmd
from distillkit.plot.figure import CLASS_COLOURS, MARKERS, class_colours
from distillkit.rng import derive

G = torch.Generator().manual_seed(0)
SHIFTED = Normalization([0.5], [0.25])


def make(n: int = 12, channels: int = 1, size: int = 4, k: int = 3, classes: list[int] | None = None) -> LabeledImages:
    labels = torch.arange(n) % k if classes is None else torch.tensor(classes)
    return LabeledImages(torch.rand(n, channels, size, size, generator=G), labels, num_classes=k)


def sheet(figure: Figure) -> Tensor:
    """Return the pixels of the figure's only image, [H, W, 3]."""
    (image,) = figure.axes[0].get_images()
    return torch.as_tensor(image.get_array())


def texts(figure: Figure) -> str:
    import matplotlib.text

    return "\n".join(t.get_text() for t in figure.findobj(matplotlib.text.Text) if t.get_visible())


def two_clients(n: int = 8, d: int = 5) -> dict[str, Tensor]:
    return {"a": torch.randn(n, d, generator=G), "b": torch.randn(n, d, generator=G) + 2}


HISTORY: Any = {"m": [[{"round": 1, "accuracy": 0.5}]]}

PICTURES: dict[str, Any] = {
    "grid": lambda ax=None: plot.grid(make(), ax=ax),
    "real_and_synthetic": lambda ax=None: plot.real_and_synthetic(make(), make(), ax=ax),
    "selection": lambda ax=None: plot.selection(make(), torch.tensor([0, 5]), ax=ax),
    "pixel_histogram": lambda ax=None: plot.pixel_histogram({"a": make()}, axes=ax),
    "tsne": lambda ax=None: plot.tsne(two_clients(), {"a": torch.arange(8) % 2, "b": torch.arange(8) % 3}, ax=ax),
    "mmd_table": lambda ax=None: plot.mmd_table(two_clients(), axes=ax),
    "partition": lambda ax=None: plot.partition(torch.tensor([0, 1, 1]), [torch.tensor([0]), torch.tensor([2])], ax=ax),
    "curves": lambda ax=None: plot.curves(HISTORY, ax=ax),
}


@pytest.mark.parametrize("name", PICTURES)
def test_a_given_axis_is_drawn_into(name: str) -> None:
    figure = Figure()
    left, right = figure.subplots(1, 2)
    assert PICTURES[name](right) is figure
    assert right.has_data()
    assert not left.has_data()


@pytest.mark.parametrize("name", PICTURES)
def test_a_notebook_shows_the_picture_without_pyplot(
    name: str, monkeypatch: pytest.MonkeyPatch, global_rng_untouched: None
) -> None:
    """IPython calls `_repr_png_` if pyplot has registered no formatter."""
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)  # importing it now fails
    figure = PICTURES[name]()
    assert isinstance(figure, Figure)
    picture = figure._repr_png_()  # type: ignore[attr-defined]
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 1000
    assert figure.axes[0].get_ylabel() or name in ("mmd_table", "selection")


# Images


def test_grid_shows_every_class_in_its_row() -> None:
    data = make(5, k=3, classes=[2, 0, 0, 2, 0])
    shown = sheet(plot.grid(data, per_class=2))
    h = 4 + 2
    assert shown.shape[:2] == (3 * h, 2 * h)
    for row, column, index in ((0, 0, 1), (0, 1, 2), (2, 0, 0), (2, 1, 3)):
        cell = shown[row * h + 1 : row * h + 5, column * h + 1 : column * h + 5]
        assert torch.allclose(cell, data.images[index, 0].unsqueeze(2).expand(-1, -1, 3))
    assert bool((shown[h : 2 * h] == 1).all())  # nobody is of class 1
    assert torch.equal(shown[0, :h], torch.full((h, 3), 0.85))  # the frame
    for figure in (plot.grid(data, classes=["x", "y", "z"]), plot.real_and_synthetic(data, data, classes="xyz")):
        assert [t.get_text() for t in figure.axes[0].get_yticklabels()] == ["x", "y", "z"]
        assert figure.axes[0].get_yticks().tolist() == [h / 2, h * 3 / 2, h * 5 / 2]


def test_grid_draws_pixels_for_any_normalization_and_channels() -> None:
    data = make(3)
    moved = data.renormalize(SHIFTED)
    assert torch.allclose(sheet(plot.grid(data)), sheet(plot.grid(moved)), atol=1e-6)
    five = make(1, channels=5, k=1)
    grey = sheet(plot.grid(five))[1:5, 1:5]
    assert torch.allclose(grey, five.images[0].mean(0).unsqueeze(2).expand(-1, -1, 3), atol=1e-6)
    colour = make(1, channels=3, k=1)
    assert torch.allclose(sheet(plot.grid(colour))[1:5, 1:5], colour.images[0].permute(1, 2, 0))


def test_real_images_are_left_of_synthetic_ones() -> None:
    real, synthetic = make(2, k=1), make(3, k=1)
    figure = plot.real_and_synthetic(real, synthetic.renormalize(SHIFTED), per_class=3)
    shown = sheet(figure)
    assert torch.allclose(shown[1:5, 1:5, 0], real.images[0, 0], atol=1e-6)
    assert torch.allclose(shown[1:5, -5:-1, 0], synthetic.images[2, 0], atol=1e-6)
    axes = figure.axes[0]
    ticks = dict(zip(axes.get_xticks(), [t.get_text() for t in axes.get_xticklabels()], strict=True))
    assert ticks == {9: "real", 18 + 4 + 9: "synthetic"}
    assert axes.xaxis.get_ticks_position() == "top"
    assert figure.get_size_inches().tolist() == pytest.approx([2 * 3 * 0.5 + 1, 1.0])
    wide = make(1, k=1, size=18)
    assert plot.real_and_synthetic(wide, wide).axes[0].get_xticks().tolist() == [10, 20 + 9 + 10]
    with pytest.raises(ValueError, match="synthetic and real"):
        plot.real_and_synthetic(wide, synthetic)


def test_selection_shows_each_part_on_its_side() -> None:
    images = torch.zeros(30, 1, 2, 2)
    images[:10] = 0.5
    figure = plot.selection(images, torch.arange(10), rows=2, columns=3)
    shown = sheet(figure)[..., 0]
    left, right = shown[:, :12], shown[:, -12:]
    assert int((left == 0.5).sum()) == 6 * 4
    assert int((left == 0).sum()) == 0
    assert int((right == 0).sum()) == 6 * 4
    assert "selected: 10" in texts(figure)
    assert "rejected: 20" in texts(figure)
    assert figure.get_size_inches().tolist() == pytest.approx([2 * 3 * 0.5 + 0.6, 2 * 0.5 + 0.4])
    values = torch.arange(30.0).view(-1, 1, 1, 1).expand(-1, 1, 2, 2) / 32
    numbered = LabeledImages(values, torch.zeros(30).long()).renormalize(SHIFTED)
    half: Any = {"selected": torch.arange(10), "rows": 2, "columns": 3}
    for pool in (values, numbered):
        drawn = [sheet(plot.selection(pool, **half, generator=seed))[1::4, 1:12:4, 0] for seed in (0, 1)]
        for one in drawn:
            shown = {*(32 * one).flatten().tolist()}
            assert len(shown) == 6
            assert shown <= set(range(10))
        assert not torch.equal(*drawn)
    everything = plot.selection(images, torch.arange(30), rows=2, columns=3)
    assert "rejected: 0" in texts(everything)


def test_histogram_counts_pixels_per_channel_in_per_cent() -> None:
    images = torch.tensor([0.05, 0.15, 0.15, 0.95]).view(1, 1, 1, 4).repeat(1, 3, 1, 1)
    images[0, 1] = 0.5
    plain = LabeledImages(images, torch.tensor([0]))
    for one in (plain, plain.renormalize(SHIFTED)):
        figure = plot.pixel_histogram({"one": one}, bins=10)
        red, green, blue = (patch.get_data() for patch in figure.axes[0].patches)
        assert red.values == pytest.approx([25, 50, 0, 0, 0, 0, 0, 0, 0, 25])
        assert green.values == pytest.approx([0, 0, 0, 0, 0, 100, 0, 0, 0, 0])
        assert blue.values == pytest.approx(red.values)
        assert red.edges == pytest.approx([i / 10 for i in range(11)])
        assert [t.get_text() for t in figure.axes[0].get_legend().get_texts()] == ["red", "green", "blue"]
        colours = [to_hex(patch.get_edgecolor()) for patch in figure.axes[0].patches]
        assert colours == ["#d55e00", "#009e73", "#0072b2"]
        assert figure.axes[0].get_yscale() == "log"
        assert figure.axes[0].get_ylim() == pytest.approx((0.7 * 25, 1.5 * 100))


def test_histogram_reports_outliers_and_shares_its_scale() -> None:
    wide = LabeledImages(torch.tensor([0.5, 2.0, -1.0, 0.5]).view(1, 1, 2, 2), torch.tensor([0]))
    figure = plot.pixel_histogram({"wide": wide, "whole": make(channels=2)})
    titles = [ax.get_title() for ax in figure.axes]
    assert titles == ["wide, 1 images\n50.0% outside [0, 1]", "whole, 12 images"]
    assert figure.axes[0].get_ylim() == figure.axes[1].get_ylim()
    figure = plot.pixel_histogram({"wide": wide, "whole": make(1200, channels=2)})
    titles = [ax.get_title() for ax in figure.axes]
    assert titles == ["wide, 1 images\n50.0% outside [0, 1]", "whole, 1,200 images"]
    assert [t.get_text() for t in figure.axes[1].get_legend().get_texts()] == ["channel 0", "channel 1"]
    assert figure.axes[0].get_ylim() == figure.axes[1].get_ylim()
    rounded = wide.replace(images=torch.tensor([-5e-7, 0.0, 1.0, 1 + 5e-7]).view(1, 1, 2, 2))
    four = plot.pixel_histogram({"rounded": rounded, **{name: make() for name in "abc"}})
    assert four.axes[0].get_title() == "rounded, 1 images"
    assert four.axes[0].get_legend() is None
    assert len(four.axes) == 4
    assert four.get_size_inches().tolist() == pytest.approx([3 * 3.2, 2 * 2.6])
    beyond = plot.pixel_histogram({"beyond": wide.replace(images=wide.images + 50)})
    assert figure.get_size_inches().tolist() == pytest.approx((beyond.get_size_inches() * [2, 1]).tolist())


# Embeddings


def test_tsne_has_a_marker_per_client_and_a_colour_per_class() -> None:
    clients = {"a": torch.randn(20, 3, generator=G), "b": torch.randn(10, 3, generator=G)}
    labels = {"b": torch.ones(10, dtype=torch.long), "a": torch.arange(20) % 2}  # in another order than the rows
    figure = plot.tsne(clients, labels, classes=["cat", "dog"])
    first, second = figure.axes[0].collections
    assert (len(first.get_offsets()), len(second.get_offsets())) == (20, 10)
    assert len({tuple(c) for c in first.get_facecolors()}) == 2
    assert {tuple(c) for c in second.get_facecolors()} == {tuple(first.get_facecolors()[1])}
    assert first.get_paths()[0].vertices.shape != second.get_paths()[0].vertices.shape
    assert {"a", "b", "cat", "dog", "client", "class"} <= set(texts(figure).split("\n"))
    assert (figure.axes[0].get_xlabel(), figure.axes[0].get_ylabel()) == ("t-SNE 1", "t-SNE 2")
    keys = figure.findobj(Legend)
    assert {key.get_title().get_text() for key in keys} == {"client", "class"}
    pairs = [pair for key in keys for pair in zip(key.legend_handles, key.get_texts(), strict=True)]
    shapes = {(MARKERS[0], "#555555", "a"), (MARKERS[1], "#555555", "b")}
    dots = {("o", CLASS_COLOURS[0], "cat"), ("o", CLASS_COLOURS[1], "dog")}
    assert {(handle.get_marker(), handle.get_color(), text.get_text()) for handle, text in pairs} == shapes | dots


def test_tsne_separates_clusters_and_is_seeded() -> None:
    clients = {"a": torch.randn(30, 8, generator=G), "b": torch.randn(30, 8, generator=G) + 20}
    labels = {name: torch.zeros(30, dtype=torch.long) for name in clients}

    def positions(seed: int) -> list[Tensor]:
        drawn = plot.tsne(clients, labels, perplexity=8.0, generator=seed).axes[0].collections
        return [torch.as_tensor(one.get_offsets().data) for one in drawn]

    a, b = positions(0)
    within = max(torch.cdist(a, a).median(), torch.cdist(b, b).median())
    assert float(torch.cdist(a, b).median()) > 2 * float(within)
    assert torch.equal(positions(0)[0], a)


def test_tsne_limits_the_perplexity_and_starts_from_components(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    fake = SimpleNamespace(fit_transform=lambda points: torch.zeros(len(points), 2).numpy())
    monkeypatch.setattr("sklearn.manifold.TSNE", lambda **how: told.append(how) or fake)
    for n, d in ((12, 3), (300, 3), (12, 1)):
        plot.tsne({"a": torch.randn(n, d, generator=G)}, {"a": torch.full((n,), 2)}, generator=n + d)
    assert [(how["perplexity"], how["init"]) for how in told] == [(4, "pca"), (30, "pca"), (4, "random")]
    assert len({how["random_state"] for how in told}) == 3


def test_tsne_of_many_classes_and_of_one_dimension() -> None:
    clients, labels = {"a": torch.randn(45, 1, generator=G)}, {"a": torch.arange(45)}
    figure = plot.tsne(clients, labels)
    assert len({tuple(c) for c in figure.axes[0].collections[0].get_facecolors()}) == 45
    key = figure.axes[0].get_legend()
    assert [t.get_text() for t in key.get_texts()] == [str(c) for c in range(0, 45, 3)]
    assert [handle.get_color() for handle in key.legend_handles] == class_colours(45)[::3]
    assert class_colours(10) == list(CLASS_COLOURS)
    assert [class_colours(11)[i] for i in (0, -1)] == [colormaps["viridis"](end) for end in (0.0, 1.0)]


@given(st.integers(2, 4), st.integers(2, 6), st.booleans())
def test_pairwise_mmd_is_the_loss_for_each_pair(clients: int, n: int, unbiased: bool) -> None:
    rows = {str(i): torch.randn(n + i, 3, generator=G) + i for i in range(clients)}
    table = plot.pairwise_mmd(rows, unbiased=unbiased)
    for i, x in enumerate(rows.values()):
        for j, y in enumerate(rows.values()):
            wanted = 0.0 if i == j else float(rbf_mmd(x.double(), y.double(), unbiased=unbiased))
            assert float(table[i, j]) == pytest.approx(wanted, abs=1e-12)


def test_the_unbiased_table_does_not_grow_as_sets_shrink() -> None:
    own = derive(0, "small sets")
    draws = [{name: torch.randn(10, 8, generator=own) for name in "ab"} for _ in range(60)]
    unbiased = statistics.mean(float(plot.pairwise_mmd(d)[0, 1]) for d in draws)
    biased = statistics.mean(float(plot.pairwise_mmd(d, unbiased=False)[0, 1]) for d in draws)
    assert abs(unbiased) < 0.03
    assert biased > 0.2


def test_mmd_table_shows_the_numbers_and_the_change() -> None:
    before, after = two_clients(), two_clients()
    after["b"] = after["b"] + 5
    means = [float(plot.pairwise_mmd(one)[0, 1]) for one in (before, after)]
    figure = plot.mmd_table(before, after)
    left, right, bar = figure.axes
    assert left.get_title() == f"before: mean {means[0]:.2f}"
    assert right.get_title() == f"after: mean {means[1]:.2f} ({means[1] / means[0] - 1:+.0%})"
    assert [t.get_text() for t in right.texts] == [f"{means[1]:.1f}"] * 2
    assert left.get_images()[0].get_clim() == right.get_images()[0].get_clim() == (0, max(means))
    assert bar.get_ylabel() == "squared MMD, RBF kernel"
    assert [t.get_text() for t in [*left.get_xticklabels(), *left.get_yticklabels()]] == ["a", "b"] * 2
    assert left.get_images()[0].get_array().mask.tolist() == [[True, False], [False, True]]
    same = {name: torch.ones(2, 3) for name in "ab"}
    assert plot.mmd_table(same, after).axes[1].get_title() == f"after: mean {means[1]:.2f}"


@pytest.mark.parametrize("options", [{}, {"unbiased": False}])
@pytest.mark.parametrize("size", [1e-9, 3e-5, 0.002, 0.04, 0.9, 7.0, 99.0, 4e3, 2e7])
def test_all_numbers_of_an_mmd_table_have_one_format(
    size: float, options: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    table = size * torch.tensor([[0.0, 1.0, 0.07], [1.0, 0.0, -0.003], [0.07, -0.003, 0.0]], dtype=torch.float64)
    monkeypatch.setattr(
        "distillkit.plot.embeddings.pairwise_mmd", lambda one, unbiased: table / (unbiased != bool(options))
    )
    left, bar = plot.mmd_table({name: torch.zeros(2, 2) for name in "abc"}, **options).axes
    shown = [t.get_text() for t in left.texts]
    assert len({len(text.partition(".")[2]) for text in shown}) == 1
    assert not any("e" in text for text in shown)
    assert [t.get_color() for t in left.texts] == ["black", "white"] * 2 + ["white"] * 2
    power = int(bar.get_ylabel().split("{")[1].split("}")[0]) if "10^" in bar.get_ylabel() else 0
    off = torch.tensor([float(text) * 10.0**power for text in shown], dtype=torch.float64) - table[table != 0]
    assert off.abs().max() <= 0.05 * size
    assert bar.get_ylim() == pytest.approx((0, size / 10.0**power))


# Federations


def bubbles(figure: Figure) -> dict[tuple[int, int], float]:
    (drawn,) = figure.axes[0].collections
    return {(int(x), int(y)): float(s) for (x, y), s in zip(drawn.get_offsets(), drawn.get_sizes(), strict=True)}


@given(st.lists(st.integers(0, 3), min_size=2, max_size=40), st.integers(1, 5), st.integers(0, 99))
def test_a_bubbles_area_is_the_number_of_images(classes: list[int], clients: int, seed: int) -> None:
    labels = torch.tensor(classes)
    owner = torch.randint(clients + 1, (len(labels),), generator=torch.Generator().manual_seed(seed))
    parts = [(owner == c).nonzero().flatten() for c in range(clients)]
    counts = Counter((c, int(k)) for c, part in enumerate(parts) for k in labels[part])
    figure = plot.partition(labels, parts, num_classes=4)
    sizes = bubbles(figure)
    assert set(sizes) == set(counts)
    for at, size in sizes.items():
        assert size / max(sizes.values()) == pytest.approx(counts[at] / max(counts.values()))
    left = int((owner == clients).sum())
    assert (f", {left} with no client" in figure.axes[0].get_title()) == (left > 0)
    written = [t.get_text() for t in figure.axes[0].texts]
    assert sorted(written) == sorted([*map(str, counts.values()), *(f"{len(p)}" for p in parts), "total"])
    assert max(sizes.values(), default=(64.8 * 0.42) ** 2) == pytest.approx((64.8 * 0.42) ** 2)
    axes = figure.axes[0]
    assert (axes.get_xlim(), axes.get_ylim()) == (pytest.approx((-0.7, clients - 0.3)), pytest.approx((3.6, -0.6)))


def test_partition_of_many_clients_writes_totals_only() -> None:
    for clients, inside, ticks, turned in ((20, 20, 20, 0), (21, 0, 21, 90), (80, 0, 40, 90), (90, 0, 30, 90)):
        parts = [torch.tensor([i]) for i in range(clients)]
        axes = plot.partition(torch.zeros(clients, dtype=torch.long), parts).axes[0]
        assert [t.get_text() for t in axes.texts] == ["1"] * (inside + clients) + ["total"]
        assert len(axes.get_xticks()) == ticks
        assert {(t.get_rotation(), t.xy[1]) for t in axes.texts[inside:-1]} == {(turned, 1.0)}
        assert max(bubbles(axes.figure).values()) == pytest.approx((64.8 * (0.42 if clients == 20 else 0.22)) ** 2)
        width, height = (0.5 * clients, 1.5) if clients == 20 else (0.22 * clients, 3.5)
        assert axes.figure.get_size_inches().tolist() == pytest.approx([width + 1.4, height + 1.2])
    axes = plot.partition(torch.zeros(4000).long(), [torch.arange(1200)], classes=["x"]).axes[0]
    assert axes.get_title() == "images per client and class (of 4,000, 2,800 with no client)"
    assert [t.get_text() for t in [*axes.texts, *axes.get_yticklabels()]] == ["1200", "1,200", "total", "x"]


def run(*rows: tuple[int, float | None, float]) -> list[dict[str, Any]]:
    return [{"round": r, "accuracy": a, "client_seconds": s, "bytes_up": 1e6, "bytes_down": 2e6} for r, a, s in rows]


def line(figure: Figure) -> list[tuple[float, float]]:
    (drawn,) = figure.axes[0].lines
    return [(float(x), float(y)) for x, y in drawn.get_xydata()]


RUNS = {"ours": [run((1, 0.2, 1.0), (2, None, 2.0), (3, 0.6, 4.0)), run((1, 0.4, 3.0), (3, 0.7, 2.0), (4, 0.9, 1.0))]}


def test_curves_draw_the_mean_and_one_standard_deviation() -> None:
    figure = plot.curves(RUNS)
    assert line(figure) == [pytest.approx((1, 30)), pytest.approx((3, 65))]
    (band,) = figure.axes[0].collections
    corners = {(float(x), round(float(y), 6)) for x, y in band.get_paths()[0].vertices}
    for x, pair in ((1, [20, 40]), (3, [60, 70])):
        mean, std = statistics.mean(pair), statistics.stdev(pair)
        assert {(x, round(mean - std, 6)), (x, round(mean + std, 6))} <= corners
    axes = figure.axes[0]
    assert axes.get_xlabel() == "communication round"
    assert all(float(tick).is_integer() for tick in axes.get_xticks())
    assert axes.get_ylabel() == "test accuracy (%)"
    assert axes.get_legend().get_title().get_text() == "mean ± std of 2 runs"
    assert [t.get_text() for t in axes.get_legend().get_texts()] == ["ours"]


def test_costs_add_up_also_over_rounds_that_were_not_measured() -> None:
    seconds = plot.curves(RUNS, x="client_seconds")
    assert line(seconds) == [pytest.approx((2, 30)), pytest.approx(((7 + 5) / 2, 65))]
    first = {"ours": RUNS["ours"][:1]}
    traffic = plot.curves(first, x="bytes")
    assert line(traffic) == [pytest.approx((3, 20)), pytest.approx((9, 60))]
    assert traffic.axes[0].get_xlabel().endswith("(MB)")
    for column, word in (("bytes_up", "upload"), ("bytes_down", "download"), ("client_seconds", "computing time")):
        assert plot.curves(RUNS, x=column).axes[0].get_xlabel().startswith(word)
    assert line(plot.curves(first, x="bytes_up")) == [pytest.approx((1, 20)), pytest.approx((3, 60))]
    assert traffic.axes[0].get_legend().get_title().get_text() == "one run"
    assert not traffic.axes[0].collections


def test_other_columns_are_drawn_unchanged() -> None:
    rows = [{"round": 1, "loss": 2.5, "bytes": 7e6, "steps_done": 3}]
    assert line(plot.curves({"m": [rows]}, x="bytes", y="loss")) == [pytest.approx((7, 2.5))]
    axes = plot.curves({"m": [rows]}, x="steps_done", y="loss").axes[0]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("steps done", "loss")
    own = [{"round": 1, "accuracy_own": 0.5, "bytes": 7e6, "bytes_up": 1, "bytes_down": 2, "seconds": 3}]
    for x, at, told in (("bytes", 7, "traffic up and down, all clients (MB)"), ("seconds", 3, "wall time (s)")):
        axes = plot.curves({"": own, "a set": [0.25]}, x=x, y="accuracy_own").axes[0]
        curve, level = (one.get_xydata()[-1].tolist() for one in axes.lines)
        assert [*curve, *level] == pytest.approx([at, 50, 1, 25])
        assert (axes.get_xlabel(), axes.get_ylabel()) == (told, "test accuracy own (%)")
        assert [t.get_text() for t in axes.get_legend().get_texts()] == ["accuracy own", "a set"]
        assert len({one.get_color() for one in axes.lines}) == 2


def test_a_single_run_is_drawn_unchanged() -> None:
    rows = RUNS["ours"][0]
    wanted = line(plot.curves({"ours": [rows]}))
    given: list[Any] = [rows, [rows], SimpleNamespace(rows=rows), {"ours": rows}, {"ours": SimpleNamespace(rows=rows)}]
    for one in given:
        assert line(plot.curves(one)) == wanted
    both: list[Any] = [SimpleNamespace(rows=rows), RUNS["ours"][1]]
    assert line(plot.curves({"ours": both})) == line(plot.curves(RUNS))
    assert "ours" not in texts(plot.curves(rows))


def test_numbers_without_rounds_are_a_horizontal_line() -> None:
    axes = plot.curves(RUNS | {"a set": [0.5, 0.7], "one": [0.9]}).axes[0]
    assert [t.get_text() for t in axes.get_legend().get_texts()] == ["ours", "a set", "one"]
    _, two, one = axes.lines
    assert [*two.get_ydata()] == pytest.approx([60, 60])
    assert [*one.get_ydata()] == pytest.approx([90, 90])
    assert {two.get_linestyle(), one.get_linestyle()} == {"--"}
    (band,) = axes.patches
    spread = 100 * statistics.stdev([0.5, 0.7])
    assert (band.get_y(), band.get_height()) == pytest.approx((60 - spread, 2 * spread))
    assert axes.get_legend().get_title().get_text() == "mean ± std of 1 to 2 runs"
    assert [*plot.curves(RUNS | {"x": [3.0]}, y="client_seconds").axes[0].lines[1].get_ydata()] == [3.0, 3.0]


def test_a_long_legend_is_beside_the_curves() -> None:
    few, many = (plot.curves({f"m{i}": RUNS["ours"][0] for i in range(n)}) for n in (4, 5))
    for figure, beside in ((few, False), (many, True)):
        figure.canvas.draw()
        axes = figure.axes[0]
        assert (axes.get_legend().get_window_extent().x0 >= axes.get_window_extent().x1) == beside


def test_no_two_of_many_curves_look_alike() -> None:
    lines = plot.curves({f"m{i}": RUNS["ours"][0] for i in range(17)}).axes[0].lines
    assert len({(one.get_color(), one.get_linestyle()) for one in lines}) == 17


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: plot.grid(make(), classes=["a"]), ValueError, "1 names for 3 classes"),
        (lambda: plot.grid(make(), classes=list("abcd")), ValueError, "4 names for 3 classes"),
        (lambda: plot.grid(make().images), TypeError, "labels must be given"),
        (lambda: plot.selection(make(), torch.tensor([12])), ValueError, "selected must be below"),
        (lambda: plot.selection(make(), torch.tensor([3, 1, 3])), ValueError, "each index once, got 3 2 times"),
        (lambda: plot.selection(make(), torch.tensor([0.5])), TypeError, "selected"),
        (lambda: plot.selection(make(), torch.tensor([0]), rows=0), ValueError, "^rows must be at least 1"),
        (lambda: plot.selection(make(), torch.tensor([0]), columns=0), ValueError, "^columns must be at least 1"),
        (lambda: plot.real_and_synthetic(3, make()), TypeError, "^real must be"),
        (lambda: plot.real_and_synthetic(make(), 3), TypeError, "^synthetic must be"),
        (lambda: plot.pixel_histogram({"a": 3}), TypeError, r"^sets\['a'\] must be"),
        (lambda: plot.pixel_histogram({"a": make(1)[:0]}), ValueError, "none may be empty"),
        (lambda: plot.pixel_histogram({"a": make()}, axes=[]), ValueError, "needs 1 axes, got 0"),
        (lambda: plot.grid(make(), ax=plot.grid(make())), TypeError, "ax must be matplotlib axes"),
        (lambda: plot.tsne({}, {}), ValueError, "labels must have the clients"),
        (lambda: plot.tsne({"a": torch.zeros(4, 2)}, {"a": torch.arange(4)}), ValueError, "at least 5 rows"),
        (lambda: plot.tsne({"a": torch.ones(6, 2)}, {"a": torch.arange(6)}), ValueError, "all 6 rows are equal"),
        (lambda: plot.tsne({"a": torch.zeros(6, 2)}, {"a": torch.arange(5)}), ValueError, "labels"),
        (lambda: plot.tsne({"a": torch.rand(6, 2)}, {"a": torch.arange(6)}, classes="x"), ValueError, "num_classes=1,"),
        (
            lambda: plot.tsne({"a": torch.rand(6, 2)}, {"a": torch.arange(6)}, classes=["x"]),
            ValueError,
            "below num_classes=1",
        ),
        (lambda: plot.pairwise_mmd({"a": torch.zeros(3, 2)}), ValueError, "at least 2 clients"),
        (lambda: plot.pairwise_mmd({"a": torch.zeros(3, 2), "b": torch.zeros(3, 4)}), ValueError, r"\[2, 4\]"),
        (lambda: plot.pairwise_mmd({"a": torch.zeros(3)}), ValueError, r"embeddings\['a'\] must have two"),
        (lambda: plot.mmd_table(two_clients(), {"a": torch.zeros(3, 2)}), ValueError, "after must have the clients"),
        (lambda: plot.mmd_table(two_clients(), dict.fromkeys("ba", torch.rand(3, 5))), ValueError, "in the same order"),
        (lambda: plot.partition(torch.tensor([0]), []), ValueError, "at least one client"),
        (lambda: plot.partition(torch.tensor([0]), [torch.tensor([1])]), ValueError, r"parts\[0\] must be below"),
        (lambda: plot.curves({}), ValueError, "at least one name"),
        (lambda: plot.curves({"m": []}), ValueError, "at least one run"),
        (lambda: plot.curves({"m": [0.5]}), ValueError, r"at least one run \(of rounds\)"),
        (lambda: plot.curves(3), TypeError, r"a run \(its rows\),? or name -> runs; the runs are"),
        (lambda: plot.curves({"m": [[1, 2]]}), TypeError, "the runs of 'm' are .*int"),
        (lambda: plot.curves({"m": [[{"accuracy": 1.0}]]}), ValueError, "must have a round"),
        (lambda: plot.curves({"m": [True]}), TypeError, "the runs of 'm' are bool"),
        (lambda: plot.curves({"m": [[{"b": 1, "a": 1.0}]]}), ValueError, r"of 'm' must have a round, got \['a', 'b'\]"),
        (lambda: plot.curves([{"round": 1, "accuracy": "x"}]), TypeError, "accuracy must be .* of '', got 'x'"),
        (lambda: plot.curves(HISTORY, x="bytes"), ValueError, "'bytes', got"),
        (lambda: plot.curves(HISTORY, y="loss"), ValueError, "no round with 'loss' in common"),
    ],
)
def test_invalid_input_is_named(call: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call()


def test_oblong_images_keep_their_shape() -> None:
    figure = plot.grid(LabeledImages(torch.rand(4, 1, 4, 8, generator=G), [0, 0, 1, 2]))
    assert figure.get_size_inches().tolist() == pytest.approx([2 * 0.5 + 1.0, 3 * 0.25 + 0.5])


def test_grid_takes_tensors_and_label_rows() -> None:
    data = make(4, k=2)
    rows = torch.nn.functional.one_hot(data.labels, 2).float()
    assert torch.equal(sheet(plot.grid(data.images, data.labels)), sheet(plot.grid(data.images, rows)))


def test_long_curves_have_few_markers() -> None:
    rows = [{"round": t, "accuracy": t / 300} for t in range(1, 301)]
    assert plot.curves({"long": [rows]}).axes[0].lines[0].get_markevery() == 12
    assert plot.curves(RUNS).axes[0].lines[0].get_markevery() == 1


def test_partitions_of_arrays_and_lists_are_drawn() -> None:
    labels = torch.tensor([0, 1, 1, 2])
    parts = [torch.tensor([0, 1]), torch.tensor([2])]
    wanted = texts(plot.partition(labels, parts))
    assert texts(plot.partition(labels.numpy(), [p.numpy() for p in parts])) == wanted
    assert texts(plot.partition(labels.tolist(), [p.tolist() for p in parts])) == wanted
