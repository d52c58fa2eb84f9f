"""Where a chunk lies in a region: pure arithmetic, no I/O.

Scheduler, workers, sidecar and third programs all take their numbers from `Geometry.compute`, so
they cannot disagree. The layout is *rank-major*: rank `r` owns one contiguous range, so it maps and
pins its own share only, and that share can be local to its device's NUMA node::

    0                 rank_bytes          2 * rank_bytes         capacity_bytes
    | rank 0                 | rank 1                | unused tail |
    | chunk 0 | chunk 1 | .. | chunk 0 | chunk 1 | ..|

Invariants: every range starts on a 2 MiB boundary, every chunk on a page; no two chunks overlap;
nothing is ever rounded to a power of two.

This module must not know files, processes, torch or vLLM.
"""

import resource
from dataclasses import dataclass
from enum import StrEnum

from kvcellar.errors import ConfigurationError

HUGE_PAGE_BYTES = 2 * 1024 * 1024
"""Alignment of a rank's range and of the capacity: the PMD huge page of x86-64 and arm64 with 4 KiB
pages, so that a mapping of the range can use huge pages (docs/reference/region-format.md)."""

BLOCK_SIZE_ALIGNMENT = resource.getpagesize()
"""Alignment of a chunk in bytes: the page size of this machine. Scheduler and workers both round the
bytes of a chunk up to it, so that they count the same number of chunks."""


class Layout(StrEnum):
    """How the ranks share a region."""

    SHARDED = "sharded"
    """Each rank keeps its own part of the KV cache: one copy a rank."""
    REPLICATED = "replicated"
    """The KV cache is the same on all ranks: one copy, stored by rank 0 and loaded by all."""


def round_up(value: int, alignment: int) -> int:
    """Smallest multiple of `alignment` (> 0) that is not below `value` (>= 0)."""
    return -(-value // alignment) * alignment


def round_down(value: int, alignment: int) -> int:
    """Largest multiple of `alignment` (> 0) that is not above `value` (>= 0)."""
    return value // alignment * alignment


def fold_rank(rank: int, world_size: int) -> int:
    """Fold a rank into `[0, world_size)`.

    A data-parallel engine may number its ranks on from those of its siblings; inside one engine's
    region they count from 0. Physical device numbers must not be folded: 0 and 2 collide in a world
    of 2.

    Raises:
        ConfigurationError: `world_size` is below 1 or `rank` is negative.
    """
    if world_size < 1 or rank < 0:
        raise ConfigurationError(
            f"rank {rank} of world size {world_size} was asked for; a rank is 0 or more and a world has at "
            "least one rank: check the parallel configuration of the engine"
        )
    return rank % world_size


@dataclass(frozen=True, slots=True)
class Geometry:
    """The numbers that place a chunk in the data file. Make one with `compute`.

    Attributes:
        layout: sharded or replicated.
        world_size: ranks of the engine.
        copies: ranges in the file: `world_size`, or 1 if replicated.
        capacity_bytes: size of the data file, a multiple of 2 MiB.
        rank_bytes: bytes of one range, a multiple of 2 MiB.
        chunk_bytes: bytes of KV data in a chunk of one rank.
        chunk_stride_bytes: distance of two chunks, `chunk_bytes` rounded up to `page_bytes`.
        page_bytes: the page size that chunks are aligned to.
        num_chunks: chunks of one range; a chunk id is in `[0, num_chunks)`.
    """

    layout: Layout
    world_size: int
    copies: int
    capacity_bytes: int
    rank_bytes: int
    chunk_bytes: int
    chunk_stride_bytes: int
    page_bytes: int
    num_chunks: int

    @classmethod
    def compute(
        cls,
        capacity_bytes: int,
        chunk_bytes: int,
        world_size: int,
        layout: Layout,
        page_bytes: int = BLOCK_SIZE_ALIGNMENT,
    ) -> "Geometry":
        """Place chunks of `chunk_bytes` in a file of `capacity_bytes` (floored to 2 MiB).

        A capacity below one chunk a rank, or a chunk of 0 bytes, gives `num_chunks` 0: no host tier.

        Raises:
            ConfigurationError: a negative size, a world below 1, or a page size that is not a power of
                two up to 2 MiB.
        """
        if capacity_bytes < 0 or chunk_bytes < 0 or world_size < 1:
            raise ConfigurationError(
                f"a geometry of capacity {capacity_bytes} bytes, chunk {chunk_bytes} bytes and world size "
                f"{world_size} was asked for; sizes are 0 or more and a world has at least one rank"
            )
        if page_bytes < 1 or page_bytes & (page_bytes - 1) or page_bytes > HUGE_PAGE_BYTES:
            raise ConfigurationError(
                f"page size {page_bytes} was asked for; it has to be a power of two up to {HUGE_PAGE_BYTES} bytes"
            )
        capacity_bytes = round_down(capacity_bytes, HUGE_PAGE_BYTES)
        copies = 1 if layout is Layout.REPLICATED else world_size
        rank_bytes = round_down(capacity_bytes // copies, HUGE_PAGE_BYTES)
        stride = round_up(chunk_bytes, page_bytes)
        return cls(
            layout=layout,
            world_size=world_size,
            copies=copies,
            capacity_bytes=capacity_bytes,
            rank_bytes=rank_bytes,
            chunk_bytes=chunk_bytes,
            chunk_stride_bytes=stride,
            page_bytes=page_bytes,
            num_chunks=rank_bytes // stride if stride else 0,
        )

    @property
    def unused_tail_bytes(self) -> int:
        """Bytes of the file that no chunk covers: the tails of all ranges and of the file."""
        return self.capacity_bytes - self.copies * self.num_chunks * self.chunk_stride_bytes

    def range_index(self, rank: int) -> int:
        """Which range `rank` uses: its own, or range 0 if replicated.

        Raises:
            ConfigurationError: the rank is not in `[0, world_size)`.
        """
        if not 0 <= rank < self.world_size:
            raise ConfigurationError(
                f"rank {rank} was asked for; this region was laid out for {self.world_size} ranks: "
                "fold the rank with fold_rank first"
            )
        return 0 if self.layout is Layout.REPLICATED else rank

    def rank_offset_bytes(self, rank: int) -> int:
        """First byte of the range of `rank`, a multiple of 2 MiB."""
        return self.range_index(rank) * self.rank_bytes

    def chunk_offset_bytes(self, rank: int, chunk: int) -> int:
        """First byte of `chunk` of `rank`, from the start of the file; a multiple of `page_bytes`.

        Raises:
            ConfigurationError: the chunk is not in `[0, num_chunks)`.
        """
        if not 0 <= chunk < self.num_chunks:
            raise ConfigurationError(
                f"chunk {chunk} was asked for; this region has {self.num_chunks} chunks a rank"
            )
        return self.rank_offset_bytes(rank) + chunk * self.chunk_stride_bytes
