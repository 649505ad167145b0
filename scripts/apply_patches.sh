#!/usr/bin/env bash
# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
#
# Writes the changes of patches/ into a source tree of megatron-core, all of them or none. The next
# call undoes an interrupted one:
#   bash scripts/apply_patches.sh MEGATRON_DIR            apply; again does nothing
#   bash scripts/apply_patches.sh MEGATRON_DIR --check    print what it would do, change nothing
#   bash scripts/apply_patches.sh MEGATRON_DIR --revert   revert them
# MEGATRON_DIR holds the megatron package: a Megatron-LM checkout, or a site-packages folder. Its
# content alone decides which folder of diffs is taken: the one that fits, or is there already. The
# version that the tree gives itself is only printed: tags and branches of Megatron-LM raise it early.
set -euo pipefail

PATCHES=$(cd "$(dirname "${BASH_SOURCE[0]}")/../patches" && pwd)

fail() {
    echo "apply_patches.sh: $*" >&2
    exit 1
}

[[ $# -ge 1 && $# -le 2 ]] || fail "expected MEGATRON_DIR [--check|--revert], got $# arguments."
mode=${2:---apply}
[[ "$mode" == --apply || "$mode" == --check || "$mode" == --revert ]] ||
    fail "expected --check or --revert, got $mode."
info=$1/megatron/core/package_info.py
[[ -f "$info" ]] || fail "$1: expected the folder that holds megatron/core, got none with $info."
tree=$(cd "$1" && pwd -P)
exec 9<"$tree"
flock 9

version=$(sed -nE 's/^(MAJOR|MINOR|PATCH) *= *([0-9]+).*/\2/p' "$info" | paste -sd .)

# One call of git takes all patches or writes nothing; as one input, because a later one may build
# on an earlier one. The ceiling keeps git from a repository that the tree only happens to lie in,
# whose ignored files it would skip silently. --reverse takes them last to first (git 2.30).
run_git() {
    (cd "$tree" && cat "${patches[@]}" | GIT_CEILING_DIRECTORIES=$(dirname "$tree") git apply -p1 "$@")
}

# An interrupted call leaves this: the files as they were before it.
backup=$tree/.megatron_muon_patches.backup
if [[ -d "$backup" ]]; then
    [[ "$mode" != --check ]] || fail "$tree: a call was interrupted. Call again without --check."
    cp -a "$backup/megatron" "$tree"
    mv "$backup" "$backup.done"
    echo "$tree: restored the files of an interrupted call"
fi
[[ "$mode" == --check ]] || rm -rf "$backup.new" "$backup.done"

# Sets state, folder and patches to those that fit. If none fit, sets errors to the shortest list of
# errors, which names best what is in the way.
find_patches() {
    local found candidate
    for candidate in "$PATCHES"/core_v*; do
        patches=("$candidate"/*.patch)
        folder=$candidate
        found=$(run_git --check 2>&1) && state=absent && return
        note_errors "$found"
        found=$(run_git --check --reverse 2>&1) && state=present && return
        note_errors "$found"
    done
    return 1
}

note_errors() {
    [[ -n "$errors" ]] && (($(wc -l <<<"$errors") <= $(wc -l <<<"$1"))) || errors=$1
}

errors=
find_patches ||
    fail "$tree: expected the source of a release in $(cd "$PATCHES" && echo core_v*), or that with \
all of its diffs, got neither in megatron-core $version:
$errors
Nothing was changed. Revert the other changes, or run it on a fresh tree."

change_tree() {
    mkdir "$backup.new"
    (cd "$tree" && sed -n 's|^+++ b/||p' "${patches[@]}" | sort -u | xargs cp -a --parents -t "$backup.new")
    mv "$backup.new" "$backup"
    run_git "$@"
    mv "$backup" "$backup.done"
    rm -rf "$backup.done"
}

case $mode/$state in
--apply/absent)
    change_tree
    echo "$tree: megatron-core $version, applied ${#patches[@]} patches of $folder"
    ;;
--revert/present)
    change_tree --reverse
    echo "$tree: megatron-core $version, reverted ${#patches[@]} patches of $folder"
    ;;
--check/*) echo "$tree: megatron-core $version, patches $state ($(basename "$folder"))" ;;
*) echo "$tree: patches $state already, nothing to do" ;;
esac
