#!/usr/bin/env bash
# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
#
# Runs the tests, building the environment first: bash scripts/test.sh [pytest arguments].
# Paths are relative to the repository root. Without one, all of tests/unit_tests runs, in several
# processes: on two cores in two, since the ranks of one test leave a quarter of them idle.
set -euo pipefail

# shellcheck source=scripts/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

has_path=false
for argument in "$@"; do
    # A node id (file.py::test) counts; the value of an option such as -k is no file.
    [[ -e "${argument%%::*}" ]] && has_path=true
done
if ! $has_path; then
    # A test starts two to four ranks. Tests that share a reference run stand together: a process
    # takes over others (worksteal) only when its own are done.
    processes=$(($(nproc) / 4))
    ((processes = processes < 2 ? 2 : processes > 8 ? 8 : processes))
    set -- tests/unit_tests --numprocesses "$processes" --dist worksteal "$@"
fi

exec .venv/bin/python -m pytest "$@"
