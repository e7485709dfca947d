"""Folder of shadow models, with a file of scores for each finished model and a file of the models' settings."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from attacks.membership.pipeline import RunScores
from distillkit._utils import check
from distillkit._utils.files import read_tensors, write_atomically, write_tensors
from distillkit.locking import locked

FORMAT = "distillkit shadow 1"
"""Name of the file format, in the files of scores and in `design.json`."""


@contextlib.contextmanager
def open_shadow_folder(
    out: str | os.PathLike[str] | None, design: Mapping[str, object], count: int
) -> Iterator[dict[int, RunScores]]:
    """Lock a folder of shadow models for the duration of a `with` block, and read the scores in it.

    Args:
        out: path of the folder, which is created if it is missing; None to use no folder.
        design: settings that determine the shadow models, as JSON values.
        count: number of wanted shadow models. Models with an index of at least `count` are not read.

    Yields:
        The scores of each finished shadow model, by its index.

    Raises:
        TypeError: `out` is not a path.
        ValueError: the shadow models in the folder were made with other settings, or the folder is damaged.
        InUse: another process uses the folder.
    """
    if out is None:
        yield {}
        return
    out = check.folder(out, "out")
    with locked(out / "shadows.lock", f"the folder of shadows {out}"):
        _require_same(design, out / "design.json")
        paths = {number: _path(out, number) for number in range(count)}
        yield {number: _read(path) for number, path in paths.items() if path.exists()}


def write_shadow(out: str | os.PathLike[str] | None, number: int, one: RunScores) -> None:
    """Write the scores of a shadow model to its file, atomically.

    Args:
        out: path of the folder; None to write nothing.
        number: index of the shadow model.
        one: the scores.
    """
    if out is not None:
        tensors = {f"scores.{n}": t for n, t in one.scores.items()}
        tensors |= {f"population.{n}": t for n, t in one.population.items()}
        write_tensors(_path(out, number), tensors, {"format": FORMAT, "seconds": repr(one.seconds)})


def _path(out: str | os.PathLike[str], number: int) -> Path:
    return Path(out) / f"shadow-{number:05d}.safetensors"


def _read(path: Path) -> RunScores:
    tensors, facts = read_tensors(path, kind=FORMAT, content="a shadow's scores")
    return RunScores(
        {n.removeprefix("scores."): t for n, t in tensors.items() if n.startswith("scores.")},
        {n.removeprefix("population."): t for n, t in tensors.items() if n.startswith("population.")},
        float(facts["seconds"]),
    )


def _require_same(design: Mapping[str, object], path: Path) -> None:
    if not path.exists():
        if any(path.parent.glob("shadow-*.safetensors")):
            raise ValueError(f"out, {path.parent}, holds shadows but no design.json; use an empty folder")
        write_atomically(path, json.dumps(design, indent=1) + "\n")
        return
    try:
        there = dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ValueError(f"out, {path.parent}, has a damaged design.json ({error}); use an empty folder") from error
    differ = [f"{k} {there.get(k)!r:.40}, here {v!r:.40}" for k, v in design.items() if there.get(k) != v]
    if differ:
        raise ValueError(
            f"out, {path.parent}, holds shadows of another design ({'; '.join(differ)}); use another folder, or the "
            "pipeline and seed of its first call"
        )
