#!/usr/bin/env bash
# Tag HEAD with the version of pyproject.toml. Nothing is pushed.
set -euo pipefail
refuse() { echo "tag.sh: $1" >&2; exit 1; }
version=$(sed -n 's/^version = "\(.*\)"$/\1/p' pyproject.toml)
heading=$(grep -m 1 '^## ' CHANGELOG.md || true)
[ -z "$(git status --porcelain)" ] || refuse "the checkout has changes: commit them first"
[[ "$heading" == "## $version ("[0-9][0-9][0-9][0-9]-[0-9][0-9]-[0-9][0-9]")" ]] ||
	refuse "CHANGELOG.md begins with '$heading': write '## $version (YYYY-MM-DD)' above its first section"
grep -qxF "version: $version" CITATION.cff || refuse "CITATION.cff has another version: write 'version: $version'"
if git rev-parse --quiet --verify "refs/tags/v$version" >/dev/null; then
	refuse "the tag v$version exists: raise the version in pyproject.toml"
fi
git tag --annotate "v$version" --message "distillkit $version"
echo "tagged v$version; to publish the tag: git push origin v$version"
