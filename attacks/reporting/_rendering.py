"""Parts of a report (text, lists, tables and figures), and their rendering as an HTML file and as Markdown."""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from distillkit._utils.display import as_png

__all__ = ["BulletList", "Part", "Section", "Table", "histogram", "image_grid", "render_html", "render_markdown"]

_STYLE = """
:root{color-scheme:light}*{box-sizing:border-box}
body{font:16px/1.5 system-ui,sans-serif;color:#1b1f24;background:#fff}
body{max-width:46rem;margin:0 auto;padding:1rem}
h1{font-size:1.6rem;line-height:1.2;margin:.5rem 0}h2{font-size:1.2rem;margin:2.2rem 0 .5rem}
h2{border-top:1px solid #d5d9de;padding-top:1rem}
.verdict{background:#fdf3e3;border-left:5px solid #c7761a;padding:.8rem 1rem;font-size:1.08rem;margin:1rem 0}
.wide{overflow-x:auto;margin:.8rem 0}table{border-collapse:collapse;font-size:.9rem;min-width:60%}
th,td{text-align:left;padding:.3rem .7rem .3rem 0;border-bottom:1px solid #e3e6ea;vertical-align:top}
th{font-weight:600;border-bottom:2px solid #9aa3ad}
figure{margin:1rem 0}figcaption{font-size:.88rem;color:#4a525b}img{display:block;width:100%;height:auto}
img.pixels{image-rendering:pixelated;border:1px solid #d5d9de;margin-bottom:.4rem}code{overflow-wrap:anywhere}
p.title{font-weight:600;margin:1.2rem 0 .2rem}ul{margin:.2rem 0 1rem;padding-left:1.3rem}
.rate{white-space:nowrap}footer{margin-top:3rem;color:#4a525b;font-size:.85rem}
"""


@dataclass(frozen=True)
class Table:
    """Table in a report, whose cells are text.

    Attributes:
        header: names of the columns.
        rows: cells of each row, one per column.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class BulletList:
    """Bulleted list in a report, with an optional title.

    Attributes:
        title: title as plain text; "" for no title.
        items: items as plain text.
    """

    title: str
    items: Sequence[str]


@dataclass(frozen=True)
class Figure:
    """Image in a report, with a caption.

    Attributes:
        data: bytes of a PNG file, or text of an SVG.
        caption: text shown below the image, and used as its alternative text.
    """

    data: bytes | str
    caption: str


@dataclass
class Section:
    """Section of a report: a heading, and the parts below it.

    Attributes:
        title: heading of the section.
        parts: texts, lists, tables and figures, in the order in which they are shown.
    """

    title: str
    parts: list[Part] = field(default_factory=list)


Part: TypeAlias = "str | BulletList | Table | Figure"


def render_html(title: str, verdict: str, lists: Sequence[BulletList], sections: Sequence[Section], footer: str) -> str:
    """Return a report as one HTML file without scripts or external resources.

    Args:
        title: title of the report, as plain text.
        verdict: sentence at the head of the report, as plain text.
        lists: lists that are shown below the verdict.
        sections: sections of the report, in order.
        footer: text at the end of the report, as plain text.
    """
    body = [f"<h1>{html.escape(title)}</h1>", f'<p class="verdict">{_text(verdict)}</p>', *map(_html, lists)]
    for section in sections:
        body += [f"<h2>{html.escape(section.title)}</h2>", *map(_html, section.parts)]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head><body>\n"
        + "\n".join(body)
        + f"\n<footer>{html.escape(footer)}</footer></body></html>\n"
    )


def _html(part: Part) -> str:
    if isinstance(part, str):
        return f"<p>{_text(part)}</p>"
    if isinstance(part, BulletList):
        title = f'<p class="title">{_text(part.title)}</p>' if part.title else ""
        return f"{title}<ul>{''.join(f'<li>{_text(item)}</li>' for item in part.items)}</ul>"
    if isinstance(part, Table):
        head = "".join(f"<th>{html.escape(name)}</th>" for name in part.header)
        rows = ("".join(_cell(cell) for cell in row) for row in part.rows)
        lines = "".join(f"<tr>{row}</tr>" for row in rows)
        return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>'
    vector = isinstance(part.data, str)
    data = part.data.encode() if isinstance(part.data, str) else part.data
    source = f"data:image/{'svg+xml' if vector else 'png'};base64,{base64.b64encode(data).decode()}"
    caption = html.escape(part.caption)
    kind = "" if vector else ' class="pixels"'
    return f'<figure><img{kind} alt="{caption}" src="{source}"><figcaption>{caption}</figcaption></figure>'


def _text(plain: str) -> str:
    return html.escape(plain).replace(" %", "&nbsp;%")


def _cell(text: str) -> str:
    kind = ' class="rate"' if re.match(r"[\d.]+ [%(]", text) else ""
    return f"<td{kind}>{_text(text)}</td>"


def render_markdown(
    title: str, verdict: str, lists: Sequence[BulletList], sections: Sequence[Section], footer: str
) -> str:
    """Return a report as Markdown, in which figures are replaced by their captions.

    Args:
        title, verdict, lists, sections, footer: parts of the report, as in `render_html`.
    """
    lines = [f"# {title}", f"**{verdict}**", *map(_markdown, lists)]
    for section in sections:
        lines += [f"## {section.title}", *map(_markdown, section.parts)]
    return "\n\n".join([*lines, f"*{footer}*"]) + "\n"


def _markdown(part: Part) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, BulletList):
        return f"{part.title}\n\n".lstrip() + "\n".join(f"- {item}" for item in part.items)
    if isinstance(part, Figure):
        return f"*Figure (in the HTML file): {part.caption}*"
    rows = [part.header, ["---"] * len(part.header), *part.rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)


def image_grid(rows: Sequence[Tensor], caption: str) -> Figure:
    """Return a figure with rows of images, for example reconstructions above the corresponding records.

    Args:
        rows: images of each row, as pixels [n, C, H, W] in [0, 1]; at least one row. The i-th images of all rows form
            the i-th column.
        caption: description of the rows.
    """
    return Figure(as_png([row.clamp(0, 1) for row in rows]), caption)


_COLOURS = ("#c7761a", "#2f6db3", "#6a7480")
_LEFT, _BOTTOM, _WIDTH, _HEIGHT = 44, 38, 480, 250


def histogram(series: Mapping[str, Tensor], caption: str, unit: str, marks: Sequence[int]) -> Figure:
    """Return a figure with the histograms of several groups of values, each drawn as a stepped line.

    Args:
        series: values of each group by name, at most three groups; infinite values are counted in the last bin.
        caption: description of the figure.
        unit: label of the horizontal axis.
        marks: values at which a thin vertical line is drawn.
    """
    finite = torch.cat([v[v.isfinite()] for v in series.values()] + [torch.tensor([10.0, 40.0])])
    low, high = 2 * int(finite.min() // 2), 2 * int(finite.clamp(max=48).max() // 2) + 2
    bins = (high - low) // 2
    counted = {n: torch.histc(v.float().clamp(low, high - 1e-3), bins, low, high) / len(v) for n, v in series.items()}
    top = max(float(c.max()) for c in counted.values())

    def x(value: float) -> float:
        return _LEFT + (value - low) / (high - low) * (_WIDTH - _LEFT - 8)

    def y(share: float) -> float:
        return _HEIGHT - _BOTTOM - share / top * (_HEIGHT - _BOTTOM - 20 - 18 * len(series))

    drawn = [f'<path d="M{x(m):.1f} {y(top):.1f}V{y(0):.1f}" stroke="#b9c0c8" stroke-dasharray="3 3"/>' for m in marks]
    for number, (name, shares) in enumerate(counted.items()):
        points = [f"{x(low):.1f},{y(0):.1f}"]
        for i, share in enumerate(shares.tolist()):
            points += [f"{x(low + 2 * i):.1f},{y(share):.1f}", f"{x(low + 2 * i + 2):.1f},{y(share):.1f}"]
        points.append(f"{x(high):.1f},{y(0):.1f}")
        colour = _COLOURS[number]
        drawn.append(
            f'<polygon points="{" ".join(points)}" fill="{colour}" fill-opacity=".15" stroke="{colour}"/>'
            f'<rect x="{_LEFT}" y="{8 + 18 * number}" width="12" height="12" fill="{colour}"/>'
            f'<text x="{_LEFT + 18}" y="{19 + 18 * number}">{html.escape(name)}</text>'
        )
    ticks = [t for t in range(low, high + 1) if t % 10 == 0 or t in marks]
    drawn += [f'<text x="{x(t):.1f}" y="{_HEIGHT - 21}" text-anchor="middle">{t}</text>' for t in ticks]
    drawn += [
        f'<text x="{_LEFT - 6}" y="{y(share) + 5:.1f}" text-anchor="end">{100 * share:.0f} %</text>'
        for share in (0, top)
    ]
    drawn.append(f'<text x="{_WIDTH - 8}" y="{_HEIGHT - 4}" text-anchor="end">{html.escape(unit)}</text>')
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        f'font-size="13" fill="#1b1f24">{"".join(drawn)}'
        f'<line x1="{_LEFT}" x2="{_WIDTH - 8}" y1="{y(0):.1f}" y2="{y(0):.1f}" stroke="#1b1f24"/></svg>'
    )
    return Figure(svg, caption)
