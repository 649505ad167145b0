# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Transformer Engine's Newton-Schulz of split matrices: an example of a backend of others.

It calls cuSOLVERMp: one call runs all steps of a matrix whose longer side is split equally over
several ranks. It communicates by itself, over the NCCL communicator of the owners. Not measured.

Source: Transformer Engine 2.19, transformer_engine/pytorch/newton_schulz.py. Its later
``newton_schulz_tp`` makes the same call for a matrix that is split along its longer side.
"""

from typing import TYPE_CHECKING, Any

from megatron_muon.newton_schulz.backend import Standard, gpu_problems, normalize
from megatron_muon.newton_schulz.settings import Call, NewtonSchulzSettings

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

# Earlier ones could use a communicator that NCCL had not created yet. Source: Transformer Engine,
# pull request 3240.
_VERSION = (2, 19)


class TransformerEngine(Standard):
    """The standard steps of a split matrix in one call.

    Its work is counted as that of :class:`Standard`, as cuSOLVERMp's is not published.
    """

    name = "transformer_engine"
    reference = Standard.name
    is_batched = False
    communicates = True

    def __init__(self) -> None:
        # cuSOLVERMp's contexts by group of owners. Creating one is expensive: they stay as long as
        # the process.
        self._contexts: dict[dist.ProcessGroup, Any] = {}

    def takes(self, n: int, m: int, num_parts: int = 1) -> bool:
        """Return whether the matrix is split, and all owners have equally many rows or columns."""
        return num_parts > 1 and m % num_parts == 0

    def problems(self, settings: NewtonSchulzSettings, device: "torch.device") -> list[str]:
        """Check for a GPU, and Transformer Engine."""
        found = []
        try:
            import transformer_engine
            from transformer_engine.pytorch.newton_schulz import newton_schulz  # noqa: F401

            version = transformer_engine.__version__
            if tuple(int(part) for part in version.split(".")[:2]) < _VERSION:
                found.append(f"expected Transformer Engine 2.19 or later, got {version}")
        # Its libraries fail to load with various errors.
        except Exception as error:
            found.append(
                f"expected Transformer Engine 2.19 or later, got {type(error).__name__}: {error}"
            )
        return found + gpu_problems(device)

    def connect(self, parts_group: "dist.ProcessGroup") -> None:
        """Create the context of a group of owners.

        Raises:
            RuntimeError: Transformer Engine was built without cuSOLVERMp, or the group is not
                NCCL's.
        """
        from transformer_engine.pytorch.newton_schulz import CusolverMpCtx

        if parts_group in self._contexts:
            return
        try:
            self._contexts[parts_group] = CusolverMpCtx(parts_group)
        except Exception as error:
            raise RuntimeError(
                f"Newton-Schulz {self.name}: expected Transformer Engine built with "
                "NVTE_WITH_CUSOLVERMP=1, and an NCCL process group, got "
                f"{str(error).partition(chr(10))[0]}"
            ) from error

    def run(self, stack: "torch.Tensor", call: Call) -> "torch.Tensor":
        """Orthogonalize one part of a matrix; see :meth:`Backend.run`."""
        import torch
        from transformer_engine.pytorch.newton_schulz import newton_schulz

        assert call.parts_group is not None and len(stack) == 1  # the plan splits single matrices
        x = stack if call.is_normalized else normalize(stack, call.parts_group)
        x = x.bfloat16() if call.settings.is_bf16 else x
        # The call splits columns, so a tall matrix is transposed. It works in place, so its input
        # is copied.
        part = (x[0].mT if call.is_tall else x[0]).clone(memory_format=torch.contiguous_format)
        is_zero = part.any().logical_not_()
        coefficients = call.settings.coefficients
        newton_schulz(part, self._contexts[call.parts_group], len(coefficients), coefficients)
        # Zeros stay zeros, whatever the library returns for a norm of zero. A part of zeros stays
        # zero in any matrix, as it is multiplied from the side that is not split.
        part.masked_fill_(is_zero, 0)
        return (part.mT if call.is_tall else part).unsqueeze(0).to(stack.dtype)
