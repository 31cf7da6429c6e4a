"""Which training implementation serves which call, forward and backward: the one rule that their refusals ask.

A channel's values lie in memory as runs of neighbours: `spatial` values long in (N, C, *spatial) order, one
value long where channels are innermost. Short runs are read across channels, as columns of a matrix; long runs
are read along the channel. Either way the question is whether the values stay on chip between the statistics and
the output, so that they are read from memory once: in one block, in a cluster of blocks, or nowhere. In a backward
that is the values of two tensors, x and the gradient, between the sums and the gradient of x.

Sizes are those of the call's size class: the batch size is at most `call.n`, and more than half of it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from tileops.kernels.batch_norm.backward_interface import BatchNormBwdCall
from tileops.kernels.batch_norm.interface import BatchNormInferCall, BatchNormTrainCall
from tileops.kernels.dtypes import refusal_of_dtypes

if TYPE_CHECKING:
    import torch

TrainCall = BatchNormTrainCall | BatchNormBwdCall
"""A call of the forward, or of the backward."""

Region = Literal["held_column", "split_column", "held_channel", "split_channel"]

VECTOR_BYTES: Final = 16
"""The widest access of one thread."""

WARP: Final = 32

SECTOR_PAIR: Final = 64
"""The least bytes of a row that a block takes: what DRAM fetches at once."""

LINE_BYTES: Final = 128
"""A cache line, what one warp asks for at a time. A shorter run leaves part of every request to other channels."""

COLUMN_THREADS: Final = 512
"""Threads of a block that takes columns, at most: alone on an SM they have 128 registers each, in pairs of blocks 64."""

LONE_REGISTERS: Final = 64
"""Registers of data of such a thread where tiles keep every SM busy: half of the 128."""

FEW_REGISTERS: Final = 32
"""The same where they do not, 64 KiB a block: what one SM reads and writes in the time of a second launch."""

HELD_REGISTERS: Final = 32
"""Registers of a thread that hold data: half of the 64 that a thread has where 1024 share an SM's 65536."""

THREAD_BYTES: Final = 64
"""Bytes that a thread of a lone block holds: four accesses in flight, and still many threads."""

LONE_WARPS: Final = 32
"""Warps of the largest block."""

LONE_BLOCK_BYTES: Final = 48 * 1024
"""Bytes of a channel up to which one block is at least as fast as a cluster or as two launches.

Measured on an H200 in float16, µs of one block, a cluster and split_channel: 12.5 KB a channel
(32, 1024, 196) 11.8, 21.0, 23.1; 25 KB (16, 512, 784) 15.1, 17.9, 20.1 and (1, 64, 12544) 5.4, 10.6, 7.9; 50 KB
(32, 128, 784) 12.3, 11.4, 13.5; 100 KB (64, 512, 784) 69.8, 42.5, 59.8.
"""

CLUSTER_WARPS: Final = 16
"""Warps of a block in a cluster, at most: two such blocks share an SM, so that one reads while the other writes.

Clusters of twice the threads, one block an SM, would hold channels of up to 2.4 MB. Measured on an H200,
(256, 64, 3136) in float16 takes them 145 µs, and split_channel 95.
"""

CLUSTER_SHARERS: Final = 2
"""Blocks of clusters that share an SM."""

CLUSTER_BLOCKS: Final = 8
"""The largest cluster that every board with clusters runs."""

PAIR_BLOCKS: Final = 2
"""The smallest cluster, for channels that its registers hold, up to 128 KiB, where it leaves no SM without a block.

Measured on an H200 in float16, µs of 2, 4 and 8 blocks: 50 KB a channel (32, 128, 784) 6.5, 6.8, 9.6; 100 KB
(64, 512, 784) 36.8, 36.1, 38.6.
"""

CLUSTER_ARCH: Final = 90

PARKING_REGISTERS: Final = 16
"""Registers by way of which a thread parks data in shared memory: 64 KiB of reads in flight on an SM."""

BESIDE_PARKING: Final = 16
"""Registers that hold data where a thread parks more.

Measured on an H200 in float16 with (32, 64, 12544), µs: 16 registers 43.3, 20 45.1, 24 49.6, 28 46.3.
"""

SHARED_RESERVE: Final = 2 * 1024
"""Shared memory of a block that holds no data: the reductions' slots, and the KiB that the system takes."""


def region(call: TrainCall) -> Region:
    """The one implementation that is meant for `call`; the general one may serve others too."""
    if crosses_channels(call.spatial, call.dtype, call.channels_last):
        rows = call.n * call.spatial // run_of(call)
        return "split_column" if rows > held_rows(call) else "held_column"
    return "split_channel" if call.n > held_n(call) else "held_channel"


def refusal_of(mine: Region, call: TrainCall) -> str | None:
    """Why the implementation called `mine` does not serve `call`; None in its own region.

    `split_channel`, which is general, serves the region of `held_channel` too.
    """
    dtypes = refusal_of_dtypes(call.dtype, weight=call.weight_dtype, bias=call.bias_dtype)
    chosen = region(call)
    if dtypes is not None or chosen == mine:
        return dtypes
    columns = ("held_column", "split_column")
    if mine in columns and chosen not in columns:
        met = f"runs of {call.spatial * call.dtype.itemsize} bytes of one channel"
        return f"{met}; serves channels innermost, and runs below {LINE_BYTES} bytes"
    if chosen in columns and mine not in columns:
        return f"neighbours of different channels; serves runs of at least {LINE_BYTES} bytes of one channel"
    if mine in columns:
        met = f"up to {call.n * call.spatial // run_of(call)} rows"
        return f"{met}; serves {'up to' if mine == 'held_column' else 'above'} the {held_rows(call)} that a block holds"
    if mine == "held_channel":
        return f"channels of up to {channel_bytes(call)} bytes; serves what stays on chip, up to {held_bytes(call)}"
    return None


class Tile(NamedTuple):
    """Whole channels for one block: `across` vectors of a row. The matrix has `tiles` of them."""

    vector: int
    across: int
    tiles: int

    @property
    def down(self) -> int:
        """Rows that the largest block reads at a time."""
        return COLUMN_THREADS // self.across


def tile_of(call: TrainCall, least_bytes: int) -> Tile:
    """Whole channels that fill at least `least_bytes` of a row, or the matrix."""
    run, columns = run_of(call), call.c * run_of(call)
    vector = vector_width(columns, call.dtype)
    unit = run // math.gcd(run, vector)
    vectors = columns // vector
    across = min(unit * -(-least_bytes // (unit * vector * call.dtype.itemsize)), vectors)
    return Tile(vector, across, -(-vectors // across))


def held_tile(call: TrainCall) -> tuple[Tile, int]:
    """The tile that one block holds, and a thread's vectors of each tensor. Wide tiles only where there are enough of them."""
    wide = tile_of(call, LINE_BYTES)
    tile = wide if wide.tiles >= 2 * call.sm_count else tile_of(call, SECTOR_PAIR)
    registers = LONE_REGISTERS if tile.tiles >= call.sm_count else FEW_REGISTERS
    return tile, held_steps(tile.vector, call.dtype, registers // held_tensors(call))


def held_tensors(call: TrainCall) -> int:
    """How many tensors as large as x are held between the statistics and the output."""
    return 2 if isinstance(call, BatchNormBwdCall) else 1


def held_rows(call: TrainCall) -> int:
    """The most rows of a matrix whose tiles blocks hold."""
    tile, steps = held_tile(call)
    return tile.down * steps


def held_n(call: TrainCall) -> int:
    """The largest batch whose channels stay on chip."""
    return max((plan.most_n for plan in held_plans(call)), default=0)


def held_bytes(call: TrainCall) -> int:
    """Bytes of a channel of such a batch."""
    return held_n(call) * call.spatial * call.dtype.itemsize


def crosses_channels(spatial: int, dtype: torch.dtype, channels_last: bool) -> bool:
    """Whether vectors are laid across channels: the values of a channel lie apart or in runs below a line."""
    return channels_last or spatial == 1 or spatial * dtype.itemsize < LINE_BYTES


def run_of(call: TrainCall | BatchNormInferCall) -> int:
    """Neighbouring columns of one channel where x is a matrix: 1 where channels are innermost, else a run."""
    return 1 if call.channels_last else call.spatial


def channel_bytes(call: TrainCall) -> int:
    """Bytes of one channel."""
    return call.n * call.spatial * call.dtype.itemsize


def vector_width(length: int, dtype: torch.dtype) -> int:
    """The largest power of two of elements that fills at most one access and divides `length`."""
    width = VECTOR_BYTES // dtype.itemsize
    return min(width, length & -length)


def vector_words(vector: int, dtype: torch.dtype) -> int:
    """Registers of one vector: below four bytes it takes one all the same."""
    return max(1, vector * dtype.itemsize // 4)


def held_steps(vector: int, dtype: torch.dtype, registers: int = HELD_REGISTERS) -> int:
    """How many vectors `registers` hold."""
    return registers // vector_words(vector, dtype)


def channel_vectors(call: TrainCall) -> int:
    """Vectors of one channel, each within one run."""
    return call.n * call.spatial // vector_width(call.spatial, call.dtype)


class HeldPlan(NamedTuple):
    """How `blocks` share out a channel: a thread has `held` vectors in registers, `parked` in shared memory.

    So many of each tensor that is held. It parks them `group` at a time. `most_n` is the largest batch that they hold.
    """

    blocks: int
    most_warps: int
    held: int
    parked: int
    group: int
    most_n: int


def held_plans(call: TrainCall) -> tuple[HeldPlan, ...]:
    """The plans for a channel that stays on chip, the fewest resources first; every batch size has the same.

    One block, while it is the fastest; then the registers of two, and of a full cluster; then, forward, its shared
    memory too.
    """
    vector, tensors = vector_width(call.spatial, call.dtype), held_tensors(call)
    vector_bytes = vector * call.dtype.itemsize
    group = held_steps(vector, call.dtype, PARKING_REGISTERS)

    def plan(blocks: int, most_warps: int, held: int, parked: int, most_bytes: int | None = None) -> HeldPlan:
        capacity = blocks * most_warps * WARP * (held + parked) * vector_bytes
        most_n = min(capacity, most_bytes or capacity) // (call.spatial * call.dtype.itemsize)
        return HeldPlan(blocks, most_warps, held, parked, group, most_n)

    lone = plan(1, LONE_WARPS, THREAD_BYTES // tensors // vector_bytes, 0, LONE_BLOCK_BYTES // tensors)
    if call.arch < CLUSTER_ARCH:
        return (lone,) if lone.most_n else ()
    held = held_steps(vector, call.dtype, HELD_REGISTERS // tensors)
    pair = [plan(PAIR_BLOCKS, CLUSTER_WARPS, held, 0)] if call.c * PAIR_BLOCKS >= call.sm_count else []
    plans = [lone, *pair, plan(CLUSTER_BLOCKS, CLUSTER_WARPS, held, 0)]
    if tensors == 1:
        room = call.smem_budget // CLUSTER_SHARERS - SHARED_RESERVE
        parked = room // (CLUSTER_WARPS * WARP * vector_bytes) // group * group
        plans.append(plan(CLUSTER_BLOCKS, CLUSTER_WARPS, held_steps(vector, call.dtype, BESIDE_PARKING), parked))
    fewer = (0, *(each.most_n for each in plans))
    return tuple(each for each, before in zip(plans, fewer) if each.most_n > before)
