# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Count what one optimizer step launches on a GPU besides its matrix products, on CPU ranks.

    .venv/bin/python benchmarks/step_cost.py

The model is a GPT of 8 layers of hidden 128: 32 matrices, in each layer query, key and value fused
(split into three blocks), the projection of attention, a gated fc1, and fc2. It runs on
megatron-core alone, without Transformer Engine and Apex, under Megatron-FSDP
``optim_grads_params``. Muon has Nesterov, weight decay and gradient clipping, and sends bf16; Lion
updates the other parameters. Everything is counted in the second step, with gradients of a real
backward pass.

What is counted is what ``optimizer.step()`` of rank 0 sends to torch's dispatcher:

- an operation is one call, whatever its size. A ``_foreach_`` operation counts once for its whole
  list, because a GPU runs it as one fused kernel. Not counted: calls that return a view and write
  nothing, allocations (``aten::empty`` and its relatives), and calls on empty tensors. The calls
  that DTensor makes on its local tensors are counted in place of its own;
- a matrix product (``mm``, ``bmm``, ``addmm``, ``baddbmm``) counts apart, whatever the stack;
- so does a collective (``c10d``);
- bytes are those of every tensor that an operation reads, and of every tensor that it writes. A
  tensor that is changed in place counts as both, and one that is passed twice is read twice.
  ``copy_``, ``fill_`` and ``out=`` write only. Products and collectives are left out;
- a host read makes the host wait for a GPU: ``item()`` and its like, ``equal``, ``nonzero``, and
  what goes past the dispatcher: ``tolist()``, ``cpu()``, and ``torch.tensor`` of tensors, which
  reads one after the other, or of numbers on a device, for whose copy it waits too. Other copies
  from the host are not counted.

"A matrix" divides by the 32 matrices of the model, whatever rank 0 holds of them; "an element" by
the elements of them that rank 0 holds. Both include what checks, clipping and Lion do.
Megatron-FSDP itself is left out of the first table: it reduces gradients before the step, and
installs weights and gathers parameters after it. The second table has it beside the other parts.

A CPU is made to take a GPU's way in three places: the kernel that moves rows runs in Triton's
interpreter (a launch counts as an operation), norms come from one fused call for a list (an empty
scratch chooses it), and owners and stacks are those of the cost model's GPU.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from gpt_under_fsdp import build_gpt, build_muon, norms_as_on_a_gpu

CPU_RANKS = Path(__file__).resolve().parents[1] / "scripts" / "cpu_ranks"
FSDP = "Megatron-FSDP"
SEQ_LENGTH, VOCAB_SIZE, MICRO_BATCH_SIZE = 32, 64, 4
LAYERS, HIDDEN, HEADS = 8, 128, 4


def build_model() -> Any:
    """Wrap the GPT in Megatron-FSDP."""
    return build_gpt(
        VOCAB_SIZE, SEQ_LENGTH, num_layers=LAYERS, hidden_size=HIDDEN, num_attention_heads=HEADS
    )


def build_optimizer(model: Any) -> Any:
    """Build Muon and Lion as on a GPU."""
    import megatron_muon
    from megatron_muon.plan.cost import CostModel

    norms_as_on_a_gpu()
    # Named, so that they replace those of CPU ranks. The other two are the run's.
    others = ("num_ns_steps", "measured", "backends", "coefficient_type")
    rates = {k: v for k, v in dataclasses.asdict(CostModel()).items() if k not in others}
    cost_model = ",".join(f"{name}={value}" for name, value in rates.items())
    return build_muon(model, exchange=megatron_muon.ExchangeSettings(cost_model=cost_model))


def run_backward(model: Any, optimizer: Any, seed: int) -> None:
    """Fill the gradients from random tokens."""
    import torch
    import torch.distributed as dist

    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    tokens = torch.randint(VOCAB_SIZE, (MICRO_BATCH_SIZE, SEQ_LENGTH + 1), generator=generator)
    positions = torch.arange(SEQ_LENGTH).expand(MICRO_BATCH_SIZE, -1)
    mask = torch.ones(1, 1, SEQ_LENGTH, SEQ_LENGTH).tril() < 0.5
    model.zero_grad_buffer()
    optimizer.zero_grad()
    model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:]).float().mean().backward()


def count_step() -> dict[str, Any]:
    """Count the second step of this rank, part by part."""
    # Before the kernel is imported, which is then interpreted.
    os.environ["TRITON_INTERPRET"] = "1"
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state, tensor_parallel
    from operation_counts import OperationCounter

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=1)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    model = build_model()
    optimizer = build_optimizer(model)
    run_backward(model, optimizer, 0)
    optimizer.step()
    run_backward(model, optimizer, 1)
    counter = OperationCounter()
    for owner, name, part in (
        (model, "finish_grad_sync", FSDP),
        (model.module, "install_optimized_model_weights", FSDP),
        (model, "start_param_sync", FSDP),
        (optimizer, "prepare_grads", "check of gradients"),
        (optimizer, "get_grad_norm", "gradient norm"),
        (optimizer.muon_step, "step", "Muon"),
        *(
            (child.optimizer, "step", type(child.optimizer).__name__)
            for child in optimizer.chained_optimizers
            if child.optimizer not in optimizer.muon_step.optimizers
        ),
    ):
        setattr(owner, name, counter.within(part, getattr(owner, name)))
    counter.count_row_kernel()
    with counter.counting():
        optimizer.step()
    matrices = [param for muon in optimizer.muon_step.optimizers for param in muon.params]
    return {
        "ranks": dist.get_world_size(),
        "matrices": len(matrices),
        "elements": sum(param._local_tensor.numel() for param in matrices),
        "parts": {part or "clipping": counts.as_json() for part, counts in counter.parts.items()},
    }


def figures(counted: dict[str, Any], parts: list[str]) -> dict[str, float]:
    """Add up parts of a step, a matrix or an element where the name says so."""
    chosen = [counted["parts"][part] for part in parts]

    def total(name: str) -> int:
        """Add up a counter of all chosen parts."""
        return sum(sum(part[name].values()) for part in chosen)

    return {
        "operations": total("operations") / counted["matrices"],
        "matrix_products": sum(part["matrix_products"] for part in chosen) / counted["matrices"],
        "collectives": total("collectives"),
        "bytes_an_element": total("num_bytes") / counted["elements"],
        "host_reads": total("host_reads") + total("unseen_reads"),
    }


def of_step(counted: dict[str, Any]) -> dict[str, float]:
    """Return the figures of a step, without Megatron-FSDP."""
    return figures(counted, [part for part in counted["parts"] if part != FSDP])


HEADER = (
    "operations a matrix | matrix products a matrix | collectives | bytes an element | host reads"
)


def row_of(found: dict[str, float]) -> str:
    """Return the figures of :data:`HEADER`."""
    return (
        f"{found['operations']:.1f} | {found['matrix_products']:.1f} | "
        f"{found['collectives']:.0f} | {found['bytes_an_element']:.0f} | {found['host_reads']:.0f}"
    )


def print_tables(worlds: list[dict[str, Any]], by_operation: bool) -> None:
    """Print the steps, their parts, and where asked the operations of each."""
    print(f"| ranks | {HEADER} |\n| {'--- | ' * 6}".rstrip())
    for counted in worlds:
        print(f"| {counted['ranks']} | {row_of(of_step(counted))} |")
    print(f"\n| ranks | part | {HEADER} |\n| {'--- | ' * 7}".rstrip())
    for counted in worlds:
        for part in counted["parts"]:
            found = figures(counted, [part])
            print(f"| {counted['ranks']} | {part} | {row_of(found)} |")
    if by_operation:
        print(
            f"\n| ranks | part | operation | calls | bytes an element |\n| {'--- | ' * 5}".rstrip()
        )
        for counted in worlds:
            for part, counts in counted["parts"].items():
                reads = {**counts["collectives"], **counts["host_reads"], **counts["unseen_reads"]}
                calls = counts["operations"] | {name: n for name, n in reads.items() if n}
                for name in sorted(calls, key=lambda name: -calls[name]):
                    num_bytes = counts["num_bytes"].get(name, 0) / counted["elements"]
                    print(
                        f"| {counted['ranks']} | {part} | {name} | {calls[name]} | "
                        f"{num_bytes:.1f} |"
                    )


def count_on(ranks: int) -> dict[str, Any]:
    """Start ranks, and return what rank 0 counted.

    Raises:
        RuntimeError: A rank failed; with the end of what it printed.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "counts.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(ranks), str(CPU_RANKS), __file__]
        done = subprocess.run(
            [*command, "--json", str(path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={"OMP_NUM_THREADS": "1", **os.environ},
            check=False,
        )
        if done.returncode:
            raise RuntimeError(
                f"exit code {done.returncode}: {' '.join(command)}\n{done.stdout[-4000:]}"
            )
        (counted,) = json.loads(path.read_text())
        return counted


def main() -> int:
    """Count on each number of ranks, print tables and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument(
        "--by-operation", action="store_true", help="list the operations, the most frequent first"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the counts here too")
    options = parser.parse_args()
    is_rank = "RANK" in os.environ
    worlds = [count_step()] if is_rank else [count_on(ranks) for ranks in options.ranks]
    if os.environ.get("RANK", "0") == "0":
        print_tables(worlds, options.by_operation)
        if options.json is not None:
            options.json.write_text(json.dumps(worlds, indent=1) + "\n")
    if is_rank:
        import torch.distributed as dist

        dist.barrier()
    return 0


if __name__ == "__main__":
    sys.exit(main())
