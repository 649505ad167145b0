#!/usr/bin/env bash
# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
#
# Builds the environment, then trains a small GPT with Muon and with Adam under Megatron-FSDP and
# compares them: bash scripts/quickstart.sh [options of scripts/quickstart.py, see --help].
set -euo pipefail

echo "quickstart: trains a small GPT with Muon and with Adam on two CPU ranks, in about two minutes" >&2
caller_folder=$PWD
# shellcheck source=scripts/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

# --output stays relative to where the caller stands.
repository=$PWD
cd "$caller_folder"
exec "$repository/.venv/bin/python" "$repository/scripts/quickstart.py" "$@"
