"""`distillkit condense`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from distillkit import plot
from distillkit._utils.pages import Section, drawn
from distillkit.commands._results import Result, printed, refuse_given
from distillkit.commands._sources import Sources, set_path, source_options, write_set
from distillkit.commands._training import Networks, network_options
from distillkit.condense import (
    Progress,
    distribution_matching,
    gradient_matching,
    herding,
    k_center,
    random_subset,
    save_state,
    stitch,
)
from distillkit.networks import RandomNetworks
from distillkit.normalization import Normalization
from distillkit.privacy import condense_private
from distillkit.sets import LabeledImages, Tiles

_METHODS = {
    "dm": "distribution matching", "dc": "gradient matching", "stitch": "best crops (RDED)", "random": "random images",
    "herding": "images near the class mean", "k-center": "images that cover the class",
    "private": "differentially private",
}  # fmt: skip
_STEPS = {"dm": 200, "dc": 100, "private": 300}
_SAVE_INTERVAL = 60.0


@click.command(
    epilog="Example: distillkit condense digits --size 16 --width 16 --depth 2 --steps 5 --out small.safetensors"
)
@click.argument("source")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    required=True,
    callback=set_path,
    help="The new set: a .safetensors or .npz file, or a folder of PNGs.",
)
@click.option(
    "--method",
    type=click.Choice(tuple(_METHODS)),
    default="dm",
    show_default=True,
    help="; ".join(f"{name}: {what}" for name, what in _METHODS.items()) + ".",
)
@click.option("--ipc", type=click.IntRange(1), default=10, show_default=True, help="Images per class.")
@click.option("--steps", type=click.IntRange(1), help="Steps; default: dm 200 (the paper: 20000), dc 100, private 300.")
@click.option(
    "--batch-real", type=click.IntRange(1), default=64, show_default=True, help="dm, dc: real images per class."
)
@click.option("--lr", type=float, help="dm, dc: learning rate on the pixels; default: found for the network.")
@click.option("--init", type=click.Choice(["real", "noise"]), default="real", show_default=True, help="dm, dc.")
@click.option("--tiles", type=click.IntRange(2), help="dm, dc: side of the grid of small images in each image.")
@click.option("--epochs", type=click.IntRange(1), default=10, show_default=True, help="stitch: epochs of its network.")
@click.option("--epsilon", type=click.FloatRange(0, min_open=True), help="private: privacy budget, at delta 1e-5.")
@click.option("--classes", help="private: all class names, in label order, separated by commas.")
@click.option("--seconds", type=click.FloatRange(0, min_open=True), help="dm, dc: finish after so long.")
@click.option("--resume", is_flag=True, help="dm, dc: go on with an interrupted or finished-early call.")
@source_options
@network_options
@printed
def condense(
    source: str, out: Path, method: str, ipc: int, seconds: float | None, resume: bool, sources: Sources,
    networks: Networks, progress: bool, **options: Any,
) -> Result:  # fmt: skip
    """Condense the training images of SOURCE to a few per class.

    The set is written to OUT, and a picture of it beside it, with the suffix .png.
    """
    began = time.monotonic()
    refuse_given(f"for --method {method}", *_UNUSED[method])
    if method == "private":
        sources = _public(sources, options)
    steps = options.pop("steps") or _STEPS.get(method, 0)
    real = sources.read(source, progress=progress).train
    run = partial(_CONDENSERS[method], real, networks, options, ipc=ipc, generator=networks.seed, progress=progress)
    note = ""
    if method in ("dm", "dc"):
        state = _State(out.with_suffix(".state.safetensors"), None if seconds is None else began + seconds)
        small, note = state.run(run, steps, resume=resume)
    else:
        small = run(steps=steps) if steps else run()
    write_set(small, out)
    figure, picture = plot.grid(small), out.with_suffix(".png")
    figure.savefig(picture)
    took = time.monotonic() - began
    record = {"out": str(out), "picture": str(picture), "images": len(small), "seconds": took, "info": dict(small.info)}
    text = f"{small}\n{note}wrote {out} and {picture} in {took:.0f} s"
    page = Section("Images", [str(small), *filter(None, [note]), drawn(figure, "the images, one class a row")])
    return Result(f"{len(small)} images condensed from {source}", text, record, [page])


_NETWORK = ("network", "width", "depth", "augment")
_PIXELS = ("batch_real", "lr", "init", "tiles", "seconds", "resume")
_PRIVATE = ("epsilon", "classes")
_UNUSED: dict[str, tuple[str, ...]] = {
    "dm": ("epochs", *_PRIVATE), "dc": ("epochs", *_PRIVATE), "private": ("epochs", "augment", *_PIXELS),
    "stitch": ("steps", *_PIXELS, *_PRIVATE),
    **dict.fromkeys(("random", "herding", "k-center"), ("steps", "epochs", *_NETWORK, *_PIXELS, *_PRIVATE)),
}  # fmt: skip
"""Options that a method does not use."""


@dataclass
class _State:
    """File with the state of an interrupted condensation, and the time at which the condensation is to end."""

    path: Path
    deadline: float | None
    saved: float = 0.0

    def run(self, condenser: Callable[..., LabeledImages], steps: int, *, resume: bool) -> tuple[LabeledImages, str]:
        """Run a condenser until the deadline, save its state each minute, and return the set and a note."""
        self.saved = time.monotonic()
        given = {"resume": self.path} if resume and self.path.exists() else {}
        try:
            small = condenser(steps=steps, callback=self._step, **given)
        except _OutOfTime as end:
            (done,) = end.args
            small = condenser(steps=done, resume=self.path)
            return small, f"stopped after {done} of {steps} steps; --resume continues\n"
        self.path.unlink(missing_ok=True)
        return small, ""

    def _step(self, progress: Progress) -> None:
        now = time.monotonic()
        over = self.deadline is not None and now >= self.deadline and progress.step < progress.steps
        if over or now - self.saved > _SAVE_INTERVAL:
            save_state(self.path, progress.state())
            self.saved = now
        if over:
            raise _OutOfTime(progress.step)


class _OutOfTime(Exception):
    """The time of `--seconds` is over. The argument is the number of steps after which the state was saved."""


def _dm(real: Any, networks: Networks, options: dict[str, Any], *, steps: int, **common: Any) -> LabeledImages:
    own = _pixels(real, networks, options)
    return distribution_matching(real, steps=steps, device=networks.device, **own, **common)


def _dc(real: Any, networks: Networks, options: dict[str, Any], *, steps: int, **common: Any) -> LabeledImages:
    own = _pixels(real, networks, options)
    return gradient_matching(real, iterations=steps, device=networks.device, **own, **common)


def _pixels(real: Any, networks: Networks, options: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that distribution matching and gradient matching share."""
    tiles = None if options["tiles"] is None else Tiles(options["tiles"])
    own = {name: options[name] for name in ("batch_real", "lr", "init")}
    made = RandomNetworks(networks.factory(real))
    return {**own, "networks": made, "augment": networks.augmentation(), "parametrize": tiles}


def _stitch(real: Any, networks: Networks, options: dict[str, Any], **common: Any) -> LabeledImages:
    observer = networks.trained(real, options["epochs"], progress=common["progress"])
    return stitch(real, observer=observer, device=networks.device, **common)


def _private(real: Any, networks: Networks, options: dict[str, Any], *, steps: int, **common: Any) -> LabeledImages:
    made = RandomNetworks(networks.factory(real))
    return condense_private(
        real, epsilon=options["epsilon"], networks=made, steps=steps, device=networks.device, **common
    )


def _coreset(
    select: Callable[..., LabeledImages], real: Any, networks: Networks, _: Any, **common: Any
) -> LabeledImages:
    return select(real, device=networks.device, **common)


_CONDENSERS: dict[str, Callable[..., LabeledImages]] = {
    "dm": _dm, "dc": _dc, "stitch": _stitch, "private": _private, "random": partial(_coreset, random_subset),
    "herding": partial(_coreset, herding), "k-center": partial(_coreset, k_center),
}  # fmt: skip


def _public(sources: Sources, options: dict[str, Any]) -> Sources:
    """Return sources of which nothing but the images and labels depends on the records."""
    if not options["epsilon"] or not options["classes"] or sources.channels is None:
        raise click.UsageError(
            "--method private needs --epsilon, --classes and --channels, which must not be found in the data"
        )
    half = (0.5,) * sources.channels
    names = [name.strip() for name in options["classes"].split(",")]
    return replace(sources, hold_out="content", classes=names, normalization=Normalization(half, half))
