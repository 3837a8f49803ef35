#!/usr/bin/env bash
# Make .venv in the checkout and install everything that this machine can use. Takes seconds when nothing has changed.
#
#   bash scripts/setup.sh            to serve, and what tests and checks need (`dev`)
#   bash scripts/setup.sh serve      to serve; an environment that can do more stays as it is
#   PYTHON=/path/to/python3.11 bash scripts/setup.sh     to choose the Python (3.10 to 3.12; 3.13 serves from a container)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
mode=${1:-dev}
venv=$PWD/.venv
stamp=$venv/.minisgl-setup
tested_torch=2.13.0                               # what a CPU machine gets, where its sources have that build
torch_cpu_index=https://download.pytorch.org/whl/cpu
export PIP_DISABLE_PIP_VERSION_CHECK=1

bold='' plain=''
if [[ -t 2 ]]; then bold=$'\033[1m' plain=$'\033[0m'; fi
say() { echo "$bold[setup]$plain $*" >&2; }
die() { say "error: $*"; exit 1; }
[[ $mode == serve || $mode == dev || $mode == fingerprint ]] || die "the mode is '$mode'; allowed: serve, dev"

# step WHAT COMMAND...: what may take minutes, with a line of how far it is; what the command says is shown where it fails.
step() {
  local output watcher result=0 started=$SECONDS
  output=$(mktemp)
  say "$1 ..."
  progress "$output" &
  watcher=$!
  "${@:2}" >"$output" 2>&1 || result=$?
  kill "$watcher" 2>/dev/null || true
  wait "$watcher" 2>/dev/null || true
  if [[ -t 2 ]]; then printf '\r\033[K' >&2; fi
  if ((result)); then cat "$output" >&2; elif ((SECONDS - started >= 10)); then say "... done in $((SECONDS - started)) s"; fi
  rm -f "$output"
  return "$result"
}
# progress FILE: what uv, pip or apt-get, whose words are in FILE, does now. On a terminal one line that changes every
# second; elsewhere a line for each change, at most every 10 s and at least every 30 s.
progress() {
  local now last='' said=0 started=$SECONDS every=${PROGRESS_SECONDS:-10}
  while sleep 1 && kill -0 $$ 2>/dev/null; do
    now=$(awk '
      /^ *Collecting /                   { packages++; what = "looking for " $2 }
      /^ *(Downloading|Using cached) /   { name = $NF ~ /^B\)|[kMG]B\)$/ ? $(NF - 2) " " $(NF - 1) " " $NF : $NF
                                           sub(".*/", "", name); sub(/-[^ ]*\.(whl|tar\.gz)/, "", name)
                                           if (name !~ /metadata/) what = "downloading " name }
      /^ *Building wheel/                { what = "building " $0; sub(/building *Building wheels? for /, "building ", what) }
      /^ *Installing collected packages/ { what = "installing " NF - 3 (NF > 4 ? " packages" : " package") }
      /^Get:[0-9]+ /                     { what = "downloading " $5 }
      /^Downloading [^ ]+ \([0-9.]+[KMG]iB\)$/ { what = "downloading " $2 " " $3 }
      /^Resolved [0-9]+ packages /       { what = "fetching " $2 " packages" }
      /^Prepared [0-9]+ packages /       { what = "installing " $2 " packages" }
      /^(Unpacking|Setting up) /         { what = tolower($1) " " ($1 == "Setting" ? $3 : $2) }
      END { print what (packages ? ", package " packages : "") }' "$1" 2>/dev/null) || now=''
    if [[ -t 2 ]]; then
      printf '\r\033[K%s[setup]%s ... %d s: %.90s' "$bold" "$plain" $((SECONDS - started)) "${now:-starting}" >&2
    elif { [[ $now != "$last" ]] && ((SECONDS - said >= every)); } || ((SECONDS - said >= 3 * every)); then
      say "... $((SECONDS - started)) s: ${now:-starting}${venv:+, $(du -sm "$venv" 2>/dev/null | cut -f1 || true) MB in .venv}"
      last=$now said=$SECONDS
    fi
  done
}
has_gpu() { [[ $'\n'$(nvidia-smi -L 2>/dev/null) == *$'\n'GPU* ]]; }
# The package's own entry point in a .venv, this one or another checkout's, is no server of its own.
triton_on_path() {
  local found
  while IFS= read -r found; do
    if ! head -c 2000 "$found" | grep -qa minisgl_backend; then echo "$found"; return; fi
  done < <(type -ap tritonserver)
}

# apt PACKAGE...: install as root, else print the command. Fails if the packages are not there afterwards.
apt_install() { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@"; }
apt() {
  if [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null; then
    step "installing $* with apt-get" apt_install "$@"
  else
    say "please run: sudo apt-get install $*      (or what your system calls it), then this script again"
    return 1
  fi
}

usable() { "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1; }
serving() { "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' >/dev/null 2>&1; }
find_python() {
  local candidate
  if [[ -n ${PYTHON:-} ]]; then
    usable "$PYTHON" || die "PYTHON is $PYTHON; allowed: a Python 3.10 to 3.13"
    echo "$PYTHON"; return
  fi
  # A container's server has one Python, the system's: its stub is linked against that.
  if [[ -n $(triton_on_path) ]] && usable python3; then echo python3; return; fi
  for candidate in python3 python3.12 python3.11 python3.10 "$HOME"/.pyenv/versions/3.1[210]*/bin/python3; do
    if serving "$candidate"; then echo "$candidate"; return; fi
  done
  for candidate in python3 python3.13; do
    if usable "$candidate"; then echo "$candidate"; return; fi
  done
}
own_path() { "$1" -c 'import os, sys; print(os.path.realpath(getattr(sys, "_base_executable", sys.executable)))'; }

python=$(find_python)
if [[ -z $python ]]; then
  apt python3 python3-venv || die "no Python 3.10 to 3.13 found"
  python=$(find_python)
  [[ -n $python ]] || die "no Python 3.10 to 3.13 found"
fi
python=$(own_path "$python")
gpu=no; if has_gpu; then gpu=yes; fi
container=$(triton_on_path)
fingerprint=$({ cat pyproject.toml scripts/setup.sh; "$python" -VV; echo "$python $PWD $gpu $container"; } | sha256sum | cut -d' ' -f1)
if [[ $mode == fingerprint ]]; then echo "$fingerprint"; exit 0; fi
# The stamp is "MODE FINGERPRINT"; whoever can test can serve.
is_done() {
  local stamped
  stamped=$(cat "$stamp" 2>/dev/null || true)
  [[ -x $venv/bin/python ]] && [[ $stamped == "dev $fingerprint" || $stamped == "$mode $fingerprint" ]]
}
if is_done; then exit 0; fi
if [[ $(cat "$stamp" 2>/dev/null) == dev\ * ]]; then mode=dev; fi
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
say "Python $version at $python, NVIDIA GPU: $gpu, tritonserver on PATH: ${container:-no}"

if [[ $mode == serve && $gpu == no ]]; then
  say "the first start installs 1.5 GB into .venv, which takes some minutes; later ones take seconds"
fi

# One setup at a time; a second one waits and then finds the work done.
exec 9>"$PWD/.setup.lock"
if command -v flock >/dev/null; then flock 9; fi
if is_done; then exit 0; fi

# --- the environment
pip() { "$venv/bin/python" -m pip "$@"; }
options=()
if [[ $gpu == yes ]] && "$python" -c 'import sys, torch; sys.exit(torch.version.cuda is None)' >/dev/null 2>&1; then
  say "using the CUDA build of torch that this Python already has"
  options+=(--system-site-packages)
fi
"$python" -c 'import venv, ensurepip' 2>/dev/null || apt "python$version-venv" || apt python3-venv || die "Python's venv module is missing"
if [[ $("$venv/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) != "$version" ]]; then
  step "making the environment .venv" "$python" -m venv --clear --without-pip ${options[@]+"${options[@]}"} "$venv"
fi

# --- what belongs to the package
extras=client,engine,gguf,grammar,images,openai
if [[ $mode == dev ]]; then extras+=,dev,docs; fi
if [[ -z $container ]]; then
  if [[ $(uname -s) != Linux || $(uname -m) != x86_64 ]] || ! serving "$venv/bin/python"; then
    say "no tritonserver for this machine: its wheel is for Linux x86-64 and Python 3.10 to 3.12; use NVIDIA's container to serve"
  elif ! "$venv/bin/python" -c 'import os, sys; sys.exit(tuple(map(int, os.confstr("CS_GNU_LIBC_VERSION").split()[1].split("."))) < (2, 35))'; then
    say "no tritonserver for this machine: its wheel needs glibc 2.35 or later; use NVIDIA's container to serve"
  else
    extras+=,server
  fi
fi

# --- with uv, where pip can bring it and its settings can be handed on: a third of pip's time. Whatever fails is tried
# again with pip, which then says why.
uv() { "$venv/bin/uv" pip install --python "$venv/bin/python" "$@"; }
uv_ready() {
  # Of the packages of a Python outside the environment, uv knows nothing and would install torch anew.
  [[ -z ${options[*]-} ]] && ! grep -qs '^include-system-site-packages = true' "$venv/pyvenv.cfg" || return
  # The pip of the Python outside saves the time to make one here, where it is new enough to install elsewhere.
  local pip_outside=("$python" -m pip --python "$venv/bin/python" install --quiet --retries 1)
  "${pip_outside[@]}" uv || { own_pip && pip install --quiet --retries 1 uv; } || return
  "$venv/bin/python" -m pip --version &>/dev/null && pip=$venv/bin/python || pip=$python
  settings=$("$venv/bin/python" scripts/pip_settings.py "$pip") || return
  eval "$settings"
  # What is imported is compiled then, which is a third of all; by serve.sh always, by others where Python may.
  if [[ -n ${PYTHONDONTWRITEBYTECODE:-} && -z ${MINISGL_STARTS_SERVER:-} && ! ${PIP_COMPILE:-1} =~ ^(0|no|off|false)$ ]]; then
    export UV_COMPILE_BYTECODE=1
  fi
}
own_pip() { pip --version &>/dev/null || "$venv/bin/python" -m ensurepip --default-pip >/dev/null; }
# Torch and everything else at once.
uv_install() {
  local wanted=(pip -e ".[$extras]")
  if ! "$venv/bin/python" -c 'import torch' >/dev/null 2>&1; then
    if [[ $gpu == yes ]]; then
      wanted+=(torch)
    elif uv --dry-run --no-deps "torch==$tested_torch+cpu"; then
      wanted+=("torch==$tested_torch+cpu")
    elif ! uv --no-deps --no-index torch; then
      wanted+=(--index "$torch_cpu_index" "torch==$tested_torch+cpu")
    fi
  fi
  # xgrammar asks for triton, a gigabyte of compiler that only GPUs and tests have a use for.
  if [[ $mode == serve && $gpu == no ]]; then
    echo "triton; python_version < '3'" >"$venv/overrides.txt"
    wanted+=(--override "$venv/overrides.txt")
  fi
  uv --upgrade-package pip "${wanted[@]}"
}
quietly() { "$@" &>/dev/null; }
install() { if [[ $installer == uv ]]; then uv "$@"; else pip install "$@"; fi; }

# --- with pip
# Never the registry's default build on a machine without a GPU: it brings gigabytes of CUDA libraries.
cpu_torch() {
  pip install --no-deps "torch==$tested_torch+cpu" ||
    pip install --no-deps --no-index torch ||
    pip install --no-deps --index-url "$torch_cpu_index" "torch==$tested_torch" ||
    pip install --no-deps --index-url "$torch_cpu_index" torch ||
    { [[ $(uname -m) != x86_64 ]] && pip install torch; }
}
# xgrammar asks for triton, a gigabyte of compiler that only GPUs and tests have a use for.
xgrammar_alone() {
  local requirements
  pip install --no-deps "$(sed -n 's/^grammar = \["\(.*\)"\]$/\1/p' pyproject.toml)" || return
  requirements=$(mktemp)
  "$venv/bin/python" - >"$requirements" <<'END' && pip install -r "$requirements" && "$venv/bin/python" -c 'import xgrammar'
from importlib.metadata import requires
print("\n".join(line for line in requires("xgrammar") or [] if "extra ==" not in line and not line.startswith("triton")))
END
  local result=$?
  rm -f "$requirements"
  return $result
}
pip_install() {
  own_pip || die "Python's ensurepip module is missing"
  # The one that a Python brings takes up to three times as long to find out what belongs together.
  step "updating pip" pip install --upgrade pip || say "warning: pip could not be updated; it may take longer"
  if ! "$venv/bin/python" -c 'import torch' >/dev/null 2>&1; then
    if [[ $gpu == yes ]]; then
      step "installing torch for CUDA" pip install torch
    else
      # A local wheel or a configured index first, else PyTorch's own index.
      step "installing torch for CPU" cpu_torch ||
        die "no CPU build of torch: put a wheel where pip finds it (pip config set global.find-links DIR) or allow $torch_cpu_index"
    fi
  fi
  if [[ $mode == serve && $gpu == no ]]; then
    step "installing the package with extras ${extras/grammar,/}" pip install -e ".[${extras/grammar,/}]"
    step "installing xgrammar without triton" xgrammar_alone || step "installing the extra grammar" pip install -e ".[grammar]"
  else
    step "installing the package with extras $extras" pip install -e ".[$extras]"
  fi
}

installer=uv
if ! step "fetching uv" quietly uv_ready || ! step "installing torch and the package with extras $extras" uv_install; then
  say "uv cannot install here; pip does"
  installer=pip
  pip_install
fi
if [[ $gpu == yes ]]; then
  # The kernels' CUDA 13 builds carry another name than the CUDA 12 ones.
  cuda=$("$venv/bin/python" -c 'import torch; print("cuda" if int((torch.version.cuda or "0").split(".")[0]) >= 13 else "cuda12")')
  step "installing the GPU kernels (extra $cuda)" install -e ".[$cuda]" || say "warning: the GPU kernels could not be installed; the triton and torch attention backends work without them"
fi

# --- NumPy 2, which the server's wheel cannot bear: beside it, for tests of everything else
if [[ $mode == dev && $extras == *server* ]]; then
  step "installing NumPy 2 beside, for tests" install --upgrade --target "$venv/numpy2" --no-deps "numpy>=2" ||
    say "warning: tests with NumPy 2 are skipped"
fi

# --- other people's clients, for tests: an environment that takes from this one what it can, and has the rest itself
frameworks() {
  local requirements result
  requirements=$(mktemp)
  sed -n 's/^frameworks = \["\(.*\)"\]$/\1/p' pyproject.toml | sed 's/", "/\n/g' >"$requirements"
  "$venv/bin/python" -m venv --without-pip --clear "$venv/frameworks" &&
    "$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
      >"$venv/frameworks/lib/python$version/site-packages/behind.pth" &&
    "$venv/frameworks/bin/python" -m pip install -r "$requirements"
  result=$?
  rm -f "$requirements"
  return $result
}
if [[ $mode == dev ]]; then
  step "installing LangChain and LlamaIndex behind, for tests" frameworks ||
    say "warning: tests with LangChain and LlamaIndex are skipped"
fi

# --- the server's own needs
if [[ $extras == *server* ]]; then
  "$venv/bin/python" -c 'import sys; from minisgl_backend.host.triton_server import find_libpython; sys.exit(find_libpython() is None)' ||
    apt "libpython$version" || say "warning: without libpython$version.so.1.0 the server cannot start"
fi
echo "$mode $fingerprint" > "$stamp.new"
mv "$stamp.new" "$stamp"
if [[ -n ${MINISGL_STARTS_SERVER:-} ]]; then
  say "the environment is complete; starting the server"
else
  say "the environment is complete: . .venv/bin/activate"
fi
