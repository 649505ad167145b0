# Copyright (c) 2026, NVIDIA CORPORATION. All rights reserved.

from types import SimpleNamespace

import pytest
import torch

from megatron.core.transformer.attention import SelfAttention


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_clip_linear_qkv_of_a_partition(tp_size):
    """Partitions of linear_qkv are clipped as the same rows of the whole weight."""
    num_groups, heads_per_group, channels, hidden_size, alpha = 4, 2, 3, 5, 0.25
    rows_per_group = (heads_per_group + 2) * channels
    eta = torch.linspace(0.2, 1.0, num_groups).view(num_groups, 1, 1)
    weight = torch.randn(num_groups * rows_per_group, hidden_size)

    expected = weight.clone().view(num_groups, rows_per_group, hidden_size)
    expected[:, : heads_per_group * channels] *= eta**alpha
    expected[:, heads_per_group * channels : -channels] *= eta ** (1 - alpha)
    expected = expected.view_as(weight)

    clipped = []
    for partition, partition_eta in zip(weight.chunk(tp_size), eta.chunk(tp_size)):
        attention = SimpleNamespace(
            config=SimpleNamespace(qk_clip_alpha=alpha),
            num_query_groups_per_partition=num_groups // tp_size,
            num_attention_heads_per_partition=num_groups * heads_per_group // tp_size,
            hidden_size_per_attention_head=channels,
            query_projection_size=num_groups * heads_per_group * channels,
            kv_projection_size=num_groups * channels,
            qk_clip_balancing_eta=partition_eta,
        )
        clipped.append(SelfAttention._clip_linear_qkv(attention, partition.clone()))

    torch.testing.assert_close(torch.cat(clipped), expected, rtol=0, atol=0)
