#!/usr/bin/env bash
# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
#
# Runs the tests, building the environment first: bash scripts/test.sh [pytest arguments].
# Paths are relative to the repository root; without one, all of tests/unit_tests runs, file by file
# in several processes where pytest-xdist is installed.
set -euo pipefail

# MEGATRON_MUON_PYTHON names another Python than that of .venv, which is then not built.
if [[ -n "${MEGATRON_MUON_PYTHON:-}" ]]; then
    cd "$(dirname "${BASH_SOURCE[0]}")/.."
    export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
    missing=$("$MEGATRON_MUON_PYTHON" -c 'from importlib.util import find_spec
names = ("torch", "emerging_optimizers", "megatron", "einops", "pytest", "hypothesis")
print(*(name for name in names if find_spec(name) is None))')
    if [[ -n "$missing" ]]; then
        echo "tests: $MEGATRON_MUON_PYTHON has no $missing; what needs it fails or is skipped" >&2
    fi
else
    # shellcheck source=scripts/environment.sh
    source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
fi

# Dozens of processes import torch and megatron, and would compile their sources anew.
unset PYTHONDONTWRITEBYTECODE

has_path=false
for argument in "$@"; do
    # A node id (file.py::test) counts; the value of an option such as -k is no file.
    [[ -e "${argument%%::*}" ]] && has_path=true
done
python=${MEGATRON_MUON_PYTHON:-.venv/bin/python}
if ! $has_path; then
    if "$python" -c "import xdist" 2>/dev/null; then
        set -- --numprocesses auto --dist loadfile "$@"
    fi
    set -- tests/unit_tests "$@"
fi

exec "$python" -m pytest "$@"
