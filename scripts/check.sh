#!/usr/bin/env bash
# Formatting, lint, types, the rules of who may import whom, and the documents (tests run their commands).
# `scripts/check.sh --fix` repairs what can be repaired; `--no-docs` leaves the documents to a run of all tests.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh dev
export PATH="$PWD/.venv/bin:$PATH"
if [[ ${1:-} == --fix ]]; then
  ruff format .
  ruff check --fix .
fi
failed=()
run() { printf '\n$ %s\n' "$*"; "$@" || failed+=("$*"); }
run ruff format --check .
run ruff check --no-cache .  # which module is whose depends on what files there are, and the cache does not see that
run mypy
run lint-imports
[[ ${1:-} == --no-docs ]] || run python -m pytest -q -p no:cacheprovider tests/docs -m "not e2e"
if ((${#failed[@]})); then
  printf '\nfailed:\n'; printf '  %s\n' "${failed[@]}"
  exit 1
fi
