#!/usr/bin/env bash
# Builds the sdist, the wheel from the sdist, installs the wheel alone in a new virtual environment
# far from the source, and runs the demos there; then the demos run beside other releases of shared packages.
# Usage: scripts/wheel_test.sh PYTHON, where PYTHON has the `build` package.
set -euo pipefail
python=$1
source_tree=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$python" -m build --outdir "$work/dist" "$source_tree" >"$work/build.log" 2>&1 || { cat "$work/build.log" >&2; exit 1; }
"$python" -m venv "$work/venv"
"$work/venv/bin/python" -m pip install --quiet --upgrade 'pip>=25.1'
"$work/venv/bin/python" -m pip install --quiet "$work"/dist/*.whl

cd "$work"
home=$("$work/venv/bin/python" -c 'import reflact; print(reflact.__file__)')
case $home in
"$work"/*) ;;
*) echo "error: reflact was imported from $home, not from the wheel" >&2; exit 1 ;;
esac
"$work/venv/bin/reflact" demo --out "$work/demo"
for file in run.db best_skill.md summary.json skills arithmetic/best_skill.md; do
	test -e "$work/demo/$file" || { echo "error: the demo left no $file" >&2; exit 1; }
done
"$work/venv/bin/reflact" demo --calibrate --out "$work/calibration"
test -e "$work/calibration/memory.db" || { echo "error: the calibration left no memory" >&2; exit 1; }
test -e "$work/calibration/calibration.html" || { echo "error: the calibration left no page" >&2; exit 1; }
echo "the wheel runs the demos on its own"

pip=("$work/venv/bin/python" -m pip install --quiet --upgrade)
beside() { # the demos, and what else imports these packages
	"$work/venv/bin/python" -c 'import reflact.llm.pydantic_ai, reflact.targets.pydantic_ai'
	"$work/venv/bin/reflact" demo --show quiet --out "$work/$1" >/dev/null
	"$work/venv/bin/reflact" demo --calibrate --show quiet --out "$work/$1-calibration" >/dev/null
	echo "the demos run beside $1 releases: $("$work/venv/bin/python" -m pip list --format freeze | grep -E '^(openai|pydantic-ai-slim|jiter)==' | tr '\n' ' ')"
}
"${pip[@]}" --upgrade-strategy eager "$work"/dist/*.whl openai pydantic-ai-slim
"$work/venv/bin/python" -m pip check
beside resolved
# over instructor's bound on jiter, as docs/getting-started.md shows
"${pip[@]}" --no-deps openai jiter pydantic-ai-slim pydantic-graph
beside newest
