# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Megatron-LM on gloo ranks without a GPU, Megatron-FSDP included.

    from megatron_muon import cpu_ranks

    cpu_ranks.enable()  # before megatron is imported
    ...                 # torch.distributed, megatron.training.pretrain, ...

Importing the package changes nothing and imports neither torch nor megatron. The names that
``enable`` replaces are in ``table.REPLACEMENTS``, with the reasons.

Files, each importing only those above it::

    hidden           Transformer Engine, kept from being imported
    torch_cuda       ``torch.cuda`` on the CPU
    bf16_products    bf16 matrix products in fp32, if the CPU has no bf16 instructions
    collectives      what gloo lacks of NCCL
    dataset_helpers  compiles them if a checkout lacks them
    megatron_core    functions of megatron that need a GPU
    table            the one list of what is replaced, and why

Limits: the device mode acts in the thread that calls ``enable``. What megatron bound on import
(``from torch.cuda import _lazy_call``) stays bound after ``disable``: use a GPU in a new process.
"""

import atexit
import contextlib
import importlib
import logging
import os
import pkgutil
import sys
import threading
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from megatron_muon.cpu_ranks.table import Replacement

__all__ = ["disable", "enable", "end_process", "is_enabled"]

logger = logging.getLogger(__name__)

_ABSENT = object()

# Both are None unless enabled: what restores everything, and the TorchFunctionMode.
_undo: contextlib.ExitStack | None = None
_mode: Any = None
_has_imported_megatron = False


def is_enabled() -> bool:
    """Return whether CPU ranks are enabled in this process."""
    return _undo is not None


def enable(force: bool = False) -> None:
    """Make ``torch.cuda`` act on the CPU, then import Megatron and adapt it; idempotent.

    From then on, imports do not find Transformer Engine, which computes on GPUs only.
    It also turns ``torch.compile`` into the identity (``TORCHDYNAMO_DISABLE=1``, unless it is set).

    Args:
        force: Enable although this machine has a usable CUDA device.

    Raises:
        RuntimeError: A CUDA device is usable and ``force`` is not given, or megatron.core was
            imported before and has already bound names that are replaced here.
    """
    global _has_imported_megatron, _mode, _undo
    if is_enabled():
        return
    if "megatron.core" in sys.modules and not _has_imported_megatron:
        raise RuntimeError(
            "cpu_ranks.enable(): expected megatron.core not yet imported, got it imported. Call "
            "enable() first thing, or run the script through `python -m megatron_muon`."
        )
    # Read when torch compiles the first function, which Megatron's decorators do on import.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    import torch

    if not force and torch.cuda.is_available():
        raise RuntimeError(
            "cpu_ranks.enable(): expected no usable CUDA device, got "
            f"{torch.cuda.device_count()}. Run on the GPU, or set MEGATRON_MUON_DEVICE=cpu "
            "(enable(force=True)) to run on CPU ranks all the same."
        )
    from megatron_muon.cpu_ranks import bf16_products, hidden, megatron_core, table, torch_cuda

    # An error on the way restores what was replaced before it.
    with contextlib.ExitStack() as stack:
        if "torch._dynamo" in sys.modules:
            config: Any = importlib.import_module("torch._dynamo.config")
            stack.enter_context(config.patch(disable=True))
        mode = stack.enter_context(torch_cuda.CpuDeviceMode())
        stack.enter_context(hidden.without_transformer_engine())
        for row in table.TORCH_REPLACEMENTS:
            _apply(row, stack)
        # Only now: on import, megatron binds torch's names and tests what is available.
        _has_imported_megatron = True
        for row in table.MEGATRON_REPLACEMENTS:
            _apply(row, stack)
        stack.enter_context(megatron_core.without_warning_of_shared_generator())
        if not bf16_products.has_bf16_instructions():
            stack.callback(bf16_products.install()._destroy)
        atexit.register(_leave_groups)
        stack.callback(atexit.unregister, _leave_groups)
        _mode, _undo = mode, stack.pop_all()


def disable() -> None:
    """Restore every name and kernel ``enable`` replaced; does nothing when not enabled.

    ``TORCHDYNAMO_DISABLE`` stays in the environment: what was decorated on import stays as it is.

    Raises:
        RuntimeError: A ``TorchFunctionMode`` entered after ``enable`` is still active.
    """
    global _mode, _undo
    if _undo is None:
        return
    from torch.overrides import _get_current_function_mode

    current = _get_current_function_mode()
    if current is not _mode:
        raise RuntimeError(
            f"cpu_ranks.disable(): expected its own TorchFunctionMode on top, got {current}. Leave "
            "the mode entered since enable(), and call it in the thread that enabled."
        )
    _undo.close()
    _mode = _undo = None


def end_process(status: int) -> NoReturn:
    """End this process as ``sys.exit(status)`` does, without tearing the interpreter down.

    Megatron keeps references to process groups, so that gloo's threads outlive their destruction. A
    thread that lets go of a tensor needs the GIL. If it waits for the GIL when the teardown begins,
    Python ends it in a destructor of C++, which aborts the process ("terminate called without an
    active exception") after all its work is done.
    """
    # As the interpreter and multiprocessing do: other threads first, then handlers.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        # Nobody may read it any more.
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def _leave_groups() -> None:
    """Destroy the process groups. The threads of those that nothing refers to end with them.

    After an error nothing is done: peers may still wait for this rank, and destroying would wait
    for them.
    """
    import torch.distributed as dist

    if dist.is_initialized() and getattr(sys, "last_exc", None) is None:
        dist.destroy_process_group()


def _resolve(target: str) -> tuple[Any, str]:
    """Return the module or class that holds ``target``, and the last name.

    Raises:
        RuntimeError: ``target`` does not exist.
    """
    path, name = target.rsplit(".", 1)
    try:
        owner = pkgutil.resolve_name(path)
        getattr(owner, name)
    except (ImportError, AttributeError) as error:
        raise RuntimeError(
            f"{target}: expected it in the installed torch and megatron-core, got {error}. Install "
            "the versions in requirements.lock."
        ) from error
    return owner, name


def _exists(target: str) -> bool:
    """Return whether the installed release has a name."""
    try:
        pkgutil.resolve_name(target)
    except (ImportError, AttributeError):
        return False
    return True


def _apply(row: "Replacement", stack: contextlib.ExitStack) -> None:
    """Replace the name of ``row``, until ``stack`` is closed."""
    if row.is_optional and not _exists(row.target):
        return
    owner, name = _resolve(row.target)
    # The raw entry, not getattr: a staticmethod must go back as one, an inherited name must vanish.
    raw = vars(owner).get(name, _ABSENT)
    value = row.replacement(getattr(owner, name)) if row.wraps else row.replacement
    if raw is _ABSENT:
        stack.callback(delattr, owner, name)
    else:
        stack.callback(setattr, owner, name, raw)
    setattr(owner, name, staticmethod(value) if isinstance(raw, staticmethod) else value)
