# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Asynchronous saves: training goes on while a thread writes a copy in CPU memory.

Upstream asks a strategy for the classes and functions of such a save. Both of its strategies fail
for ``fsdp_dtensor``, or need a package; ``write_by_thread()`` is a third one::

    save_checkpoint                  upstream's; completes an earlier save first
        plan_and_copy                ranks plan a save and copy what they write, together
        _Thread                      writes files, without collectives or CUDA
    maybe_finalize_async_save        upstream's, in each iteration; once all ranks have written:
        AsyncWriter.complete         table of contents, together
        tracker                      upstream's

A checkpoint becomes visible as after a synchronous save: its table of contents is renamed, and then
the tracker.
"""

import threading
import time
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing.strategies import async_utils
from torch.distributed.checkpoint.utils import _DistWrapper

from megatron_muon.mcore.checkpoint_save import ReplacingFileSystemWriter
from megatron_muon.mcore.torch_fsdp2 import is_ours


class AsyncWriter(ReplacingFileSystemWriter):
    """Copy what a rank saves, as a writer of ``dcp.save``; write and complete it in later calls.

    Memory: the bytes that the rank saves, in CPU memory, until they are a checkpoint. For CUDA
        tensors it is pinned; torch keeps it for the next save.
    """

    def __init__(self, path: str, **_: Any) -> None:
        # Copying ahead would use CUDA in the thread, and device 0 on every rank.
        super().__init__(path, per_thread_copy_ahead=0)
        self._results: Future[list[Any]] = Future()

    def write_data(self, plan: Any, planner: Any) -> torch.futures.Future[list[Any]]:
        """Copy the items of a plan, and write nothing."""
        copies = {item.index: _copied(planner.resolve_data(item)) for item in plan.items}
        torch.cuda.synchronize()
        self._arguments: Any = plan, SimpleNamespace(resolve_data=lambda item: copies[item.index])
        nothing: torch.futures.Future[list[Any]] = torch.futures.Future()
        nothing.set_result([])
        return nothing

    def finish(self, metadata: Any, results: Any) -> None:
        """Keep the table of contents until all ranks have written."""
        self._metadata = metadata

    def get_save_function_and_args(self) -> tuple[Any, None, list[Any]]:
        """Return the function of the thread; upstream calls this."""
        return self.write, None, []

    def write(self) -> None:
        """Write the copies, in a thread."""
        try:
            self._results.set_result(super().write_data(*self._arguments).value())
        except BaseException as error:  # complete() raises it on all ranks
            self._results.set_exception(error)

    def complete(self) -> None:
        """Make the written files a checkpoint.

        Raises:
            CheckpointException: On all ranks, if one of them could not write.

        Communication: a gather and a broadcast of objects over all ranks.
        """
        finish, ranks = super().finish, _DistWrapper(None, use_dist=True, coordinator_rank=0)
        ranks.all_reduce("write", self._results.result, lambda r: finish(self._metadata, r))


def _copied(value: Any) -> Any:
    # An object is serialized already.
    if not isinstance(value, torch.Tensor):
        return value
    copy = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
    return copy.copy_(value.detach(), non_blocking=True)


def plan_and_copy(
    state_dict: dict[str, Any], writer: AsyncWriter, *_: Any, planner: Any, **__: Any
) -> tuple[AsyncWriter]:
    """Plan a save and copy what this rank writes.

    Communication: as a synchronous ``dcp.save``, which raises on all ranks if one of them fails.
    """
    dcp.save(state_dict, storage_writer=writer, planner=planner)
    return (writer,)


class _Thread(async_utils.TemporalAsyncCaller):
    """Run the function of a request in a thread, in place of a forked process."""

    def schedule_async_call(self, async_req: Any) -> None:
        """Start the thread; a rank that fails ends without waiting for it."""
        self.start_time = time.time()
        target, args = async_req.async_fn, async_req.async_fn_args
        self.process = threading.Thread(target=target, args=args, daemon=True)
        self.process.start()


class _Queue(async_utils.AsyncCallsQueue):
    """Saves in flight; all ranks agree by an all-reduce of an int32 that they have written."""

    def _get_async_caller(self) -> _Thread:
        return _Thread()


def write_by_thread(original: Any, strategy: str = "nvrx", module: str | None = None) -> Any:
    """Wrap ``get_async_strategy`` for Megatron-FSDP, whose checkpoints upstream fails to save.

    Upstream passes the arguments of one strategy to a function of the other, a TypeError.
    """
    from megatron.training.global_vars import get_args

    if module or not is_ours(get_args()):
        return original(strategy, module)
    return strategy, {
        "AsyncCallsQueue": _Queue,
        "AsyncRequest": async_utils.AsyncRequest,
        "FileSystemWriterAsync": AsyncWriter,
        "save_state_dict_async_plan": plan_and_copy,
        "save_state_dict_async_finalize": AsyncWriter.complete,
    }
