# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Owners of matrices, and routes of their rows: integers only, no torch.

Every rank builds the same plan from the same layouts, so nothing is negotiated in a step.
``python -m megatron_muon.plan`` builds one for a job that does not run.

One parameter on two ranks. It fuses query, key and value of two query groups (``q q k v``);
the border of the shards falls inside the second group. Rank 0 is the owner::

      shards              gather                stacks of rank 0            scatter

    rank 0 | 0 q |                           +--------------------+
           | 1 q |   these rows stay         | Q  rows 0 1 4 | 5  |   row 5 --> rank 1
           | 2 k |   ------------------->    +--------------------+
           | 3 v |                           | K  row  2     | 6  |   row 6 --> rank 1
           | 4 q |                           | V  row  3     | 7  |   row 7 --> rank 1
    -------+-----+-------                    +--------------------+
    rank 1 | 5 q |   3 routes,
           | 6 k |   one message               one Newton-Schulz call per stack: Q is a
           | 7 v |   ------------------->      stack of one, K and V are a stack of two

Terms of this package:

=======  =========================================================================================
matrix   unit of ownership: a 2-D parameter, a slice of it, or one of a batch; whole over shards,
         and over tensor parallelism where ``--muon-tp-mode`` joins it. A *local* matrix is held by
         its owner alone, and is not exchanged
block    rows of a matrix that are orthogonalized together: query, key, value, or all rows
box      rows and columns of a parameter on one rank, its holder; maybe none. A box of whole rows
         is a *shard*
replica  one of several holders of equal boxes (ZeRO-0, HSDP, copies of tensor-parallel ranks)
owner    a rank that orthogonalizes a matrix; a matrix has one, or a few that split it
part     an owner's slice of a block, along the longer side: all of it, unless the block is split
region   intersection of a block and a box, a rectangle
route    intersection of a region and a part: one holder sends it to the owner, unless the owner is
         a holder itself; the result goes back to all holders
bucket   matrices that are gathered, orthogonalized and scattered together
stack    parts of one shape on one owner, contiguous; one Newton-Schulz call
load     estimated compute time of a rank, or of a matrix on its owner, in nanoseconds
domain   ranks that may own each other's matrices. Matrices of a domain with the same replicas share
         a plan; a rank may have several plans, such as one for experts
staging  memory of messages and stacks while a step runs; the *arena* is the allocation
=======  =========================================================================================

How a plan is made, once, at construction
(``plan_matrices()``)::

    for m in matrices:                                  # owners.py
        split m over 2, 4, 8 owners while it alone exceeds the fair share of a rank
    if all matrices have one holder, and balance saves less than 3 collectives: they stay
    capacity = 1.0375 * max(mean load, longest matrix)
    for m in matrices, whole on one rank first, then most owners first, then longest first:
        fits = [r for r in holders of m if load[r] + time of m <= capacity]
        owner[m] = (rank of fits that receives least so far) or (rank with the least load)
    local, exchanged = matrices that only their owner holds, all others

    shortest = max(longest exchanged matrix, ten times the two collectives of a bucket)
    n = round(Newton-Schulz of exchanged on the busiest owner / shortest), 1 to 16
    for n in n, 2 n, 4 n, ... 64:                                       # buckets.py
        for m in exchanged, longest first:
            put m into the bucket with the least load on its owners
        if buffers of the fullest rank (all-reduce), placed by lifetime, fit into memory: break

    compare a hash of all owners and buckets between ranks, as one of all layouts before

    # rank_plan.py, for one rank:
    routes   = every rectangle of a shard and a part, from one of its holders to the owner
    messages = routes by sender and receiver; the scatter sends the same routes back
    stacks   = its parts by shape
    moves    = tables of integers: rectangles between shards, messages and stacks
    offsets  = of every buffer in one arena

The step of a rank (``megatron_muon.plan.schedule``)::

    start gathers of the first two buckets
    for bucket in buckets:
        orthogonalize some local matrices; wait for the gather of bucket; start another gather
        orthogonalize the stacks of bucket
        finish an earlier scatter; start the scatter of bucket
    finish the scatters that are left

Files, each importing only those above it::

    layout         boxes of rows and columns; regions and blocks of a matrix
    cost           estimated times of Newton-Schulz, links and kernels
    settings       settings of the exchange, and the resulting numbers of a plan
    owners         the owners of every matrix
    routes         routes of a matrix to its owners, and of results back to the holders
    schedule       the order of a step
    staging        memory of a step: lifetimes and offsets of buffers
    buckets        matrices that are exchanged together
    exchange_plan  the plan of ranks that work together, checked
    rank_plan      the step of one rank: messages, stacks, and tables of moves
"""

from megatron_muon.plan.exchange_plan import ExchangePlan
from megatron_muon.plan.rank_plan import RankBucket, RankPlan
from megatron_muon.plan.routes import Part, Route
from megatron_muon.plan.settings import CommDtypes, ExchangeSettings

__all__ = [
    "CommDtypes",
    "ExchangePlan",
    "ExchangeSettings",
    "Part",
    "RankBucket",
    "RankPlan",
    "Route",
]
