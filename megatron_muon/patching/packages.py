# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Check the installed packages before megatron is imported, which would fail with other errors.

Megatron treats an ImportError of Transformer Engine as its absence. An incomplete installation
raises other errors (RuntimeError, AssertionError, FileNotFoundError), which name neither Megatron
nor the missing part. Its packages on PyPI; a build from source has all three under the first name:

==========================  ====================================================================
transformer-engine          Python code without libraries ("meta package")
transformer-engine-cu12/13  the core library, for one major version of CUDA
transformer-engine-torch    the extension for torch, built from source at installation
==========================  ====================================================================
"""

import importlib
import importlib.metadata
import importlib.util
import sys
import sysconfig
from pathlib import Path

from megatron_muon.patching.versions import (
    IncompatibleMegatronError,
    installed_versions,
    version_problems,
)

_CODE, _TORCH = "transformer-engine", "transformer-engine-torch"
_CORES = ("transformer-engine-cu12", "transformer-engine-cu13")
_LIBRARIES = {"core": "libtransformer_engine*.so", _TORCH: "transformer_engine_torch*.so"}


def check_packages() -> None:
    """Check the versions of the packages, and that Transformer Engine is absent or complete.

    Raises:
        IncompatibleMegatronError: The patches were not written for a package.
    """
    problems = version_problems(installed_versions()) + transformer_engine_problems()
    if problems:
        raise IncompatibleMegatronError(problems)


def transformer_engine_problems() -> list[str]:
    """Return a sentence if Transformer Engine is incomplete or in several versions, or nothing.

    It is imported only if a part seems to be missing: a build that keeps its libraries elsewhere is
    complete if that works.
    """
    if sys.modules.get("transformer_engine", sys) is None:
        return []  # hidden from imports, as on CPU ranks
    versions = _installed_parts()
    spec = importlib.util.find_spec("transformer_engine")
    if spec is None and not versions:
        return []
    libraries = _libraries(spec.origin if spec is not None else None)
    has_core = any(name in versions for name in _CORES) or "core" in libraries
    has_torch = _TORCH in versions or _TORCH in libraries
    has_code = _CODE in versions or not versions
    if has_code and has_core and has_torch and len(set(versions.values())) <= 1:
        return []
    if spec is not None and _can_be_imported():
        return []
    found = ", ".join(f"{name} {version}" for name, version in versions.items())
    missing = [
        name
        for name, is_there in (
            (_CODE, has_code),
            (" or ".join(_CORES), has_core),
            (_TORCH, has_torch),
        )
        if not is_there
    ]
    lacks = f" without {' and without '.join(missing)}" if missing else ""
    return [
        f"transformer-engine: expected none of it, or {_CODE}, {' or '.join(_CORES)} and {_TORCH} "
        f"in one version, found {found or 'a module of that name'}{lacks}. `import megatron.core` "
        "fails with it. Remove it (pip uninstall transformer-engine transformer-engine-cu12 "
        "transformer-engine-cu13 transformer-engine-torch), or complete it (pip install "
        "--no-build-isolation 'transformer-engine[core_cu13,pytorch]', core_cu12 with CUDA 12)."
    ]


def _can_be_imported() -> bool:
    try:
        importlib.import_module("torch")  # loads libraries that it needs
        importlib.import_module("transformer_engine.pytorch")
    except Exception:
        return False
    return True


def _installed_parts() -> dict[str, str]:
    versions = {}
    for name in (_CODE, *_CORES, _TORCH):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _libraries(origin: str | None) -> set[str]:
    """Find the libraries in the folders where Transformer Engine itself looks for them.

    Source: ``transformer_engine/common/__init__.py`` of 2.20.2, ``_find_shared_object_in_te_dir``.
    """
    roots = [Path(sysconfig.get_paths()["purelib"])]
    if origin is not None:
        roots.append(Path(origin).parent.parent)
    folders = [
        root / part
        for root in roots
        for part in ("", "transformer_engine", "transformer_engine/wheel_lib")
    ]
    return {
        name
        for name, pattern in _LIBRARIES.items()
        if any(any(folder.glob(pattern)) for folder in folders)
    }
