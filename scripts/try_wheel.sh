#!/usr/bin/env bash
# Use the wheel of dist/upload in an empty environment: try_wheel.sh VERSION-OF-PYTHON (see `make release`).
set -euo pipefail
python=python$1
if ! "$python" -c "" 2>/dev/null; then echo "$python: not found here, the wheel was not tried"; exit 0; fi
if [ -n "${WHEEL_DEPS:-}" ] && [[ $WHEEL_DEPS != */python"$1"/* ]]; then
	echo "$python: the wheel was not tried, because WHEEL_DEPS belongs to another Python"
	exit 0
fi
cd dist
environment=try-$1
trap 'rm -rf "$environment"' EXIT
"$python" -m venv "$environment"
installed=$environment/lib/python$1/site-packages
pip=("$environment/bin/python" -m pip install --disable-pip-version-check --quiet)
if [ -n "${WHEEL_DEPS:-}" ]; then
	"${pip[@]}" --no-deps upload/*.whl
	echo "$WHEEL_DEPS" >"$installed/wheel_deps.pth"
else
	"${pip[@]}" upload/*.whl
fi
"$environment/bin/python" -P ../tests/smoke.py "$installed"
"$environment/bin/distillkit" doctor
"$environment/bin/distillkit" sets >/dev/null
echo "$python: the wheel works"
