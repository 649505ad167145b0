# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Hide Transformer Engine, which computes on GPUs only, from the imports of CPU ranks.

Megatron uses it wherever it can be imported; an ImportError means that it is absent. Its kernels
fail on CPU tensors ("CUDAGuardImpl initialized with non-CUDA DeviceType: cpu").
"""

import contextlib
import importlib.util
import logging
import sys
from collections.abc import Iterator

logger = logging.getLogger(__name__)

_PACKAGES = ("transformer_engine", "transformer_engine_torch")


@contextlib.contextmanager
def without_transformer_engine() -> Iterator[None]:
    """Let imports of Transformer Engine raise ModuleNotFoundError inside the context."""
    if importlib.util.find_spec(_PACKAGES[0]) is not None:
        logger.info("Transformer Engine is taken for absent: it computes on GPUs only")
    loaded = {
        name: module for name, module in sys.modules.items() if name.partition(".")[0] in _PACKAGES
    }
    # Names of this module are gone where an interpreter ends inside the context.
    packages, modules = _PACKAGES, sys.modules
    # None is what Python documents for a module that shall not be found.
    modules.update(dict.fromkeys([*packages, *loaded]))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in packages:
            modules.pop(name, None)
        modules.update(loaded)
