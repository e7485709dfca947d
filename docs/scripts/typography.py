"""MkDocs hook: keep numbers, units and intervals on one line, show minus signs, and let long code in tables break."""

from __future__ import annotations

import re
from typing import Any

_MARK = re.compile(r"<!--.*?-->")
_CODE_OR_TAG = re.compile(r"(<(pre|code|math)\b.*?</\2>|<[^>]*>)", re.DOTALL)
_NUMBER = re.compile(
    r"(?<=[\d)]) (?=%|±|dB\b|[kMG]B\b|[KMG]iB\b|m?s\b)|(?<=±) (?=\d)|(?<=\d) (?=to [\d.]+\))|(?<=\d to) (?=[\d.]+\))"
    r"|(?<=\d,) (?=[-+]?[\d.,]+\])"
)
_MINUS = re.compile(r"(?:^|(?<=[\s\[(]))-(?=\.?\d)")
_LONG = re.compile(r"<code>([^<]{33,})</code>")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Remove the script markers, because a marker at the start of a line would begin a paragraph."""
    return _MARK.sub("", markdown)


def on_page_content(content: str, **_: Any) -> str:
    """Insert non-breaking spaces and minus signs into numbers outside of code, and mark long code."""
    parts = _CODE_OR_TAG.split(content)
    texts = (_MINUS.sub("\u2212", _NUMBER.sub("\u00a0", part)) for part in parts[::3])
    tags = [*parts[1::3], ""]
    return "".join(text + _LONG.sub(r'<code class="long">\1</code>', tag) for text, tag in zip(texts, tags))
