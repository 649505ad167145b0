#!/usr/bin/env bash
# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
#
# Builds the documentation site into build/site; `scripts/docs.sh serve` previews it. The tools come
# from requirements-docs.lock, in an environment of their own.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."

if ! cmp --silent requirements-docs.lock .venv-docs/requirements-docs.lock; then
    "${MEGATRON_MUON_PYTHON:-python3}" -m venv --clear .venv-docs
    .venv-docs/bin/pip install --quiet --require-hashes -r requirements-docs.lock
    cp requirements-docs.lock .venv-docs
fi

# mkdocs reads one folder, which must not be that of its configuration.
rm -rf build/pages
mkdir -p build/pages/patches build/pages/tests/functional
for page in *.md LICENSE docs patches/README.md tests/functional/README.md; do
    ln -s "$PWD/$page" "build/pages/$page"
done

exec .venv-docs/bin/mkdocs "${1:-build}" --strict
