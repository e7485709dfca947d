"""A release: links of its README, its tag, licenses of what it ships, and the workflow that tests it."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml

from distillkit.data import set_cards
from tests.scripts import load_script

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
README = (ROOT / "README.md").read_text(encoding="utf-8")
HOST = "https://example.org/us/distillkit"


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the hook of the build, without the builder, which tests do not need."""
    name = "hatchling.metadata.plugin.interface"
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(MetadataHookInterface=object))  # type: ignore[arg-type]
    return load_script("scripts/release_metadata.py")


def metadata(build: ModuleType) -> dict[str, Any]:
    hook, found = build.ReleaseMetadata(), {"version": PROJECT["version"]}
    hook.root = str(ROOT)
    hook.update(found)
    return found


def test_readme_of_a_release_has_absolute_links_to_existing_files(
    build: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REPOSITORY_URL", f"{HOST}/")
    found = metadata(build)
    text, version = found["readme"]["text"], PROJECT["version"]
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    relative = re.findall(r"\]\((?!https?:|#)([^)\s]+)\)", README)
    ours = [link for link in links if link.startswith(HOST)]
    assert len(ours) == len(relative) > 40
    for link, path in zip(ours, relative, strict=True):
        kind = "raw" if path.endswith(".png") else "blob"
        assert link == f"{HOST}/{kind}/v{version}/{path}"
        assert (ROOT / path.partition("#")[0]).exists(), path
    assert all(link.startswith(("https://", "#")) for link in links)
    assert re.sub(rf"{HOST}/\w+/v{version}/", "", text) == README
    assert found["readme"]["content-type"] == "text/markdown"
    assert found["urls"] == {
        "Repository": HOST,
        "Issues": f"{HOST}/issues",
        "Changelog": f"{HOST}/blob/v{version}/CHANGELOG.md",
    }


def test_readme_stays_as_it_is_without_a_repository(build: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REPOSITORY_URL", raising=False)
    assert metadata(build)["readme"]["text"] == README
    assert "urls" not in metadata(build)


def run(*command: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": "/usr/bin:/bin:/usr/local/bin", "HOME": str(folder), **variables}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, encoding="utf-8", check=False)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "distillkit"\nversion = "1.2.0"\n', encoding="utf-8")
    (tmp_path / "CHANGELOG.md").write_text(
        "# Changelog\n\n## 1.2.0 (2031-05-06)\n\n## 1.1.0 (2031-01-01)\n", encoding="utf-8"
    )
    (tmp_path / "CITATION.cff").write_text("version: 1.2.0\n", encoding="utf-8")
    run("git", "init", "--quiet", folder=tmp_path)
    commit(tmp_path)
    return tmp_path


def commit(folder: Path) -> None:
    who = {f"GIT_{role}_{what}": "a@b.org" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    run("git", "add", "--all", folder=folder)
    assert run("git", "commit", "--quiet", "--message", "x", folder=folder, **who).returncode == 0


def tag(folder: Path) -> subprocess.CompletedProcess[str]:
    who = {"GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b.org"}
    return run("bash", str(ROOT / "scripts" / "tag.sh"), folder=folder, **who)


def test_tag_is_made_once(checkout: Path) -> None:
    made = tag(checkout)
    assert (made.returncode, made.stderr) == (0, "")
    shown = run(
        "git", "tag", "--list", "--points-at", "HEAD", "--format", "%(refname:short) %(objecttype)", folder=checkout
    )
    assert shown.stdout == "v1.2.0 tag\n"
    again = tag(checkout)
    assert again.returncode == 1
    assert "the tag v1.2.0 exists" in again.stderr


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("CHANGELOG.md", "## 1.2.0 (unreleased)\n", "begins with '## 1.2.0 \\(unreleased\\)': write '## 1.2.0 \\(YYYY"),
        ("CHANGELOG.md", "## 1.3.0 (2031-05-06)\n\n## 1.2.0 (2031-05-06)\n", "begins with '## 1.3.0"),
        ("CHANGELOG.md", "## 1.2.0 (2031-5-6)\n", "YYYY-MM-DD"),
        ("CHANGELOG.md", "none\n", "begins with ''"),
        ("CITATION.cff", "version: 1.2.0.1\n", "CITATION.cff has another version: write 'version: 1.2.0'"),
    ],
)
def test_tag_needs_the_version_and_a_date(checkout: Path, file: str, text: str, message: str) -> None:
    (checkout / file).write_text(text, encoding="utf-8")
    dirty = tag(checkout)
    assert dirty.returncode == 1
    assert "the checkout has changes" in dirty.stderr
    commit(checkout)
    refused = tag(checkout)
    assert refused.returncode == 1
    assert re.search(message, refused.stderr), refused.stderr
    assert run("git", "tag", folder=checkout).stdout == ""


def test_citation_has_the_version() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert cited["version"] == PROJECT["version"]
    assert cited["license"] == PROJECT["license"]
    headings = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert re.fullmatch(rf"{re.escape(PROJECT['version'])} \((unreleased|\d{{4}}-\d\d-\d\d)\)", headings[0])


def test_every_shipped_picture_and_set_has_a_license() -> None:
    assert PROJECT["license-files"] == ["LICENSE", "NOTICE"]
    notice = (ROOT / "NOTICE").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^(\S+/\S+) +\| (.+)$", notice, re.MULTILINE))
    origins = dict(re.findall(r"^(\w+): ((?:.+\n  )*.+)$", notice, re.MULTILINE))
    assert set(rows.values()) == {*origins, "plots"}
    assert all(re.search(r"CC BY [24]\.0|MIT License, Copyright", text) for text in origins.values())
    text = {".py", ".md", ".txt", ".typed", ".toml", ".js", ".css", ".json", ".jsonl"}
    folders = ("distillkit", "fl", "attacks", "docs", "examples", "tests")
    files = [path.relative_to(ROOT) for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    data = [path.as_posix() for path in files if path.suffix not in text and "__pycache__" not in path.parts]
    data += [path.as_posix() for path in files if path.parts[:2] == ("docs", "notebooks") and path.suffix in text]
    assert len(data) > 70
    matches = {file: [pattern for pattern in rows if fnmatch(file, pattern)] for file in data}
    assert {file: found for file, found in matches.items() if len(found) != 1} == {}
    assert {pattern for found in matches.values() for pattern in found} == set(rows)
    for name, card in set_cards().items():
        origin = rows[matches[f"distillkit/data/shipped/{name}.safetensors"][0]]
        license, _, who = card["licence"].partition(": ")
        assert license in origins[origin], name
        assert who.partition(",")[0] in origins[origin], name


def test_workflow_runs_the_local_command_on_every_supported_python() -> None:
    text = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    job = yaml.safe_load(text)["jobs"]["test"]
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o100
    prefix = "Programming Language :: Python :: "
    supported = [name.removeprefix(prefix) for name in PROJECT["classifiers"] if name.startswith(prefix)]
    assert job["strategy"]["matrix"]["python"] == supported
    assert f"for version in {' '.join(supported)}; do" in (ROOT / "Makefile").read_text(encoding="utf-8")
