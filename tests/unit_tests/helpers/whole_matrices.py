# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Emerging-optimizers' Muon and Newton-Schulz on whole matrices: none of it is this package's."""

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
from emerging_optimizers.orthogonalized_optimizers import AdaptiveMuon, Muon, muon, muon_utils
from emerging_optimizers.utils import fp32_matmul_precision

from megatron_muon.newton_schulz.standard import least_norm


class WholeMuon:
    """Upstream's Muon with each matrix as a parameter; norms of bf16 messages are in float64."""

    def __init__(
        self,
        parameters: Sequence[Any],
        comm_dtype: str = "fp32",
        adaptive: str | None = None,
        **settings: Any,
    ) -> None:
        self._parameters, self._adaptive = parameters, adaptive
        self.replaced: list[tuple[Any, str, Any]] = []
        if comm_dtype == "bf16":
            self.replaced.append((torch.nn.functional, "normalize", float64_normalize))
        if adaptive is not None:
            settings |= {"moment2_method": adaptive}
        build = Muon if adaptive is None else AdaptiveMuon
        self._matrices = [
            [torch.nn.Parameter(part) for part in _parts(each, each.whole)] for each in parameters
        ]
        # One optimizer a parameter: groups have settings, scales of transposed ones are patched.
        self._muons = [
            build(matrices, **{name: each.keys.get(name, settings[name]) for name in settings})
            for each, matrices in zip(parameters, self._matrices, strict=True)
        ]

    def step(self, grads: Sequence[torch.Tensor]) -> None:
        for each, matrices, optimizer, grad in zip(
            self._parameters, self._matrices, self._muons, grads, strict=True
        ):
            for matrix, part in zip(matrices, _parts(each, grad), strict=True):
                matrix.grad = part
            replaced = [*self.replaced]
            if each.keys.get("transposed"):
                scale = muon.get_muon_scale_factor
                turned = lambda rows, cols, mode, scale=scale: scale(cols, rows, mode)  # noqa: E731
                replaced.append((muon, "get_muon_scale_factor", turned))
            with ExitStack() as stack:
                for owner, name, value in replaced:
                    stack.enter_context(mock.patch.object(owner, name, value))
                optimizer.step()

    def wholes(self) -> list[list[torch.Tensor]]:
        """Return the whole value and momentum of each parameter; the owner has that of NAMO."""
        return [
            [
                _joined(each, matrices),
                _joined(each, [optimizer.state[part]["momentum_buffer"] for part in matrices]),
            ][: 1 if self._adaptive == "namo" else 2]
            for each, matrices, optimizer in zip(
                self._parameters, self._matrices, self._muons, strict=True
            )
        ]


def differences(
    parameters: Sequence[Any],
    optimizer: Any,
    wholes: Sequence[Sequence[torch.Tensor]],
    atol: float = 0.0,
) -> list[str]:
    """List values and momentum of which this rank's part is not that of ``WholeMuon.wholes()``."""
    different = []
    for i, (each, expected) in enumerate(zip(parameters, wholes, strict=True)):
        state = optimizer.state[each.param]
        pair = (state.get("main_param", each.param), state.get("momentum_buffer"))
        # Only values, where momentum is expected of nobody.
        for what, ours, whole in zip(("value", "momentum"), pair, expected, strict=False):
            ours, part = getattr(ours, "to_local", lambda ours=ours: ours)(), each.own(whole)
            worst = math.inf
            if ours.shape == part.shape:
                worst = float((ours - part).abs().max()) if ours.numel() else 0.0
            if not torch.equal(ours, part) and not worst <= atol > 0:
                different.append(f"weight.{i}, {what}: {worst:.1e}")
    return different


def _blocks(parameter: Any, whole: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return what Newton-Schulz sees: views with a row an output, and masks of the rows of blocks.

    It is other code than the package's.
    """
    whole = whole.flatten(1) if parameter.keys.get("flatten") else whole
    found = []
    for matrix in [whole] if whole.ndim == 2 else whole:
        view = _turned(parameter, matrix)
        of_output = _block_of_output(parameter, torch.arange(len(view)))
        found += [(view, of_output == block) for block in of_output.unique()]
    return found


def _turned(parameter: Any, matrix: torch.Tensor) -> torch.Tensor:
    return matrix.mT if parameter.keys.get("transposed") else matrix


def _block_of_output(parameter: Any, outputs: torch.Tensor) -> torch.Tensor:
    sizes = parameter.keys.get("split_sizes") or 1
    if isinstance(sizes, int):
        return outputs // (len(outputs) // sizes)
    if len(sizes) == 1:
        return outputs // sizes[0]
    of_group = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    return of_group.repeat(len(outputs) // sum(sizes))


def _parts(parameter: Any, whole: torch.Tensor) -> list[torch.Tensor]:
    """Return contiguous copies of the matrices of a parameter, aligned as allocations are.

    Libraries choose kernels, and so bits, by the alignment of memory too.
    """
    own = (_turned(parameter, view[rows]) for view, rows in _blocks(parameter, whole))
    return [each.clone(memory_format=torch.contiguous_format) for each in own]


def _joined(parameter: Any, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    joined = torch.full_like(parameter.whole, float("nan"))
    for (view, rows), part in zip(_blocks(parameter, joined), parts, strict=True):
        view[rows] = _turned(parameter, part.detach())
    return joined


def float64_normalize(x: torch.Tensor, p: int, dim: tuple[int, int], eps: float) -> torch.Tensor:
    """Divide by the norm summed in float64: as documented for ``comm_dtype`` bf16."""
    assert (p, dim) == (2, (-2, -1))
    return x / x.double().square().sum().sqrt().clamp_min(eps).float()


def orthogonalized(
    matrix: torch.Tensor,
    precision: str,
    *,
    has_float64_norm: bool,
    steps: int = 5,
    coefficient_type: str = "quintic",
) -> torch.Tensor:
    """Orthogonalize one whole matrix by upstream's function."""
    with ExitStack() as stack:
        stack.enter_context(fp32_matmul_precision(precision))
        if has_float64_norm:
            norm = mock.patch("torch.nn.functional.normalize", float64_normalize)
            stack.enter_context(norm)
        return muon_utils.newton_schulz(matrix, steps, coefficient_type)


def normalized_bf16(matrix: torch.Tensor) -> torch.Tensor:
    """Divide by the float64 norm and round to bf16: where "medium" precision starts."""
    return float64_normalize(matrix, 2, (-2, -1), least_norm()).bfloat16()


class WholeOptimizer:
    """An optimizer of whole matrices, one for each parameter.

    Args:
        parameters: With their whole values.
        build: Builds it from matrices.
    """

    def __init__(self, parameters: Sequence[Any], build: Callable[..., Any]) -> None:
        self._parameters, self.build = parameters, build
        self._matrices = [
            [torch.nn.Parameter(part) for part in _parts(each, each.whole)] for each in parameters
        ]
        self._optimizers = [build(matrices) for matrices in self._matrices]

    def step(self, grads: Sequence[torch.Tensor]) -> None:
        for each, matrices, grad in zip(self._parameters, self._matrices, grads, strict=True):
            for matrix, part in zip(matrices, _parts(each, grad), strict=True):
                matrix.grad = part
        for optimizer in self._optimizers:
            optimizer.step()

    def wholes(self) -> list[torch.Tensor]:
        """Return the whole value of each parameter."""
        pairs = zip(self._parameters, self._matrices, strict=True)
        return [_joined(each, matrices) for each, matrices in pairs]

    def differences(self) -> list[str]:
        """List the parameters of which this rank's part is another."""
        return [
            f"weight.{number}"
            for number, (each, whole) in enumerate(
                zip(self._parameters, self.wholes(), strict=True)
            )
            if not torch.equal(getattr(each.param, "_local_tensor", each.param), each.own(whole))
        ]
