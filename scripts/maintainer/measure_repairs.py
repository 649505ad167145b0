# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Print the gradient norms that test_gradient_repairs.py compares, a table of patches/README.md."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests" / "unit_tests")]

from helpers.repairs import REPAIRS  # noqa: E402


def main() -> None:
    """Run each case under DDP, with the repair and without it."""
    print("| defect | DDP | repaired | upstream |\n| --- | --- | --- | --- |")
    for repair in REPAIRS:
        norms = repair.norms_under_ddp()[0], repair.norms()[0], repair.norms(is_repaired=False)[0]
        print(
            f"| {repair.name} | " + " | ".join(f"{norm:.4f}" for norm in norms) + " |", flush=True
        )


if __name__ == "__main__":
    main()
