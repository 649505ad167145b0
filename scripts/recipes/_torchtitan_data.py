# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The recipes' samples as a dataloader of torchtitan, which it saves and loads."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from _model import sample
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.tokenizer import BaseTokenizer


class Tokens(torch.utils.data.IterableDataset):
    """A rank's samples, from where a checkpoint stopped."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.rank, self.num_ranks, self.next = rank, num_ranks, 0

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            tokens = sample(self.rank + self.num_ranks * self.next)
            self.next += 1
            yield {"input": tokens[:-1]}, tokens[1:].clone()

    def state_dict(self) -> dict[str, int]:
        """Return how many samples were read."""
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Skip the samples that were read."""
        self.next = state["next"]


class Loader(ParallelAwareDataloader):
    """Batches of them; torchtitan saves how far they were read."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):
        """Nothing to set."""

    def __init__(
        self, config: Config, *, dp_world_size: int, dp_rank: int, local_batch_size: int, **_: Any
    ) -> None:
        dataset = Tokens(dp_rank, dp_world_size)
        super().__init__(dataset, dp_rank, dp_world_size, batch_size=local_batch_size)


class NoTokenizer(BaseTokenizer):
    """Samples are tokens already."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        """Nothing to set."""

    def __init__(self, config: Config, *, tokenizer_path: str) -> None:
        super().__init__()

    encode = decode = get_vocab_size = None
