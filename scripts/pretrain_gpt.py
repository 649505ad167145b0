# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Pretrain a GPT model with megatron-core's wheel alone, which ships no ``pretrain_gpt.py``.

Takes every flag of Megatron-LM. It knows nothing of Muon: ``-m megatron_muon`` prepares
Megatron, then runs it as it is::

    torchrun --nproc-per-node 2 -m megatron_muon scripts/pretrain_gpt.py --mock-data ...

For bytes as tokens ``--tokenizer-type NullTokenizer --vocab-size 257``: 256 ends a document.
"""

import importlib.util
from collections.abc import Iterator
from dataclasses import fields
from functools import partial
from typing import Any

import torch
from megatron.core import mpu, utils
from megatron.core.datasets import utils as datasets_utils
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.transformer.multi_token_prediction import mtp_on_this_rank
from megatron.training import get_args, get_tokenizer, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from megatron.training.utils import get_blend_and_blend_per_split

Batch = dict[str, Any]
BATCH_KEYS = ("tokens", "labels", "loss_mask", "position_ids", "attention_mask")


def get_batch(data_iterator: Iterator[Batch] | None, vp_stage: int | None) -> Batch:
    """Return the next micro batch, the same on every rank of a tensor-parallel group.

    Args:
        data_iterator: This rank's data; only that of tensor-parallel rank 0 is read.
        vp_stage: Virtual pipeline stage of the model; None without a virtual pipeline.

    Returns:
        ``tokens``, ``labels`` and ``position_ids``, int64 ``(batch, seq)``, ``loss_mask``, fp32
        ``(batch, seq)``, ``attention_mask``, bool ``(batch, 1, seq, seq)``; None where not needed.

    Communication: one broadcast an entry over the tensor-parallel group.
    """
    args = get_args()
    batch: Batch = dict.fromkeys((*BATCH_KEYS, "cu_seqlens"))
    stage: Batch = {"ignore_virtual": vp_stage is None, "vp_stage": vp_stage}
    is_first, is_last = mpu.is_pipeline_first_stage(**stage), mpu.is_pipeline_last_stage(**stage)
    has_mtp = mtp_on_this_rank(mtp_num_layers=args.mtp_num_layers, **stage)
    if not (is_first or is_last or has_mtp):
        return batch
    tp_rank = mpu.get_tensor_model_parallel_rank()
    if tp_rank == 0:
        assert data_iterator is not None
        batch |= {k: v.cuda(non_blocking=True) for k, v in next(data_iterator).items()}
    batch = utils.get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=False,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=tp_rank,
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=has_mtp,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=is_first,
        is_pipeline_last_stage=is_last,
    )
    if args.context_parallel_size > 1:
        cp_group = mpu.get_context_parallel_group()
        batch = utils.get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=cp_group)
    return batch


def loss_func(
    loss_mask: torch.Tensor, losses: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return the summed loss, fp32, the number of tokens in it, int32, and both for the log.

    Args:
        loss_mask: Weight of each token, fp32 ``(batch, seq)``.
        losses: Loss of each token ``(batch, seq)``.
    """
    loss = (losses.float().view(-1) * loss_mask.view(-1)).sum()
    num_tokens = loss_mask.sum().to(torch.int)
    if get_args().check_for_nan_in_loss_and_grad:
        validate = partial(get_rerun_state_machine().validate_result, loss, fatal=True)
        validate(torch.isnan, message="found NaN in the loss")
        validate(torch.isinf, message="found Inf in the loss")
    return loss, num_tokens, {"lm loss": torch.stack([loss.detach(), num_tokens.float()])}


def forward_step(
    data_iterator: Iterator[Batch], model: torch.nn.Module
) -> tuple[torch.Tensor, partial]:
    """Return the model's output for the next micro batch, and the function that makes it a loss."""
    batch = get_batch(data_iterator, utils.get_attr_wrapped_model(model, "vp_stage"))
    tokens, labels, loss_mask, position_ids, attention_mask = (batch[key] for key in BATCH_KEYS)
    output = model(tokens, position_ids, attention_mask, labels=labels, loss_mask=loss_mask)
    return output, partial(loss_func, loss_mask)


def train_valid_test_datasets(num_samples: list[int], vp_stage: int | None = None) -> list[Any]:
    """Return the datasets to train, validate and test on, of ``num_samples`` samples or more.

    Args:
        num_samples: By dataset.
        vp_stage: Virtual pipeline stage of the model, as Megatron asks; all have the same data.
    """
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    # Most settings go by the same name on both sides.
    names = {field.name for field in fields(GPTDatasetConfig) if field.init} & vars(args).keys()
    config = GPTDatasetConfig(
        **{name: getattr(args, name) for name in names},
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        path_to_cache=args.data_cache_path,
        tokenizer=get_tokenizer(),
        create_attention_mask=args.create_attention_mask_in_dataloader,
    )
    dataset_type = MockGPTDataset if args.mock_data else GPTDataset
    # Tensor-parallel rank 0 alone reads data.
    return BlendedMegatronDatasetBuilder(
        dataset_type, num_samples, lambda: mpu.get_tensor_model_parallel_rank() == 0, config
    ).build()


def main() -> None:
    """Parse the command line and pretrain."""
    # The wheel ships the dataset helpers compiled, but no Makefile to compile them with again.
    if importlib.util.find_spec("megatron.core.datasets.helpers_cpp"):
        datasets_utils.compile_helpers = lambda: None
    train_valid_test_datasets.is_distributed = True  # type: ignore[attr-defined]
    args = parse_and_validate_args()
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(config, train_valid_test_datasets, ModelType.encoder_or_decoder, forward_step)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
