# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Megatron-LM on gloo ranks without a GPU, for the quickstart, the tests and the benchmarks.

    torchrun --nproc-per-node 2 scripts/cpu_ranks SCRIPT [ARGS...]

runs a script as ``-m megatron_muon`` does on GPUs. A script that starts by itself calls
``enable()`` before it imports megatron. Files, each importing only those above it::

    torch_cuda     torch.cuda on the CPU, and what gloo lacks of NCCL
    bf16_products  bf16 matrix products in fp32, if the CPU has no bf16 instructions
    megatron_core  functions of megatron that need a GPU
    __main__       the launcher of megatron_muon on CPU ranks

Replaced names stay replaced in the process, and the device mode acts in the thread that calls
``enable``.
"""

import atexit
import os
import pkgutil
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

_is_enabled = False
# Keeps the kernels of bf16_products from being restored.
_library: Any = None


def enable() -> None:
    """Let ``torch.cuda`` act on the CPU, then import Megatron and adapt it; idempotent.

    ``torch.compile`` becomes the identity (``TORCHDYNAMO_DISABLE=1``, unless it is set), and
    Transformer Engine, whose kernels need a GPU, is not found by imports.

    Raises:
        RuntimeError: megatron.core was imported before, and has bound names that are replaced here.
    """
    global _is_enabled, _library
    if _is_enabled:
        return
    if "megatron.core" in sys.modules:
        raise RuntimeError(
            "cpu_ranks.enable(): expected megatron.core not yet imported, got it imported. Call "
            "enable() first, or run the script by `torchrun scripts/cpu_ranks`."
        )
    # Read when torch compiles the first function, which Megatron's decorators do on import.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    # None is what Python documents for a module that shall not be found.
    for package in ("transformer_engine", "transformer_engine_torch"):
        sys.modules[package] = None  # type: ignore[assignment]
    from cpu_ranks import bf16_products, megatron_core, torch_cuda

    torch_cuda.CpuDeviceMode().__enter__()
    replace(torch_cuda.VALUES)
    wrap(torch_cuda.WRAPPERS)
    wrap(torch_cuda.COLLECTIVES)
    # Only now: on import, megatron binds torch's names and tests what is available.
    replace(megatron_core.VALUES)
    wrap(megatron_core.WRAPPERS)
    wrap(megatron_core.WRAPPERS_OF_V2, are_optional=True)
    wrap(megatron_core.WRAPPERS_OF_TRAINING)
    megatron_core.silence_warning_of_shared_generator()
    if not bf16_products.has_bf16_instructions():
        _library = bf16_products.install()
    atexit.register(_leave_groups)
    _is_enabled = True


def replace(values: Mapping[str, Any]) -> None:
    """Bind dotted names, module first, to other values."""
    wrap({target: lambda _, value=value: value for target, value in values.items()})


def wrap(wrappers: Mapping[str, Callable[[Any], Any]], are_optional: bool = False) -> None:
    """Bind dotted names to what a function makes of their values.

    Args:
        wrappers: Names, module first, to functions.
        are_optional: Skip names that the installed release lacks.
    """
    for target, wrapper in wrappers.items():
        path, name = target.rsplit(".", 1)
        try:
            owner = pkgutil.resolve_name(path)
            value = getattr(owner, name)
        except (ImportError, AttributeError):
            if are_optional:
                continue
            raise
        setattr(owner, name, wrapper(value))


def end_process(status: int) -> NoReturn:
    """End this process as ``sys.exit(status)`` does, without tearing the interpreter down.

    Megatron keeps references to process groups, so that gloo's threads outlive their destruction. A
    thread that releases a tensor needs the GIL. If it waits for the GIL when the teardown begins,
    Python ends it in a destructor of C++, which aborts the process ("terminate called without an
    active exception") after all its work is done.
    """
    # As the interpreter and multiprocessing do: other threads first, then handlers.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)


def _leave_groups() -> None:
    """Destroy the process groups, whose threads otherwise outlive the interpreter.

    After an error nothing is done: peers may still wait for this rank, and destroying would wait
    for them.
    """
    import torch.distributed as dist

    if dist.is_initialized() and getattr(sys, "last_exc", None) is None:
        dist.destroy_process_group()
