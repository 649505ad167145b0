# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""CUDA tensors without a GPU: torch's FakeTensors, which have shapes, dtypes and devices alone.

An operation between two devices raises, as on a GPU. Flags that the host reads are not set; numbers
are 1.
"""

import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_PACKAGE = "megatron_muon"


class Allocation(NamedTuple):
    """Memory that an operation took on the device.

    Args:
        num_bytes: Of the new storage.
        file: File of the package that asked for it, or an empty string.
    """

    num_bytes: int
    file: str


class Recorder(TorchDispatchMode):
    """Records the allocations on CUDA devices while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.allocations: list[Allocation] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation; list the storages that it returns and was not given."""
        if func is torch.ops.aten._local_scalar_dense.default:
            dtype = args[0].dtype
            return 1.0 if dtype.is_floating_point else 0
        old = {each.untyped_storage()._cdata for each in _tensors((args, kwargs))}
        out = func(*args, **(kwargs or {}))
        new = {
            each.untyped_storage()._cdata: each.untyped_storage().nbytes()
            for each in _tensors(out)
            if each.device.type == "cuda" and each.untyped_storage()._cdata not in old
        }
        if func is torch.ops.aten.resize_.default:
            new = {0: args[0].untyped_storage().nbytes()}
        self.allocations += [Allocation(size, _file()) for size in new.values()]
        return out


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [each for each in tree_leaves(tree) if isinstance(each, torch.Tensor)]


def _file() -> str:
    """Return the file of the package that runs, innermost first."""
    frame = sys._getframe(2)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if _PACKAGE in path.parts:
            return str(Path(*path.parts[path.parts.index(_PACKAGE) + 1 :]))
        frame = frame.f_back  # type: ignore[assignment]
    return ""


class _Stream:
    def synchronize(self) -> None:
        """Wait for nothing."""

    wait_stream = record_event = wait_event = lambda self, *args: self


@contextmanager
def fake_cuda() -> Iterator[Recorder]:
    """Let tensors on "cuda" be fake ones; rows are moved by torch instead of the kernel."""
    from megatron_muon.fsdp2 import muon
    from megatron_muon.newton_schulz.settings import coefficients_of
    from megatron_muon.runtime import row_moves

    # emerging-optimizers is asked for numbers, once per process.
    coefficients_of(5, "quintic")
    recorder = Recorder()
    empty, zeros = torch.empty, torch.zeros
    replaced = [
        (torch.cuda, "Stream", lambda *args: _Stream()),
        (torch.cuda, "current_stream", lambda *args: _Stream()),
        (torch.cuda, "current_device", lambda: 0),
        (torch.cuda, "mem_get_info", lambda *args: (70 << 30, 80 << 30)),
        (torch.cuda, "get_device_capability", lambda *args: (9, 0)),
        (torch.Tensor, "tolist", lambda self: _zeros(self.shape)),
        (torch.Tensor, "pin_memory", lambda self, *args: self),
        (torch, "empty", lambda *args, pin_memory=False, **kwargs: empty(*args, **kwargs)),
        (torch, "zeros", lambda *args, pin_memory=False, **kwargs: zeros(*args, **kwargs)),
        # It computes numbers too.
        (muon, "dependency_problems", list),
        (row_moves, "uses_kernel", lambda device: False),
    ]
    with ExitStack() as stack:
        for owner, name, value in replaced:
            stack.enter_context(mock.patch.object(owner, name, value))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        yield stack.enter_context(recorder)


def _zeros(shape: torch.Size) -> Any:
    return [_zeros(shape[1:]) for _ in range(shape[0])] if shape else 0
