# pyright: basic, reportInvalidTypeForm=false, reportCallIssue=false, reportOperatorIssue=false
"""A cluster of blocks for each channel, and what they tell each other."""

from typing import Any

import tilelang.language as T

from tileops.kernels.compiled_program import macro
from tileops.kernels.shared_program import WARP

__all__ = ["clusters", "tell_cluster"]


def clusters(channels: int, blocks: int, warps: Any) -> Any:
    """The launch of a cluster of `blocks` for each channel."""
    threads = [WARP, warps]
    if blocks == 1:
        return T.Kernel(channels, threads=threads)
    return T.ClusterKernel(channels * blocks, threads=threads, cluster_dims=(blocks, 1, 1))


@macro
def tell_cluster(values, mine, peers, rank, warp, blocks: int, count: int):
    """Put ``values[:count]`` (float32, local) into ``peers[rank]`` of every block of the cluster.

    ``mine`` (count) and ``peers`` (blocks, count) are shared float32. The caller has announced itself to the cluster:
    no block may write into one that has not started.
    """
    T.cluster_wait()
    if warp == 0:
        # Every lane writes the same, and reads back what it wrote itself.
        for i in T.unroll(count):
            mine[i] = values[i]
        for block in list(range(blocks)):
            T.copy_cluster(mine, peers[rank, :], dst_block=block)
    T.cluster_sync()
