#!/usr/bin/env bash
# Serve a model on Triton Inference Server until Ctrl-C. On a fresh machine everything needed is installed first.
#
#   bash scripts/serve.sh                                the demo model
#   bash scripts/serve.sh DIR_OR_ID [--attn fi --page-size 16 ...]
#   bash scripts/serve.sh --help                         every option
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

# Before anything is installed: help, and what is wrong with the options. Any Python can say that.
for python in "$root/.venv/bin/python" "${PYTHON:-python3}" python3.12 python3.11 python3.10; do
  if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
    answer=0
    PYTHONPATH=$root "$python" -S -m minisgl_backend.host.options.server "$@" || answer=$?
    case $answer in
      0) break ;;
      3) exit 0 ;;
      *) exit "$answer" ;;
    esac
  fi
done

MINISGL_STARTS_SERVER=1 bash "$root/scripts/setup.sh" serve
# What was installed is compiled when it is first imported, and kept: else each process of each start compiles it anew.
export PYTHONDONTWRITEBYTECODE=
exec "$root/.venv/bin/python" -m minisgl_backend.host.server_supervisor --repository "$root/model_repository" "$@"
