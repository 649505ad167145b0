# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Let Megatron-Bridge import without a GPU and without libraries that its trainer does not call.

Some modules import Transformer Engine, the resiliency extension or Megatron Energon, a loader of
data, whether they use them or not. Placeholders take their names; a call of one does nothing.
"""

import abc
import builtins
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any

import cpu_ranks

_ENERGON = "megatron.energon"
# Modules that import a package without asking whether it is there.
_NEEDED = {
    "megatron.bridge.peft.lora_layers": "transformer_engine",
    "megatron.bridge.models.gpt_full_te_layer_autocast_spec": "transformer_engine",
    "megatron.bridge.training.inprocess_restart": "nvidia_resiliency_ext",
    "megatron.bridge.training.pretrain": "nvidia_resiliency_ext",
}


class _AnyName(abc.ABCMeta):
    """Metaclass whose classes have an attribute of any name."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _AnyName(name, (_Placeholder,), {})


class _Placeholder(metaclass=_AnyName):
    """Package, class, generic class, decorator and base class in one."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __init_subclass__(cls, **kwargs: object) -> None:
        pass

    def __class_getitem__(cls, item: object) -> type:
        return cls

    def __call__(self, function: object = None, *args: object, **kwargs: object) -> object:
        return function


class _PlaceholderModule(types.ModuleType):
    __path__: Sequence[str] = ()

    def __getattr__(self, name: str) -> Any:
        return getattr(_Placeholder, name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of Energon; the last finder, so that an installed one comes first."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        if name == _ENERGON or name.startswith(f"{_ENERGON}."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _PlaceholderModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def enable() -> None:
    """Enable CPU ranks and the placeholders, before megatron is imported.

    Dataset helpers are not compiled: wheels have them.
    """
    cpu_ranks.enable()
    sys.meta_path.append(_Finder())
    original = builtins.__import__

    def import_(
        name: str,
        globals: dict[str, Any] | None = None,
        locals: Any = None,
        fromlist: Sequence[str] = (),
        level: int = 0,
    ) -> Any:
        package = name.partition(".")[0]
        if _NEEDED.get((globals or {}).get("__name__", "")) == package:
            return _PlaceholderModule(name if fromlist else package)
        return original(name, globals, locals, fromlist, level)

    builtins.__import__ = import_
    from megatron.bridge.training import initialize

    initialize.compile_helpers = lambda: None
