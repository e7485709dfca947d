"""Pictures for the pages on sets, condensing, networks and losses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from _drawing import GREY, LINE_COLOURS, bare, below, images, plain, subplots, trained, write
from matplotlib.patches import Polygon, Rectangle
from sklearn.datasets import load_sample_image
from torch import Tensor
from torch.nn.functional import interpolate

from distillkit import losses
from distillkit.augment import DSA
from distillkit.condense import gradient_matching, herding, k_center, random_subset
from distillkit.data import load
from distillkit.networks import ConvNet, RandomNetworks, build
from distillkit.networks._layers import AveragePool
from distillkit.rng import derive

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from distillkit.condense import Progress

FAMILIES = ("color", "crop", "cutout", "flip", "scale", "rotate")


def photographs() -> Tensor:
    """Return crops [4, 3, 40, 40] of scikit-learn's photograph `china.jpg` (CC BY 2.0)."""
    photo = torch.from_numpy(load_sample_image("china.jpg").copy()).permute(2, 0, 1)[None] / 255
    crops = [photo[..., 60:260, 140:340], photo[..., 170:370, 0:200], photo[..., 170:370, 440:640]]
    return torch.cat([interpolate(crop, size=40, mode="area") for crop in [*crops, photo[..., 60:260, 300:500]]])


def augment() -> None:
    """Draw three samples of each transform family beside the image, and a batch with shared and with separate draws."""
    crops = photographs()
    figure, (left, right) = subplots(None, 2, 5.2, 2.6)
    rows = []
    for number in range(3):
        drawn = [DSA(family)(crops[:1] - 0.5, derive(number, family)) + 0.5 for family in FAMILIES]
        rows.append(torch.cat([crops[:1], *drawn]))
    images(left, rows, [f"draw {i + 1}" for i in range(3)], ["image", *FAMILIES], gap=3)
    left.set_title("one image, one family at a time", fontsize=10)
    both = DSA("scale_rotate_crop", mode="M")
    alike, own = (both(crops - 0.5, derive(1), siamese=siamese) + 0.5 for siamese in (True, False))
    images(right, [crops, alike, own], ["batch", "siamese=True", "siamese=False"], gap=3)
    right.set_title("one draw for a batch, or one for each image", fontsize=10)
    write(figure, "augment")


def coresets() -> None:
    """Draw ten images of a class chosen by three methods, and their positions among all images of the class."""
    train = load("digits", size=16).train
    network = trained(train)
    own = train[(train.labels == 3).nonzero()[:, 0]]
    ways = {
        "random_subset": random_subset(own, ipc=10, classes=[3], generator=0),
        "herding": herding(own, ipc=10, classes=[3], network=network),
        "k_center": k_center(own, ipc=10, classes=[3], network=network),
    }
    with torch.no_grad():
        all_, chosen = network.features(own.images), {n: network.features(s.images) for n, s in ways.items()}
    mean = all_.mean(0)
    plane = torch.linalg.svd(all_ - mean, full_matrices=False)[2][:2].T
    figure, axes = subplots(None, 4, 2.9, 3.0)
    rows = [s.pixels()[5 * i : 5 * i + 5] for s in ways.values() for i in (0, 1)]
    images(axes[0], rows, [name for way in ways for name in (way, "")])
    axes[0].set_title("ten threes each", fontsize=10)
    for ax, colour, (name, embeddings) in zip(axes[1:], LINE_COLOURS, chosen.items(), strict=False):
        ax.scatter(*((all_ - mean) @ plane).T, s=6, color="#BBBBBB", label="class 3")
        ax.scatter(*((embeddings - mean) @ plane).T, s=28, color=colour, edgecolor="white", label="chosen")
        ax.scatter(0, 0, marker="P", s=60, color="black", edgecolor="white", label="class mean")
        middle = (embeddings.mean(0) - mean) @ plane
        ax.scatter(*middle, marker="X", s=60, color=colour, edgecolor="black", label="mean of chosen")
        plain(ax)
        ax.set_title(name, fontsize=10)
        ax.set(xlabel="first principal axis", ylabel="second" if ax is axes[1] else "")
        below(ax)
    write(figure, "coresets")


def matched() -> None:
    """Draw synthetic digits during matching, and the gradient distance at each step."""
    train, seen, distances = load("digits", size=16).train, {}, []

    def keep(progress: Progress) -> None:
        distances.append(progress.loss)
        if progress.step in (10, 50, 200):
            seen[progress.step] = progress.images.detach().clone()

    start = torch.randn((10, 1, 16, 16), generator=derive(0, "start"))
    made = gradient_matching(
        train,
        networks=RandomNetworks(lambda: ConvNet((1, 16, 16), 10, width=16, depth=2)),
        ipc=1,
        iterations=200,
        init=train[:10].replace(images=start, labels=torch.arange(10), columns={}),
        batch_real=32,
        lr=0.5,
        callback=keep,
        progress=False,
    )
    figure, (left, right) = subplots(None, 2, 4.8, 2.6)
    rows = [made.normalization.decode(x) for x in (start, *seen.values())]
    images(left, rows, ["start: noise", *(f"step {n}" for n in seen)], [str(k) for k in range(10)])
    right.plot(
        range(1, len(distances) + 1), distances, color="#BBBBBB", linewidth=0.8, label="a step, on a new network"
    )
    mean = torch.tensor(distances).unfold(0, 20, 1).mean(1)
    right.plot(range(11, len(distances) - 8), mean, color=LINE_COLOURS[0], label="mean of twenty steps around it")
    right.set(xlabel="step", ylabel="distance of gradients", ylim=(0, None))
    plain(right)
    below(right)
    write(figure, "gradient_matching")


def networks() -> None:
    """Draw the shapes in ConvNet and the weights between them, read from the network."""
    network = build(lambda: ConvNet((3, 32, 32), 10), 0)
    shapes: list[tuple[int, ...]] = [(3, 32, 32)]
    for layer in network.modules():
        if isinstance(layer, AveragePool):
            layer.register_forward_hook(lambda m, x, y: shapes.append(tuple(y.shape[1:])))
    size = network.features(torch.zeros(1, *shapes[0])).shape[1]
    weights = [p.numel() for p in network.parameters()]
    blocks = [sum(weights[i : i + 4]) for i in range(0, len(weights) - 2, 4)]
    figure, (ax,) = subplots(None, 1, 10, 3.1)
    left = 0.0
    for number, (channels, height, width) in enumerate(shapes):
        deep, side = 0.12 + channels / 110, 0.5 + height / 16
        box(ax, left, side, deep, LINE_COLOURS[4] if number == 0 else LINE_COLOURS[0])
        ax.text(left + deep / 2 + side / 5, -1.55, f"{channels} x {height} x {width}", ha="center", fontsize=9)
        left += deep + 0.4 * side + 0.15
        words = f"3x3 convolution\n{network_words(network)}\n2x2 mean\n" if number < len(blocks) else "flatten\n\n\n"
        said = f"{blocks[number]:,} weights" if number < len(blocks) else ""
        arrow(ax, left, words, said)
        left += 1.75
    for count, side, name, colour in ((size, 2.3, "features", LINE_COLOURS[2]), (10, 0.9, "logits", LINE_COLOURS[1])):
        ax.add_patch(Rectangle((left, -side / 2), 0.16, side, facecolor=colour, edgecolor="white"))
        ax.text(left + 0.08, -1.55, f"{name}\n{count:,}", ha="center", va="center", fontsize=9)
        left += 0.4
        if name == "features":
            arrow(ax, left, "classifier:\nlinear\n\n", f"{sum(weights[-2:]):,} weights")
            left += 1.75
    ax.set(xlim=(-0.2, left), ylim=(-1.8, 1.8), aspect="equal")
    bare(ax)
    write(figure, "networks")


def network_words(network: ConvNet) -> str:
    """Return the names of the layers between a block's convolution and its pooling."""
    names = [type(layer).__name__.strip("_") for layer in network.modules() if not list(layer.children())]
    return f"{'instance norm' if 'Instance' in names[1] else names[1]}\n{names[2]}"


def box(ax: Axes, left: float, side: float, deep: float, colour: str) -> None:
    """Draw a block of `deep` channels of `side` pixels, seen from the left front."""
    lift = 0.2 * side
    front = [(left, -side / 2 - lift / 2), (left, side / 2 - lift / 2)]
    back = [(x + 2 * lift, y + lift) for x, y in front]
    ax.add_patch(Polygon([*front, back[1], back[0]], facecolor=colour, alpha=0.85, edgecolor="white"))
    shifted = [(x + deep, y) for x, y in (front[0], back[0], back[1], front[1])]
    ax.add_patch(Polygon([front[1], back[1], shifted[2], shifted[3]], facecolor=colour, alpha=0.45, edgecolor="white"))
    ax.add_patch(Polygon([*front, shifted[3], shifted[0]], facecolor=colour, alpha=0.65, edgecolor="white"))
    ax.add_patch(Polygon(shifted, facecolor=colour, alpha=0.25, edgecolor="white", zorder=0))


def arrow(ax: Axes, left: float, above: str, under: str) -> None:
    """Draw an arrow from one shape to the next, labelled with the layer and its weights."""
    ax.annotate("", (left + 1.6, 0), (left, 0), arrowprops={"arrowstyle": "->", "color": GREY})
    ax.text(left + 0.8, 0.0, above.rstrip("\n"), ha="center", va="bottom", fontsize=8, linespacing=1.3)
    ax.text(left + 0.8, -0.1, under, ha="center", va="top", fontsize=8, color=GREY)


@torch.no_grad()
def loss_curves() -> None:
    """Draw four losses over the quantity they measure."""
    figure, (pull, shift, apart, clip) = subplots(None, 4, 3.0, 3.0)
    turn = torch.linspace(0, torch.pi, 181)
    for colour, t in zip(LINE_COLOURS, (0.07, 0.2, 0.5), strict=False):
        values = [contrast(a, t) for a in turn]
        pull.plot(turn.cos(), values, color=colour, label=f"temperature {t}")
    pull.set(xlabel="cosine to the image of its class", ylabel="loss", title="supervised_contrastive")
    cloud = torch.randn(200, 8, generator=derive(0))
    steps = torch.linspace(0, 4, 81)
    moved = [cloud + torch.eye(8)[0] * s for s in steps]
    linear = [float(losses.mean_embedding_distance(cloud, m)) for m in moved]
    kernel = [float(losses.rbf_mmd(cloud, m)) for m in moved]
    shift.plot(steps, linear, color=LINE_COLOURS[0], label="mean_embedding_distance")
    shift.plot(steps, kernel, color=LINE_COLOURS[1], label="rbf_mmd")
    shift.set(xlabel="shift (standard deviations)", ylabel="loss", ylim=(0, 4), title="two sets, one shifted")
    logit = torch.linspace(0, 8, 161)
    pairs = torch.stack([logit, torch.zeros_like(logit)], 1), torch.stack([-logit, torch.zeros_like(logit)], 1)
    kinds = {
        "jensen_shannon": losses.jensen_shannon(*pairs, reduction="none"),
        "clamped_disagreement": losses.clamped_disagreement(*pairs, reduction="none"),
        "clamp_result=False": losses.clamped_disagreement(*pairs, reduction="none", clamp_result=False),
    }
    for colour, style, (name, values) in zip(LINE_COLOURS, ("-", "-", ":"), kinds.items(), strict=False):
        apart.plot(logit, values, color=colour, linestyle=style, label=name, zorder=3 if style == ":" else 2)
    apart.set(xlabel="logit z of one network, -z of the other", ylabel="disagreement")
    apart.set_title("two networks, two classes")
    norms = torch.linspace(0.01, 5, 500)
    row = torch.stack([norms, torch.zeros_like(norms)], 1)
    for colour, exact in zip(LINE_COLOURS, (False, True), strict=False):
        out = losses.clip_logit_norm(row, continuous=exact).norm(dim=1)
        clip.plot(norms, out, color=colour, label=f"continuous={exact}")
    clip.set(xlabel="norm of a row of logits", ylabel="its norm afterwards", title="clip_logit_norm")
    for ax in (pull, shift, apart, clip):
        ax.title.set_fontsize(10)
        plain(ax)
        below(ax, 1)
    write(figure, "losses")


def contrast(angle: Tensor, temperature: float) -> float:
    """Return the contrastive loss of two images of a class at this angle, with an aligned and an orthogonal pair."""
    rows = torch.stack(
        [torch.tensor([1.0, 0, 0]), torch.stack([angle.cos(), angle.sin(), angle * 0]), *torch.eye(3)[[2, 2]]]
    )
    return float(losses.supervised_contrastive(rows, torch.tensor([0, 0, 1, 1]), temperature=temperature))
