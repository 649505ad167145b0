#!/usr/bin/env bash
# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
#
# Builds a release from its tag, and checks the wheel in an empty environment:
#     bash scripts/release.sh v0.1.0 https://HOST/OWNER/REPOSITORY
# Writes dist/ (wheel and sdist) and release_notes.md (the version's section of CHANGELOG.md).
set -euo pipefail

tag=$1
url=$2
# shellcheck source=scripts/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

repository=$PWD
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/source"
git archive "$tag" | tar -x -C "$work/source"
rm -rf dist

cd "$work/source"
version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' megatron_muon/__init__.py)
date="20[0-9][0-9]-[01][0-9]-[0-3][0-9]"
if [[ "$tag" != "v$version" ]] || ! grep -q "^## $version - $date\$" CHANGELOG.md ||
    ! grep -q "^version: $version\$" CITATION.cff; then
    echo "$tag: expected the version in megatron_muon/__init__.py ($version), in CITATION.cff," \
        "and in CHANGELOG.md as a heading '## $version - YEAR-MONTH-DAY'." >&2
    exit 1
fi

# Relative links lead nowhere from a registry's page or from that of a release.
sed -E -i "s|\]\(([^):#]+[^):]*)\)|](${url}/blob/${tag}/\1)|g
    s|src=\"(docs/)|src=\"${url}/raw/${tag}/\1|" README.md CHANGELOG.md
sed -i "s|^\[project.urls\]\$|&\nRepository = \"$url\"|" pyproject.toml
# The page of a release breaks lines where its text does: one line per item.
sed "1,/^## $version - /d; /^## /,\$d" CHANGELOG.md | sed -z 's/\n  / /g' >"$repository/release_notes.md"
python -m build --no-isolation --outdir "$repository/dist"

# Outside of the repository: Python imports from the current folder first.
wheel=$(echo "$repository"/dist/*.whl)
cd "$work"
python -m venv empty
export PATH="$work/empty/bin:$PATH" PIP_DISABLE_PIP_VERSION_CHECK=1
pip install --quiet "$wheel"
torchrun --nproc-per-node 2 -m megatron_muon.check
pip install --quiet "${wheel}[megatron]"
python -c "import megatron_muon; megatron_muon.enable()"
