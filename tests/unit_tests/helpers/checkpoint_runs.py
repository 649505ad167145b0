# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Runs that save and load, with what the optimizer held on the way."""

import argparse
import functools
import hashlib
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from helpers.ranks import Run, launch
from helpers.toy_gpt import fsdp_toy_gpt
from megatron_muon.mcore.checkpoint_folders import TRACKER, find_checkpoint
from megatron_muon.mcore.checkpoint_reading import read_checkpoint
from megatron_muon.tools.checkpoint.reading import find_problems, read_object

type Change = Callable[[], None] | None
# Shape of the whole tensor, index at which the shard begins in it, and the shard.
type Shard = tuple[torch.Size, torch.Size, torch.Tensor]

SAVED_AT, LAST = 3, 5
SCHEDULE = f"--train-iters {LAST} --lr-decay-iters 20 --save-interval {SAVED_AT}".split()

# A checkpoint of Megatron-FSDP with one matrix, and names in it.
ARGS = {
    "bf16": False,
    "fp16": False,
    "swiglu": True,
    "transformer_impl": "local",
    "moe_grouped_gemm": False,
    "num_layers": 1,
    "num_experts": None,
    "optimizer": "muon",
}
MATRIX = "module.module.decoder.layers.0.w"
WEIGHT, MOMENTUM = f"model.{MATRIX[7:]}", f"optimizer.state.{MATRIX}.momentum_buffer"
SETTING = f"optimizer.param_to_group_meta.{MATRIX}.lr"


def save_matrix(folder: Path, value: float = 1.0, **more: Any) -> Path:
    """Save it; its bytes have the same places for every value."""
    matrix = torch.full((20, 30), value)
    state = {WEIGHT: matrix, MOMENTUM: matrix.clone(), SETTING: 0.1, "iteration": 3}
    state["args"] = argparse.Namespace(**ARGS)
    dcp.save(state | more, checkpoint_id=folder, no_dist=True)
    return folder


def saved_run(
    world_size: int, folder: Path, sharding: str, *flags: str, before: Change = None
) -> Run:
    """Train to the end, saving every ``SAVED_AT`` iterations; see ``watch()`` for ``before``."""
    folder.mkdir()
    arguments = fsdp_toy_gpt(sharding, *SCHEDULE, "--save", str(folder), *flags)
    watching = functools.partial(watch, str(folder), before)
    return launch(world_size, arguments, before=watching).check()


def resumed_run(
    world_size: int,
    folder: Path,
    output: Path,
    sharding: str,
    *flags: str,
    before: Change = None,
    **options: Any,
) -> Run:
    """Load what was saved at iteration ``SAVED_AT`` and train on; states go to ``output``."""
    output.mkdir(exist_ok=True)
    arguments = [*SCHEDULE, "--load", str(folder), "--ckpt-step", str(SAVED_AT)]
    return launch(
        world_size,
        fsdp_toy_gpt(sharding, *arguments, *flags),
        before=functools.partial(watch, str(output), before),
        **options,
    )


def digest(optimizer: Any) -> str:
    """Digest this rank's parameters and state; zeros, which a load may make, count as none."""
    found = hashlib.sha256()
    for child in getattr(optimizer, "chained_optimizers", [optimizer]):
        for param in child.get_parameters():
            state = child.optimizer.state.get(param, {})
            tensors = {key: each for key, each in sorted(state.items()) if torch.is_tensor(each)}
            for key, tensor in {"param": param, **tensors}.items():
                local = getattr(tensor, "_local_tensor", tensor).detach().cpu()
                if local.any():
                    # numpy has no bfloat16.
                    values = local.reshape(-1).view(torch.uint8).numpy()
                    found.update(key.encode() + values.tobytes())
    return found.hexdigest()


def watch(folder: str, before: Change = None) -> None:
    """Write on each rank a digest of parameters and state after each step, and its tensors once.

    First ``before`` changes the run. Tensors are written before the first step that follows
    iteration ``SAVED_AT``, ``local_<rank>.pt``; digests to ``digests_<rank>``.
    """
    if before is not None:
        before()
    from megatron.training import get_args

    from megatron_muon.mcore.chained_optimizer import FSDPMuonChainedOptimizer

    def step(original: Callable[[Any], Any], optimizer: Any) -> Any:
        rank, iteration = torch.distributed.get_rank(), get_args().curr_iteration
        if iteration == SAVED_AT:
            torch.save(local_tensors(optimizer), Path(folder) / f"local_{rank}.pt")
        done = original(optimizer)
        with open(Path(folder) / f"digests_{rank}", "a") as file:
            file.write(f"{iteration} {digest(optimizer)}\n")
        return done

    wrap(FSDPMuonChainedOptimizer, "step", step)


def local_tensors(optimizer: Any) -> dict[str, Shard]:
    """Return this rank's shard of parameters and state, by name.

    Where a shard begins is what Megatron-FSDP's own function finds. State of the shape of its
    parameter lies like it, so one call serves both.
    """
    from megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor import (
        gather_and_compute_chunk_metadata,
    )

    packed = optimizer.state_dict()["state"]
    by_name = {name: param for param, name in optimizer.stored_state.names.items()}
    shards = {}
    for name, state in packed.items():
        param = by_name[name].detach()
        begins = {param.shape: gather_and_compute_chunk_metadata(param).offsets}
        tensors = {key: each for key, each in state.items() if torch.is_tensor(each)}
        for key, tensor in {"param": param, **tensors}.items():
            if not hasattr(tensor, "_local_tensor"):
                shards[f"{name}.{key}"] = tensor.shape, torch.Size([0] * tensor.dim()), tensor
                continue
            if tensor.shape not in begins or tensor.placements != param.placements:
                begins[tensor.shape] = gather_and_compute_chunk_metadata(tensor.detach()).offsets
            begin = begins[tensor.shape]
            shards[f"{name}.{key}"] = tensor.shape, begin, tensor.detach()._local_tensor
    return shards


def digests(folder: Path, rank: int) -> list[str]:
    """Read the digests of the iterations after ``SAVED_AT``, the first run's or a resumed one's."""
    lines = (folder / f"digests_{rank}").read_text().splitlines()
    return [line for line in lines if int(line.split()[0]) >= SAVED_AT]


def assert_resumes(
    first: Run,
    saved: Path,
    resumed: Path,
    world_size: int,
    sharding: str,
    *flags: str,
    before: Change = None,
) -> None:
    """Resume a saved run, and compare it with the one that never stopped, bit for bit.

    Losses, parameters and state of each iteration that follows are compared, on every rank.
    """
    run = resumed_run(world_size, saved, resumed, sharding, *flags, before=before).check()
    assert run.losses == first.losses[SAVED_AT:]
    assert len(run.losses) == LAST - SAVED_AT
    # The printed loss of the second iteration is another; without this line it looks like a fault.
    assert run.outputs[0].count("Megatron prints the mean loss of the first two iterations") == 1
    for rank in range(world_size):
        found = digests(resumed, rank)
        assert found == digests(saved, rank)
        assert len(set(found)) == LAST - SAVED_AT


# State that is sharded as the rows of its parameter.
_OF_ROWS = ("param", ".momentum_buffer", ".moment2_buffer")


def gathered(folder: Path, world_size: int, tp: int = 1, etp: int = 1) -> dict[str, torch.Tensor]:
    """Join what all ranks wrote.

    Gated layers interleave the halves of tensor-parallel ranks; they are put in order.
    """
    whole = joined(
        [torch.load(folder / f"local_{rank}.pt", map_location="cpu") for rank in range(world_size)]
    )
    for name, tensor in whole.items():
        # State of whole blocks and matrices has no rows of it.
        if "linear_fc1.weight" in name and tensor.dim() == 2 and name.endswith(_OF_ROWS):
            ranks = etp if ".experts." in name else tp
            halves = tensor.view(ranks, 2, -1, tensor.shape[1])
            whole[name] = halves.transpose(0, 1).reshape(tensor.shape)
    return whole


def as_saved(whole: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return what ``gathered()`` does by the keys of a checkpoint."""
    found = {}
    for name, tensor in whole.items():
        name, _, kind = name.rpartition(".")
        prefix, suffix = f"optimizer.state.{name}", f".{kind}"
        if kind == "param":
            # In bf16 the optimizer sees one wrapper more than in fp32.
            prefix, suffix = "model.module." + name.rpartition("module.")[2], ""
        if "linear_fc1" in name:
            halves = zip(("_w", "_v"), tensor.chunk(2), strict=True)
            found |= {f"{prefix}{half}{suffix}": rows for half, rows in halves}
        else:
            found[f"{prefix}{suffix}"] = tensor
    return found


def joined(of_ranks: Sequence[Mapping[str, Shard]]) -> dict[str, torch.Tensor]:
    """Join the shards of all ranks, which agree where they overlap and leave nothing out."""
    whole: dict[str, torch.Tensor] = {}
    for rank, shards in enumerate(of_ranks):
        for name, (shape, begin, shard) in shards.items():
            if name not in whole:
                whole[name] = torch.full(shape, float("nan"), dtype=shard.dtype)
            place = whole[name][
                tuple(slice(b, b + n) for b, n in zip(begin, shard.shape, strict=True))
            ]
            assert torch.equal(torch.where(place.isnan(), shard, place), shard), (rank, name)
            place.copy_(shard)
    for name, tensor in whole.items():
        assert not tensor.isnan().any(), name
    return whole


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    different = [name for name in found if not torch.equal(found[name], expected[name])]
    assert not different, different


def wrap(owner: Any, name: str, call: Callable[..., Any]) -> None:
    """Replace a function by a call that is given it first."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return call(original, *args, **kwargs)

    setattr(owner, name, wrapper)


def after_enable(break_it: Callable[[], None]) -> None:
    """Break something after the patches are applied."""
    from megatron_muon import launcher

    def report(original: Callable[[Any], None], device: Any) -> None:
        original(device)
        break_it()

    wrap(launcher, "_report", report)


def die() -> None:
    """End this process as the kernel would."""
    os.kill(os.getpid(), signal.SIGKILL)


def kill_in_save(rank: int, fraction: float, number: int = 2) -> None:
    """Kill a rank in the save of a number, after a fraction of the time that the first one took."""
    from megatron.training import training

    durations: list[float] = []

    def save(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        if len(durations) == number - 1 and int(os.environ["RANK"]) == rank:
            threading.Timer(durations[0] * fraction, die).start()
        start = time.monotonic()
        original(*args, **kwargs)
        durations.append(time.monotonic() - start)

    wrap(training, "save_checkpoint", save)


def loadable(folder: Path) -> int:
    """Check every byte of what the tracker points to, and return its iteration."""
    checkpoint = read_checkpoint(find_checkpoint(folder))
    assert list(find_problems(checkpoint)) == []
    iteration = read_object(checkpoint, "iteration")
    assert (folder / TRACKER).read_text() == str(iteration)
    return iteration
