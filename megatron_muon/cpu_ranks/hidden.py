# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Hide Transformer Engine, which computes on GPUs only, from the imports of CPU ranks.

Megatron uses it wherever it can be imported; an ImportError means that it is absent. Its kernels
fail on CPU tensors ("CUDAGuardImpl initialized with non-CUDA DeviceType: cpu").
"""

import importlib.util
import logging
import sys
from types import ModuleType

logger = logging.getLogger(__name__)

_PACKAGES = ("transformer_engine", "transformer_engine_torch")

# What sys.modules held of a name; None where it had no entry.
type Hidden = dict[str, ModuleType | None]


def hide() -> Hidden:
    """Let imports of Transformer Engine raise ModuleNotFoundError; :func:`show` undoes it."""
    if importlib.util.find_spec(_PACKAGES[0]) is not None:
        logger.info("Transformer Engine is taken for absent: it computes on GPUs only")
    loaded = [name for name in sys.modules if name.partition(".")[0] in _PACKAGES]
    hidden = {name: sys.modules.get(name) for name in {*_PACKAGES, *loaded}}
    # What Python documents for a module that is not to be found.
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    return hidden


def show(hidden: Hidden) -> None:
    """Put back what :func:`hide` took away."""
    for name, module in hidden.items():
        if module is None:
            sys.modules.pop(name, None)
        else:
            sys.modules[name] = module
