# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs of Newton-Schulz: one launch a stack in place of fifteen and more.

Source: torch 2.15, torch/cuda/graphs.py.
"""

from collections.abc import Callable

import torch


class CudaGraphs:
    """Captures functions of this rank, which then replay one after the other.

    Args:
        device: A GPU.

    Raises:
        ValueError: The device is not a GPU.

    Memory: what the function that needs most allocates, kept as long as this object: graphs share
        one pool. No tensor of a function outlives it, so they may replay in any order.
    """

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise ValueError(
                f"exchange.cuda_graphs: expected a GPU, got {device.type} ranks. Leave it out."
            )
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, stack: torch.Tensor, function: Callable[[], None]) -> Callable[[], None]:
        """Capture a function, and compare a replay with a call of it.

        Args:
            stack: What the function reads and writes, at this address for good. Its values are
                overwritten.
            function: Launches the same kernels in every call, and never waits for the device.

        Returns:
            Does what the function does, in one launch.

        Raises:
            RuntimeError: The function cannot be captured, or a replay has other bits than a call.
        """
        # Its own generator: Megatron's must be in the same state on tensor-parallel ranks.
        drawn = torch.empty_like(stack)
        drawn.normal_(generator=torch.Generator(stack.device).manual_seed(0))
        drawn /= drawn.float().norm()
        # Kernels are loaded and tuned in a first call, which a capture cannot do.
        stack.copy_(drawn)
        function()
        expected = stack.clone()
        graph = torch.cuda.CUDAGraph()
        # Threads of NCCL may ask for events meanwhile, which a global capture forbids.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            function()
        stack.copy_(drawn)
        graph.replay()
        if not torch.equal(stack, expected):
            raise RuntimeError(
                "exchange.cuda_graphs: expected a CUDA graph of Newton-Schulz to have the bits of "
                f"its launches, got others for a stack of {tuple(stack.shape)}. Leave it out, and "
                "report it with the versions of torch and CUDA."
            )
        return graph.replay
