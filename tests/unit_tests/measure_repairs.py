# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Print the gradient norms that test_repairs.py compares, as a table for docs/numerics.md."""

from test_repairs import ADAM, CASES, _grad_norms
from toy_gpt import fsdp_toy_gpt, toy_gpt


def main() -> None:
    """Run each case under DDP, with the repair and without it."""
    print("| defect | DDP | repaired | upstream |\n| --- | --- | --- | --- |")
    for case in CASES:
        attribute, world_size, flags, fsdp_flags, _ = case.values
        sharded = fsdp_toy_gpt("optim_grads_params", *ADAM, *flags, *fsdp_flags)
        norms = (
            _grad_norms(world_size, toy_gpt(*ADAM, *flags))[0],
            _grad_norms(world_size, sharded)[0],
            _grad_norms(world_size, sharded, without=attribute)[0],
        )
        print(f"| {case.id} | " + " | ".join(f"{norm:.4f}" for norm in norms) + " |", flush=True)


if __name__ == "__main__":
    main()
