"""MkDocs hook: show and copy tested snippets without prompts."""

from __future__ import annotations

import html
import re
from doctest import DocTestParser, Example
from itertools import pairwise
from typing import Any

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

_BLOCK = re.compile(
    r'<div class="(?:language-\w+ )?highlight"><pre><span></span><code>(.*?)</code></pre></div>', re.DOTALL
)
_DIRECTIVE = re.compile(r" *# doctest: .*")
_PARSER = DocTestParser()
_CODE, _PLAIN = PythonLexer(stripnl=False), HtmlFormatter(nowrap=True)


def _source(examples: list[Example]) -> str:
    """Join statements; an indented block ends with an empty line, as a shell needs it."""
    indented = (e.source.splitlines()[-1][:1] in ("", " ", "\t") for e in examples)
    sources = (_DIRECTIVE.sub("", e.source) for e in examples)
    return "".join(source + "\n" * ends for source, ends in zip(sources, indented))


def _output(example: Example) -> str:
    """Return the output of an example; for an error its last lines without the traceback."""
    return (example.exc_msg or example.want).replace("<BLANKLINE>", "").rstrip("\n")


def shown(snippet: str) -> str:
    """Render a snippet: code without prompts, its output below, and the code alone in `data-copy`."""
    examples = _PARSER.get_examples(snippet)
    parts = []
    ends = [0, *(i + 1 for i, e in enumerate(examples) if e.want), len(examples)]
    for start, end in pairwise(ends):
        own = examples[start:end]
        if own:
            parts.append(highlight(_source(own).rstrip("\n"), _CODE, _PLAIN))
            if own[-1].want:
                kind = "output error" if own[-1].exc_msg else "output"
                parts.append(f'<span class="{kind}">{html.escape(_output(own[-1]))}\n</span>')
    copied = html.escape(_source(examples).rstrip("\n")).replace("\n", "&#10;")
    return f'<div class="highlight" data-copy="{copied}"><pre><code>{"".join(parts)}</code></pre></div>'


def on_page_content(content: str, **_: Any) -> str:
    """Replace every snippet with prompts on a rendered page (called by mkdocs once per page)."""

    def replaced(found: re.Match[str]) -> str:
        text = html.unescape(re.sub(r"<[^>]+>", "", found[1]))
        return shown(text) if text.startswith(">>> ") else found[0]

    return _BLOCK.sub(replaced, content)
