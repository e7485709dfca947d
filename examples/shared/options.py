"""Common command line of the examples."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from shared.data import root_or_pictures


class _Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Help formatter that shows defaults and keeps the description's line breaks."""


def number(least: int) -> Callable[[str], int]:
    """Return an argparse type for integers of at least `least`."""

    def integer(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {value}")
        return value

    return integer


def split_type(*names: str) -> Callable[[str], str]:
    """Return an argparse type for splits: one of the names, or the alpha of a Dirichlet distribution."""

    def split(text: str) -> str:
        if text in names:
            return text
        if not 0 < float(text) < float("inf"):
            raise argparse.ArgumentTypeError(f"must be {', '.join(names)} or an alpha above 0, got {text}")
        return f"{float(text):g}"

    return split


def command_line(
    description: str | None,
    *,
    out: str,
    presets: Mapping[str, Mapping[str, Any]],
    workers: str = "runs at a time, each in its own process",
    data: bool = True,
    pictures: bool = False,
    study: bool = True,
) -> argparse.ArgumentParser:
    """Return a parser with the common options. An example adds its own options, and then calls `parse_arguments`.

    Args:
        description: text that `--help` shows first.
        out: default folder of the results, to which `-<preset>` is appended.
        presets: values of the options that are not given, by choice of `--preset`; "cpu" is the default choice. Without
            `seeds`, "smoke" has one seed, and the others have three.
        workers: description of what `--workers` counts.
        data: whether there is the option `--data`.
        pictures: whether `--data` may also name folders of the user's own pictures; see `shared.data.own_task`.
        study: whether the example runs a study with `run_study`, which `--repeat` and `--seconds` are for.
    """
    again = "An interrupted call continues where it stopped; finished runs are not repeated."
    parser = argparse.ArgumentParser(description=description, epilog=again, formatter_class=_Help, allow_abbrev=False)
    add = parser.add_argument
    add("--preset", choices=tuple(presets), default="cpu", help="how much to compute")
    add("--seeds", type=int, nargs="+", default=None, metavar="S", help="seeds; default: the preset's")
    add("--out", type=Path, default=None, help=f"folder of the results; default: {out}-<preset>")
    add("--workers", type=number(1), default=max(1, os.cpu_count() or 1), help=workers)
    add("--device", default="auto", help="where to compute: auto, cpu, cuda, ...")
    root = "root of the datasets by name; default: $DISTILLKIT_DATA"
    own = f"{root}; or your own pictures: one folder (class/picture.png) or .npz to split, or one per client"
    if data:
        add("--data", type=Path, nargs="+" if pictures else None, metavar="PATH", help=own if pictures else root)
    if pictures:
        add("--size", type=number(8), default=32, help="height and width of your own pictures after resizing")
    add("--estimate", action="store_true", help="only estimate the cost: seconds, bytes, memory")
    if study:
        add("--seconds", type=number(1), default=None, help="stop after this time; the same call continues")
        add("--repeat", nargs=2, metavar=("RECORDS", "RUN"), help="repeat one recorded run and compare it")
    parser.set_defaults(presets=presets, default_out=out, pictures=[] if pictures else None)
    return parser


def parse_arguments(parser: argparse.ArgumentParser, words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse a list of words (default: the command line), and resolve the output folder, the device and `--data`.

    In the result, `data` is the root of named datasets, or None; `pictures` lists the user's own folders and files.
    """
    first = parser.parse_known_args(words)[0]
    seeds = [0] if first.preset == "smoke" else [0, 1, 2]
    parser.set_defaults(**{"seeds": seeds, **first.presets[first.preset]})
    found = parser.parse_args(words)
    try:
        torch.empty(0, device=None if found.device == "auto" else found.device)
    except (RuntimeError, AssertionError) as error:
        parser.error(f"argument --device: this machine has no {found.device}: {str(error).splitlines()[0]}")
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal may lack characters of tables
    if isinstance(getattr(found, "data", None), list):
        try:
            found.data, found.pictures = root_or_pictures(found.data)
        except FileNotFoundError as error:
            parser.error(f"argument --data: {error}")
    refuse_unused(parser, words, "without pictures of your own in --data", "--size", unless=found.pictures != [])
    found.out = found.out or Path(f"{found.default_out}-{found.preset}")
    del found.default_out, found.presets
    if found.device == "auto":
        found.device = str(torch.accelerator.current_accelerator(check_available=True) or "cpu")
    return found


def given_options(words: Sequence[str] | None) -> list[str]:
    """Return the options that a list of words (default: the command line) names."""
    return [word.partition("=")[0] for word in (sys.argv[1:] if words is None else words)]


def refuse_unused(
    parser: argparse.ArgumentParser, words: Sequence[str] | None, why: str, *options: str, unless: object = False
) -> None:
    """Exit if an option was given that has no effect because of other options.

    Args:
        parser: the script's parser.
        words: the words that the parser parses; None for the command line.
        why: reason why the options are ignored, such as "without --dp".
        options: the ignored options, such as "--epsilon".
        unless: condition under which the options have an effect; if true, the function does nothing.
    """
    unused = [option for option in options if option in given_options(words)]
    if unused and not unless:
        parser.error(f"{unused[0]} has no effect {why}; omit it")
