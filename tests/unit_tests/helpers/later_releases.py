# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""A stand-in for emerging-optimizers 0.4 and 0.5, which no registry has.

The installed release gets what those have and Muon meets; what was done in 0.3 stays upstream's own
code. The tags themselves were run by hand (docs/support.md).
"""

from typing import Any

import torch


def pretend_emerging_optimizers_0_5() -> None:
    """Change the installed emerging-optimizers, in this process only.

    Coefficients "cubic5", whose last number is 0 and of which all five steps must be taken; another
    least norm; more arguments; settings that cannot be set later; a count of steps in Lion's state.
    """
    from emerging_optimizers.orthogonalized_optimizers import Muon, muon_utils
    from emerging_optimizers.scalar_optimizers import Lion

    cubic = [(2.5 - 0.1 * number, -1.6 + 0.1 * number, 0.0) for number in range(5)]
    muon_utils._COEFFICIENT_SETS["cubic5"] = cubic  # type: ignore[index]
    newton_schulz, step = muon_utils.newton_schulz, muon_utils.newton_schulz_step

    def later_newton_schulz(
        x: Any,
        steps: int,
        coefficient_type: str = "quintic",
        custom_coefficient_sets: Any = None,
        eps: float = 1e-15,
        transpose: bool | None = None,
        tp_group: Any = None,
        use_syrk: bool = False,
        normalize_in_double: bool = False,
    ) -> Any:
        if coefficient_type == "cubic5" and steps != len(cubic):
            raise ValueError(f"cubic5 has {len(cubic)} steps; got steps={steps}.")
        assert not normalize_in_double
        return newton_schulz(
            x,
            steps,
            coefficient_type,
            custom_coefficient_sets,
            eps,
            transpose,
            tp_group,
            use_syrk,
        )

    def later_step(x: Any, a: float, b: float, c: float, tp_group: Any = None) -> Any:
        if c:
            return step(x, a, b, c, tp_group)
        square = x @ x.mT
        if tp_group is not None:
            torch.distributed.all_reduce(square, group=tp_group)
        return torch.addmm(x, square, x, alpha=b, beta=a)

    muon_utils.newton_schulz = later_newton_schulz
    muon_utils.newton_schulz_step = later_step
    for name in ("num_ns_steps", "coefficient_type", "scale_mode", "extra_scale_factor"):
        # Without a setter: whoever assigns to it fails.
        setattr(Muon, name, property(lambda self, name=name: self.__dict__[f"_{name}"]))
    init_group = Lion._init_group

    def later_init_group(self: Any, group: Any, skip_non_grad_params: bool = True) -> None:
        init_group(self, group, skip_non_grad_params)
        for param in group["params"]:
            if self.state.get(param):
                self.state[param].setdefault("step", 0)

    Lion._init_group = later_init_group
