# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Train a small Llama with the Trainer of transformers, or one that extends it, under FSDP2.

    torchrun --nproc-per-node 2 scripts/recipes/with_trainer.py
    torchrun --nproc-per-node 2 scripts/recipes/with_trainer.py --form class
    torchrun --nproc-per-node 2 scripts/recipes/with_trainer.py --trainer trl --form parameters

``optimizer_cls_and_kwargs`` has two forms. A class of optimizers gets the Trainer's groups, which
it splits by weight decay, unless its arguments have ``params``; anything else is a factory, called
without arguments, and then with the model. ``from_parameters`` is a class that takes the groups.
Trainer saves and loads; its loop, clipping and schedule are used as they are. axolotl has no
argument for it: ``of_axolotl`` is what the ``get_trainer_cls(cfg)`` of a plugin returns. ms-swift
has callbacks; its own trainer needs its models. Ranks without a GPU need ``CpuTrainer``: accelerate
chooses no FSDP there.
"""

import os
from typing import Any

import _model
import torch
from _accelerate_cpu import shard_on_cpu
from _model import BATCH, LENGTH, SAVED_AT, STEPS, VOCAB, WIDTH
from accelerate import FullyShardedDataParallelPlugin
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from megatron_muon.fsdp2 import MuonAdamW, from_parameters, parameter_groups


class CpuTrainer(Trainer):
    """A Trainer that shards on ranks without a GPU too."""

    def create_accelerator_and_postprocess(self) -> None:
        """Create the Accelerator, and choose FSDP."""
        super().create_accelerator_and_postprocess()
        plugin = FullyShardedDataParallelPlugin(**self.args.fsdp_plugin_args)
        shard_on_cpu(self.accelerator, plugin)
        self.is_fsdp_enabled = True


class Samples(torch.utils.data.Dataset):
    """Samples of the decoder's data; labels are the tokens, which Llama shifts itself."""

    def __len__(self) -> int:
        return BATCH * STEPS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": _model.sample(index), "labels": _model.sample(index)}


def muon_factory() -> Any:
    """Return a function of the model: what the Trainer calls a factory."""
    return MuonAdamW.from_model


def optimizer_of(model: torch.nn.Module, name: str, form: str) -> dict[str, Any]:
    """Return the Trainer's argument; none for its own AdamW."""
    if name == "adamw":
        return {}
    if form == "factory":
        return {"optimizer_cls_and_kwargs": (muon_factory, {"lr": 1e-2})}
    if form == "parameters":
        return {"optimizer_cls_and_kwargs": (from_parameters, {"lr": 1e-2})}
    kwargs = {"params": parameter_groups(model), "lr": 1e-2}
    return {"optimizer_cls_and_kwargs": (MuonAdamW, kwargs)}


def of_axolotl(name: str) -> Any:
    """Return axolotl's trainer, with ``from_parameters`` as its optimizer."""
    from axolotl.core.trainers.base import AxolotlTrainer

    class MuonTrainer(AxolotlTrainer):
        def create_optimizer(self, model: torch.nn.Module | None = None) -> torch.optim.Optimizer:
            if name == "muon":
                options = {"lr": self.args.learning_rate}
                self.optimizer_cls_and_kwargs = (from_parameters, options)
            return super().create_optimizer(model)

    return MuonTrainer


def of_swift(name: str) -> Any:
    """Return a Trainer that calls a callback for optimizers as ms-swift's trainers do.

    Names and class are the content of a file for ``--external_plugins``, with ``--optimizer
    megatron_muon``.
    """
    from swift.optimizers import OptimizerCallback, optimizers_map

    class MuonCallback(OptimizerCallback):
        def create_optimizer(self, model: torch.nn.Module | None = None) -> torch.optim.Optimizer:
            model = self.trainer.model if model is None else model
            options = {"lr": self.args.learning_rate, "weight_decay": self.args.weight_decay}
            return MuonAdamW.from_model(model, **options)

    optimizers_map["megatron_muon"] = MuonCallback

    class CallbackTrainer(CpuTrainer):
        def create_optimizer(self, model: torch.nn.Module | None = None) -> torch.optim.Optimizer:
            callback = optimizers_map["megatron_muon" if name == "muon" else "default"]
            self.optimizer = callback(self.args, self).create_optimizer(model)
            return self.optimizer

    return CallbackTrainer


def trainer_of(options: Any, model: torch.nn.Module, arguments: dict[str, Any]) -> Trainer:
    """Return the trainer that the options name."""
    muon = optimizer_of(model, options.optimizer, options.form)
    if options.trainer == "transformers":
        common = {"args": TrainingArguments(**arguments), "train_dataset": Samples()}
        return CpuTrainer(model=model, **common, **muon)
    if options.trainer == "ms-swift":
        from swift.trainers import TrainingArguments as SwiftArguments

        common = {"args": SwiftArguments(**arguments), "train_dataset": Samples()}
        return of_swift(options.optimizer)(model=model, **common)
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import DataCollatorForSeq2Seq, PreTrainedTokenizerFast

    words = models.WordLevel({f"w{number}": number for number in range(VOCAB)}, unk_token="w0")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(words), pad_token="w0", eos_token="w1"
    )
    rows = [_model.sample(index).tolist() for index in range(BATCH * STEPS)]
    common = {
        "model": model,
        "train_dataset": Dataset.from_list([{"input_ids": row, "labels": row} for row in rows]),
        "processing_class": tokenizer,
    }
    if options.trainer == "trl":
        from trl import SFTConfig, SFTTrainer

        kind = type("CpuSFTTrainer", (CpuTrainer, SFTTrainer), {})
        config = SFTConfig(**arguments, bf16=False, gradient_checkpointing=False)
        return kind(args=config, **common, **muon)
    if arguments["use_cpu"]:
        # It makes accelerate's state anew, which would be of one process without a GPU.
        os.environ["ACCELERATE_USE_CPU"] = "true"
    from axolotl.core.training_args import AxolotlTrainingArguments

    kind = type("CpuAxolotlTrainer", (CpuTrainer, of_axolotl(options.optimizer)), {})
    config = AxolotlTrainingArguments(**arguments)
    return kind(args=config, data_collator=DataCollatorForSeq2Seq(tokenizer), **common)


def train(options: Any, seed: int = 0, resume: bool = False) -> list[float]:
    """Train, with a checkpoint after ``SAVED_AT`` steps, or from it; return losses of all steps."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=4 * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
    )
    model = LlamaForCausalLM(config)
    arguments = {
        "output_dir": str(options.folder),
        "fsdp": True,
        "fsdp_config": {
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
            "state_dict_type": options.state_dict_type,
        },
        "use_cpu": not torch.cuda.is_available(),
        "per_device_train_batch_size": BATCH // 2,
        "max_steps": STEPS,
        "save_steps": SAVED_AT,
        "learning_rate": 1e-2,
        "max_grad_norm": 1.0,
        "logging_steps": 1,
        "report_to": [],
        "disable_tqdm": True,
    }
    trainer = trainer_of(options, model, arguments)
    trainer.train(
        resume_from_checkpoint=f"{options.folder}/checkpoint-{SAVED_AT}" if resume else None
    )
    _model.check_is_sharded(trainer.model)
    return [record["loss"] for record in trainer.state.log_history if "loss" in record]


def main() -> None:
    """Train, and train the last steps again from the checkpoint."""
    parser = _model.parser_of(__doc__)
    parser.add_argument(
        "--trainer", choices=("transformers", "trl", "axolotl", "ms-swift"), default="transformers"
    )
    parser.add_argument("--form", choices=("factory", "class", "parameters"), default="factory")
    parser.add_argument(
        "--state-dict-type", default="SHARDED_STATE_DICT", help="or FULL_STATE_DICT"
    )
    options = parser.parse_args()
    losses = train(options)
    resumed = train(options, seed=1, resume=True)[SAVED_AT:]
    _model.report(options.trainer, options.optimizer, losses, resumed)


if __name__ == "__main__":
    main()
