"""Sections of a report with what each found, the sentence that sums them up, and the page as HTML and Markdown."""

from __future__ import annotations

import html
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from distillkit._utils.display import as_png, embedded_picture
from distillkit._utils.tables import Table

__all__ = ["KINDS", "Findings", "Picture", "Section", "histogram", "image_grid", "render_html", "render_markdown"]

KINDS = ("claim", "inversion", "images", "shadows", "model", "classes")
"""Kinds of leaks, the most serious first.

They are: a refuted privacy claim, records reconstructed from an update, members recognized from images, members
recognized by attacks with shadow models, members recognized by one threshold on the last model's scores, and disclosed
classes of clients.
"""

_NEGATIVE_ORDER = ("images", "shadows", "inversion", "model", "classes", "claim")
"""Order of attacks that found no leak: the attacks that were most likely to find one come first."""

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
    """Section of a report: a heading, the parts below it, and what was found.

    Attributes:
        title: heading.
        parts: parts in the order in which they are shown.
        leaks: leaks, each with its kind (see `KINDS`) and the end of a sentence that begins "This run leaks:".
        negatives: attacks that found no leak, each with its kind and the smallest leak that it would have detected.
        missing: questions that could not be answered, each with the argument of `report` that would allow an answer.
        recovered: text that states the share of private records that are recognizable in the sent images.
    """

    title: str
    parts: list[Part] = field(default_factory=list)
    leaks: list[tuple[str, str]] = field(default_factory=list)
    negatives: list[tuple[str, str]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    recovered: str = ""

    def add(self, *parts: Part) -> None:
        """Show further parts."""
        self.parts += parts

    def leak(self, kind: str, phrase: str) -> None:
        """Add a leak."""
        self.leaks.append((kind, phrase))


class Findings:
    """Results of all sections, ordered.

    Attributes:
        leaks: leaks, the most serious first.
        not_found: attacks that found no leak, starting with those that were most likely to find one.
        missing: questions that could not be answered.
        verdict: sentence at the head of the report. It states the worst leak, or that none was found, and never that
            the run protects its records.
        other_leaks: the leaks that the verdict does not mention.
    """

    def __init__(self, sections: Sequence[Section], sends_records: bool) -> None:
        leaks = [leak for one in sections for leak in one.leaks]
        negatives = [negative for one in sections for negative in one.negatives]
        self.leaks = tuple(phrase for _, phrase in sorted(leaks, key=lambda one: KINDS.index(one[0])))
        ordered = sorted(negatives, key=lambda one: _NEGATIVE_ORDER.index(one[0]))
        self.not_found = tuple(phrase for _, phrase in ordered)
        self.missing = tuple(question for one in sections for question in one.missing)
        self.other_leaks = self.leaks if sends_records else self.leaks[1:]
        if sends_records:
            shares = "".join(f", and {one.recovered}" for one in sections if one.recovered)
            self.verdict = f"This run sends private records: its images start from real ones{shares}."
        elif leaks:
            self.verdict = f"This run leaks: {self.leaks[0]}."
        elif negatives:
            rest = "smaller leaks and other attacks remain possible"
            self.verdict = f"No leak found at this resolution: {self.not_found[0]}; {rest}."
        else:
            self.verdict = "No verdict yet: no attack on individual records was run (see the last section)."


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


def histogram(series: Mapping[str, Tensor], caption: str, unit: str, marks: Sequence[int]) -> Picture:
    """Return a picture with the histograms of several groups of values, each drawn as a stepped line.

    Args:
        series: values of each group by name, at most three groups; infinite values are counted in the last bin.
        caption: description of the picture.
        unit: label of the horizontal axis.
        marks: values at which a thin vertical line is drawn.
    """
    from matplotlib.figure import Figure

    finite = torch.cat([v[v.isfinite()] for v in series.values()] + [torch.tensor([10.0, 40.0])])
    low, high = 2 * int(finite.min() // 2), 2 * int(finite.clamp(max=48).max() // 2) + 2
    figure, file = Figure(figsize=(6.4, 3.4), layout="constrained", dpi=150), io.BytesIO()
    axes = figure.subplots()
    for (name, values), colour, line in zip(series.items(), ("#c7761a", "#2f6db3", "#6a7480"), ("-", "--", ":")):
        look: dict[str, Any] = {"facecolor": f"{colour}26", "edgecolor": colour, "linestyle": line, "label": name}
        shown, percents = values.clamp(low, high - 1e-3).tolist(), [100 / len(values)] * len(values)
        axes.hist(shown, range(low, high + 1, 2), weights=percents, histtype="stepfilled", **look)
    for mark in marks:
        axes.axvline(mark, color="#b9c0c8", linestyle=(0, (3, 3)), linewidth=1)
    axes.set(xlabel=unit, ylabel="share of the group (%)", xlim=(low, high))
    axes.set_xticks(sorted({*range(-(-low // 10) * 10, high + 1, 10), *marks}))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(file, format="png")
    return Picture(file.getvalue(), caption)
