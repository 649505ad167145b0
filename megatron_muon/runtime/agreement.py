# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Process groups, and checks by which all ranks of a group go on or raise together.

A process without a process group is a job of one rank.
"""

import hashlib
import itertools
import math
import os
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist

# Refuses a step after one that failed between its first change and its end.
INTERRUPTED = (
    "step: expected weights and state of a complete step, got those of one that failed in the "
    "middle. Load a checkpoint, weights and optimizer"
)


def own_rank() -> int:
    """Return the rank of this process; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def gather_objects[T](value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the values of all ranks of a group; None is the job."""
    if not dist.is_initialized():
        return [value]
    values = [value] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def raise_where_any_rank_fails(
    problems: Sequence[str],
    group: dist.ProcessGroup | None,
    device: torch.device,
    advice: str,
    *,
    num_device_problems: torch.Tensor | None = None,
    describe: Callable[[], Sequence[str]] = list,
    cause: Exception | None = None,
) -> None:
    """Raise on every rank of a group when one of them has something to report.

    Args:
        problems: Error messages of this rank, one sentence each.
        group: Ranks that decide together; None for all ranks of the job.
        device: Where the flag that is reduced lives (the backend's device).
        advice: What the user should do, the end of the message.
        num_device_problems: Number of problems counted on the device, an integer scalar; read by
            the host together with the flag.
        describe: Returns a sentence for each problem counted on the device.
        cause: Exception of this rank, whose traceback is kept.

    Raises:
        RuntimeError: On all ranks, naming the ranks and their problems.

    Communication: one all-reduce of a single int32; the texts are gathered only before raising.
    """
    # Not torch.tensor, for whose copy the host would wait.
    num_problems = torch.full((1,), len(problems), dtype=torch.int32, device=device)
    if num_device_problems is not None:
        num_problems += num_device_problems
    # Texts are only exchanged once somebody has one: the usual step pays for four bytes.
    if dist.is_initialized():
        dist.all_reduce(num_problems, group=group)
    if num_problems.item() == 0:
        return
    texts = gather_objects([*problems, *describe()], group)
    ranks = dist.get_process_group_ranks(group) if group is not None else range(len(texts))
    # The same sentence from many ranks is one line with all of them.
    by_text: dict[str, list[str]] = {}
    for rank, sentences in zip(ranks, texts, strict=True):
        for text in sentences:
            by_text.setdefault(text, []).append(str(rank))
    lines = [
        f"rank{'s' if len(where) > 1 else ''} {', '.join(where)}: {text}"
        for text, where in by_text.items()
    ]
    # A fault of the model is one of all ranks and many parameters; a screen of it is enough.
    shown = lines[:20] + ([f"... and {len(lines) - 20} more"] if len(lines) > 20 else [])
    text = "\n  ".join(["Stopping on all ranks:", *shown]) + f"\n{advice}"
    raise RuntimeError(text) from cause


def raise_where_ranks_differ(
    entries: Sequence[str],
    group: dist.ProcessGroup | None,
    device: torch.device,
    what: str,
    advice: str = "Build the same model with the same arguments on every rank.",
) -> None:
    """Check that all ranks of a group hold the same list, by its hash.

    Args:
        entries: The list, one line of text per item, in order.
        group: Ranks that must agree; None for all ranks of the job.
        device: Where the hash that is gathered lives (the backend's device).
        what: Name of the list for the message.
        advice: What the user should do, the end of the message.

    Raises:
        RuntimeError: On all ranks of the group, naming the first items that differ, per deviating
            rank.

    Communication: see ``differences_between_ranks()``.
    """
    differences = differences_between_ranks(entries, group, device, what)
    if differences:
        raise RuntimeError(f"{differences[0]}. {advice}")


def differences_between_ranks(
    entries: Sequence[str], group: dist.ProcessGroup | None, device: torch.device, what: str
) -> list[str]:
    """Describe how the lists of a group's ranks differ, in a sentence; none where they do not.

    Args:
        entries: The list, one line of text per item, in order.
        group: Ranks that must agree; None for all ranks of the job.
        device: Where the hash that is gathered lives (the backend's device).
        what: Name of the list for the message.

    Returns:
        A sentence without a full stop that names the first items that differ, per deviating rank;
        the same on all ranks of the group.

    Communication: one all-gather of one int64 a rank; the lists only where they differ.
    """
    # Seven bytes of the hash fit into a positive int64, the largest integer all backends gather.
    digest = hashlib.sha256("\n".join(entries).encode()).digest()
    mine = torch.tensor([int.from_bytes(digest[:7], "big")], dtype=torch.int64, device=device)
    hashes = mine.new_empty(dist.get_world_size(group))
    dist.all_gather_into_tensor(hashes, mine, group=group)
    if bool((hashes == hashes[0]).all()):
        return []
    # Only now that ranks are known to differ: the lists of a large model are megabytes.
    lists = gather_objects(list(entries), group)
    ranks = dist.get_process_group_ranks(group) if group is not None else range(len(lists))
    lines = []
    for rank, own in zip(ranks, lists, strict=True):
        pairs = itertools.zip_longest(own, lists[0], fillvalue="nothing")
        differing = [(here, there) for here, there in pairs if here != there]
        # One parameter more shifts all others: the first difference explains the rest.
        num_shown = 3 if len(own) == len(lists[0]) else 1
        lines += [
            f"rank {rank} has {here!r} where rank {ranks[0]} has {there!r}"
            for here, there in differing[:num_shown]
        ]
    return [f"{what}: expected the same on all ranks of the group, got " + "; ".join(lines[:8])]


def signed_checksum(entries: Iterable[str], ranks: Sequence[int]) -> int:
    """Return a number whose sum over some ranks is 0 if all of them have the same entries.

    A step adds it to a reduction that it makes anyway. Sums of other entries are 0 by chance, once
    in 4 billion. The number has at most 32 bits more than the number of ranks.

    Args:
        entries: Lines of text.
        ranks: The ranks, of which this is one.
    """
    checksum = zlib.crc32("\n".join(entries).encode())
    return checksum * (len(ranks) - 1 if own_rank() == ranks[0] else -1)


def first_line(error: Exception) -> str:
    """Return the first line of an error, with its class where that says more than the text."""
    is_known = isinstance(error, MemoryError | RuntimeError)
    name = "" if is_known else f"{type(error).__name__}: "
    return name + str(error).partition("\n")[0]


def ranks_of(group: dist.ProcessGroup) -> tuple[int, ...]:
    """Return the ranks of the job in a group, ascending."""
    return tuple(sorted(dist.get_process_group_ranks(group)))


def new_groups(sets: Iterable[tuple[int, ...]]) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """Make process groups; called by all ranks of the job together.

    Every rank takes part in making every group. ``use_local_synchronization`` would avoid that, but
    names a group by the number of groups that the rank is in already: ranks with different numbers
    would hang. New groups have the timeout of the job's group (``--distributed-timeout-minutes``).

    Args:
        sets: Ranks of the groups, ascending, this one among them.

    Returns:
        The groups, by their ranks.

    Communication: one gather of objects over the job.
    """
    if not dist.is_initialized():
        return {}
    rank = dist.get_rank()
    requested = gather_objects([ranks for ranks in sets if ranks[0] == rank])
    world = dist.group.WORLD
    assert world is not None
    # On gloo torch gives new groups half an hour.
    timeout = world._get_backend(world._device_types[0]).options._timeout
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for ranks in sorted(set(itertools.chain(*requested))):
        group = dist.new_group(list(ranks), timeout=timeout)
        if rank in ranks:
            groups[ranks] = cast(dist.ProcessGroup, group)
    return groups


@dataclass(frozen=True)
class Domain:
    """The ranks that exchange matrices with this one.

    Args:
        ranks: Ranks of the job, ascending.
        group: Their process group; None where this rank is alone.
        ranks_per_node: Ranks that the launcher started per node; None if it did not say so on every
            rank.
    """

    ranks: tuple[int, ...]
    group: dist.ProcessGroup | None
    ranks_per_node: int | None


def num_ranks_on_node() -> int:
    """Return how many ranks the launcher started on this node; 0 where it did not say."""
    # torchrun sets it, and counts the ranks of a node in a row.
    on_node = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(on_node) if on_node.isdecimal() else 0


def ranks_per_node(sizes: Sequence[int]) -> int | None:
    """Return one number for all nodes; None where the launcher did not say on all of them.

    If nodes have different numbers of ranks, it is their greatest common divisor: ranks that count
    as neighbors then are on one node, though a node may count as several.
    """
    return math.gcd(*sizes) if min(sizes) > 0 else None
