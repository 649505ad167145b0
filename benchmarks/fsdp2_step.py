# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Time a step of fsdp2.Muon against its peers on FSDP2 parameters, on GPUs or on gloo ranks.

    torchrun --nproc-per-node 4 benchmarks/fsdp2_step.py --hidden 128 --layers 4 --peers DIR
    torchrun --nproc-per-node 4 benchmarks/fsdp2_step.py --soap --layers 1 --peers DIR

Needs no megatron. Three peers are in no registry. Copy into DIR, under the same paths: ``dion/``
(microsoft/dion), ``torchtitan/distributed/flex_shard/`` (pytorch/torchtitan, DistMuon) and for
``--soap`` ``distributed_shampoo/`` (facebookresearch/optimizers).

Every peer has the same parameters, sharded by ``fully_shard``, and the same gradients. Layouts:

    even        one axis; rows divide, and so does the number of matrices
    remainders  one axis; neither divides
    experts     one axis; batches of matrices, of which ranks have different numbers
    tiny        one axis; 600 matrices of 16 x 16 (4 layers of hidden 128)
    HSDP        two replicas of n / 2 shards, shapes of even
    TP x FSDP   two tensor-parallel ranks of n / 2 shards, shapes of even

First each peer steps alone, which counts collectives and bytes. If it raises, its row is the error;
it must raise on all ranks, or the benchmark ends after five minutes. Then all others are timed in
turn, one step each, so that other work on the machine disturbs all peers equally. Times are of the
slowest rank, medians over the rounds.

Bytes and calls are of all collectives that reach torch's dispatcher, DTensor's included. An
all-reduce counts as a ring. "Update" is how far the first update is from that of megatron_muon with
fp32 messages, relative to its norm, for the worst parameter: bf16 Newton-Schulz with other
rounding is off by up to 0.05.

"Stacks as on GPUs" batches matrices of one shape. On CPU ranks this package does not, as batches
may have other bits there; the peers batch everywhere.

The same for all: ``torch.compile`` is off, and where the CPU has no bf16 instructions, products of
bf16 matrices are computed in fp32. No peer is tuned. AdamW stands for the time that Muon should
come near.

``--soap`` compares SOAP instead: this package's, and the lossless distributor of Shampoo in both of
its modes, with an eigenbasis by QR in every step. They are variants of one algorithm: updates
differ. "Kept" is the memory of tensors that stay between steps beside parameters and gradients.
"""

import argparse
import gc
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from fsdp2_peers import OURS, OURS_FP32, PEERS, SOAP_PEERS, Builder, Params, is_there
from measure import CollectiveCounter, of_all_ranks, setup_of, start_ranks, step_seconds
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

LAYOUTS = "even", "remainders", "experts", "tiny", "HSDP", "TP x FSDP"
Shapes = Sequence[tuple[int, ...]]


def shapes_of(layout: str, hidden: int, num_layers: int) -> Shapes:
    """Return the shapes of all parameters."""
    layer = [(hidden, hidden), (3 * hidden, hidden), (4 * hidden, hidden), (hidden, 4 * hidden)]
    if layout == "remainders":
        odd = [(rows + 1, cols) for rows, cols in layer]
        return [*odd * num_layers, odd[0]]
    if layout == "tiny":
        return [(hidden // 8, hidden // 8)] * (150 * num_layers)
    if layout == "experts":
        num_experts = 3 * dist.get_world_size() // 2
        return [(num_experts, 2 * hidden, hidden), (num_experts, hidden, hidden)] * num_layers
    return layer * num_layers


def _mesh(layout: str, device: torch.device) -> DeviceMesh:
    size = dist.get_world_size()
    if layout == "HSDP":
        return init_device_mesh(device.type, (2, size // 2), mesh_dim_names=("replica", "shard"))
    if layout == "TP x FSDP":
        return init_device_mesh(device.type, (size // 2, 2), mesh_dim_names=("shard", "tensor"))
    return init_device_mesh(device.type, (size,), mesh_dim_names=("shard",))


def _sharded(layout: str, mesh: DeviceMesh, shapes: Shapes, seed: int) -> Params:
    """Draw tensors as small as weights are at first, the same for the same seed, and shard them."""
    generator = torch.Generator().manual_seed(seed)
    module = torch.nn.Module()
    is_parallel = layout == "TP x FSDP"
    for number, shape in enumerate(shapes):
        value = torch.randn(shape, generator=generator).to(mesh.device_type) * 0.02
        if is_parallel:
            # Columnwise what widens, otherwise rowwise.
            dim = 0 if shape[0] > shape[1] else 1
            value = distribute_tensor(value, mesh["tensor"], [Shard(dim)])
        module.register_parameter(f"matrix{number}", torch.nn.Parameter(value))
    fully_shard(module, mesh=mesh["shard"] if is_parallel else mesh)
    return list(module.parameters())


class Stepped:
    """A peer with parameters of its own.

    The constructor steps twice: the first step makes the state, and collectives of the second one
    are counted.

    Attributes:
        update: Local change of each parameter by the first step.
        counts: Numbers of collectives and of the bytes that this rank sends and keeps.
    """

    def __init__(self, build: Builder, layout: str, mesh: DeviceMesh, shapes: Shapes) -> None:
        params = _sharded(layout, mesh, shapes, seed=0)
        self._params: Any = params
        self._grads = [param.detach() for param in _sharded(layout, mesh, shapes, seed=1)]
        bytes_before = _kept_bytes()
        self.optimizer = build(params)
        # Their own memory: no operations of DTensor.
        locals_ = [param.detach().to_local() for param in self._params]
        before = [local.clone() for local in locals_]
        self.set_gradients()
        self.optimizer.step()
        self.update = [new - old for new, old in zip(locals_, before, strict=True)]
        self.set_gradients()
        with CollectiveCounter() as counter:
            self.optimizer.step()
        for param in params:
            param.grad = None
        del before
        kept = _kept_bytes() - bytes_before - sum(x.nbytes for x in self.update)
        self.counts = {
            "calls": counter.calls.total(),
            "bytes_by_collective": dict(counter.num_bytes),
            "kept_bytes": kept,
        }

    def set_gradients(self) -> None:
        """Bring the gradients back: a peer may overwrite them."""
        for param, grad in zip(self._params, self._grads, strict=True):
            param.grad = grad.clone()

    def planned_bytes(self) -> int:
        """Return the bytes that all ranks send, by the plans of this package."""
        from megatron_muon.tools.plan.rank_report import build_report

        plans = self.optimizer.muon.engine.plans  # type: ignore[attr-defined]
        report = build_report(dist.get_world_size(), plans)
        return sum(rank.bytes_sent for rank in report.ranks)


def _kept_bytes() -> int:
    """Return the memory of all tensors of this process, without DTensors, which are counted."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor)]
    shards = [x._local_tensor if isinstance(x, DTensor) else x for x in tensors]
    storages = (x.untyped_storage() for x in shards)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _difference(update: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> float:
    """Return the largest relative difference of a parameter's update, over all ranks."""
    pairs = zip(update, other, strict=True)
    norms = [[float(x.norm()) ** 2 for x in (a - b, b)] for a, b in pairs]
    sums = torch.tensor(norms, device=update[0].device)
    dist.all_reduce(sums)
    return float((sums[:, 0] / sums[:, 1]).sqrt().max())


def compare(layout: str, options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Return a row for each peer: its step in this layout, or its error."""
    mesh = _mesh(layout, device)
    shapes = shapes_of(layout, options.hidden, options.layers)
    peers, reference = (SOAP_PEERS, OURS) if options.soap else (PEERS, OURS_FP32)
    rows: dict[str, dict[str, Any]] = {}
    stepped: dict[str, Stepped] = {}
    for peer, build in peers.items():
        if peer in options.leave_out:
            continue
        error = None
        if dist.get_rank() == 0:
            print(f"{layout}: {peer} steps alone", file=sys.stderr, flush=True)
        if not is_there(peer):
            error = "not installed"
        else:
            try:
                stepped[peer] = Stepped(build, layout, mesh, shapes)
            except Exception as raised:  # of any kind: it is a result
                error = f"{type(raised).__name__}: {str(raised).partition('\n')[0]}"
        rows[peer] = {"error": next(filter(None, of_all_ranks(error)), None)}
    stepped = {peer: stepped[peer] for peer, row in rows.items() if row["error"] is None}
    if missing := {OURS, reference, "AdamW"} - stepped.keys():
        # All others are held against them.
        raise RuntimeError(f"{layout}: expected a step of {missing}, got {rows}")
    seconds: dict[str, list[float]] = {peer: [] for peer in stepped}
    for number in range(options.rounds):
        if dist.get_rank() == 0:
            print(f"{layout}: round {number + 1} of {options.rounds}", file=sys.stderr, flush=True)
        for peer, steps in stepped.items():
            steps.set_gradients()
            seconds[peer].append(step_seconds(steps.optimizer.step))
    step_ms = {peer: median(times) * 1e3 for peer, times in seconds.items()}
    for peer, steps in stepped.items():
        counts = of_all_ranks(steps.counts)
        sent = [Counter(of_rank["bytes_by_collective"]) for of_rank in counts]
        rows[peer] = {
            "calls": max(of_rank["calls"] for of_rank in counts),
            "bytes_a_rank": max(kinds.total() for kinds in sent),
            "bytes_by_collective": dict(sum(sent, Counter())),
            "kept_bytes": [of_rank["kept_bytes"] for of_rank in counts],
            "step_ms": step_ms[peer],
            "over_adamw": step_ms[peer] / step_ms["AdamW"],
            "over_ours": step_ms[peer] / step_ms[OURS],
        }
        if peer != "AdamW":
            rows[peer]["update_error"] = _difference(steps.update, stepped[reference].update)
        if peer in (OURS, OURS_FP32):
            rows[peer]["plan_bytes"] = steps.planned_bytes()
    return rows


def _lines(layout: str, rows: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    for peer, row in rows.items():
        cells = [row["error"], *"-------"] if "error" in row else [
            f"{row['step_ms']:.1f}",
            f"{row['over_adamw']:.2f}",
            f"{row['over_ours']:.2f}",
            f"{row['calls']}",
            f"{row['bytes_a_rank'] / 1e3:.1f}",
            f"{row['update_error']:.3f}" if "update_error" in row else "-",
            f"{max(row['kept_bytes']) / 1e6:.2f}",
            f"{sum(row['kept_bytes']) / 1e6:.2f}",
        ]  # fmt: skip
        yield f"| {layout} | {peer} | {' | '.join(cells)} |"


def main() -> int:
    """Compare in all layouts, print a table, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7, help="timed steps of each peer")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument(
        "--leave-out",
        nargs="+",
        choices=sorted({*PEERS, *SOAP_PEERS} - {OURS, OURS_FP32, "AdamW"}),
        default=[],
        help="such as torch.optim.Muon, whose 2,400 collectives a step of tiny take minutes",
    )
    parser.add_argument("--soap", action="store_true", help="SOAP in place of Muon")
    parser.add_argument("--peers", type=Path, metavar="DIR", help="where packages are installed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here too")
    options = parser.parse_args()
    # Read where functions are compiled, when a peer is imported.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    if options.peers is not None:
        sys.path.append(str(options.peers))
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))
    from cpu_ranks import bf16_products

    if not bf16_products.has_bf16_instructions():
        _kernels = bf16_products.install()  # they are restored when it is collected
    device = start_ranks()
    ranks = dist.get_world_size()
    if (ranks > 1 and ranks % 2) or options.hidden % ranks:
        parser.error(f"expected 1, or an even number of ranks that divides --hidden, got {ranks}")
    setup = setup_of(options, "hidden", "layers", "rounds")
    is_first = dist.get_rank() == 0
    if is_first:
        print(", ".join(f"{key} {value}" for key, value in setup.items()))
        print(
            "| layout | peer | step ms | / AdamW | / ours | calls | kB a rank | update "
            "| kept MB, fullest | kept MB, all |"
        )
        print("| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |", flush=True)
    layouts = {}
    for layout in options.layouts:
        layouts[layout] = compare(layout, options, device)
        if is_first:
            print(*_lines(layout, layouts[layout]), sep="\n", flush=True)
    if is_first and options.json is not None:
        data = {"setup": setup, "layouts": layouts}
        options.json.write_text(json.dumps(data, indent=1) + "\n")
    dist.barrier()
    return 0


if __name__ == "__main__":
    sys.exit(main())
