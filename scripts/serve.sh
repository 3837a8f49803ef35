#!/usr/bin/env bash
# Serve a model on Triton Inference Server until Ctrl-C. On a fresh machine everything needed is installed first.
#
#   bash scripts/serve.sh                                the demo model
#   bash scripts/serve.sh --model DIR_OR_ID [--attn fi --page-size 16 ...]
#   bash scripts/serve.sh --help                         every option
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
bash "$root/scripts/setup.sh"
exec "$root/.venv/bin/python" -m minisgl_backend.host.server_supervisor --repository "$root/model_repository" "$@"
