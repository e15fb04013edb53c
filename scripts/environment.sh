# Sourced by the other scripts: makes a virtual environment and tells what this machine has.
#
# PYTHON       the interpreter to start from (python3)
# PREFILL_VENV where the environment lies (.venv in the source tree)
# PREFILL_TORCH what to install where no usable torch is found

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
export PIP_DISABLE_PIP_VERSION_CHECK=1

say() { printf '\n== %s\n' "$*"; }

has_gpu() { nvidia-smi -L 2>/dev/null | grep -q '^GPU '; }

# compute-sanitizer: COMPUTE_SANITIZER, else on PATH, in CUDA_HOME, in /usr/local/cuda; nothing where
# there is none.
compute_sanitizer() {
  if [[ -n ${COMPUTE_SANITIZER:-} ]]; then
    echo "$COMPUTE_SANITIZER"
  else
    (PATH=$PATH:${CUDA_HOME:-/usr/local/cuda}/bin:/usr/local/cuda/bin
     command -v compute-sanitizer || true)
  fi
}

# Whether the interpreter $1 has a torch that will do: recent, and seeing the GPU if there is one.
has_torch() {
  local needs_gpu=0
  if has_gpu; then needs_gpu=1; fi
  "$1" - "$needs_gpu" <<'PY' 2>/dev/null
import sys

import torch

version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
sys.exit(version < (2, 10) or (sys.argv[1] == "1" and not torch.cuda.is_available()))
PY
}

# Makes the environment $1 with torch in it. A usable torch of the base interpreter is taken as it is.
make_environment() {
  local venv=$1 site=() torch
  if [[ ! -x $venv/bin/python ]]; then
    say "making $venv"
    if has_torch "$python"; then site=(--system-site-packages); fi
    "$python" -m venv "${site[@]}" "$venv"
  fi
  if ! has_torch "$venv/bin/python"; then
    if has_gpu; then torch=${PREFILL_TORCH:-torch>=2.10}; else torch=${PREFILL_TORCH:-torch==2.13.0}; fi
    say "installing $torch"
    "$venv/bin/python" -m pip install --quiet "$torch" numpy  # torch warns where there is no numpy
  fi
}

# Installs into $1 what a build without isolation needs; PREFILL_KERNELS decides how much that is.
install_build_requirements() {
  local requirements requirement tools=() files=()
  requirements=$("$1/bin/python" "$root/cmake/prefill_build.py" requires)
  while read -r requirement; do
    case $requirement in
      nvidia-*) files+=("$requirement") ;;
      *) tools+=("$requirement") ;;
    esac
  done <<<"$requirements"
  "$1/bin/python" -m pip install --quiet "${tools[@]}"
  # Of these the headers and compilers are wanted, not what their Python modules depend on.
  if ((${#files[@]})); then "$1/bin/python" -m pip install --quiet --no-deps "${files[@]}"; fi
}
