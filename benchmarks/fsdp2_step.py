# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Time a step of fsdp2.Muon against its peers on FSDP2 parameters, on CPU ranks or on GPUs.

    .venv/bin/python benchmarks/fsdp2_step.py --ranks 4 --hidden 128 --layers 4 --peers DIR

Needs no megatron. Two peers are in no registry. Copy into DIR, under the same paths: ``dion/``
(microsoft/dion) and ``torchtitan/distributed/flex_shard/`` (pytorch/torchtitan, DistMuon).

Every peer has the same parameters, sharded by ``fully_shard``, and the same gradients. Layouts:

    even           one axis; rows divide, and so does the number of matrices
    remainders     one axis; neither divides
    experts        one axis; batches of matrices, of which ranks have different numbers
    whole experts  the same, two matrices of each batch on every rank
    tiny           one axis; 600 matrices of 16 x 16 (4 layers of hidden 128)
    small          one axis; 150 of 64 x 64, and 150 of 64 x 128
    HSDP           two replicas of n / 2 shards, shapes of even
    TP x FSDP      two tensor-parallel ranks of n / 2 shards, shapes of even

First each peer steps each layout alone, in ranks of its own: that counts collectives and bytes. If
it raises, or ends a rank, its row is the first error. Then all others are timed in turn, one step
each, so that other work on the machine disturbs all peers equally. Times are of the slowest rank,
medians over the rounds.

Bytes and calls are of all collectives that reach torch's dispatcher, DTensor's included. An
all-reduce counts as a ring. "Update" is how far the first update is from that of megatron_muon with
fp32 messages, relative to its norm, for the worst parameter: bf16 Newton-Schulz with other
rounding is off by up to 0.05.

The same for all: ``torch.compile`` is off, and where the CPU has no bf16 instructions, products of
bf16 matrices are computed in fp32. No peer is tuned. AdamW stands for the time that Muon should
come near.
"""

import argparse
import datetime
import importlib
import importlib.util
import json
import os
import platform
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from measure import CollectiveCounter, step_seconds
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.multiprocessing import (
    ProcessExitedException,
    ProcessRaisedException,
    start_processes,
)

LR, MOMENTUM, WEIGHT_DECAY = 0.01, 0.95, 0.1
OURS, OURS_FP32 = "megatron_muon", "megatron_muon, fp32 messages"
# Modules of the peers that may not be installed.
PACKAGES = {"dion": "dion", "DistMuon": "torchtitan.distributed.flex_shard.dist_muon"}
LAYOUTS = "even", "remainders", "experts", "whole experts", "tiny", "small", "HSDP", "TP x FSDP"
Shapes = Sequence[tuple[int, ...]]
Params = list[torch.nn.Parameter]
Builder = Callable[[Params], torch.optim.Optimizer]


def _ours(comm_dtype: Any) -> Builder:
    def build(params: Params) -> torch.optim.Optimizer:
        """Build this package's optimizer, with torch's coefficients and scale."""
        from megatron_muon.fsdp2 import ExchangeSettings, Muon

        exchange = ExchangeSettings(comm_dtype=comm_dtype)
        keys: Any = {"coefficient_type": "simple", "scale_mode": "shape_scaling", "nesterov": True}
        return Muon(params, LR, MOMENTUM, WEIGHT_DECAY, exchange=exchange, **keys)

    return build


def _dion(params: Params) -> torch.optim.Optimizer:
    """Build dion's Muon over the axis that shards, as its documentation asks for."""
    from torch.distributed.tensor import DTensor

    first = params[0]
    assert isinstance(first, DTensor)
    mesh: Any = first.device_mesh
    if mesh.ndim > 1:
        # Of hybrid sharding; it has no tensor parallelism.
        mesh = mesh[mesh.mesh_dim_names[1]]
    return importlib.import_module("dion").Muon(
        params,
        distributed_mesh=mesh,
        lr=LR,
        mu=MOMENTUM,
        weight_decay=WEIGHT_DECAY,
        nesterov=True,
        adjust_lr="spectral_norm",
        use_polar_express=False,
    )


def _dist_muon(params: Params) -> torch.optim.Optimizer:
    """Build torchtitan's: whole matrices on one rank each, experts where they are, one bucket.

    It refuses other devices than CUDA in one check.
    """
    module: Any = importlib.import_module(PACKAGES["DistMuon"])
    reshard: Any = importlib.import_module("torchtitan.distributed.flex_shard")
    from torch.distributed.tensor import Shard

    if params[0].device.type == "cpu":
        device = params[0].device
        module.DistMuon._validate_parameter_storage = lambda self: device
        # Nothing is asynchronous there: torch has streams that do nothing.
        torch.cpu.Stream = _Stream  # type: ignore[misc]
    names = [str(number) for number, _ in enumerate(params)]
    layouts = {
        name: reshard.ComputeLayout(
            shardings_by_mesh_axis={"shard": Shard(0) if param.ndim == 3 else reshard.Owned()}
        )
        for name, param in zip(names, params, strict=True)
    }
    return reshard.build_dist_muon(
        [{"params": params, "param_names": names}],
        compute_sharding_by_fqn=layouts,
        bucket_configs=[reshard.BucketConfig(patterns=("*",), name="all")],
        lr=LR,
        weight_decay=WEIGHT_DECAY,
        momentum=MOMENTUM,
        nesterov=True,
    )


class _Stream(torch.cpu.Stream):
    """torch's stream of a CPU, which takes no device."""

    def __init__(self, device: object = None, priority: int = -1) -> None:
        super().__init__(priority)


PEERS: Mapping[str, Builder] = {
    OURS: _ours("bf16"),
    OURS_FP32: _ours("fp32"),
    "AdamW": lambda params: torch.optim.AdamW(params, LR, weight_decay=WEIGHT_DECAY, foreach=True),
    "torch.optim.Muon": lambda params: torch.optim.Muon(params, LR, WEIGHT_DECAY, MOMENTUM),
    "dion": _dion,
    "DistMuon": _dist_muon,
}


def is_there(module: str) -> bool:
    """Return whether a module can be imported."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # not even the package that has it
        return False


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
        """Bring the gradients back: a peer may overwrite them."""
        for param, grad in zip(self.params, self._grads, strict=True):
            param.grad = grad.clone()

    def first_update(self) -> list[torch.Tensor]:
        """Step, and return what has changed on this rank."""
        # Their own memory: no operations of DTensor.
        locals_: list[Any] = [param.detach() for param in self.params]
        before = [local.to_local().clone() for local in locals_]
        self.set_gradients()
        self.optimizer.step()
        return [new.to_local() - old for new, old in zip(locals_, before, strict=True)]


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

        plans = stepped.optimizer.engine.plans  # type: ignore[attr-defined]
        report = build_report(range(options.ranks), plans)
        found["plan_bytes"] = report.ranks[dist.get_rank()].bytes_sent
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


def _run_rank(rank: int, folder: Path, function: Callable[..., Any], args: Sequence[Any]) -> None:
    """Run a function on a rank, and leave its result in a file."""
    torch.set_num_threads(1)
    options = args[-1]
    if options.device == "cuda":
        torch.cuda.set_device(rank)
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))
    from cpu_ranks import bf16_products

    if not bf16_products.has_bf16_instructions():
        _kernels = bf16_products.install()  # they are restored when it is collected
    dist.init_process_group(
        "nccl" if options.device == "cuda" else "gloo",
        store=dist.FileStore(str(folder / "store")),
        rank=rank,
        world_size=options.ranks,
        timeout=datetime.timedelta(seconds=options.timeout),
    )
    result = function(*args)
    dist.barrier()
    (folder / f"{rank}.json").write_text(json.dumps(result))


def run_ranks(
    function: Callable[..., Any], *args: Any, limit_s: float
) -> tuple[list[Any], str | None]:
    """Run a function on ranks forked from this process.

    Args:
        function: Called with ``args`` on each rank; returns a JSON value.
        *args: The last one are the options.
        limit_s: Seconds after which ranks are ended.

    Returns:
        Results by rank, and the error of the first rank that failed; None where all went well.
    """
    deadline = time.monotonic() + limit_s
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ranks = start_processes(
            _run_rank,
            (folder, function, args),
            nprocs=args[-1].ranks,
            join=False,
            start_method="fork",
        )
        try:
            while not ranks.join(timeout=max(0.0, deadline - time.monotonic())):
                if time.monotonic() >= deadline:
                    for process in ranks.processes:
                        process.kill()
        except ProcessRaisedException as error:
            # Of the traceback, which begins with other lines.
            return [], re.findall(r"^[\w.]+(?:: .*)?$", str(error), re.MULTILINE)[-1]
        except ProcessExitedException as error:
            return [], str(error)
        files = [folder / f"{rank}.json" for rank in range(args[-1].ranks)]
        return [json.loads(file.read_text()) for file in files], None


def compare(layout: str, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return a row for each peer: what it does in this layout, or how it fails."""
    rows: dict[str, dict[str, Any]] = {}
    for peer in PEERS:
        if peer in PACKAGES and not is_there(PACKAGES[peer]):
            rows[peer] = {"error": "not installed"}
            continue
        found, error = run_ranks(probe, peer, layout, options, limit_s=options.timeout)
        if error is not None:
            rows[peer] = {"error": error}
            continue
        sent = [Counter(counts["bytes_by_collective"]) for counts in found]
        rows[peer] = {
            "calls": max(counts["calls"] for counts in found),
            "bytes_a_rank": max(kinds.total() for kinds in sent),
            "bytes_by_collective": dict(sum(sent, Counter())),
        }
        if "plan_bytes" in found[0]:
            rows[peer]["plan_bytes"] = sum(counts["plan_bytes"] for counts in found)
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
    """Return the table."""
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
    }
    print(", ".join(f"{key} {value}" for key, value in setup.items()))
    print("\n".join(_lines(layouts)))
    if options.json is not None:
        options.json.write_text(json.dumps({"setup": setup, "layouts": layouts}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
