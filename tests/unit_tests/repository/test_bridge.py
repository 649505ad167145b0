# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The recipe of Megatron-Bridge: losses beside DDP, checkpoints, refusals.

``bash scripts/recipes/bridge.sh`` installs Bridge for it, as continuous integration does.
"""

import os
import re
import sys

import pytest
from helpers.commands import run_command
from helpers.ranks import ROOT

BRIDGE = ROOT / ".bridge"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.ranks,
    pytest.mark.cpu_only,
    pytest.mark.skipif(not BRIDGE.is_dir(), reason="scripts/recipes/bridge.sh has not run"),
]

ENVIRONMENT = {"PYTHONPATH": f"{BRIDGE}{os.pathsep}{ROOT}", "HF_HUB_OFFLINE": "1"}
# Products in fp32, and fp32 messages: upstream's arithmetic.
EXACT = "--fp32 optimizer.muon_fp32_matmul_prec=high"
# The sum of two gradients has no order; a norm does.
SOAP = "--fp32 --optimizer soap train.micro_batch_size=2 optimizer.clip_grad=0"
EXPERTS = "--experts 4 model.expert_model_parallel_size=2"


def run(num_ranks: int, *runs: str) -> dict[str, list[str] | str]:
    """Return the printed losses, or the error, of runs of the recipe, by the last rank."""
    script = str(ROOT / "tests/unit_tests/helpers/bridge_runs.py")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, "--nproc-per-node", str(num_ranks), script, *runs]
    done = run_command(*command, env=ENVIRONMENT)
    assert done.returncode == 0, (done.stdout + done.stderr)[-30_000:]
    results: dict[str, list[str] | str] = {}
    for text in runs:
        line = re.search(rf"^rank {num_ranks - 1}: {re.escape(text)}: (.*)$", done.stdout, re.M)
        assert line, done.stdout[-6000:]
        losses = re.findall(r"'([\d.E+-]+)'", line[1])
        results[text] = losses or line[1]
    return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Folder of checkpoints that one launch saves and another loads."""
    return tmp_path_factory.mktemp("bridge")


@pytest.fixture(scope="module")
def two_ranks(folder):
    """Results of all runs on two ranks; the last one fails, and leaves Megatron as it is."""
    runs = {
        "ddp": f"{EXACT} --ddp",
        "saved": f"{EXACT} --save {folder}/dense",
        "resumed": f"{EXACT} --load {folder}/dense --step 3",
        "dist_muon": f"{EXACT} --optimizer dist_muon",
        "soap_ddp": f"{SOAP} --ddp",
        "soap": f"{SOAP} --save {folder}/soap",
        "soap_resumed": f"{SOAP} --load {folder}/soap --step 3",
        "options": "optimizer.muon_momentum_dtype=bf16 optimizer.muon_split_glu=true "
        "optimizer.optimizer_cpu_offload=true optimizer.optimizer_offload_fraction=1.0",
        "plain": "",
        "experts": f"{EXPERTS} --save {folder}/experts",
        "experts_resumed": f"{EXPERTS} --load {folder}/experts --step 3",
        "stages": f"model.pipeline_model_parallel_size=2 --save {folder}/stages",
        "stages_resumed": f"model.pipeline_model_parallel_size=2 --load {folder}/stages --step 3",
        "adam": f"--optimizer adam --save {folder}/adam",
        "adam_into_muon": f"--load {folder}/adam --step 3",
    }
    results = run(2, *runs.values())
    return {name: results[text] for name, text in runs.items()}


def test_losses_are_those_of_upstreams_muon_under_ddp(two_ranks):
    """Bridge trains a gated model as upstream does without sharding."""
    print(two_ranks)
    got, expected = ([float(x) for x in two_ranks[name]] for name in ("saved", "ddp"))
    # Six printed digits; ranks sum gradients of a bucket in another order than DDP's.
    assert len(got) == 6
    assert got == pytest.approx(expected, rel=2e-6)
    assert two_ranks["dist_muon"] == two_ranks["saved"]
    assert two_ranks["soap"] == two_ranks["soap_ddp"]


@pytest.mark.parametrize("name", ["saved", "soap", "experts", "stages"])
def test_resumed_run_has_the_losses_of_the_first(two_ranks, name):
    """A resumed run of Bridge has the losses of the first, also gated, with experts or stages."""
    resumed = {"saved": "resumed"}.get(name, f"{name}_resumed")
    assert two_ranks[resumed] == two_ranks[name][3:] and len(two_ranks[resumed]) == 3


def test_fields_of_the_configuration_act(two_ranks):
    """Fields of the configuration change the losses after the first updates."""
    assert two_ranks["options"][:2] == two_ranks["plain"][:2]
    assert two_ranks["options"] != two_ranks["plain"]


def test_checkpoint_of_adam_is_refused(two_ranks):
    """A checkpoint of Adam is refused, instead of momentum that silently starts at zero."""
    text = two_ranks["adam_into_muon"]
    assert "momentum_buffer: expected (128, 64), got nothing" in text
    assert "checkpoint.load_optim=False" in text and "ranks 0, 1:" in text


def test_checkpoint_loads_on_other_ranks_and_instances(two_ranks, folder):
    """Four ranks in two instances go on from a checkpoint of two ranks."""
    text = f"{EXACT} --load {folder}/dense --step 3 ddp.num_distributed_optimizer_instances=2"
    got = [float(loss) for loss in run(4, text)[text]]
    print(got)
    # Sums over four ranks and over two differ in their last bits.
    assert got == pytest.approx([float(loss) for loss in two_ranks["saved"][3:]], rel=2e-6)


def test_configuration_is_written_and_read(tmp_path):
    """Bridge writes the fields of Muon to YAML and reads them."""
    code = f"""
import sys; sys.path.insert(0, {str(ROOT / "scripts")!r})
from cpu_ranks import megatron_bridge; megatron_bridge.enable()
from megatron_muon.bridge import MuonOptimizerConfig
from megatron.bridge.training.config import ConfigContainer
sys.path.insert(0, {str(ROOT / "scripts/recipes")!r})
sys.argv = ["recipe", "--optimizer", "adaptive_muon"]
import with_megatron_bridge as recipe
cfg = recipe.config_of(recipe.parse())
cfg.optimizer.muon_fsdp_comm_dtype = "fp32"
cfg.optimizer.moe_router_skip_muon = True
cfg.to_yaml({str(tmp_path / "run.yaml")!r})
read = ConfigContainer.from_yaml({str(tmp_path / "run.yaml")!r}).optimizer
assert type(read) is MuonOptimizerConfig and read == cfg.optimizer, read
"""
    done = run_command(sys.executable, "-c", code, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr[-3000:]
