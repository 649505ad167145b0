# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Run every measurement that fits a machine, and report which promises of the documents hold.

    bash scripts/evidence.sh

A *piece* is a command with a time limit. Its exit status, its output (``NAME.log``) and its JSON
(``NAME.json``) make a *record*. A *promise* is a sentence of a document, judged from a record.
Files, each importing only those above it::

    machine     GPUs, versions and commit
    pieces      commands, in the order of their value
    processes   a command with a time limit, and the end of all its processes
    nodes       the first node tells the others which piece runs
    records     results of pieces in a folder, from which a later call goes on
    verdicts    functions that judge a promise from a record
    promises    sentences of the documents
    report      report.md, tables and pictures
    command     the loop over pieces, and its options
    __main__    starts it

Nothing here imports torch.
"""
