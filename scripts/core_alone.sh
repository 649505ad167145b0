#!/usr/bin/env bash
# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
#
# Runs the tests of the core in a copy of the tree without mcore, the launcher and the tools:
# bash scripts/core_alone.sh [pytest arguments]. Without megatron's help the core must work.
set -euo pipefail

# shellcheck source=scripts/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
cp -r megatron_muon tests scripts benchmarks docs pyproject.toml "$copy"
python=$PWD/.venv/bin/python
cd "$copy"
core=(newton_schulz plan runtime rows step fsdp2)
for path in megatron_muon/* megatron_muon/plan/__main__.py; do
    name=$(basename "$path")
    [[ " ${core[*]} __init__.py py.typed " == *" $name "* ]] || rm -r "$path"
done
# Tests marked "megatron" compare with it.
PYTHONPATH=$copy "$python" -m pytest -p no:cacheprovider -m "not megatron and not slow" \
    "${core[@]/#/tests/unit_tests/}" "$@"
