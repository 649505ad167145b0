# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Triton's interpreter, mended so that it multiplies bf16.

The interpreter of Triton 3.6.0 keeps bf16 in 16-bit integers. It multiplies these integers as such,
cuts fp32 off where a GPU rounds it to bf16, and fails where numpy 2 no longer turns an array of one
element into an integer.
"""

from typing import Any

import numpy as np
import torch


def mend() -> None:
    """Replace three functions of the interpreter.

    Call it before the first kernel runs, with ``TRITON_INTERPRET=1`` in the environment from before
    Triton is imported.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    multiply = interpreter.InterpreterBuilder.create_dot
    cast = interpreter.InterpreterBuilder.cast_impl
    patch_tensor = interpreter._patch_lang_tensor

    def create_dot(self: Any, a: Any, b: Any, *others: Any) -> Any:
        """Multiply; bf16 in fp32."""
        if a.dtype == tl.bfloat16:
            a, b = (interpreter.TensorHandle(_to_fp32(each.data), tl.float32) for each in (a, b))
        return multiply(self, a, b, *others)

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        """Convert; fp32 to the nearest bf16."""
        if (src.dtype.scalar, dst_type.scalar) != (tl.float32, tl.bfloat16):
            return cast(self, src, dst_type)
        rounded = torch.from_numpy(np.ascontiguousarray(src.data)).bfloat16()
        return interpreter.TensorHandle(rounded.view(torch.uint16).numpy(), tl.bfloat16)

    def patch_lang_tensor(tensor: Any, scope: Any) -> None:
        """Patch as the interpreter does, but for the conversion to an integer."""
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter.InterpreterBuilder.create_dot = create_dot
    interpreter.InterpreterBuilder.cast_impl = cast_impl
    interpreter._patch_lang_tensor = patch_lang_tensor


def _to_fp32(bits: np.ndarray) -> np.ndarray:
    return torch.from_numpy(np.ascontiguousarray(bits)).view(torch.bfloat16).float().numpy()
