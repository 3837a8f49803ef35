#!/usr/bin/env bash
# Run every test that this machine can run; tests that need a GPU skip themselves. Arguments go to pytest:
#
#   bash scripts/test.sh                                 everything, three quarters of an hour on 2 cores
#   bash scripts/test.sh --full                          and the tests that take minutes each
#   bash scripts/test.sh -m "not e2e and not gpu"        the fast half
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh dev
export PATH="$PWD/.venv/bin:$PATH" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
exec .venv/bin/python -m pytest "$@"
