#!/usr/bin/env bash
# Make (or keep) a virtual environment with this project and some of its extras installed.
#
#     scripts/bootstrap.sh FOLDER EXTRA [JAX_VERSION]
#
# FOLDER/installed is written last and holds a checksum of all that decides what is installed. An environment whose
# file is missing (an interrupted run) or differs is deleted and made anew; one that agrees is left as it is.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly environment=$1 extra=$2 jax_version=${3:-}
readonly stamp=$environment/installed

say() { echo "bootstrap: $*" >&2; }

# Print the real path of interpreter $1 if it can hold the project: Python >= 3.12, able to fill an environment.
usable_interpreter() {
    "$1" - 2>/dev/null <<'PYTHON'
import importlib.util, sys
able = any(importlib.util.find_spec(name) for name in ("ensurepip", "pip")) and importlib.util.find_spec("venv")
if sys.version_info < (3, 12) or not able:
    sys.exit(1)
print(sys.executable)
PYTHON
}

# Print a Python of uv's, where uv comes from PyPI through any Python that has pip. uv stays within .uv/.
interpreter_from_uv() {
    say "no Python >= 3.12 with pip here; fetching one with uv"
    if [[ ! -x .uv/bin/uv ]]; then
        python3 -m pip install --quiet --target .uv uv >&2 || return 1
    fi
    UV_PYTHON_INSTALL_DIR=$PWD/.uv/python .uv/bin/uv python install 3.12 >&2 || return 1
    UV_PYTHON_INSTALL_DIR=$PWD/.uv/python .uv/bin/uv python find --managed-python 3.12
}

find_interpreter() {
    local candidate pyenv=${PYENV_ROOT:-$HOME/.pyenv}/versions
    for candidate in python3 python3.12 python3.13 python3.14; do
        usable_interpreter "$candidate" && return
    done
    for candidate in $(ls "$pyenv" 2>/dev/null | sort -rV); do
        usable_interpreter "$pyenv/$candidate/bin/python3" && return
    done
    interpreter_from_uv && return
    say "needs Python >= 3.12 with pip (on Debian and Ubuntu: apt install python3-venv python3-pip)."
    say "None was found as python3, python3.12 to python3.14 or under $pyenv, and uv could not fetch one."
    return 1
}

# The CUDA extra that the NVIDIA driver can run, if there is a driver: CUDA 13 needs driver 580 or newer.
cuda_extra() {
    local driver
    driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1) || return 0
    case ${driver%%.*} in
        '' | *[!0-9]*) ;;
        *) if ((${driver%%.*} >= 580)); then echo cuda13; else echo cuda12; fi ;;
    esac
}

# The pinned versions, with another jax where one is asked for.
constraints() {
    if [[ -n $jax_version ]]; then
        sed -E "s/^(jax|jaxlib)==.*/\1==$jax_version/" constraints.txt
    else
        cat constraints.txt
    fi
}

create() {
    local interpreter
    interpreter=$(find_interpreter)
    say "making $environment with $interpreter"
    rm -rf "$environment"
    if "$interpreter" -c 'import ensurepip' 2>/dev/null; then
        "$interpreter" -m venv "$environment"
    else
        # Debian's Python without python3-venv: its own pip fills the environment, beginning with a pip for it.
        "$interpreter" -m venv --without-pip "$environment"
        "$interpreter" -m pip --python "$environment/bin/python" install --quiet pip
    fi
}

install() {
    local extras=$extra
    if [[ -n $cuda ]]; then extras=$extras,$cuda; fi
    say "installing pallas-flash[$extras] (once; a few minutes)"
    constraints >"$environment/constraints.txt"
    "$environment/bin/python" -m pip install --quiet --disable-pip-version-check \
        --constraint "$environment/constraints.txt" --editable ".[$extras]"
}

cuda=$(cuda_extra)
fingerprint=$({ echo "$PWD $cuda $jax_version"; cat pyproject.toml constraints.txt scripts/bootstrap.sh; } | cksum)
installed=$(cat "$stamp" 2>/dev/null || true)
if [[ $installed == "$fingerprint"* && -x $environment/bin/python ]]; then
    if [[ " $installed " == *" $extra "* ]]; then exit 0; fi
    rm "$stamp"  # this run adds an extra; until it has ended the environment counts as half-made
else
    installed=$fingerprint
    create
fi
install
echo "$installed $extra" >"$stamp"
