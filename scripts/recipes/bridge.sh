#!/usr/bin/env bash
# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
#
# Installs Megatron-Bridge into the folder .bridge, for gloo ranks without a GPU. It uses the
# packages of .venv, and comes before them by PYTHONPATH=.bridge.
set -euo pipefail

# shellcheck source=scripts/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/../environment.sh"

lock=scripts/recipes/requirements-bridge.lock
if ! cmp --silent "$lock" .bridge/requirements-bridge.lock; then
    rm -rf .bridge
    find_uv
    "${UV[@]}" pip install --quiet --python .venv/bin/python --target .bridge --no-deps \
        --require-hashes -r "$lock"
    cp "$lock" .bridge
fi
