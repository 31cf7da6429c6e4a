"""Which training implementation serves which call: the one rule that all of their refusals ask.

A channel's values lie in memory as runs of neighbours: `spatial` values long in (N, C, *spatial) order, one
value long where channels are innermost. Short runs are read across channels, as columns of a matrix; long runs
are read along the channel. Along the channel the question is who can keep it on chip between the statistics and
the output, so that it is read from memory once: one block, a cluster of blocks, or nobody.

Sizes are those of the call's size class: the batch size is at most `call.n`, and more than half of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from tileops.kernels.dtypes import refusal_of_dtypes

if TYPE_CHECKING:
    import torch

    from tileops.kernels.batch_norm.interface import BatchNormTrainCall

Region = Literal["column", "held_channel", "cluster_channel", "split_channel"]

VECTOR_BYTES: Final = 16
"""The widest access of one thread."""

LINE_BYTES: Final = 128
"""A cache line, what one warp asks for at a time. A shorter run leaves part of every request to other channels."""

HELD_REGISTERS: Final = 32
"""Registers of a thread that hold data: half of the 64 that a thread has where 1024 share an SM's 65536."""

BLOCK_THREADS: Final = 1024

LONE_BLOCK_BYTES: Final = 48 * 1024
"""Bytes of a channel up to which one block is at least as fast as a cluster or as two launches.

Measured on an H200 in float16, µs of held_channel, cluster_channel and split_channel: 12.5 KB a channel
(32, 1024, 196) 11.8, 21.0, 23.1; 25 KB (16, 512, 784) 15.1, 17.9, 20.1 and (1, 64, 12544) 5.4, 10.6, 7.9; 50 KB
(32, 128, 784) 12.3, 11.4, 13.5; 100 KB (64, 512, 784) 69.8, 42.5, 59.8.
"""

CLUSTER_THREADS: Final = 512
"""Threads of a block in a cluster: two such blocks share an SM, so that one reads while the other writes.

Clusters of twice the threads, one block an SM, would hold channels of up to 2.4 MB. Measured on an H200,
(256, 64, 3136) in float16 takes them 145 µs, and split_channel 95.
"""

CLUSTER_SHARERS: Final = 2
"""Blocks of clusters that share an SM."""

CLUSTER_BLOCKS: Final = 8
"""The largest cluster that every board with clusters runs."""

CLUSTER_ARCH: Final = 90

PARKING_REGISTERS: Final = 16
"""The same, at least, where a thread parks more in shared memory: the way there takes registers too."""

PARKING_GROUP: Final = 4
"""Vectors that a thread parks at a time: 64 KiB of reads in flight on an SM."""

MOST_PARKED: Final = 16
"""Vectors that a thread parks: the program writes each out, and narrow ones would make it long, not fast."""

SHARED_RESERVE: Final = 2 * 1024
"""Shared memory of a block that holds no data: the reductions' slots, and the KiB that the system takes."""


def region(call: BatchNormTrainCall) -> Region:
    """The one implementation that is meant for `call`; the general one may serve others too."""
    if crosses_channels(call.spatial, call.dtype, call.channels_last):
        return "column"
    if beyond_block(call) is None:
        return "held_channel"
    if call.arch >= CLUSTER_ARCH and cluster_plan(call) is not None:
        return "cluster_channel"
    return "split_channel"


def refusal_of(mine: Region, call: BatchNormTrainCall) -> str | None:
    """Why the implementation called `mine` does not serve `call`; None in its own region.

    `split_channel`, which is general, serves the regions of the two that hold a channel too.
    """
    dtypes = refusal_of_dtypes(call.dtype, weight=call.weight_dtype, bias=call.bias_dtype)
    chosen = region(call)
    if dtypes is not None or chosen == mine:
        return dtypes
    if mine == "column":
        met = f"runs of {call.spatial * call.dtype.itemsize} bytes of one channel"
        return f"{met}; serves channels innermost, and runs below {LINE_BYTES} bytes"
    if chosen == "column":
        return f"neighbours of different channels; serves runs of at least {LINE_BYTES} bytes of one channel"
    if mine == "held_channel":
        return beyond_block(call)
    if mine == "cluster_channel":
        return _beyond_cluster(call, chosen)
    return None


def beyond_block(call: BatchNormTrainCall) -> str | None:
    """Why one block a channel does not do; None where it does."""
    if channel_bytes(call) <= LONE_BLOCK_BYTES:
        return None
    return f"channels of up to {channel_bytes(call)} bytes; serves up to {LONE_BLOCK_BYTES}"


def _beyond_cluster(call: BatchNormTrainCall, chosen: Region) -> str:
    if chosen == "held_channel":
        return f"channels of {channel_bytes(call)} bytes, which one block serves; serves what one block does not"
    return f"channels of {channel_bytes(call)} bytes; serves what {CLUSTER_BLOCKS} blocks hold on chip"


def crosses_channels(spatial: int, dtype: torch.dtype, channels_last: bool) -> bool:
    """Whether vectors are laid across channels: the values of a channel lie apart or in runs below a line."""
    return channels_last or spatial == 1 or spatial * dtype.itemsize < LINE_BYTES


def columns_of(spatial: int, channels_last: bool) -> int:
    """Neighbouring columns of one channel where x is a matrix: 1 where channels are innermost, else a run."""
    return 1 if channels_last else spatial


def channel_bytes(call: BatchNormTrainCall) -> int:
    """Bytes of one channel."""
    return call.n * call.spatial * call.dtype.itemsize


def vector_width(length: int, dtype: torch.dtype) -> int:
    """The largest power of two of elements that fills at most one access and divides `length`."""
    width = VECTOR_BYTES // dtype.itemsize
    return min(width, length & -length)


def held_steps(vector: int, dtype: torch.dtype) -> int:
    """How many vectors a thread can hold. A vector below four bytes takes a register all the same."""
    return HELD_REGISTERS // max(1, vector * dtype.itemsize // 4)


def channel_vectors(call: BatchNormTrainCall) -> int:
    """Vectors of one channel, each within one run."""
    return call.n * call.spatial // vector_width(call.spatial, call.dtype)


@dataclass(frozen=True)
class ClusterPlan:
    """How a cluster shares out a channel: `held` vectors a thread in registers, `parked` in shared memory."""

    blocks: int
    held: int
    parked: int


def cluster_plan(call: BatchNormTrainCall) -> ClusterPlan | None:
    """The fewest blocks whose registers hold the channel and whose number fills the chip.

    Where the largest cluster's registers do not suffice, the rest parks in shared memory. None where that does
    not suffice either.
    """
    vector = vector_width(call.spatial, call.dtype)
    most = held_steps(vector, call.dtype)
    steps = 0
    for blocks in (2, 4, CLUSTER_BLOCKS):
        steps = -(-channel_vectors(call) // (blocks * CLUSTER_THREADS))
        if steps <= most and (blocks == CLUSTER_BLOCKS or call.c * blocks >= 2 * call.sm_count):
            return ClusterPlan(blocks, steps, 0)
    held = most * PARKING_REGISTERS // HELD_REGISTERS + steps % PARKING_GROUP
    parked = steps - held
    room = call.smem_budget // CLUSTER_SHARERS - SHARED_RESERVE
    fits = parked <= MOST_PARKED and parked * CLUSTER_THREADS * vector * call.dtype.itemsize <= room
    return ClusterPlan(CLUSTER_BLOCKS, held, parked) if fits else None
