# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""DTensors of Megatron-FSDP's version 1 outside of its trainer: placements do not say who has what.

Which rows a rank holds is found in their values: those of the whole matrix before it was sharded.
"""

import functools
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers.device import device, init_group
from helpers.device import kind as device_kind
from helpers.megatron_fsdp import Reference
from helpers.ranks import run_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.megatron]

MUON = {"lr": 0.02, "weight_decay": 0.1, "nesterov": True}
# Three matrices in one buffer, and one in each: rows divide then, but for the last.
UNEVEN, EVEN = ["Sequential", [[10, 8], [16, 10], [8, 16]]], ["Linear", [[16, 8], [8, 16], [32, 8]]]
# Axes of the mesh: ranks of the outer one, of the inner one, and of tensor parallelism, with the
# dimension that it cuts.
LAYOUTS: dict[str, tuple[tuple[int, int, int], int | None]] = {
    "one axis": ((1, 4, 1), None),
    "hfsdp": ((2, 2, 1), None),
    "tensor rows": ((1, 2, 2), 0),
    "tensor columns": ((1, 2, 2), 1),
    "hfsdp, tensor rows": ((2, 2, 2), 0),
    "hfsdp, tensor columns": ((2, 2, 2), 1),
}


class Model:
    """A model that Megatron-FSDP has sharded, and its whole matrices.

    Args:
        layout: Mesh, and the dimension that tensor parallelism cuts.
        unit: Name of the class whose parameters share a buffer.
        shapes: Of the matrices.
        seed: Of their values.
        copies: Positions of the matrices that tensor parallelism replicates.
        strategy: Of the data-parallel axes.
    """

    def __init__(
        self,
        layout: Any,
        unit: str,
        shapes: list[list[int]],
        seed: int = 0,
        *,
        copies: Sequence[int] = (),
        strategy: str = "optim_grads_params",
    ) -> None:
        import torch
        from helpers.fsdp2_models import drawn
        from torch.distributed.device_mesh import init_device_mesh

        mesh_shape, _ = layout
        self.mesh = init_device_mesh(
            device_kind(), tuple(mesh_shape), mesh_dim_names=("outer", "fsdp", "tp")
        )
        self.wholes = [drawn(shape, seed + i) for i, shape in enumerate(shapes)]
        tp_size, tp_rank = self.mesh.size(2), self.mesh.get_local_rank("tp")
        # What tensor parallelism leaves of the columns.
        self._cols = [slice(None)] * len(shapes)
        layers = []
        for i, whole in enumerate(self.wholes):
            tensor_dim = None if i in copies else layout[1]
            part = whole if tensor_dim is None else whole.chunk(tp_size, dim=tensor_dim)[tp_rank]
            if tensor_dim == 1:
                width = whole.shape[1] // tp_size
                self._cols[i] = slice(tp_rank * width, (tp_rank + 1) * width)
            layers.append(torch.nn.Linear(*reversed(part.shape), bias=False))
            layers[-1].weight.data.copy_(part)
            if tensor_dim is not None:
                layers[-1].weight.tensor_model_parallel = True
                layers[-1].weight.partition_dim = tensor_dim
                layers[-1].weight.partition_stride = 1
        module = torch.nn.Sequential(*layers).to(self.wholes[0].device)
        self.model = self._shard(module, unit, strategy)
        self.params = list(self.model.parameters())
        self._first_rows = [self._first_row(i) for i in range(len(self.params))]

    def _shard(self, module: Any, unit: str, strategy: str) -> Any:
        import torch
        from megatron.core.distributed.fsdp.src.megatron_fsdp import fully_shard_model
        from megatron.core.distributed.fsdp.src.megatron_fsdp.mixed_precision import (
            MixedPrecisionPolicy,
        )

        outer: dict[str, Any] = {}
        if self.mesh.size(0) > 1:
            hybrid = self.mesh["outer", "fsdp"]._flatten("hybrid").get_group()
            outer = {
                "dp_outer_dim": "outer",
                "hybrid_fsdp_group": hybrid,
                "outer_dp_sharding_strategy": 0 if strategy == "no_shard" else 1,
            }
        return fully_shard_model(
            module,
            device_mesh=self.mesh,
            dp_shard_dim="fsdp",
            tp_dim="tp",
            fsdp_unit_modules=[getattr(torch.nn, unit)],
            zero_dp_strategy=strategy,
            mixed_precision_policy=MixedPrecisionPolicy(main_params_dtype=torch.float32),
            **outer,
        )

    def _first_row(self, i: int) -> int:
        import torch

        local, whole = self.params[i].to_local(), self.wholes[i][:, self._cols[i]]
        return next(
            (j for j, row in enumerate(whole) if len(local) and torch.equal(row, local[0])), 0
        )

    def own(self, i: int, whole: Any) -> Any:
        """Cut this rank's part out of a tensor that is shaped like a whole matrix."""
        first, num_rows = self._first_rows[i], len(self.params[i].to_local())
        return whole[first : first + num_rows, self._cols[i]]

    def set_grads(self, step: int) -> list[Any]:
        """Set gradients that do not depend on the ranks, and return the whole ones."""
        import torch
        from helpers.fsdp2_models import drawn

        wholes = [drawn(whole.shape, 1000 + 10 * step + i) for i, whole in enumerate(self.wholes)]
        for i, (param, whole) in enumerate(zip(self.params, wholes, strict=True)):
            # Megatron-FSDP sets no gradient of an empty shard.
            param.grad = torch.zeros_like(param) if param.to_local().numel() else None
            if param.grad is not None:
                param.grad.to_local().copy_(self.own(i, whole))
        return wholes

    def is_where_torch_reads_it(self) -> bool:
        """Return whether this rank holds the rows that its placements mean in torch."""
        starts = [
            chunk.offsets[0]
            for param in self.params
            for chunk in param.__create_chunk_list__()
            if param.to_local().numel()
        ]
        held = [
            first
            for first, param in zip(self._first_rows, self.params, strict=True)
            if param.to_local().numel()
        ]
        return starts == held


def _muon(model: Model, **settings: Any) -> Any:
    from megatron_muon.fsdp2 import ExchangeSettings, Muon

    named = [(f"w{i}", param) for i, param in enumerate(model.params)]
    groups = [{"params": named[:1], "split_sizes": 2}, {"params": named[1:]}]
    return Muon(groups, exchange=ExchangeSettings(comm_dtype="fp32", max_owners=1), **settings)


def _differences(model: Model, muon: Any, expected: list[list[Any]]) -> list[str]:
    import torch

    return [
        f"w{i}: {what}"
        for i, (param, wholes) in enumerate(zip(model.params, expected, strict=True))
        for what, ours, whole in zip(
            ("value", "momentum"),
            (param, muon.state[param]["momentum_buffer"]),
            wholes,
            strict=True,
        )
        if not torch.equal(ours.to_local(), model.own(i, whole))
    ]


def _step_all(names: list[str]) -> dict[str, list[Any]]:
    """Step on every layout, and list rows by matrix, who is where torch reads it, what differs."""
    init_group()
    found = {}
    for name in names:
        for kind, (unit, shapes) in (("even", EVEN), ("uneven", UNEVEN)):
            model = Model(LAYOUTS[name], unit, shapes)
            muon, reference = _muon(model, **MUON), Reference(model.wholes, **MUON)
            for step in range(2):
                reference.step(model.set_grads(step))
                muon.step()
            rows = [len(param.to_local()) for param in model.params]
            different = _differences(model, muon, reference.wholes())
            found[f"{name}, {kind}"] = [rows, model.is_where_torch_reads_it(), different]
    return found


@functools.cache
def steps(num_ranks: int, *names: str) -> list[dict[str, list[Any]]]:
    """Return what the ranks of one world found."""
    return run_ranks(num_ranks, _step_all, list(names)).check().results


FOUR_RANKS = tuple(LAYOUTS)[:4]


@pytest.mark.parametrize("rows", ["even", "uneven"])
@pytest.mark.parametrize(
    "name",
    [*FOUR_RANKS, *(pytest.param(name, marks=pytest.mark.slow) for name in list(LAYOUTS)[4:])],
)
def test_step_is_that_of_whole_matrices(name, rows):
    """Without a call of ``update_uneven_dtensor_chunk_metadata()``.

    Placements were read in torch's order, which is another where two axes cut the rows: with rows
    that divide, halves of the first matrix were then made of others' rows, without an error.
    """
    by_rank = steps(8, *list(LAYOUTS)[4:]) if "hfsdp, " in name else steps(4, *FOUR_RANKS)
    found = [each[f"{name}, {rows}"] for each in by_rank]
    assert [different for _, _, different in found] == [[]] * len(found)
    is_even = all(
        len(set(sizes)) == 1 for sizes in zip(*(each for each, _, _ in found), strict=True)
    )
    assert is_even == (rows == "even")
    # What a single axis cuts into even shards is where torch thinks, and nothing else here is.
    is_plain = rows == "even" and name in ("one axis", "tensor columns")
    assert all(is_torchs for _, is_torchs, _ in found) == is_plain


def _steps_and_holders(layout: Any, options: dict[str, Any]) -> list[Any]:
    """Step twice; list what differs, and the ranks that hold each matrix of this rank."""
    init_group()
    model = Model(layout, *UNEVEN, **options)
    muon, reference = _muon(model, **MUON), Reference(model.wholes, **MUON)
    for step in range(2):
        reference.step(model.set_grads(step))
        muon.step()
    holders = {
        matrix.name: sorted(matrix.elements_by_rank)
        for plan in muon.compute.plans
        for matrix in plan.matrices
    }
    return [_differences(model, muon, reference.wholes()), holders]


def test_matrix_that_tensor_parallelism_replicates_is_orthogonalized_once():
    """Each tensor-parallel rank planned its copy alone: on a GPU copies could drift apart.

    Version 1 leaves tensor parallelism out of the mesh of such a parameter.
    """
    run = run_ranks(4, _steps_and_holders, [[1, 2, 2], 0], {"copies": [2]}).check()
    of_copies = {rank for _, holders in run.results for rank in holders["w2"]}
    for rank, (different, holders) in enumerate(run.results):
        assert different == []
        # Those of the other tensor-parallel rank too.
        assert set(holders["w2"]) == of_copies, rank
    assert {rank % 2 for rank in of_copies} == {0, 1}


def test_instances_without_shards_are_replicas():
    """ZeRO-0 with two instances of the optimizer: every rank holds all rows."""
    options = {"strategy": "no_shard"}
    run = run_ranks(4, _steps_and_holders, [[2, 2, 1], None], options).check()
    for different, holders in run.results:
        assert different == []
        assert all(ranks == [0, 1, 2, 3] for ranks in holders.values())


def _muon_of_shards() -> str:
    import torch
    from megatron.core.distributed.fsdp.src.megatron_fsdp import uneven_dtensor

    from megatron_muon.fsdp2 import Muon

    init_group()
    param = Model(LAYOUTS["one axis"], *UNEVEN).params[0]
    made = torch.nn.Parameter(param.detach().clone())
    uneven_dtensor.update_uneven_dtensor_chunk_metadata(made)
    try:
        Muon([("made", made)])
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_tensor_made_of_shards_is_refused_on_all_ranks():
    """No buffer says which rows others hold; to gather all shapes took minutes on 16,384 ranks."""
    for error in run_ranks(4, _muon_of_shards).check().results:
        assert "made: expected a parameter of a model of Megatron-FSDP" in error
        assert "Pass the parameter" in error and "No optimizer was built." in error


SAVED = {**MUON, "weight_decay": 0.0}  # fully_shard_optimizer() makes a step, which would decay


def _state(model: Model, muon: Any) -> dict[str, Any]:
    return {"model": model.model.state_dict(), "optimizer": muon.state_dict()}


def _save(folder: str) -> list[str]:
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from megatron.core.distributed.fsdp.src.megatron_fsdp import fully_shard_optimizer

    init_group()
    different = []
    for kind, (unit, shapes) in (("even", EVEN), ("uneven", UNEVEN)):
        model = Model(LAYOUTS["hfsdp"], unit, shapes)
        muon, reference = (
            fully_shard_optimizer(_muon(model, **SAVED)),
            Reference(model.wholes, **SAVED),
        )
        expected = []
        for step in range(2):
            reference.step(model.set_grads(step))
            muon.step(sync_grad_before_optimizer_step=False)
            expected.append(reference.wholes())
            if step == 0:
                dcp.save(_state(model, muon), checkpoint_id=f"{folder}/{kind}")
        different += _differences(model, muon, expected[1])
        if dist.get_rank() == 0:
            torch.save(expected, f"{folder}/{kind}/expected")
    return different


def _load(folder: str, names: list[str]) -> dict[str, list[list[str]]]:
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from megatron.core.distributed.fsdp.src.megatron_fsdp import fully_shard_optimizer

    init_group()
    found = {}
    for name, (kind, (unit, shapes)) in itertools.product(
        names, (("even", EVEN), ("uneven", UNEVEN))
    ):
        layout = LAYOUTS.get(name, ((1, dist.get_world_size(), 1), None))
        model = Model(layout, unit, shapes, seed=50)
        muon = fully_shard_optimizer(_muon(model, **SAVED))
        state = _state(model, muon)
        dcp.load(state, checkpoint_id=f"{folder}/{kind}")
        model.model.load_state_dict(state["model"])
        muon.load_state_dict(state["optimizer"])
        expected = torch.load(f"{folder}/{kind}/expected", map_location=device())
        loaded = _differences(model, muon, expected[0])
        model.set_grads(1)
        muon.step(sync_grad_before_optimizer_step=False)
        found[f"{name}, {kind}"] = [loaded, _differences(model, muon, expected[1])]
    return found


def test_state_of_hfsdp_loads_on_other_ranks(tmp_path: Path):
    """Through upstream's hooks of ``state_dict()``, which record chunks; on the bits of the run."""
    assert run_ranks(4, _save, str(tmp_path)).check().results == [[]] * 4
    for num_ranks, names in ((2, ["one axis of two"]), (4, ["tensor rows", "tensor columns"])):
        for found in run_ranks(num_ranks, _load, str(tmp_path), names).check().results:
            assert len(found) == 2 * len(names)
            assert all(each == [[], []] for each in found.values()), found


def _state_with_adamw() -> list[list[str]]:
    """Return the names of states, by parameter, of one optimizer with a group of AdamW."""
    from megatron.core.distributed.fsdp.src.megatron_fsdp import fully_shard_optimizer

    from megatron_muon.fsdp2 import MuonAdamW

    init_group()
    # One buffer of all: its small last matrix is on one rank alone.
    model = Model(LAYOUTS["one axis"], "Sequential", [[10, 8], [16, 10], [2, 16]])
    matrices, (last,) = model.params[:2], model.params[2:]
    optimizer = fully_shard_optimizer(
        MuonAdamW([{"params": matrices}, {"params": [last], "algorithm": "adamw"}])
    )
    model.set_grads(0)
    optimizer.step(sync_grad_before_optimizer_step=False)
    # It gathers each tensor of the state, on all ranks together.
    optimizer.state_dict()
    assert last.grad is None or last.to_local().numel()
    return [sorted(optimizer.state[param]) for param in model.params]


def test_adamw_has_state_of_empty_shards_on_all_ranks():
    """Megatron-FSDP gathers every tensor of the state to save it: it hung where one was missing."""
    of_muon, of_adamw = ["momentum_buffer"], ["exp_avg", "exp_avg_sq", "step"]
    found = run_ranks(4, _state_with_adamw).check().results
    assert found == [[of_muon, of_muon, of_adamw]] * 4
