# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Compare every backend and dtype with the exact polynomial in float64.

    .venv/bin/python benchmarks/newton_schulz_error.py [--checkpoint FOLDER]

Errors are of the Frobenius norm, relative. Matrices are rounded to what a backend gets, and the
polynomial is applied to the singular values of the rounded matrix. "to polar" is the cosine to the
orthogonal polar factor, "singular values" are the least and the largest of the result.

A CPU has no tensor cores: fp16 and bf16 are emulated, every result of a product rounded, its sums
in fp32. With --checkpoint the momentum of a run is measured too, the mean over its matrices.
"""

import argparse
import sys
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))
from gpu_checks.exact import exact, relative_error, rounded_products, spectra  # noqa: E402

from megatron_muon.newton_schulz.call import Call
from megatron_muon.newton_schulz.registry import BACKENDS
from megatron_muon.newton_schulz.settings import NewtonSchulzSettings

SHAPE = (256, 1024)
# Backend, what products are rounded to, and whether the Gram form restarts.
FORMS = {
    "standard, bf16": ("standard", torch.bfloat16, True),
    "standard, fp32": ("standard", None, True),
    "gram, fp16": ("gram", torch.float16, True),
    "gram, fp32": ("gram", None, True),
    "gram, bf16": ("gram", torch.bfloat16, True),
    "gram, fp16, no restart": ("gram", torch.float16, False),
}


def run(name: str, x: torch.Tensor, settings: NewtonSchulzSettings) -> torch.Tensor:
    """Run one form on an fp32 matrix."""
    backend, dtype, restarts = FORMS[name]
    with ExitStack() as stack:
        if dtype is not None:
            stack.enter_context(rounded_products(dtype))
        if not restarts:
            stack.enter_context(
                mock.patch("megatron_muon.newton_schulz.gram.segments_of", lambda c: (len(c),))
            )
        call = Call(settings, (x.shape[0], x.shape[1]), is_normalized=False)
        return BACKENDS[backend].run(x.unsqueeze(0), call)[0]


def momenta(checkpoint: Path) -> list[torch.Tensor]:
    """Read the momentum of every matrix of a run."""
    import torch.distributed.checkpoint as dcp

    metadata = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    state = {
        key: torch.empty(value.size, dtype=value.properties.dtype)
        for key, value in metadata.items()
        if key.endswith(".momentum_buffer") and len(value.size) == 2
    }
    dcp.load(state, checkpoint_id=checkpoint, no_dist=True)
    return list(state.values())


def row(name: str, matrices: list[torch.Tensor], settings: NewtonSchulzSettings) -> list[str]:
    """Return the cells of one kind of matrix: a mean over its matrices for each form."""
    cells = [name]
    for form in FORMS:
        errors, cosines, least, largest = [], [], [], []
        for matrix in matrices:
            x = (matrix / matrix.norm()).bfloat16().float()
            expected, polar = exact(x / x.norm(), settings.steps, settings.coefficient_type)
            found = run(form, x, settings).double()
            errors.append(relative_error(found, expected))
            cosines.append(float((found * polar).sum() / found.norm() / polar.norm()))
            values = torch.linalg.svdvals(torch.nan_to_num(found))
            least.append(float(values.min()))
            largest.append(float(values.max()))
        mean = sum(errors) / len(errors)
        if not mean < 10:
            cells.append(f"{mean:.0e}")
            continue
        cells.append(
            f"{mean:.1e}; {sum(cosines) / len(cosines):.3f}; {min(least):.2f} to {max(largest):.2f}"
        )
    return cells


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--coefficients", default="quintic")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--checkpoint", type=Path, help="folder iter_... of a run with Muon")
    options = parser.parse_args()
    torch.set_num_threads(1)
    settings = NewtonSchulzSettings(
        options.steps, options.coefficients, False, lambda rows, cols: (1.0,)
    )
    print("Error; to polar; singular values\n")
    print("| matrix | " + " | ".join(FORMS) + " |")
    print("| --- | " + " | ".join(["---"] * len(FORMS)) + " |")
    matrices = spectra(*SHAPE)
    # Of any norm.
    matrices |= {f"Gaussian times {x:g}": matrices["Gaussian"] * x for x in (1e15, 1e-5)}
    kinds = [(name, [matrix]) for name, matrix in matrices.items()]
    if options.checkpoint:
        found = momenta(options.checkpoint)
        kinds.append((f"momentum of {len(found)} matrices", found))
    for name, matrices in kinds:
        print("| " + " | ".join(row(name, matrices, settings)) + " |", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
