# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Count what one optimizer step launches on a GPU besides its matrix products, on CPU ranks.

    .venv/bin/python benchmarks/step_cost.py

The model is a GPT of 8 layers of hidden 128 under Megatron-FSDP ``optim_grads_params``: 32
matrices, of which query, key and value are split into three blocks. Muon has Nesterov, weight decay
and gradient clipping, and sends bf16; Lion updates the other parameters. What ``optimizer.step()``
of rank 0 sends to torch's dispatcher is counted in the second step:

- an operation is one call. A ``_foreach_`` operation counts once for its whole list, as a GPU runs
  it as one fused kernel. Views, allocations and calls on empty tensors are not counted, and of
  DTensor's calls only those on its local tensors;
- matrix products and collectives count apart;
- bytes are those of every tensor that an operation reads, and of every tensor that it writes. One
  that is changed in place counts as both; ``copy_``, ``fill_`` and ``out=`` write only;
- a host read makes the host wait for a GPU: ``item()`` and its like, and what goes past the
  dispatcher: ``tolist()``, ``cpu()``, and ``torch.tensor`` of tensors or of numbers on a device.

"A matrix" divides by the 32 matrices of the model, "an element" by the elements of them that rank 0
holds. Megatron-FSDP is left out, which reduces gradients before the step and gathers parameters
after it.

A CPU goes a GPU's way in four places: the kernel that moves rows runs in Triton's interpreter (a
launch counts as an operation), norms come from one fused call for a list, gradients are clipped as
with Transformer Engine, and owners and stacks are those of the cost model's GPU.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from gpt_under_fsdp import (
    build_gpt,
    build_muon,
    clip_as_with_transformer_engine,
    norms_as_on_a_gpu,
)
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

CPU_RANKS = Path(__file__).resolve().parents[1] / "scripts" / "cpu_ranks"
SEQ_LENGTH, VOCAB_SIZE, MICRO_BATCH_SIZE = 32, 64, 4
LAYERS, HIDDEN, HEADS = 8, 128, 4

MATRIX_PRODUCTS = {"mm", "bmm", "addmm", "addmm_", "baddbmm", "baddbmm_"}
# Each waits for the GPU: the host needs what it returns, or the shape of it.
HOST_READS = {"_local_scalar_dense", "equal", "nonzero", "masked_select", "is_nonzero", "item"}
COLLECTIVES = {"c10d", "_c10d_functional", "c10d_functional"}
# Memory without contents. Views are recognized by their schema.
ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
# They return what they are given, or another view of it, which their schema does not say.
NOTHING = {"lift_fresh", "_unsafe_view", "_reshape_alias", "set_", "resize_"}
# Written from other arguments alone: what these arguments hold before is not read.
ONLY_WRITTEN = {"copy_", "_foreach_copy_", "fill_", "zero_", "_foreach_zero_"}


class OperationCounter(TorchDispatchMode):
    """Count what is sent to the dispatcher in this thread; as a context.

    DTensor's own operations are not counted, those on its local tensors are.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations: Counter[str] = Counter()
        self.num_bytes: Counter[str] = Counter()
        self.matrix_products: Counter[str] = Counter()
        self.collectives: Counter[str] = Counter()
        # Reads past the dispatcher are there by the function that does them.
        self.host_reads: Counter[str] = Counter()
        self._past_dispatcher = _ReadsPastDispatcher(self.host_reads)

    def __enter__(self) -> "OperationCounter":
        """Count from here on."""
        self._past_dispatcher.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        """Count no more."""
        super().__exit__(*error)
        self._past_dispatcher.__exit__(*error)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Count an operation on plain tensors; leave DTensor's to DTensor, which makes them."""
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        full_name = func._schema.name
        name = full_name.partition("::")[2]
        if func.namespace in COLLECTIVES:
            # wait_tensor launches nothing.
            self.collectives[full_name] += "wait" not in name
        elif name in HOST_READS:
            self.host_reads[full_name] += 1
        elif name in MATRIX_PRODUCTS:
            self.matrix_products[full_name] += 1
        elif not (name in ALLOCATIONS or name in NOTHING or _is_view(func)):
            num_bytes = _bytes_moved(name, func, args, kwargs, result)
            # An empty tensor launches no kernel.
            if num_bytes:
                self.operations[full_name] += 1
                self.num_bytes[full_name] += num_bytes
        return result

    def count_row_kernel(self) -> None:
        """Count a launch of the kernel that moves rows as one operation, and not what runs it."""
        from megatron_muon.runtime import row_kernel

        launch = row_kernel.launch

        def counted(table: Any, pointers: Any, norms: Any) -> None:
            """Count a launch, and what it reads and writes; run it uncounted."""
            # Triton's interpreter copies tensors, which no GPU does.
            _uncounted(launch)(table, pointers, norms)
            num_elements = int((table.moves[:, 8] * table.moves[:, 9]).sum())
            self.operations["row_kernel"] += 1
            self.num_bytes["row_kernel"] += num_elements * sum(d.itemsize for d in table.dtypes)

        row_kernel.launch = _uncounted(counted)


def _uncounted(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        """Call without counting."""
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            return function(*args, **kwargs)

    return call


def _is_view(func: Any) -> bool:
    """Return whether what comes back shares memory with an argument, and nothing is written."""
    aliases = [argument.alias_info for argument in func._schema.arguments]
    returned = [each.alias_info is not None for each in func._schema.returns]
    is_written = any(alias is not None and alias.is_write for alias in aliases)
    return any(returned) and not is_written


def _bytes_moved(
    name: str, func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any
) -> int:
    """Add up what is read and what is written."""
    num_bytes = 0
    written = set()
    for position, argument in enumerate(func._schema.arguments):
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        is_read = not is_written or not (argument.is_out or name in ONLY_WRITTEN)
        for tensor in _tensors(value):
            num_bytes += tensor.nbytes * (is_written + is_read)
            if is_written:
                written.add(_memory(tensor))
    # What was written in place, or to out=, comes back.
    return num_bytes + sum(t.nbytes for t in _tensors(result) if _memory(t) not in written)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [each for each in tree_leaves(value) if isinstance(each, torch.Tensor)]


def _memory(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


class _ReadsPastDispatcher(TorchFunctionMode):
    """Find reads by the host that do not reach the dispatcher where tensors are on a CPU."""

    def __init__(self, reads: Counter[str]) -> None:
        super().__init__()
        self._reads = reads

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Count the tensors that become numbers."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if func is torch.as_tensor and isinstance(args[0], torch.Tensor):
            pass  # it is there already
        elif func in (torch.tensor, torch.as_tensor):
            # One after the other: each is an item() of its own.
            found = sum(isinstance(each, torch.Tensor) for each in tree_leaves(args))
            # Numbers are copied from pageable memory, for which the host waits as well.
            is_copy = isinstance(kwargs.get("device"), torch.device)
            self._reads[f"torch.{name}"] += found or is_copy
        elif func in (torch.Tensor.tolist, torch.Tensor.cpu, torch.Tensor.numpy):
            self._reads[f"Tensor.{name}"] += 1
        elif func is torch.Tensor.to and "cpu" in map(str, (*args[1:], *kwargs.values())):
            self._reads["Tensor.to"] += 1
        return func(*args, **kwargs)


class Launches:
    """Replace what a GPU would run by functions that count, and do nothing."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._replaced: list[tuple[Any, str, Any]] = []

    def replace(self, owner: Any, name: str, result: Callable[..., Any]) -> None:
        """Replace a function by one that counts, and returns ``result`` of its arguments."""
        self._replaced.append((owner, name, getattr(owner, name)))

        def counted(*args: Any, **kwargs: Any) -> Any:
            """Count instead of computing."""
            self.counts[name] += 1
            return result(*args, **kwargs)

        setattr(owner, name, counted)

    def restore(self) -> None:
        """Undo all replacements."""
        for owner, name, original in reversed(self._replaced):
            setattr(owner, name, original)


def replace_arithmetic(launches: Launches) -> None:
    """Replace the functions of torch that the step and AdamW call on lists and whole tensors."""
    from megatron_muon.newton_schulz import BACKENDS

    numbers: dict[tuple[int, Any], Any] = {}

    def norms(tensors: Sequence[Any], *_: Any, dtype: Any = None, **__: Any) -> Any:
        """Return as many numbers as tensors."""
        key = len(tensors), dtype or tensors[0].dtype
        if key not in numbers:
            device = tensors[0].device
            numbers[key] = tuple(torch.ones((), dtype=key[1], device=device) for _ in tensors)
        return numbers[key]

    def same(first: Any, *_: Any, **kwargs: Any) -> Any:
        """Return the result where it is given, otherwise what is as large."""
        return kwargs.get("out", first)

    for name in dir(torch):
        if name == "_foreach_norm":
            launches.replace(torch, name, norms)
        elif name.startswith("_foreach_") and callable(getattr(torch, name)):
            launches.replace(torch, name, same)
    for name in ("div", "mul"):
        launches.replace(torch, name, same)
    for backend in BACKENDS.values():
        launches.replace(type(backend), "run", lambda self, stack, call: stack)
    from megatron_muon.runtime import row_kernel

    launches.replace(row_kernel, "launch", lambda *_, **__: None)


def count_launches(launches: Launches, step: Callable[[], Any]) -> Counter[str]:
    """Count a step: what is replaced, and what else reaches the dispatcher."""
    launches.counts.clear()
    with OperationCounter() as counter:
        step()
    return launches.counts + Counter({"other": counter.operations.total()})


def build_optimizer(model: Any) -> Any:
    """Build Muon and Lion as on a GPU."""
    import megatron_muon
    from megatron_muon.plan.cost import CostModel
    from megatron_muon.runtime import local_rows

    norms_as_on_a_gpu()
    clip_as_with_transformer_engine()
    # CPU ranks orthogonalize one matrix at once.
    local_rows.batch_size = len
    # Named, so that they replace those of CPU ranks. The other two are the run's.
    others = ("num_ns_steps", "backends", "coefficient_type")
    rates = {k: v for k, v in dataclasses.asdict(CostModel()).items() if k not in others}
    cost_model = ",".join(f"{name}={value}" for name, value in rates.items())
    return build_muon(model, exchange=megatron_muon.ExchangeSettings(cost_model=cost_model))


def run_backward(model: Any, optimizer: Any, seed: int) -> None:
    """Fill the gradients from random tokens."""
    import torch.distributed as dist

    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    tokens = torch.randint(VOCAB_SIZE, (MICRO_BATCH_SIZE, SEQ_LENGTH + 1), generator=generator)
    positions = torch.arange(SEQ_LENGTH).expand(MICRO_BATCH_SIZE, -1)
    mask = torch.ones(1, 1, SEQ_LENGTH, SEQ_LENGTH).tril() < 0.5
    model.zero_grad_buffer()
    optimizer.zero_grad()
    model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:]).float().mean().backward()


def count_step() -> dict[str, Any]:
    """Count the second step of this rank."""
    # Before the kernel is imported, which is then interpreted.
    os.environ["TRITON_INTERPRET"] = "1"
    import torch.distributed as dist
    from megatron.core import parallel_state, tensor_parallel

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=1)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    model = build_gpt(
        VOCAB_SIZE, SEQ_LENGTH, num_layers=LAYERS, hidden_size=HIDDEN, num_attention_heads=HEADS
    )
    optimizer = build_optimizer(model)
    run_backward(model, optimizer, 0)
    optimizer.step()
    run_backward(model, optimizer, 1)
    for owner, name in (
        (model, "finish_grad_sync"),
        (model.module, "install_optimized_model_weights"),
        (model, "start_param_sync"),
    ):
        setattr(owner, name, _uncounted(getattr(owner, name)))
    counter = OperationCounter()
    counter.count_row_kernel()
    with counter:
        optimizer.step()
    matrices = [param for muon in optimizer.muon_step.optimizers for param in muon.params]
    counts = ("operations", "num_bytes", "matrix_products", "collectives", "host_reads")
    return {
        "ranks": dist.get_world_size(),
        "matrices": len(matrices),
        "elements": sum(param._local_tensor.numel() for param in matrices),
        **{name: dict(getattr(counter, name).most_common()) for name in counts},
    }


HEADER = (
    "operations a matrix | matrix products a matrix | collectives | bytes an element | host reads"
)


def row_of(counted: dict[str, Any]) -> str:
    """Return the figures of :data:`HEADER`."""
    matrices, elements = counted["matrices"], counted["elements"]
    total = {name: sum(v.values()) for name, v in counted.items() if isinstance(v, dict)}
    return (
        f"{total['operations'] / matrices:.1f} | {total['matrix_products'] / matrices:.1f} | "
        f"{total['collectives']} | {total['num_bytes'] / elements:.0f} | {total['host_reads']}"
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
    """Count on each number of ranks, print a table and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the counts by operation")
    options = parser.parse_args()
    is_rank = "RANK" in os.environ
    worlds = [count_step()] if is_rank else [count_on(ranks) for ranks in options.ranks]
    if os.environ.get("RANK", "0") == "0":
        print(f"| ranks | {HEADER} |\n| {'--- | ' * 6}".rstrip())
        for counted in worlds:
            print(f"| {counted['ranks']} | {row_of(counted)} |")
        if options.json is not None:
            options.json.write_text(json.dumps(worlds, indent=1) + "\n")
    if is_rank:
        torch.distributed.barrier()
    return 0


if __name__ == "__main__":
    sys.exit(main())
