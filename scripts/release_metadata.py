"""Metadata of a release: the README with absolute links, and the addresses of the project."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"(\]\()(?![a-z][a-z+.-]*:|#|/)([^)\s]+)")
_PICTURES = (".png", ".svg", ".jpg", ".gif")


def absolute(text: str, repository: str, version: str) -> str:
    """Return Markdown whose links and pictures point to the tag of the version in the repository."""

    def at_tag(link: re.Match[str]) -> str:
        kind = "raw" if link[2].lower().endswith(_PICTURES) else "blob"
        return f"{link[1]}{repository.rstrip('/')}/{kind}/v{version}/{link[2]}"

    return _LINK.sub(at_tag, text)


class ReleaseMetadata(MetadataHookInterface):
    """Hatchling's hook that sets `readme` and `urls`. Without `REPOSITORY_URL`, links stay relative."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the dynamic fields."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        if repository := os.environ.get("REPOSITORY_URL", "").rstrip("/"):
            text = absolute(text, repository, metadata["version"])
            pages = {"Repository": "", "Issues": "/issues", "Changelog": f"/blob/v{metadata['version']}/CHANGELOG.md"}
            metadata["urls"] = {name: repository + page for name, page in pages.items()}
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
