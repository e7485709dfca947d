"""Pages of results: titled sections of text, tables and pictures, as one HTML file or as Markdown."""

from __future__ import annotations

import html
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from torch import Tensor

from distillkit._utils.display import as_png, embedded_picture
from distillkit._utils.tables import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STYLE = """
body{font:16px/1.5 system-ui,sans-serif;color:#1b1f24;background:#fff;max-width:46rem;margin:0 auto;padding:1rem}
h1{font-size:1.6rem}h2{font-size:1.2rem;margin:2.2rem 0 .5rem;border-top:1px solid #d5d9de;padding-top:1rem}
.verdict{background:#fdf3e3;border-left:5px solid #c7761a;padding:.8rem 1rem;font-size:1.08rem;margin:1rem 0}
.wide{overflow-x:auto;margin:.8rem 0}table{border-collapse:collapse;font-size:.9rem;min-width:60%}
th,td{padding:.3rem .7rem .3rem 0;border-bottom:1px solid #e3e6ea}td[style*=right]{white-space:nowrap}
th{border-bottom:2px solid #9aa3ad}figure{margin:1rem 0}img{display:block;width:100%}ul{padding-left:1.3rem}
img.pixels{image-rendering:pixelated;border:1px solid #d5d9de}figcaption,footer{font-size:.88rem;color:#4a525b}
"""


@dataclass(frozen=True)
class Picture:
    """Bytes of a PNG file, with a caption that is also its alternative text, and whether its pixels are shown sharp."""

    png: bytes
    caption: str
    pixels: bool = False


Part: TypeAlias = "str | list[str] | Table | Picture"
"""Part of a section: a paragraph, a bulleted list, a table or a picture. Texts are plain."""


@dataclass
class Section:
    """Section of a page: a heading, and the parts below it in the order in which they are shown."""

    title: str
    parts: list[Part] = field(default_factory=list)

    def add(self, *parts: Part) -> None:
        """Show further parts."""
        self.parts += parts


def render_html(title: str, verdict: str, sections: Sequence[Section], footer: str) -> str:
    """Return a report as one HTML file without scripts or external resources. All texts are plain and are escaped."""
    body = [f"<h1>{html.escape(title)}</h1>", f'<p class="verdict">{_text(verdict)}</p>']
    for section in sections:
        body += [f"<h2>{html.escape(section.title)}</h2>", *map(_html, section.parts)]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head><body>\n"
        + "\n".join([*body, f"<footer>{html.escape(footer)}</footer></body></html>\n"])
    )


def _html(part: Part) -> str:
    if isinstance(part, str):
        return f"<p>{_text(part)}</p>"
    if isinstance(part, list):
        return f"<ul>{''.join(f'<li>{_text(item)}</li>' for item in part)}</ul>"
    if isinstance(part, Table):
        return f'<div class="wide">{part._repr_html_()}</div>'
    shown = embedded_picture(part.png, part.caption, **({"class": "pixels"} if part.pixels else {}))
    return f"<figure>{shown}<figcaption>{html.escape(part.caption)}</figcaption></figure>"


def _text(plain: str) -> str:
    return html.escape(plain).replace(" %", "&nbsp;%")


def render_markdown(title: str, verdict: str, sections: Sequence[Section], footer: str) -> str:
    """Return a report as Markdown, in which pictures are replaced by their captions, and no text begins an HTML tag."""
    lines = [f"# {_line(title)}", f"**{_line(verdict)}**"]
    for section in sections:
        lines += [f"## {section.title}", *map(_markdown, section.parts)]
    return "\n\n".join([*lines, f"*{footer}*"]).replace("<", "&lt;") + "\n"


def _markdown(part: Part) -> str:
    if isinstance(part, list):
        return "\n".join(f"- {_line(item)}" for item in part)
    if isinstance(part, Picture):
        return f"*Figure (in the HTML file): {part.caption}*"
    return str(part) if isinstance(part, Table) else _line(part)


def _line(plain: str) -> str:
    """Return a text without line breaks, so that it cannot look like another heading or item."""
    return " ".join(plain.split())


def image_grid(rows: Sequence[Tensor], caption: str) -> Picture:
    """Return a picture with rows of images, for example reconstructions above the corresponding records.

    Args:
        rows: images of each row, as pixels [n, C, H, W] in [0, 1]; at least one row. The i-th images of all rows form
            the i-th column.
        caption: description of the rows.
    """
    return Picture(as_png([row.clamp(0, 1) for row in rows]), caption, pixels=True)


def drawn(figure: Figure, caption: str) -> Picture:
    """Return a picture of a matplotlib figure."""
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return Picture(file.getvalue(), caption)
