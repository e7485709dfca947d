"""The command line `distillkit`. Every command calls the library's public functions.

A package adds a command by an entry point of the group `distillkit.commands` that names a `click.Command`.
"""

from __future__ import annotations

import os
import re
import warnings
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import click

from distillkit._utils.provenance import VERSION

__all__ = ["main"]

_GROUP = "distillkit.commands"


class _Commands(click.Group):
    """Group of all installed commands, which reports errors of the library without a traceback."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_installed())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = _installed().get(cmd_name)
        return None if entry is None else entry.load()

    def invoke(self, ctx: click.Context) -> Any:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_, **__: click.echo(f"Warning: {message}", err=True)
            if os.environ.get("DISTILLKIT_TRACEBACK"):
                return super().invoke(ctx)
            try:
                return super().invoke(ctx)
            except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError):
                raise
            except Exception as error:
                kind = "" if isinstance(error, ValueError | TypeError | OSError) else f"{type(error).__name__}: "
                command = self.get_command(ctx, ctx.invoked_subcommand or "")
                raise click.ClickException(_as_options(f"{kind}{error}", command)) from error


def _as_options(message: str, command: click.Command | None) -> str:
    """Write arguments that a message advises, such as `size=32`, as options of the command; calls stay as they are."""
    names = {name for param in command.params for name in param.opts} if command is not None else set()

    def option(found: re.Match[str]) -> str:
        name = f"--{found[1].replace('_', '-')}"
        return f"{name}{' ' if found[2] else ''}" if name in names else found[0]

    return re.sub(r"(?<!\()(?<!, )\b(\w+)=(?=([\w'\"]?))", option, message)


def _installed() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=_GROUP)}


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(VERSION, prog_name="distillkit")
def main() -> None:
    """Condense, label, evaluate and attack image sets.

    A SOURCE of images is a folder with one sub-folder per class, a table (.csv, .parquet) of picture files and labels,
    an .npz file, a set that distillkit saved, or the name of a dataset such as "digits".

    Errors are one line; set DISTILLKIT_TRACEBACK=1 for the whole traceback.
    """
