"""Build the site's notebooks from docs/notebooks/*.py: execute them, write each as .ipynb and as a page with pictures.
As a hook of MkDocs, link pages of notebooks to Colab, if `REPOSITORY_URL` names a repository on GitHub.

    pip install "nbclient>=0.11" "ipykernel>=7.4"     # for this script alone
    python docs/scripts/notebooks.py [name ...]       # --text: after changes of words alone; executes nothing

A source is Python: `# %%` begins a cell, `# %% [markdown]` one of text. `# quick: 3` behind an assignment is what a
test takes in its place; notebooks are shown without it. Tests and the site need none of the packages above.
"""

from __future__ import annotations

import argparse
import base64
import json
import re
import resource
import subprocess
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "notebooks"
NAMES = ("own_images", "federated_comparison", "given_away")

_QUICK = re.compile(r" = (.*?)  # quick: (.*)$", re.MULTILINE)
_CELL = re.compile(r"^# %%( \[markdown\])?\n", re.MULTILINE)


def cells(source: str) -> list[tuple[str, str]]:
    """Split a source into cells: "markdown" or "code", with the text that the notebook shows."""
    _, *parts = _CELL.split(source)
    found = []
    for text, body in zip(parts[::2], parts[1::2]):
        if text:
            lines = (line.removeprefix("#").removeprefix(" ") for line in body.splitlines())
            found.append(("markdown", "\n".join(lines)))
        else:
            found.append(("code", _QUICK.sub(r" = \1", body)))
    return [(kind, text.strip().replace("  # fmt: skip", "")) for kind, text in found]


def quick(source: str) -> str:
    """Return the source with the small numbers that tests use."""
    return _QUICK.sub(r" = \2", source)


def unexecuted(name: str) -> dict[str, Any]:
    """Return the notebook of a source as JSON, without outputs."""
    made = []
    for number, (kind, text) in enumerate(cells((FOLDER / f"{name}.py").read_text(encoding="utf-8"))):
        cell: dict[str, Any] = {"cell_type": kind, "id": f"{number:02d}", "metadata": {}, "source": text}
        made.append(cell | ({"execution_count": None, "outputs": []} if kind == "code" else {}))
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {"cells": made, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}


def executed(name: str) -> dict[str, Any]:
    """Execute a notebook in an empty folder; its metadata says how it was made."""
    import nbclient
    import nbformat

    notebook = nbformat.from_dict(unexecuted(name))
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as empty:
        nbclient.NotebookClient(notebook, timeout=3600, resources={"metadata": {"path": empty}}).execute()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    made = json.loads(nbformat.writes(notebook))
    for cell in made["cells"]:
        cell["metadata"] = {}
        cell["source"] = "".join(cell["source"])
        bars = [o for o in cell.get("outputs", ()) if o.get("name") == "stderr" and o["text"][0].startswith("\r")]
        if bars:
            cell["outputs"] = [output for output in cell["outputs"] if output not in bars]
        for output in cell.get("outputs", ()):
            assert output.get("name") != "stderr", output
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True, encoding="utf-8"
    )
    made["metadata"]["distillkit"] = {
        "command": f"python docs/scripts/notebooks.py {name}",
        "commit": commit.stdout.strip(),
        "cpu_seconds": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime),
    }
    return made


def reworded(name: str) -> dict[str, Any]:
    """Return an executed notebook with the current text of its source.

    Raises:
        ValueError: the code is not what was executed.
    """
    notebook = json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))
    new = unexecuted(name)["cells"]
    old = {cell["id"]: cell for cell in notebook["cells"]}
    code = [cell for cell in new if cell["cell_type"] == "code"]
    if any(old.get(cell["id"], {}).get("source") != cell["source"] for cell in code):
        raise ValueError(f"the code of {name} has changed: execute it")
    notebook["cells"] = [old[cell["id"]] if cell in code else cell for cell in new]
    return notebook


def page(name: str, notebook: dict[str, Any]) -> tuple[str, list[bytes]]:
    """Return a notebook as a Markdown page, and its pictures in order."""
    made = notebook["metadata"]["distillkit"]
    first, *rest = notebook["cells"]
    title, _, start = first["source"].partition("\n")
    cost = f"it took {made['cpu_seconds']} CPU seconds, on commit {made['commit'][:7]}"
    said = f"*A notebook, executed ({cost}). [Download it]({name}.ipynb).*"
    parts, pictures = [title, said, start.strip()], []
    for cell in rest:
        if cell["cell_type"] == "markdown":
            parts.append(cell["source"])
            continue
        parts.append(f"```python\n{cell['source']}\n```")
        streams = [output for output in cell["outputs"] if output["output_type"] == "stream"]
        if streams:
            said = "".join("".join(output["text"]) for output in streams).rstrip("\n")
            parts.append(f"```text\n{said}\n```")
        for output in (one for one in cell["outputs"] if one not in streams):
            data = output["data"]
            plain = "".join(data.get("text/plain", ""))
            if "image/png" in data:
                pictures.append(base64.b64decode("".join(data["image/png"])))
                parts.append(f"![Output of the cell above]({name}_{len(pictures)}.png)")
            elif plain.startswith("| "):
                parts.append(plain)
            elif "text/html" in data:
                parts.append("".join(data["text/html"]))
            else:
                parts.append(f"```text\n{plain}\n```")
    return "\n\n".join(parts) + "\n", pictures


def write(name: str, notebook: dict[str, Any]) -> None:
    """Write a notebook, its page and its pictures, and delete old pictures."""
    text, pictures = page(name, notebook)
    (FOLDER / f"{name}.ipynb").write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    (FOLDER / f"{name}.md").write_text(text, encoding="utf-8")
    for old in FOLDER.glob(f"{name}_*.png"):
        old.unlink()
    for number, picture in enumerate(pictures, start=1):
        (FOLDER / f"{name}_{number}.png").write_bytes(picture)


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Add the link to Colab beside that to the file."""
    address = (config.repo_url or "").rstrip("/")
    repository = address.partition("://github.com/")[2]
    name = f"{Path(page.file.src_uri).stem}.ipynb"
    if not repository or f"]({name})" not in markdown:
        return markdown
    link = f"https://colab.research.google.com/github/{repository}/blob/main/docs/notebooks/{name}"
    said = f" or [open it in Colab]({link}), after `%pip install git+{address}`"
    return markdown.replace(f"]({name})", f"]({name}){said}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=NAMES, help=f"of {', '.join(NAMES)}; default: all")
    parser.add_argument("--text", action="store_true", help="take over text that has changed, execute nothing")
    asked = parser.parse_args()
    for given in asked.names:
        write(given, reworded(given) if asked.text else executed(given))
