#!/usr/bin/env bash
# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
#
# Runs functional test cases through the launcher and judges them:
#   bash tests/functional/run.sh [CASE...] [--list] [--output FOLDER] [--platform cpu|dgx_h100]
set -euo pipefail

CALLED_FROM=$PWD
# shellcheck source=scripts/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/../../scripts/environment.sh"
PYTHON=$PWD/.venv/bin/python
RUNNER=$PWD/tests/functional/run.py

cd "$CALLED_FROM"
exec "$PYTHON" "$RUNNER" "$@"
