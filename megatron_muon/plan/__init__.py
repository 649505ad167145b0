# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Who orthogonalizes which matrix, and which rows travel: integers only, no torch.

Every rank builds the same plan from the same layouts, so nothing has to be negotiated in a step.
``python -m megatron_muon.plan`` builds one for a job that does not run.

One parameter on two ranks. It fuses query, key and value of two query groups (``q q k v`` each);
the border of the shards falls inside the second group. Rank 0 is the owner::

      shards              gather                stacks of rank 0            scatter

    rank 0 | 0 q |                           +--------------------+
           | 1 q |   these rows stay         | Q  rows 0 1 4 | 5  |   row 5 --> rank 1
           | 2 k |   ------------------->    +--------------------+
           | 3 v |                           | K  row  2     | 6  |   row 6 --> rank 1
           | 4 q |                           | V  row  3     | 7  |   row 7 --> rank 1
    -------+-----+-------                    +--------------------+
    rank 1 | 5 q |   3 routes,
           | 6 k |   one message               one Newton-Schulz call a stack: Q is a
           | 7 v |   ------------------->      stack of one, K and V are a stack of two

The stacks are those of a GPU with rows in bf16. Rows in fp32 are orthogonalized one matrix by one.

The words of this package, each with one meaning everywhere:

================  ================================================================================
matrix            one 2-D parameter, whole over its shards; whole over tensor parallelism too where
                  ``--muon-tp-mode`` asks for that
block             rows of a matrix that are orthogonalized as one: query, key, value, or all rows
shard             the contiguous rows of a matrix that one rank holds, maybe none
holder            a rank that holds rows; holders of the same rows are replicas (ZeRO-0, HSDP)
region            the rectangle of a block that lies in one shard
owner             a rank that orthogonalizes a matrix; each matrix has one, or a few that split it
part              what one owner orthogonalizes of a block: all of it, or a slice of its longer side
route             a region and a part overlap in a rectangle; it is gathered from its source to the
                  owner, and its result is scattered to a holder, which spreads it to replicas
local matrix      a matrix whose owner holds all its rows, and nobody else any: nothing travels
bucket            matrices that are gathered and orthogonalized together; of a portioned one each
                  gather brings a portion of every matrix
stack             parts of one shape on one owner, contiguous; one call on the bf16 wire
message           all routes from one rank to another in one gather or scatter
load              estimated Newton-Schulz seconds of a rank, or what one matrix adds to them
wire              the dtypes in which rows travel to the owner and results travel back
domain            the ranks that may exchange matrices with each other; one replica of each shard is
                  an instance, and groups of instances may each orthogonalize every matrix
================  ================================================================================

Files, each importing only those above it::

    wire           dtypes and bytes of rows and results
    layout         which rank holds which rows of a matrix
    splits         which parts of fused matrices are orthogonalized separately
    cost           estimated times of Newton-Schulz, links, kernels and the host
    flags          Megatron's flags in place of arguments, in errors
    settings       how matrices are exchanged: one object
    owners         the owners of every matrix
    routes         where each rectangle of a matrix goes
    replicas       how results come back, to replicas too
    schedule       the order of a step
    staging        memory of a step: lifetimes and offsets of buffers
    sizes          what ranks send, receive and stage in one bucket
    buckets        which matrices are exchanged together
    exchange_plan  the plan of ranks that work together, checked
    rank_plan      what one rank does in a step
"""

from megatron_muon.plan.exchange_plan import ExchangePlan
from megatron_muon.plan.rank_plan import OwnedStacks, RankBucket, RankPlan
from megatron_muon.plan.routes import Part, Route
from megatron_muon.plan.settings import ExchangeSettings
from megatron_muon.plan.wire import Wire

__all__ = [
    "ExchangePlan",
    "ExchangeSettings",
    "OwnedStacks",
    "Part",
    "RankBucket",
    "RankPlan",
    "Route",
    "Wire",
]
