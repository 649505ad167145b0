# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Load the step counter of one implementation of Adam into another one.

========================  ==================================  ======================================
Adam                      keeps its step counter as           in checkpoints
========================  ==================================  ======================================
torch's                   a tensor per parameter              ``state.<parameter>.step``
Transformer Engine's,     a number per parameter group        ``param_to_group_meta.<parameter>
Apex's                                                        .step``
========================  ==================================  ======================================

Their groups also differ in settings such as torch's ``amsgrad``, which come from flags.
"""

from collections.abc import Mapping
from typing import Any

import torch

from megatron_muon.checkpoint.storage import StoredCheckpoint
from megatron_muon.mcore.fsdp_dtensor.state import MOVING_SETTINGS


def as_stored(checkpoint: StoredCheckpoint, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of an optimizer's state dict to load: counters where the checkpoint has them.

    Settings that the checkpoint lacks are left out if they come from flags.

    Args:
        checkpoint: The stored keys.
        wanted: ``state`` and ``param_to_group_meta`` of this run, as they would be saved: gated
            layers in halves, ``<parameter>_w`` and ``<parameter>_v``. Not changed.
    """
    own_settings = wanted["param_to_group_meta"]
    stored = checkpoint.tensors.keys() | checkpoint.objects.keys()
    settings = {
        name: {
            key: value
            for key, value in own.items()
            if key in MOVING_SETTINGS or _setting_key(name, key) in stored
        }
        for name, own in own_settings.items()
    }
    states = {name: dict(own) for name, own in wanted["state"].items()}
    for name, own in wanted["state"].items():
        parent = name if name in settings else name[:-2]
        in_state = f"optimizer.state.{name}.step" in checkpoint.tensors
        in_group = _setting_key(parent, "step") in checkpoint.objects
        if "step" in own and in_group and not in_state:
            del states[name]["step"]
            settings[parent]["step"] = 0
        elif "step" in own_settings.get(parent, {}) and in_state and not in_group:
            states[name]["step"] = torch.tensor(0.0, dtype=torch.float32)
            settings[parent].pop("step", None)
    return {**wanted, "state": states, "param_to_group_meta": settings}


def as_in_run(loaded: Mapping[str, Any], own: dict[str, Any]) -> None:
    """Fill this run's state dict from that of :func:`as_stored`, which has been loaded in place.

    Args:
        loaded: Settings and counters from the checkpoint. Its other states are those of ``own``,
            or parts of them.
        own: State dict of this run, gated layers not halved; its dictionaries are replaced.
    """
    counts = [float(states["step"]) for states in loaded["state"].values() if "step" in states]
    states, settings = dict(own["state"]), {}
    for name, own_settings in own["param_to_group_meta"].items():
        found = loaded["param_to_group_meta"][name]
        settings[name] = {**own_settings, **found}
        if "step" in found and "step" not in own_settings:
            step = torch.tensor(float(settings[name].pop("step")), dtype=torch.float32)
            states[name] = {**states[name], "step": step}
        elif "step" in own_settings and "step" not in found:
            # A group has one counter: all its parameters have been stepped together.
            settings[name]["step"] = int(max(counts))
    own["state"], own["param_to_group_meta"] = states, settings


def _setting_key(name: str, setting: str) -> str:
    return f"optimizer.param_to_group_meta.{name}.{setting}"
