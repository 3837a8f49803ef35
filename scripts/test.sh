#!/usr/bin/env bash
# Run every test that this machine can run; tests that need a GPU skip themselves. Arguments go to pytest:
#
#   bash scripts/test.sh                                 everything, 25 minutes on 2 cores
#   bash scripts/test.sh --full                          and the tests that take minutes each
#   bash scripts/test.sh -m "not e2e and not gpu"        the fast half
#
# Two processes share the tests, and a third computes while those wait (`-n 3`); on a GPU there is one, and `-n 0` asks for
# one anywhere.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh dev
export PATH="$PWD/.venv/bin:$PATH" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
workers=3
if command -v nvidia-smi >/dev/null || (($(nproc) < 2)); then workers=0; fi
# tests/conftest.py says what stays together and what comes last.
exec .venv/bin/python -m pytest -n "$workers" "$@"
