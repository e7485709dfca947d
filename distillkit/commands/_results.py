"""Output of a command: text, JSON, or one HTML page with pictures."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from distillkit._utils.files import write_atomically
from distillkit._utils.pages import Section, render_html
from distillkit._utils.provenance import VERSION


@dataclass(frozen=True)
class Result:
    """Result of a command: a sentence, the text for a terminal, JSON values, and the sections of a page."""

    summary: str
    text: str
    record: dict[str, Any]
    sections: list[Section] = field(default_factory=list)


def printed(command: Callable[..., Result]) -> Callable[..., None]:
    """Add the options `--json`, `--html` and `--quiet` to a command that returns a `Result`, and show the result.

    The command gets `progress`, which is False with `--quiet`.
    """

    @click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
    @click.option("--html", type=click.Path(dir_okay=False, path_type=Path), help="Also write one HTML page.")
    @click.option("--quiet", is_flag=True, help="Show no progress.")
    @functools.wraps(command)
    def shown(as_json: bool, html: Path | None, quiet: bool, **options: Any) -> None:
        result = command(progress=not quiet, **options)
        click.echo(json.dumps(result.record, indent=2) if as_json else result.text)
        if html is not None:
            name = click.get_current_context().info_name
            line = f"distillkit {VERSION}: distillkit {' '.join(sys.argv[1:]) or name}"
            write_atomically(html, render_html(f"distillkit {name}", result.summary, result.sections, line).encode())
            click.echo(f"wrote {html}", err=True)

    return shown


def refuse_given(why: str, *names: str) -> None:
    """Refuse options of the running command that were given on the command line, but would change nothing."""
    context = click.get_current_context()
    for name in names:
        if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            options = (option for one in context.command.params if one.name == name for option in one.opts)
            raise click.UsageError(f"{next(options)} would change nothing {why}; leave it out")
