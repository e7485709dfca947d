"""The command line that every example understands."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

__all__ = ["command_line", "number", "parsed", "positive"]


class _Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows defaults, and a description in the lines that it is written in."""


def number(least: int) -> Callable[[str], int]:
    """A type for argparse: an integer that is at least `least`."""

    def integer(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {value}")
        return value

    return integer


def positive(text: str) -> float:
    """A type for argparse: a number above 0."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text}")
    return value


def command_line(
    description: str | None,
    *,
    out: str,
    presets: Sequence[str] = ("smoke", "cpu", "paper"),
    workers: str = "threads that run clients",
) -> argparse.ArgumentParser:
    """A parser with the common options, to which an example adds its own; `parsed` reads the words.

    Args:
        description: what `--help` says first.
        out: the folder of the results, to which `-<preset>` is appended by default.
        presets: the first words of `--preset`'s choices; "cpu" is the default.
        workers: what `--workers` counts.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=_Help)
    add = parser.add_argument
    add("--preset", choices=tuple(presets), default="cpu", help="how much to compute")
    add("--seeds", type=int, nargs="+", default=None, metavar="S", help="seeds; default: the preset's")
    add("--out", type=Path, default=None, help=f"folder of the results; default: {out}-<preset>")
    add("--workers", type=number(1), default=max(1, os.cpu_count() or 1), help=workers)
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to compute")
    add("--data", type=Path, default=None, help="root of the datasets by name; default: $DISTILLKIT_DATA")
    add("--resume", action="store_true", help="go on with an interrupted run in --out")
    parser.set_defaults(default_out=out)
    return parser


def parsed(parser: argparse.ArgumentParser, words: Sequence[str] | None = None) -> argparse.Namespace:
    """What the words say (default: those of the command line), with the folder and the device that they mean."""
    found = parser.parse_args(words)
    found.out = found.out or Path(f"{found.default_out}-{found.preset}")
    del found.default_out
    if found.device == "auto":
        found.device = "cuda" if torch.cuda.is_available() else "cpu"
    return found
