# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Products of bf16 matrices in fp32, for CPUs without instructions for bf16.

There torch multiplies bf16 element by element: 1.3 GFLOP/s on an AMD EPYC 7003 (Zen 3), and fp32
at 70; the quickstart took ten minutes. Instead the factors are converted to fp32, multiplied by the
fp32 kernel, and the result is rounded once. Kernels for bf16 also sum in fp32 and round once, but
in another order: a few elements differ in the last bit, and by more if a sum nearly cancels.

The kernels are replaced in torch's dispatcher, below autograd. That includes the products of a
backward pass, of ``torch.matmul``, ``torch.einsum`` and ``torch.nn.functional.linear``, in every
thread. A ``TorchFunctionMode`` would not see a backward pass; a ``TorchDispatchMode`` would call
Python for every operator. Products with a vector (``torch.mv``) and
``scaled_dot_product_attention``, which has a kernel of its own, are not replaced.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch

# Names of torch's operators, with their overloads. torch.matmul and its relatives end in these.
OPERATORS = (
    *("mm", "mm.out", "bmm", "bmm.out"),
    *("addmm", "addmm.out", "addmm_", "baddbmm", "baddbmm.out", "baddbmm_"),
)


def has_bf16_instructions() -> bool:
    """Return whether oneDNN, torch's library for bf16 products, has a kernel for this CPU.

    The CPU's flags alone do not tell which of them oneDNN's kernels need, and
    ``ONEDNN_MAX_CPU_ISA`` may withhold some. A torch built without oneDNN has no such kernel.
    """
    try:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    except AttributeError:
        return False


def install() -> torch.library.Library:
    """Replace the CPU kernels of ``OPERATORS``, whatever the CPU.

    Returns:
        The library that holds the replacements. Its ``_destroy()``, or its garbage collection,
        restores the kernels.
    """
    kernels = {name: torch.library.get_kernel(f"aten::{name}", "CPU") for name in OPERATORS}
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        # torch warns that a kernel is overridden, which is intended.
        warnings.simplefilter("ignore", UserWarning)
        for name, kernel in kernels.items():
            function = _in_fp32(kernel, kernels[name.removesuffix(".out").removesuffix("_")])
            library.impl(name, function, "CPU", with_keyset=True)
    return library


def _in_fp32(original: Any, product: Any) -> Callable[..., torch.Tensor]:
    """Return the kernel that computes bf16 by ``product`` in fp32, other dtypes by ``original``.

    Args:
        original: Kernel of the operator.
        product: Kernel of the overload that returns a new tensor.
    """

    def kernel(
        keys: torch.DispatchKeySet,
        *args: torch.Tensor,
        out: torch.Tensor | None = None,
        **scalars: float,
    ) -> torch.Tensor:
        """Compute the product in fp32, and round the result to bf16."""
        target = args[0] if original is not product and out is None else out
        written = () if out is None else (out,)
        if any(tensor.dtype is not torch.bfloat16 for tensor in (*args, *written)):
            options: dict[str, Any] = scalars if out is None else {**scalars, "out": out}
            return original.call_boxed(keys, *args, **options)
        # A Newton-Schulz step passes one matrix three times.
        in_fp32 = {id(tensor): tensor.float() for tensor in args}
        result = product.call_boxed(keys, *(in_fp32[id(tensor)] for tensor in args), **scalars)
        if target is None:
            return result.bfloat16()
        if target.shape != result.shape:
            target.resize_(result.shape)
        return target.copy_(result)

    return kernel
