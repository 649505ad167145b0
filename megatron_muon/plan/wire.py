# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The dtypes of what travels; bytes follow from them."""

from dataclasses import dataclass
from typing import Literal

# The names of torch's dtypes: runtime/ looks them up there, and this package needs no torch.
type DTypeName = Literal["bfloat16", "float32"]

_BYTES: dict[DTypeName, int] = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True)
class Wire:
    """How rows travel to their owner, and results back.

    Args:
        gather_dtype: Of the rows. ``bfloat16`` rows are divided by the float64 norm of their block
            first: rounding them before that would change the norm, and so the result.
        scatter_dtype: Of the results. Results of Newton-Schulz in bf16 are bf16-valued, so
            ``bfloat16`` loses nothing, whatever the gather dtype. ``float32`` if a method of the
            owner changes them.
        num_norms: Norms of a block that a method needs, that of what is sent included.
    """

    gather_dtype: DTypeName
    scatter_dtype: DTypeName
    num_norms: int = 0

    @classmethod
    def of(cls, name: Literal["bf16", "fp32"], *, is_bf16: bool) -> "Wire":
        """Return the wire that ``--muon-fsdp-wire`` calls bf16 or fp32.

        Args:
            name: What the flag says, ``auto`` resolved.
            is_bf16: Whether Newton-Schulz runs in bf16.
        """
        return cls(
            "bfloat16" if name == "bf16" else "float32", "bfloat16" if is_bf16 else "float32"
        )

    @property
    def normalizes(self) -> bool:
        """Whether rows are divided by the norm of their block before they travel."""
        return self.gather_dtype == "bfloat16"

    @property
    def gather_bytes(self) -> int:
        """Bytes an element takes to its owner."""
        return _BYTES[self.gather_dtype]

    @property
    def scatter_bytes(self) -> int:
        """Bytes an element takes from its owner."""
        return _BYTES[self.scatter_dtype]

    @property
    def stack_dtype(self) -> DTypeName:
        """Dtype of stacks, which hold rows and then results: the wider of both."""
        return "float32" if "float32" in (self.gather_dtype, self.scatter_dtype) else "bfloat16"

    @property
    def stack_bytes(self) -> int:
        """Bytes an element takes in a stack."""
        return _BYTES[self.stack_dtype]

    @property
    def norm_bytes(self) -> int:
        """Bytes a block takes in the all-reduce of squared norms: a float64 each, or nothing."""
        return 8 * max(self.normalizes, self.num_norms)
