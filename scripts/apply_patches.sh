#!/usr/bin/env bash
# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
#
# Writes the changes of patches/ into a source tree of megatron-core, all of them or none. The next
# call undoes an interrupted one:
#   bash scripts/apply_patches.sh MEGATRON_DIR            apply; again does nothing
#   bash scripts/apply_patches.sh MEGATRON_DIR --check    print what it would do, change nothing
#   bash scripts/apply_patches.sh MEGATRON_DIR --revert   revert them
# MEGATRON_DIR holds the megatron package: a Megatron-LM checkout, or a site-packages folder.
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
folder=$PATCHES/core_v$version
[[ -d "$folder" ]] ||
    fail "$tree: expected a release in $(cd "$PATCHES" && echo core_v*), got version $version."
patches=("$folder"/*.patch)

# One call of git takes all patches or writes nothing; as one input, because a later one may build
# on an earlier one. The ceiling keeps git from a repository that the tree only happens to lie in,
# whose ignored files it would skip without a word. --reverse takes them last to first (git 2.30).
run_git() {
    (cd "$tree" && cat "${patches[@]}" | GIT_CEILING_DIRECTORIES=$(dirname "$tree") git apply -p1 "$@")
}

# An interrupted call leaves this: the files as they were before it.
backup=$tree/.megatron_muon_patches.backup
if [[ -d "$backup" ]]; then
    [[ "$mode" != --check ]] || fail "$tree: a call was cut short. Call again without --check."
    cp -a "$backup/megatron" "$tree"
    mv "$backup" "$backup.done"
    echo "$tree: put back the files of a call that was cut short"
fi
[[ "$mode" == --check ]] || rm -rf "$backup.new" "$backup.done"

if errors=$(run_git --check 2>&1); then
    state=absent
elif missing=$(run_git --check --reverse 2>&1); then
    state=present
else
    # The shorter list says what is amiss: what stands in the way of all, or what is not there.
    (($(wc -l <<<"$missing") < $(wc -l <<<"$errors"))) && errors=$missing
    fail "$tree: expected megatron-core $version as released, or with all of $folder, got neither:
$errors
Nothing was changed. Take the other changes back, or run it on a fresh tree."
fi

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
    echo "$tree: applied ${#patches[@]} patches of $folder"
    ;;
--revert/present)
    change_tree --reverse
    echo "$tree: took back ${#patches[@]} patches of $folder"
    ;;
--check/*) echo "$tree: megatron-core $version, patches $state" ;;
*) echo "$tree: patches $state already, nothing to do" ;;
esac
