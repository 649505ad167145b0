# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Newton-Schulz of split matrices by Transformer Engine, which calls cuSOLVERMp.

One call runs all steps of a matrix whose longer side is split equally over several ranks. It
communicates by itself, over the NCCL communicator of the owners. Not measured here.

Source: Transformer Engine 2.19, transformer_engine/pytorch/newton_schulz.py. Its later
``newton_schulz_tp`` makes the same call for a matrix that is split along its longer side.
"""

from typing import TYPE_CHECKING, Any

from megatron_muon.newton_schulz.backend import NewtonSchulzArgs, gpu_problems
from megatron_muon.newton_schulz.settings import NewtonSchulzSettings
from megatron_muon.newton_schulz.standard import Standard, normalize

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

# Earlier ones could use a communicator that NCCL had not created yet. Source: Transformer Engine,
# pull request 3240.
_VERSION = (2, 19)


class TransformerEngine(Standard):
    """The standard steps of a split matrix in one call.

    Its work is counted as for :class:`Standard`: the work of cuSOLVERMp is not published.
    """

    name = "transformer_engine"
    reference = Standard
    is_batched = False
    communicates = True

    def __init__(self) -> None:
        # cuSOLVERMp's contexts by group of owners. Creating one is expensive.
        self._contexts: dict[dist.ProcessGroup, Any] = {}

    def takes(self, n: int, m: int, num_parts: int = 1) -> bool:
        """Return whether the matrix is split, and all owners have equally many rows or columns."""
        return num_parts > 1 and m % num_parts == 0

    def problems(self, settings: NewtonSchulzSettings, device: "torch.device") -> list[str]:
        """Check for a GPU, and Transformer Engine."""
        problems = []
        try:
            import transformer_engine
            from transformer_engine.pytorch.newton_schulz import newton_schulz  # noqa: F401

            version = transformer_engine.__version__
            if tuple(int(part) for part in version.split(".")[:2]) < _VERSION:
                problems.append(f"expected Transformer Engine 2.19 or later, got {version}")
        # Its libraries fail to load with various errors.
        except Exception as error:
            problems.append(
                f"expected Transformer Engine 2.19 or later, got {type(error).__name__}: {error}"
            )
        return problems + gpu_problems(device)

    def connect(self, parts_group: "dist.ProcessGroup") -> None:
        """Create the context of a group of owners.

        Raises:
            RuntimeError: Transformer Engine was built without cuSOLVERMp, or the group is not
                NCCL's.
        """
        from transformer_engine.pytorch.newton_schulz import CusolverMpCtx

        if parts_group in self._contexts:
            return
        if not self._contexts:
            self._destroy_contexts_before_groups()
        try:
            self._contexts[parts_group] = CusolverMpCtx(parts_group)
        except Exception as error:
            raise RuntimeError(
                f"Newton-Schulz {self.name}: expected Transformer Engine built with "
                "NVTE_WITH_CUSOLVERMP=1, and an NCCL process group, got "
                f"{str(error).partition(chr(10))[0]}"
            ) from error

    def _destroy_contexts_before_groups(self) -> None:
        """Destroy contexts before the communicators that they use, which NCCL frees with groups."""
        import torch.distributed as dist

        destroy_process_group = dist.destroy_process_group

        def destroy(group: Any = None) -> None:  # noqa: ANN401 - torch releases differ in its type
            """Destroy all contexts with the group of all ranks, then the groups."""
            while self._contexts and group in (None, dist.group.WORLD):
                self._contexts.popitem()[1].destroy()
            destroy_process_group(group)

        dist.destroy_process_group = destroy

    def run(self, stack: "torch.Tensor", args: NewtonSchulzArgs) -> "torch.Tensor":
        """Orthogonalize one part of a matrix; see :meth:`Backend.run`."""
        import torch
        from transformer_engine.pytorch.newton_schulz import newton_schulz

        assert args.parts_group is not None and len(stack) == 1  # the plan splits single matrices
        x = normalize(stack, args)
        x = x.bfloat16() if args.settings.is_bf16 else x
        # The call splits columns, so a tall matrix is transposed. It works in place, so its input
        # is copied.
        part = (x[0].mT if args.is_tall else x[0]).clone(memory_format=torch.contiguous_format)
        is_zero = part.any().logical_not_()
        coefficients = args.settings.coefficients
        newton_schulz(part, self._contexts[args.parts_group], len(coefficients), coefficients)
        # Zeros stay zeros: the library may return anything for a norm of zero. A part of zeros
        # stays zero in any matrix, as it is multiplied from the side that is not split.
        part.masked_fill_(is_zero, 0)
        return (part.mT if args.is_tall else part).unsqueeze(0).to(stack.dtype)
