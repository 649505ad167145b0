#!/usr/bin/env bash
# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
#
# Puts the functional recipes and cases where a Megatron-LM checkout looks for its own:
#   bash scripts/link_recipes.sh MEGATRON_DIR            link recipes, copy cases; again updates
#   bash scripts/link_recipes.sh MEGATRON_DIR --remove   remove them
# Recipes are links in tests/test_utils/local_recipes, which Megatron's recipe parser reads. Cases
# are copies: Megatron's run_ci_test.sh edits model_config.yaml in place.
set -euo pipefail

FUNCTIONAL=$(cd "$(dirname "${BASH_SOURCE[0]}")/../tests/functional" && pwd)
MARK=.from_megatron_muon

fail() {
    echo "link_recipes.sh: $*" >&2
    exit 1
}

[[ $# -ge 1 && $# -le 2 && "${2:---remove}" == --remove ]] ||
    fail "expected MEGATRON_DIR [--remove], got: $*"
[[ -d "$1/tests/test_utils" && -d "$1/tests/functional_tests" ]] ||
    fail "$1: expected a Megatron-LM checkout with tests/test_utils and tests/functional_tests."
recipes=$(cd "$1/tests/test_utils" && pwd)/local_recipes
cases=$(cd "$1/tests/functional_tests" && pwd)/test_cases

# Look at every target first: nothing of Megatron's own is replaced.
for source in "$FUNCTIONAL"/recipes/*.yaml; do
    target=$recipes/$(basename "$source")
    [[ ! -e "$target" && ! -L "$target" ]] || [[ "$(readlink "$target")" == */tests/functional/recipes/* ]] ||
        fail "$target: expected a link of ours or nothing."
done
for source in "$FUNCTIONAL"/test_cases/*/*/; do
    target=$cases/${source#"$FUNCTIONAL"/test_cases/}
    [[ ! -e "$target" || -e "$target$MARK" ]] || fail "$target: expected a copy of ours or nothing."
done

if [[ $# == 2 ]]; then
    for source in "$FUNCTIONAL"/recipes/*.yaml; do
        rm -f "$recipes/$(basename "$source")"
    done
    for source in "$FUNCTIONAL"/test_cases/*/*/; do
        target=$cases/${source#"$FUNCTIONAL"/test_cases/}
        [[ -d "$target" ]] || continue
        for file in "$source"*; do
            rm -f "$target$(basename "$file")"
        done
        rm -f "$target$MARK"
        # What was put there since, golden values above all, stays.
        rmdir --ignore-fail-on-non-empty "$target"
    done
    echo "$1: recipes and cases are taken out"
    exit
fi

mkdir -p "$recipes"
for source in "$FUNCTIONAL"/recipes/*.yaml; do
    ln -sfn "$source" "$recipes/"
    echo "$recipes/$(basename "$source")"
done
for source in "$FUNCTIONAL"/test_cases/*/*/; do
    target=$cases/${source#"$FUNCTIONAL"/test_cases/}
    mkdir -p "$target"
    touch "$target$MARK"
    cp "$source"* "$target"
    echo "$target"
done
