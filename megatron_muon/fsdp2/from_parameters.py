# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""``MuonAdamW`` for trainers that call ``optimizer(model.parameters(), lr=..., ...)``.

``MuonAdamW.from_model`` chooses by names and modules. Here they have to be found: Python's garbage
collector knows all modules. The outermost one that has the parameters counts, as a part of a model
has no names of the layers around it.
"""

import gc
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from megatron_muon.fsdp2.groups import as_groups, choose
from megatron_muon.fsdp2.muon_adamw import MuonAdamW

# Arguments of MuonAdamW that are AdamW's and Lion's.
_ELEMENTWISE_KEYS = ("betas", "eps", "foreach", "fused")


class from_parameters(MuonAdamW):
    """Build ``MuonAdamW`` from parameters alone, with the choices of ``MuonAdamW.from_model()``.

    It is for configurations that name an optimizer, by ``megatron_muon.fsdp2.from_parameters``.
    Parameters are refused if no module has them, or if it is open which module's names count.
    Frozen parameters are left out. It is a class because Hydra's ``get_class`` and the ``Trainer``
    of transformers accept nothing else; calling it returns a ``MuonAdamW``. Other arguments are
    arguments of ``MuonAdamW.from_model()``.

    Args:
        params: Parameters, pairs of name and parameter, or groups of either. Groups are divided by
            algorithm; their other keys, such as ``weight_decay``, come before other options, and
            ``betas``, ``eps``, ``foreach`` and ``fused`` are AdamW's.
        lr: Learning rate.

    Raises:
        TypeError: An unknown argument.
        ValueError: No parameter is trainable, no module has one, or several outermost modules do.

    Memory: a list of all of Python's objects, during one garbage collection and one search.
    """

    def __new__(  # type: ignore[misc]
        cls,
        params: ParamsT,
        lr: float = 3e-4,
        **options: Any,  # noqa: ANN401 - of from_model, by name
    ) -> MuonAdamW:
        """Build a ``MuonAdamW``."""
        # torch checks the parameters, and makes groups of them.
        groups = torch.optim.Optimizer(params, {}).param_groups
        selected = [param for group in groups for param in group["params"] if param.requires_grad]
        if not selected:
            raise ValueError("params: expected trainable parameters, got none. Set requires_grad")
        choice_options = {
            key: options.pop(key) for key in inspect.signature(choose).parameters if key in options
        }
        choices = choose(_model_of(selected), **choice_options)
        divided_groups = []
        for group in groups:
            tensors = set(group["params"])
            for part in as_groups(choice for choice in choices if choice.param in tensors):
                ignored = _ELEMENTWISE_KEYS if part["algorithm"] == "muon" else ("momentum",)
                kept = {key: value for key, value in group.items() if key not in ignored}
                named = zip(part["param_names"], part["params"], strict=True)
                divided_groups.append({**part, **kept, "params": list(named)})
        # Muon's first, as from_model has them.
        divided_groups.sort(key=lambda part: part["algorithm"] != "muon")
        optimizer = MuonAdamW(divided_groups, lr, **options)
        optimizer._reasons = {choice.name: choice.reason for choice in choices}
        return optimizer


def _model_of(selected: Sequence[torch.Tensor]) -> torch.nn.Module:
    """Return the outermost module that has the parameters, or a list of several, as of a pipeline.

    A module is left out if another one has its parameters, and more: a loss may have the head's.
    """
    places = {param: place for place, param in enumerate(selected)}
    # Deleted models may still exist if they have reference cycles.
    gc.collect()
    # isinstance() would read an attribute of proxies. A module under construction has no _modules.
    modules = [
        value
        for value in gc.get_objects()
        if issubclass(type(value), torch.nn.Module) and "_modules" in vars(value)
    ]
    inner = {id(child) for module in modules for child in module._modules.values()}
    owned = [
        (module, params)
        for module in modules
        if id(module) not in inner and (params := places.keys() & module.parameters())
    ]
    missing = places.keys() - set().union(*(params for _, params in owned))
    owned = [(module, params) for module, params in owned if not any(params < p for _, p in owned)]
    # Ranks need one order, and the collector's differs.
    owned.sort(key=lambda pair: min(places[param] for param in pair[1]))
    if missing:
        raise ValueError(
            f"params: expected parameters of modules, got {len(missing)} that no module has, of "
            f"shapes {sorted({tuple(param.shape) for param in missing})}. Pass the parameters that "
            "the model has now, as fully_shard makes new ones, or call MuonAdamW.from_model(model)"
        )
    if len(owned) == 1:
        return owned[0][0]
    # Names and modules of shared parameters may lead to different choices, and a layer alone has
    # no name: it may be a head.
    num_shared = sum(len(params) for _, params in owned) - len(places)
    if num_shared or not all(module._modules for module, _ in owned):
        raise ValueError(
            "params: expected parameters of one module, or of models that share none, got those "
            f"of {[type(module).__name__ for module, _ in owned]}, with {num_shared} shared. Call "
            "MuonAdamW.from_model() with a module that has them all"
        )
    return torch.nn.ModuleList(module for module, _ in owned)
