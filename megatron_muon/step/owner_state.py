# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""State that the owner of a matrix keeps, whole, in the state of the parameter.

Other ranks have none of it. A checkpoint has it under the parameter's name, and the prefix of the
matrix in a batch or in a fused parameter.
"""

import secrets
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import torch

from megatron_muon.rows.parameters import PlannedParameter
from megatron_muon.runtime.agreement import gather_objects

# Number of a step of a run, in the state of each parameter on all ranks, and of each matrix on its
# owner: torch's full_state_dict keeps the first for all parameters, and the second for one rank.
STEP_OF_ALL, STEP_OF_OWNER = "step_of_all_ranks", "step_of_owner"
# State of a ``StackMethod``.
MOMENT2_OF_OWNER = "moment2_of_owner"
type States = Mapping[torch.Tensor, dict[str, Any]]


class OwnedState(Protocol):
    """State of a matrix.

    Attributes:
        param: The parameter that it belongs to.
        name: Name of the matrix.
        prefix: Of the names of its state, in the state of the parameter.
    """

    param: torch.Tensor
    name: str
    prefix: str

    def complete(self, state: dict[str, Any]) -> None:
        """Add what is missing to the state of the parameter, which was created or loaded."""


class StateOwner:
    """Owner of matrices with state; base of the classes that are a ``MatrixOwner``.

    Attributes:
        owned: State of the matrices that this rank owns.
        number: Number of the last step.
    """

    owned: Sequence[OwnedState]
    number: int = 0

    def begin(self, planned: Mapping[torch.Tensor, PlannedParameter]) -> None:
        """Name states, and number steps; called by all ranks of the job together.

        Args:
            planned: All parameters as they are planned.
        """
        # The high bits identify the run: its state must not be mixed with the state of another.
        self.number = gather_objects(secrets.randbits(30))[0] << 32
        for own in self.owned:
            parameter = planned[own.param]
            suffix = own.name.removeprefix(parameter.name).strip()
            own.prefix = parameter.state_prefix + (suffix and f"{suffix}.")

    def complete(self, states: States) -> None:
        """Add missing values to states that were created or loaded."""
        for values in states.values():
            values.setdefault(STEP_OF_ALL, self.number)
        for own in self.owned:
            own.complete(states[own.param])
            states[own.param].setdefault(own.prefix + STEP_OF_OWNER, states[own.param][STEP_OF_ALL])

    def advance(self, states: States, without: Collection[torch.Tensor]) -> None:
        """Count a step.

        Args:
            states: State by parameter.
            without: Parameters without a gradient, whose state stays.
        """
        self.number += 1
        for values in states.values():
            values[STEP_OF_ALL] = self.number
        for own in self.owned:
            states[own.param][own.prefix + STEP_OF_OWNER] = self.number

    def use_loaded(self, states: States) -> None:
        """Prepare states that were loaded."""
        self.number = max((values[STEP_OF_ALL] for values in states.values()), default=0)
