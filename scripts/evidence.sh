#!/usr/bin/env bash
# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
#
# Runs all measurements that fit this machine, and writes a report:
# bash scripts/evidence.sh [--minutes N] [--out DIR] [--only NAME ...] [--peers DIR].
# docs/gpus.md describes it.
set -euo pipefail

# Of the caller: where --out and --peers begin.
folder=$PWD
# MEGATRON_MUON_PYTHON names another Python than that of .venv, which is then not built.
if [[ -n "${MEGATRON_MUON_PYTHON:-}" ]]; then
    cd "$(dirname "${BASH_SOURCE[0]}")/.."
else
    # shellcheck source=scripts/environment.sh
    source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
fi
root=$PWD
python=${MEGATRON_MUON_PYTHON:-$root/.venv/bin/python}
cd "$folder"
exec "$python" "$root/scripts/evidence" "$@"
