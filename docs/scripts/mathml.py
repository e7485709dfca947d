"""MkDocs hook: convert formulas to MathML, which browsers render without scripts or a network."""

from __future__ import annotations

import html
import re
from typing import Any

from latex2mathml.converter import convert

_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)


def on_page_content(content: str, **_: Any) -> str:
    """Replace every formula of a rendered page (called by mkdocs once per page)."""

    def drawn(found: re.Match[str]) -> str:
        _, bracket, latex = found.groups()
        formula = convert(html.unescape(latex).strip(), display="inline" if bracket == "(" else "block")
        if re.search(r">[^<]*(\\|&#x0005C;)[^<]*<", formula):
            raise ValueError(f"latex2mathml does not know a command of {latex.strip()!r}; write it another way")
        return (
            formula if bracket == "(" else f'<div class="formula">{formula}</div>'
        )  # which scrolls where it is too wide

    return _FORMULA.sub(drawn, content)
