# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Byte-level Megatron data set (``.bin`` and ``.idx``) of the sources of Python's standard library.

A token is a byte. ``END_OF_DOCUMENT`` follows a document: a file, or a part of a large file.
"""

import hashlib
import logging
import os
import random
import sysconfig
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np

END_OF_DOCUMENT = 256
VOCAB_SIZE = 257
# Megatron splits train and validation by whole documents: neither may end up with one huge one.
MIN_DOCUMENTS = 40
# Tests, generated tables, and what a distribution adds or leaves out: not text worth learning.
SKIPPED_FOLDERS = frozenset(
    "__pycache__ dist-packages encodings ensurepip idlelib lib2to3 pydoc_data site-packages test "
    "tests turtledemo".split()
)


def standard_library_files() -> list[Path]:
    """Return the ``.py`` sources of the running interpreter's standard library, sorted by path."""
    root = Path(sysconfig.get_paths()["stdlib"])
    relative = (path.relative_to(root) for path in root.rglob("*.py"))
    # _sysconfigdata holds this machine's paths and compiler flags.
    kept = [
        path
        for path in relative
        if not SKIPPED_FOLDERS & set(path.parts) and not path.name.startswith("_sysconfigdata")
    ]
    return [root / path for path in sorted(kept, key=lambda path: path.as_posix())]


def read_documents(files: Sequence[Path], max_bytes: int, seed: int = 0) -> list[bytes]:
    """Return the files' bytes in an order shuffled by ``seed``, ``max_bytes`` at most.

    Training takes the first documents and validation the last: in the order of names, the two would
    hold different kinds of text.
    """
    files = list(files)
    random.Random(seed).shuffle(files)
    contents, total = [], 0
    for file in files:
        content = file.read_bytes()[: max_bytes - total]
        if content:
            contents.append(content)
            total += len(content)
    limit = -(-total // MIN_DOCUMENTS)
    return [
        content[start : start + limit]
        for content in contents
        for start in range(0, len(content), limit)
    ]


def write_dataset(documents: Sequence[bytes], prefix: Path) -> None:
    """Write the documents, each with its end token, as ``prefix.bin`` and ``prefix.idx``."""
    with warnings.catch_warnings():
        # Of Transformer Engine, Apex and CUDA, which a data set does not need.
        warnings.simplefilter("ignore")
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    prefix.parent.mkdir(parents=True, exist_ok=True)
    # Written under another name first: an interrupted call leaves nothing that looks complete.
    partial = prefix.with_name(f"{prefix.name}.{os.getpid()}.partial")
    partial_bin, partial_idx = Path(f"{partial}.bin"), Path(f"{partial}.idx")
    builder = IndexedDatasetBuilder(str(partial_bin), dtype=np.uint16)
    for document in documents:
        tokens = np.empty(len(document) + 1, dtype=np.uint16)
        tokens[:-1] = np.frombuffer(document, dtype=np.uint8)
        tokens[-1] = END_OF_DOCUMENT
        builder.add_document(tokens, [len(tokens)])
    builder.finalize(str(partial_idx))
    partial_bin.rename(f"{prefix}.bin")
    partial_idx.rename(f"{prefix}.idx")


def build_byte_dataset(files: Sequence[Path], folder: Path, max_bytes: int) -> Path:
    """Build the data set of ``files`` in ``folder``, or find it there, and return its prefix.

    Its name holds a hash of its content: Megatron keeps an index of the samples next to it and
    finds that again by name.
    """
    documents = read_documents(files, max_bytes)
    digest = hashlib.sha256()
    for document in documents:
        digest.update(len(document).to_bytes(8, "little") + document)
    prefix = folder / f"bytes-{digest.hexdigest()[:12]}"
    if not Path(f"{prefix}.idx").exists():
        write_dataset(documents, prefix)
    return prefix
