# shellcheck shell=bash
# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
#
# Sourced by scripts/*.sh and .ci/run: changes to the repository root and makes .venv there from
# requirements.lock (every file checked against its hash), with this package installed editable. The
# Python is 3.12, or of the version MEGATRON_MUON_PYTHON_VERSION. A stamp inside .venv lets the next
# call start at once; it is written last, so an interrupted installation never looks complete.

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

python_version=${MEGATRON_MUON_PYTHON_VERSION:-3.12}

environment_stamp() {
    # The path is part of it: an editable install points at its folder, so a copied .venv is synced.
    { pwd -P && echo "$python_version" && cat requirements.lock pyproject.toml; } | sha256sum |
        cut -d " " -f 1
}

environment_is_ready() {
    [[ -x .venv/bin/python && -f .venv/megatron-muon.stamp ]] &&
        [[ "$(cat .venv/megatron-muon.stamp)" == "$(environment_stamp)" ]]
}

# Sets the array UV to a command that runs uv, installing it under .uv when there is none.
find_uv() {
    local candidate
    # Run each: a pyenv shim is on PATH even where uv belongs to another Python, and then fails.
    for candidate in uv "python3 -m uv" "python3.12 -m uv" "${HOME:-}/.local/bin/uv" .uv/bin/uv; do
        read -r -a UV <<<"$candidate"
        "${UV[@]}" --version >/dev/null 2>&1 && return 0
    done
    echo "environment: found no uv, installing it into .uv" >&2
    # No warnings of pip about root or a newer pip: --target needs neither root nor a venv, and an
    # externally managed Python takes it too.
    for candidate in python3 python3.12 /usr/bin/python3; do
        PIP_ROOT_USER_ACTION=ignore PIP_DISABLE_PIP_VERSION_CHECK=1 \
            "$candidate" -m pip install --quiet --upgrade --target .uv uv >&2 || continue
        UV=(".uv/bin/uv")
        "${UV[@]}" --version >/dev/null 2>&1 && return 0
    done
    echo "environment: expected uv or a python3 with pip, got neither. Install uv first." >&2
    return 1
}

is_wanted_python() {
    "$1" -c "import sys; sys.exit('%d.%d' % sys.version_info[:2] != '$python_version')" 2>/dev/null
}

# Prints a Python of that version, or the version alone: uv then looks further, and downloads it.
find_python() {
    local candidate
    local pyenv_root=${PYENV_ROOT:-${HOME:-}/.pyenv}
    for candidate in "python$python_version" python3 \
        "$pyenv_root/versions/$python_version"*/bin/python; do
        if is_wanted_python "$candidate"; then
            "$candidate" -c "import sys; print(sys.executable)"
            return
        fi
    done
    echo "$python_version"
}

build_environment() {
    echo "environment: building .venv from requirements.lock, once: 5 GB with torch," \
        "minutes to download" >&2
    find_uv || return 1
    export UV_HTTP_TIMEOUT="${UV_HTTP_TIMEOUT:-300}"
    # A marker without a stamp means that an installation was interrupted: start again.
    if [[ -e .venv/megatron-muon.installing ]] || ! is_wanted_python .venv/bin/python; then
        rm -rf .venv
        "${UV[@]}" venv --quiet --python "$(find_python)" .venv || return 1
    fi
    rm -f .venv/megatron-muon.stamp
    touch .venv/megatron-muon.installing
    "${UV[@]}" pip sync --quiet --python .venv/bin/python --require-hashes requirements.lock ||
        return 1
    # The build backend, setuptools, is in the lock: the editable install fetches nothing unpinned.
    "${UV[@]}" pip install --quiet --python .venv/bin/python --no-deps --no-build-isolation \
        --editable . || return 1
    environment_stamp >.venv/megatron-muon.stamp.new
    rm .venv/megatron-muon.installing
    mv .venv/megatron-muon.stamp.new .venv/megatron-muon.stamp
    echo "environment: ready in .venv" >&2
}

ensure_environment() {
    environment_is_ready && return 0
    # The subshell holds the lock until it ends; whoever waited finds the environment ready.
    (
        flock 9 || exit 1
        environment_is_ready || build_environment
    ) 9>.venv.lock
}

if ! ensure_environment; then
    echo "environment: the installation failed; its error stands above. Call again to retry, or" \
        "name a Python that has the packages of requirements.lock: MEGATRON_MUON_PYTHON=python3" \
        "bash scripts/test.sh" >&2
    exit 1
fi
export PATH="$PWD/.venv/bin:$PATH" VIRTUAL_ENV="$PWD/.venv"
# More threads than cores make ranks that share a machine slower, not faster.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
