# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Train a small Llama with the Trainer of transformers, under FSDP2.

    torchrun --nproc-per-node 2 scripts/recipes/with_trainer.py
    torchrun --nproc-per-node 2 scripts/recipes/with_trainer.py --form class

``optimizer_cls_and_kwargs`` has two forms. A class of optimizers gets the Trainer's groups, which
it splits by weight decay, unless its arguments have ``params``; anything else is a factory, called
without arguments, and then with the model. Trainer saves and loads; its loop, clipping and schedule
are used as they are. Ranks without a GPU need ``CpuTrainer``: accelerate chooses no FSDP there.
"""

from typing import Any

import _model
import torch
from _accelerate_cpu import shard_on_cpu
from _model import BATCH, LENGTH, SAVED_AT, STEPS, VOCAB, WIDTH
from accelerate import FullyShardedDataParallelPlugin
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from megatron_muon.fsdp2 import MuonAdamW, parameter_groups


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
    kwargs = {"params": parameter_groups(model), "lr": 1e-2}
    return {"optimizer_cls_and_kwargs": (MuonAdamW, kwargs)}


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
    arguments = TrainingArguments(
        output_dir=str(options.folder),
        fsdp=True,
        fsdp_config={
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
            "state_dict_type": options.state_dict_type,
        },
        use_cpu=not torch.cuda.is_available(),
        per_device_train_batch_size=BATCH // 2,
        max_steps=STEPS,
        save_steps=SAVED_AT,
        learning_rate=1e-2,
        max_grad_norm=1.0,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = CpuTrainer(
        model=model,
        args=arguments,
        train_dataset=Samples(),
        **optimizer_of(model, options.optimizer, options.form),
    )
    trainer.train(
        resume_from_checkpoint=f"{options.folder}/checkpoint-{SAVED_AT}" if resume else None
    )
    _model.check_is_sharded(trainer.model)
    return [record["loss"] for record in trainer.state.log_history if "loss" in record]


def main() -> None:
    """Train, and train the last steps again from the checkpoint."""
    parser = _model.parser_of(__doc__)
    parser.add_argument("--form", choices=("factory", "class"), default="factory")
    parser.add_argument(
        "--state-dict-type", default="SHARDED_STATE_DICT", help="or FULL_STATE_DICT"
    )
    options = parser.parse_args()
    losses = train(options)
    resumed = train(options, seed=1, resume=True)[SAVED_AT:]
    _model.report("transformers", options.optimizer, losses, resumed)


if __name__ == "__main__":
    main()
