# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Time a step of fsdp2.Muon against its peers on FSDP2 parameters, on CPU ranks or on GPUs.

    .venv/bin/python benchmarks/fsdp2_step.py --ranks 4 --hidden 128 --layers 4 --peers DIR

Needs no megatron. Three peers are packages of PyPI, which this project does not depend on::

    pip install --no-deps --target DIR muon-fsdp2==0.3.0 dtensor-muon==0.1.0 muonium==0.2.0

Others are in no registry. Copy into DIR, under the same paths: ``dion/`` (microsoft/dion),
``torchtitan/distributed/flex_shard/`` (pytorch/torchtitan, DistMuon), ``veomni/optim/muon.py``,
``veomni/utils/{logging,device,import_utils}.py`` (ByteDance-Seed/VeOmni), and
``xtuner/v1/{optim/muon,utils/dtensor}.py`` (InternLM/xtuner).

Every peer has the same parameters, sharded by ``fully_shard``, and the same gradients. Layouts:

    even           one axis; rows divide, and so does the number of matrices
    remainders     one axis; neither divides
    experts        one axis; batches of matrices, of which ranks have different numbers
    whole experts  the same, two matrices of each batch on every rank
    tiny           one axis; 600 matrices of 16 x 16 (4 layers of hidden 128)
    small          one axis; 150 each of 64 x 64 and 64 x 128
    HSDP           two replicas of n / 2 shards, shapes of even
    TP x FSDP      two tensor-parallel ranks of n / 2 shards, shapes of even

First each peer steps each layout alone, in ranks of its own: that counts collectives and bytes. If
it raises, or ends a rank, its row is the first error. Then all others are timed in turn, one step
each, so that other work on the machine disturbs all of them alike. Times are of the slowest rank,
medians over the rounds.

Bytes and calls are those of all collectives that reach torch's dispatcher, DTensor's among them. An
all-reduce counts as a ring. "Update" is how far the first update is from that of megatron_muon with
fp32 messages, relative to its norm, for the worst parameter: bf16 Newton-Schulz with other
rounding is off by up to 0.05.

The same for all: ``torch.compile`` is off, and where the CPU has no bf16 instructions, products of
bf16 matrices are computed in fp32. dtensor-muon and muonium choose Triton kernels, which need a
GPU: ``ns_loop_triton`` is replaced by the packages' own ``ns_loop``. Their batched classes need one
too: matrices are stepped one by one. fsdp2_peers.py says what lets others run on gloo. No peer is
tuned. AdamW stands for the time that Muon should come near.
"""

import argparse
import datetime
import importlib
import json
import math
import multiprocessing
import os
import platform
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fsdp2_peers import (
    OURS,
    OURS_FP32,
    PACKAGES,
    PEERS,
    Params,
    installed_version,
    is_there,
)
from measure import CollectiveCounter, median, step_seconds
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

LAYOUTS = "even", "remainders", "experts", "whole experts", "tiny", "small", "HSDP", "TP x FSDP"
# How long the other ranks may go on when one has failed: they usually lose a connection.
GRACE_S = 5.0
Shapes = Sequence[tuple[int, ...]]


def shapes_of(layout: str, options: argparse.Namespace) -> Shapes:
    """Return the shapes of all parameters."""
    hidden, num_layers = options.hidden, options.layers
    layer = [(hidden, hidden), (3 * hidden, hidden), (4 * hidden, hidden), (hidden, 4 * hidden)]
    if layout == "remainders":
        odd = [(rows + 1, cols) for rows, cols in layer]
        return [*odd * num_layers, odd[0]]
    if layout == "tiny":
        return [(hidden // 8, hidden // 8)] * (150 * num_layers)
    if layout == "small":
        return [(hidden // 2, hidden // 2), (hidden // 2, hidden)] * (75 * num_layers // 2)
    if layout.endswith("experts"):
        num_experts = 2 * options.ranks if "whole" in layout else 3 * options.ranks // 2
        return [(num_experts, 2 * hidden, hidden), (num_experts, hidden, hidden)] * num_layers
    return layer * num_layers


def _mesh(layout: str, device: str) -> DeviceMesh:
    size = dist.get_world_size()
    if layout == "HSDP":
        return init_device_mesh(device, (2, size // 2), mesh_dim_names=("replica", "shard"))
    if layout == "TP x FSDP":
        return init_device_mesh(device, (size // 2, 2), mesh_dim_names=("shard", "tensor"))
    return init_device_mesh(device, (size,), mesh_dim_names=("shard",))


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
    """A peer with parameters of its own."""

    def __init__(self, peer: str, layout: str, mesh: DeviceMesh, shapes: Shapes) -> None:
        self.params = _sharded(layout, mesh, shapes, seed=0)
        self._grads = [param.detach() for param in _sharded(layout, mesh, shapes, seed=1)]
        self.optimizer = PEERS[peer](self.params)

    def set_gradients(self) -> None:
        """Bring the gradients back, which muon-fsdp2 overwrites."""
        for param, grad in zip(self.params, self._grads, strict=True):
            param.grad = grad.clone()

    def first_update(self) -> list[torch.Tensor]:
        """Step, and return what has changed on this rank."""
        # Their own memory: no operations of DTensor.
        locals_: list[Any] = [param.detach() for param in self.params]
        before = [each.to_local().clone() for each in locals_]
        self.set_gradients()
        self.optimizer.step()
        return [each.to_local() - old for each, old in zip(locals_, before, strict=True)]


def probe(peer: str, layout: str, options: argparse.Namespace) -> dict[str, Any]:
    """Step one peer twice, and count the second step: the first makes its state."""
    shapes = shapes_of(layout, options)
    stepped = Stepped(peer, layout, _mesh(layout, options.device), shapes)
    stepped.first_update()
    stepped.set_gradients()
    with CollectiveCounter() as counter:
        stepped.optimizer.step()
    found = {"calls": counter.calls.total(), "bytes_by_collective": dict(counter.num_bytes)}
    if peer in (OURS, OURS_FP32):
        from megatron_muon.report.rank_report import build_report

        plans = stepped.optimizer.compute.plans  # type: ignore[attr-defined]
        report = build_report(range(options.ranks), plans)
        found["plan_bytes"] = report.ranks[dist.get_rank()].bytes_sent
        dtypes = plans[0].dtypes
        # All of a matrix but the owner's share is sent there and comes back.
        moved = sum(map(math.prod, shapes)) * (options.ranks - 1) // options.ranks
        found["even_all_to_all_bytes"] = moved * (dtypes.gather_bytes + dtypes.scatter_bytes)
    return found


def measure(peers: Sequence[str], layout: str, options: argparse.Namespace) -> dict[str, Any]:
    """Time the steps of all peers in turn; returns seconds by peer, and how updates differ."""
    mesh = _mesh(layout, options.device)
    shapes = shapes_of(layout, options)
    stepped = {peer: Stepped(peer, layout, mesh, shapes) for peer in peers}
    updates = {peer: stepped[peer].first_update() for peer in peers}
    muons = [peer for peer in peers if peer != "AdamW"]
    errors = {peer: _difference(updates[peer], updates[OURS_FP32]) for peer in muons}
    seconds: dict[str, list[float]] = {peer: [] for peer in peers}
    for _ in range(options.rounds):
        for peer in peers:
            stepped[peer].set_gradients()
            seconds[peer].append(step_seconds(stepped[peer].optimizer.step))
    return {"seconds": seconds, "update_error": errors}


def _difference(update: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> float:
    """Return the largest relative difference of a parameter's update, over all ranks."""
    pairs = zip(update, other, strict=True)
    norms = [[float(x.norm()) ** 2 for x in (a - b, b)] for a, b in pairs]
    sums = torch.tensor(norms, device=update[0].device)
    dist.all_reduce(sums)
    return float((sums[:, 0] / sums[:, 1]).sqrt().max())


def _run_rank(
    rank: int, folder: Path, function: Callable[..., Any], args: Sequence[Any], limit_s: float
) -> None:
    """Run a function on a rank, and leave its result or its error in a file."""
    with (folder / f"{rank}.log").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    torch.set_num_threads(1)
    options = args[-1]
    if options.device == "cuda":
        torch.cuda.set_device(rank)
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))
    from cpu_ranks import bf16_products

    if not bf16_products.has_bf16_instructions():
        _kernels = bf16_products.install()  # they are restored when it is collected
    store, timeout = dist.FileStore(str(folder / "store")), datetime.timedelta(seconds=limit_s)
    try:
        dist.init_process_group(
            "nccl" if options.device == "cuda" else "gloo",
            store=store,
            rank=rank,
            world_size=options.ranks,
            timeout=timeout,
        )
        found = {"result": function(*args)}
        dist.barrier()
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        found = {"error": f"{type(error).__name__}: {lines[0]}", "time": time.monotonic()}
    (folder / f"{rank}.json").write_text(json.dumps(found))
    # Not destroyed: other ranks may be gone.
    os._exit("error" in found)


def run_ranks(
    function: Callable[..., Any], *args: Any, limit_s: float
) -> tuple[list[Any], str | None]:
    """Run a function on ranks forked from this process.

    Args:
        function: Called with ``args`` on each rank; returns a JSON value.
        *args: The last one are the options.
        limit_s: Seconds after which ranks are ended.

    Returns:
        Results by rank, and the error of the rank that failed first; None where all went well.
    """
    process_of = multiprocessing.get_context("fork").Process
    size = args[-1].ranks
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ranks = [
            process_of(target=_run_rank, args=(rank, folder, function, args, limit_s))
            for rank in range(size)
        ]
        for process in ranks:
            process.start()
        deadline = time.monotonic() + limit_s
        failed: dict[int, int] = {}  # the first rank, or those that ended with it
        while any(process.is_alive() for process in ranks) and time.monotonic() < deadline:
            time.sleep(0.01)
            if not failed:
                failed = {rank: p.exitcode for rank, p in enumerate(ranks) if p.exitcode}
                deadline = min(deadline, time.monotonic() + GRACE_S) if failed else deadline
        is_late = any(process.is_alive() for process in ranks)
        for process in ranks:
            process.kill()
            process.join()
        files = [folder / f"{rank}.json" for rank in range(size)]
        found = [json.loads(file.read_text()) for file in files if file.exists()]
        logs = [(folder / f"{rank}.log").read_text(errors="replace") for rank in range(size)]
    # Of the others, some raise because a connection is lost, or abort.
    if failed and max(failed.values()) < 0:
        rank, code = next(iter(failed.items()))
        # Of an exception of C++ that nobody caught.
        what = logs[rank].partition("what():")[2].strip().partition("\n")[0]
        return [], f"{signal.Signals(-code).name} on rank {rank}: {what or 'no message'}"
    errors = [each for each in found if "error" in each]
    if errors:
        return [], min(errors, key=lambda each: each["time"])["error"]
    if is_late:
        return [], f"no end after {limit_s:.0f} s"
    return [each["result"] for each in found], None


def compare(layout: str, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return a row for each peer: what it does in this layout, or how it fails."""
    rows: dict[str, dict[str, Any]] = {}
    for peer in PEERS:
        if peer in PACKAGES and not installed_version(peer):
            rows[peer] = {"error": "not installed"}
            continue
        found, error = run_ranks(probe, peer, layout, options, limit_s=options.timeout)
        if error is not None:
            rows[peer] = {"error": error}
            continue
        sent = [Counter(each["bytes_by_collective"]) for each in found]
        rows[peer] = {
            "calls": max(each["calls"] for each in found),
            "bytes_a_rank": max(each.total() for each in sent),
            "bytes_by_collective": dict(sum(sent, Counter())),
        }
        if "plan_bytes" in found[0]:
            rows[peer]["plan_bytes"] = sum(each["plan_bytes"] for each in found)
            rows[peer]["even_all_to_all_bytes"] = found[0]["even_all_to_all_bytes"]
    able = {peer: row for peer, row in rows.items() if "error" not in row}
    for peer in (OURS, OURS_FP32, "AdamW"):
        # All others are held against them.
        if peer not in able:
            raise RuntimeError(f"{layout}, {peer}: expected a step, got {rows[peer]['error']}")
    limit_s = options.timeout * (options.rounds + 2)
    found, error = run_ranks(measure, list(able), layout, options, limit_s=limit_s)
    if error is not None:
        raise RuntimeError(f"{layout}: expected steps of {', '.join(able)} in turn, got {error}")
    step_ms = {peer: median(found[0]["seconds"][peer]) * 1e3 for peer in able}
    for peer, row in able.items():
        row["step_ms"] = step_ms[peer]
        row["over_adamw"] = step_ms[peer] / step_ms["AdamW"]
        row["over_ours"] = step_ms[peer] / step_ms[OURS]
        row["update_error"] = found[0]["update_error"].get(peer)
    return rows


def _lines(layouts: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> list[str]:
    """Return the tables: of steps, and of the bytes of this package's plans."""
    lines = [
        "| layout | peer | step ms | / AdamW | / ours | calls | kB a rank | update |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for layout, rows in layouts.items():
        for peer, row in rows.items():
            if "error" in row:
                lines.append(f"| {layout} | {peer} | {row['error']} | - | - | - | - | - |")
                continue
            error = "-" if row["update_error"] is None else f"{row['update_error']:.3f}"
            lines.append(
                f"| {layout} | {peer} | {row['step_ms']:.1f} | {row['over_adamw']:.2f} | "
                f"{row['over_ours']:.2f} | {row['calls']} | {row['bytes_a_rank'] / 1e3:.1f} | "
                f"{error} |"
            )
    lines += [
        "",
        "Bytes of all ranks: flags and norms are all-reduced, the others are rows and results.",
        "",
        "| layout | peer | even all-to-all | plan | rows and results | all collectives |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for layout, rows in layouts.items():
        for peer, row in rows.items():
            if "plan_bytes" in row:
                found = row["bytes_by_collective"]
                total = sum(found.values())
                even = f"{row['even_all_to_all_bytes']:,}" if layout == "even" else "-"
                lines.append(
                    f"| {layout} | {peer} | {even} | "
                    f"{row['plan_bytes']:,} | {total - found.get('allreduce', 0):,} | {total:,} |"
                )
    return lines


def main() -> int:
    """Compare in all layouts, print tables, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="a GPU a rank")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7, help="timed steps of each peer")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--peers", type=Path, metavar="DIR", help="where packages are installed")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds of a peer's steps")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here too")
    options = parser.parse_args()
    if options.ranks % 2 or options.hidden % options.ranks:
        parser.error(
            f"--ranks: expected an even number that divides --hidden, got {options.ranks} and "
            f"{options.hidden}. Choose 4 and 128."
        )
    # Read where functions are compiled, when a peer is imported.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    torch.set_num_threads(1)
    if options.peers is not None:
        sys.path.append(str(options.peers))
    # Once, not in every rank that is forked; the first two are what optimizers import when built.
    late = ("torch._dynamo", "torch.distributed.checkpoint", "megatron_muon.fsdp2")
    for module in (*late, *PACKAGES.values()):
        if is_there(module):
            importlib.import_module(module)
    layouts = {layout: compare(layout, options) for layout in options.layouts}
    setup = {
        **{name: getattr(options, name) for name in ("ranks", "hidden", "layers", "rounds")},
        "cpus": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{package: installed_version(package) for package in PACKAGES},
    }
    print(", ".join(f"{key} {value}" for key, value in setup.items()))
    print("\n".join(_lines(layouts)))
    if options.json is not None:
        options.json.write_text(json.dumps({"setup": setup, "layouts": layouts}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
