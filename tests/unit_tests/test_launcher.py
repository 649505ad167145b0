# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The launcher, as a user starts it, and what it prints where it cannot start."""

import json
import re
import shlex
import shutil
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.commands import run_command, run_torchrun
from helpers.ranks import PRETRAIN_GPT, ROOT, launch, run_ranks
from helpers.toy_gpt import fsdp_toy_gpt, toy_gpt

from megatron_muon import IncompatibleMegatronError, launcher
from megatron_muon.user_errors import SettingsError


def _list_patches() -> list[str]:
    from megatron_muon.mcore.patches import PATCHES

    assert launcher.main(["--list-patches"]) == 0
    return [f"{patch.symbol}: {patch.purpose}" for patch in PATCHES]


@pytest.mark.ranks
def test_patches_are_listed_on_request():
    """--list-patches prints one line for each patch and symbol."""
    run = run_ranks(1, _list_patches).check()
    assert run.outputs[0].splitlines() == run.results[0]


def _run_script(tmp_path, code: str, name: str = "script.py"):
    script = tmp_path / name
    script.write_text(code)
    return launch(1, ["--flag", "value"], script=script)


@pytest.mark.ranks
def test_script_runs_as_main_with_its_folder_and_arguments(tmp_path):
    """A script runs as ``python SCRIPT ARGS`` would run it."""
    (tmp_path / "beside.py").write_text("NAME = 'found'")
    code = (
        "import sys, beside, megatron_muon\n"
        "print('SEEN', __name__, sys.argv[1:], beside.NAME, megatron_muon.is_enabled(),"
        " sys.modules['__main__'].__file__ == __file__)\n"
    )
    run = _run_script(tmp_path, code).check()
    assert "SEEN __main__ ['--flag', 'value'] found True True" in run.outputs[0]


@pytest.mark.ranks
def test_exit_status_of_the_script_is_kept(tmp_path):
    """A script that raises or exits with a status ends the rank with it."""
    assert _run_script(tmp_path, "raise KeyError('x')").exit_codes == [1]


CHECKOUT = """
import megatron.core, megatron.training
print("CORE", megatron.core.__file__)
"""


@pytest.mark.slow
def test_megatron_package_beside_the_script_is_used(tmp_path):
    """A Megatron-LM checkout's own pretrain_gpt.py brings the megatron package next to it."""
    checkout = tmp_path / "Megatron-LM"
    checkout.mkdir()
    package = Path(find_spec("megatron.core").origin).parents[1]
    (checkout / "megatron").symlink_to(package)
    (checkout / "pretrain_gpt.py").write_text(CHECKOUT)
    cpu_ranks = str(ROOT / "scripts" / "cpu_ranks")
    done = run_command(sys.executable, cpu_ranks, str(checkout / "pretrain_gpt.py"))
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"CORE {checkout}/megatron/core/__init__.py" in done.stdout


def test_launcher_without_a_gpu_says_how_to_use_cpu_ranks(monkeypatch, tmp_path):
    """A missing GPU is an error with the way to CPU ranks, not a fall back."""
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (tmp_path / "script.py").touch()
    with pytest.raises(SettingsError, match="expected a usable GPU, got none.*scripts/cpu_ranks"):
        launcher.main([str(tmp_path / "script.py")])


# The rule of Megatron-LM's, in short.
MAKEFILE = """\
OUT = helpers_cpp$(shell python3-config --extension-suffix)
$(OUT): helpers.cpp
\tg++ -shared $(shell python3 -m pybind11 --includes) $< -o $@
"""
OURS = f"helpers_cpp{sysconfig.get_config_var('EXT_SUFFIX')}"
OTHERS = "helpers_cpp.cpython-27-none.so"
INCLUDES = f"-I{sysconfig.get_path('include')} -I/pybind11/include"
HELPERS = [
    # Compiled already, what python3-config names, what pybind11 of python3 prints, refused.
    pytest.param([], OURS, INCLUDES, False, id="this_python"),
    pytest.param([OURS], OURS, "", False, id="compiled"),
    pytest.param([], OTHERS, "-I/usr/include/python2.7", True, id="other_python"),
    pytest.param([OTHERS], OTHERS, INCLUDES, True, id="compiled_for_other_python"),
    pytest.param([OURS], OTHERS, "", True, id="compiled_and_other_python"),
    pytest.param([], OURS, "-I/usr/include/python2.7", True, id="headers_of_other_python"),
    pytest.param([], OURS, "", True, id="without_pybind11"),
    pytest.param([], None, INCLUDES, True, id="without_python3_config"),
]


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize(("compiled", "named", "includes", "is_refused"), HELPERS)
def test_checkout_that_compiles_for_another_python_is_refused(
    compiled, named, includes, is_refused, monkeypatch, tmp_path
):
    """A checkout whose tools compile for another Python is refused before any rank starts."""
    datasets, tools = tmp_path / "datasets", tmp_path / "bin"
    datasets.mkdir()
    tools.mkdir()
    (datasets / "helpers.cpp").touch()
    (datasets / "Makefile").write_text(MAKEFILE)
    for name in compiled:
        (datasets / name).touch()
    (tools / "make").symlink_to(shutil.which("make"))
    (tools / "sh").symlink_to("/bin/sh")
    suffix = named and named.removeprefix("helpers_cpp")
    for name, output in {"python3": includes, "python3-config": suffix}.items():
        if output is not None:
            (tools / name).write_text(f"#!/bin/sh\necho '{output}'\n")
            (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tools))
    spec = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(launcher, "find_spec", lambda name: spec)
    monkeypatch.setattr(launcher, "_has_gpu", lambda: False)
    (tmp_path / "script.py").touch()
    line = rf"Type: PATH={Path(sys.executable).parent}:.*\$PATH torchrun"
    with pytest.raises(SettingsError, match=line if is_refused else "expected a usable GPU"):
        launcher.main([str(tmp_path / "script.py")])
    assert sorted(file.name for file in datasets.glob("*.so")) == compiled


def test_usage_and_missing_scripts_are_errors(capsys):
    """The launcher shows its usage without a script, and names a wrong path."""
    assert launcher.main([]) == 2
    assert "-m megatron_muon SCRIPT" in capsys.readouterr().err
    with pytest.raises(SettingsError, match="got no_such_script.py"):
        launcher.main(["no_such_script.py"])


@pytest.mark.ranks
def test_command_of_the_flags_page_trains_without_a_checkout():
    """The command of docs/flags.md trains from the wheel alone, also in bf16."""
    page = (ROOT / "docs" / "flags.md").read_text().replace("\\\n", " ")
    (command,) = re.findall(r"scripts/cpu_ranks scripts/pretrain_gpt\.py (.*)", page)
    # Forked ranks start no processes of their own.
    flags = [*shlex.split(command), "--num-workers", "0", "--bf16"]
    run = launch(2, flags, env={"CUDA_DEVICE_MAX_CONNECTIONS": "1"}).check()
    assert len(run.losses) == 3
    output = run.outputs[0]
    shown = re.findall(r"^\[megatron_muon\] (.*)", page, re.M)
    assert len(shown) == 4
    for line in shown[1:3]:
        assert output.count(line) == 1
    assert shown[3].partition(":")[0] in output


@pytest.mark.ranks
def test_tensor_parallelism_without_fsdp_starts_on_cpu_ranks_too():
    """Tensor parallelism under DDP gets the variable that Megatron asserts."""
    flags = ("--tensor-model-parallel-size", "2", "--transformer-impl", "transformer_engine")
    run = launch(2, toy_gpt(*flags, "--train-iters", "1", "--lr-warmup-iters", "0")).check()
    assert len(run.losses) == 1
    assert "CPU ranks have CUDA_DEVICE_MAX_CONNECTIONS=1 and" in run.outputs[0]


@pytest.mark.slow
def test_refused_flags_end_with_one_text_on_rank_0():
    """Refused flags end two ranks with one text and torchrun's summary."""
    flags = ("--ckpt-convert-format", "torch_dist", "--fp16", "--muon-fsdp-max-owners", "3")
    env = {"PYTHONWARNINGS": "ignore"}
    done = run_torchrun(2, str(PRETRAIN_GPT), *fsdp_toy_gpt("optim_grads_params", *flags), env=env)
    assert done.returncode == 1
    text = (
        "megatron_muon: --optimizer muon --use-megatron-fsdp cannot run with:\n"
        "  --fp16: emerging optimizers have no loss scaling; use --bf16.\n"
        "  --ckpt-convert-format: a Megatron-FSDP model writes no other format; drop it.\n"
        "  --muon-fsdp-max-owners: expected a power of two, got 3. "
    )
    # Rank 0 prints it, unless rank 1 failed first and torchrun ended rank 0 before it could.
    assert f"\n{done.stderr}".count(f"\n{text}") <= 1
    # torchrun's own, of the process that started the ranks; below it the text once more.
    assert done.stderr.count("Traceback (most recent call last)") == 1
    assert "raise ChildFailedError" in done.stderr
    assert "megatron_muon/" not in done.stderr, "a frame of this package"
    summary = done.stderr.rpartition("Root Cause (first observed failure)")[2]
    assert "--ckpt-convert-format" in summary


@pytest.fixture
def launch_raising(monkeypatch, tmp_path):
    """Launch a ``main`` that raises; return the exit status, and the file for torchrun."""

    def launch(error, rank, file="error.json"):
        def main(argv, enable_cpu_ranks):
            raise error

        monkeypatch.setenv("RANK", rank)
        monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
        if file:
            monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / file))
        monkeypatch.setattr(launcher, "main", main)
        monkeypatch.setattr(sys, "last_exc", None, raising=False)
        return launcher.launch(["script.py"]), tmp_path / str(file)

    return launch


@pytest.mark.parametrize(
    "error", [SettingsError("x: wrong."), IncompatibleMegatronError(["torch: wrong."])]
)
def test_rank_0_says_the_error_of_the_user(launch_raising, capsys, error):
    """Rank 0 prints a user's error, and writes it for torchrun."""
    status, file = launch_raising(error, "0")
    assert status == 1
    assert capsys.readouterr().err == f"megatron_muon: {error}\n"
    assert sys.last_exc is error, "process groups would be destroyed, which waits for peers"
    written = json.loads(file.read_text())["message"]
    assert written["message"] == f"megatron_muon: {error}"
    assert written["extraInfo"].keys() == {"timestamp"}


def test_other_ranks_speak_only_where_nobody_reads_their_file(launch_raising, capsys):
    """Other ranks print a user's error only where no launcher reads their file."""
    error = SettingsError("x: wrong.")
    status, file = launch_raising(error, "1")
    assert status == 1 and capsys.readouterr().err == ""
    assert "x: wrong." in file.read_text()
    assert launch_raising(error, "1", file="")[0] == 1
    assert capsys.readouterr().err == "megatron_muon: x: wrong.\n"


@pytest.mark.parametrize("error", [ValueError("ours"), RuntimeError("ranks"), KeyError("k")])
def test_crash_keeps_its_traceback(launch_raising, capsys, error):
    """Errors other than UserError keep their traceback."""
    with pytest.raises(type(error)) as caught:
        launch_raising(error, "0")
    assert caught.value is error
    assert capsys.readouterr().err == ""
