"""One product over all ranks: C = A B by panels (SUMMA), on heterogeneous ranks.

van de Geijn and Watts 1997, "SUMMA: scalable universal matrix multiplication algorithm"; blocks in
proportion to speed by columns of rectangles, as in Beaumont, Boudet, Rastello and Robert 2001,
"Matrix multiplication on heterogeneous platforms", section 4. Rank r owns the same rectangle of
A, B and C. For each panel of k, rank r needs A[its rows, panel] and B[panel, its columns]:

              panel            columns of r
            +--|--|--+         +-----+----+
    rows    |  |##|  |       --|-----|####|--  panel
    of r    +--|--|--+         +-----+----+
            |  A     |         |   B      |

While a panel is multiplied, the next three are in flight, each piece directly from its owner. A
panel has few owners, so one panel at a time would leave most NICs idle.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from harness.domain.partition import Block, Interval, cut_dim, intersect, volume
from harness.measure.recorder import Clock
from harness.runtime.ranks.messages import start_messages
from harness.workloads.matmul.product import SEED_A, SEED_B, block

# Number of panels in flight or being multiplied.
_DEPTH = 4
_SHARE_STEPS = 1_000_000

Marks = list[tuple[Any, Any]]


def split_square(speeds: Sequence[float], size: int) -> list[Block]:
    """Tile a size x size matrix with one rectangle per rank, its area in proportion to its speed.

    Ranks are sorted by speed and grouped into columns of rectangles such that the sum of half
    perimeters, to which the received bytes are proportional, is minimal (exact for column-wise
    tilings, by dynamic programming).

    Returns:
        (rows, columns) of each rank.

    Raises:
        StrategyError: the matrix is too small to give each rank a row and a column.
    """
    order = sorted(range(len(speeds)), key=lambda rank: (speeds[rank], rank))
    columns = _best_columns([speeds[rank] / sum(speeds) for rank in order])
    groups = [order[start:stop] for start, stop in columns]
    widths = cut_dim(size, _shares([sum(speeds[rank] for rank in group) for group in groups]))
    tiles: dict[int, Block] = {}
    for group, width in zip(groups, widths, strict=True):
        heights = cut_dim(size, _shares([speeds[rank] for rank in group]))
        tiles.update({rank: (rows, width) for rank, rows in zip(group, heights, strict=True)})
    return [tiles[rank] for rank in range(len(speeds))]


def _shares(speeds: Sequence[float]) -> list[int]:
    return [max(1, round(_SHARE_STEPS * speed / sum(speeds))) for speed in speeds]


def _best_columns(areas: Sequence[float]) -> list[Interval]:
    """Cut ascending areas (sum 1) into columns; a column of q areas costs 1 + q x its width."""
    best: list[tuple[float, list[Interval]]] = [(0.0, [])]
    for stop in range(1, len(areas) + 1):
        best.append(
            min(
                (
                    best[start][0] + 1 + (stop - start) * sum(areas[start:stop]),
                    [*best[start][1], (start, stop)],
                )
                for start in range(stop)
            )
        )
    return best[-1][1]


def cut_panels(blocks: Sequence[Block], size: int, width: int) -> list[Interval]:
    """Cut k into panels that are at most `width` wide and do not cross a border between owners.

    Consecutive panels have different owners, because otherwise one rank would send while all
    others wait. The order does not change the product.
    """
    borders = sorted({0, size, *(edge for tile in blocks for side in tile for edge in side)})
    panels: list[tuple[float, int, Interval]] = []
    for start, stop in pairwise(borders):
        n_panels = -(-(stop - start) // width)
        for i, (first, last) in enumerate(cut_dim(stop - start, n_panels)):
            panels.append(((i + 0.5) / n_panels, start, (start + first, start + last)))
    return [panel for _, _, panel in sorted(panels)]


@dataclass(frozen=True)
class PanelPiece:
    """Part of a panel that `source` holds and `target` needs; `part` indexes the whole matrix."""

    source: int
    target: int
    matrix: int
    part: Block


def pieces_of(panel: Interval, blocks: Sequence[Block]) -> Iterator[PanelPiece]:
    """Yield the pieces of one panel, local ones included, in the same order on all ranks."""
    for target, (rows, columns) in enumerate(blocks):
        for source, held in enumerate(blocks):
            for matrix, needed in ((SEED_A, (rows, panel)), (SEED_B, (panel, columns))):
                part = intersect(held, needed)
                if part is not None:
                    yield PanelPiece(source, target, matrix, part)


def _view(tensor: torch.Tensor, origin: Block, part: Block) -> torch.Tensor:
    """View a part of the matrix in the tensor that holds its block `origin`."""
    (row, _), (column, _) = origin
    (r0, r1), (c0, c1) = part
    return tensor[r0 - row : r1 - row, c0 - column : c1 - column]


def _shaped(buffer: torch.Tensor, part: Block) -> torch.Tensor:
    """View the beginning of a flat buffer in the shape of a part of the matrix."""
    height, width = (stop - start for start, stop in part)
    return buffer[: height * width].view(height, width)


class Summa:
    """One rank's part of C = A B over the ranks 0 to len(blocks) - 1 of `group`.

    Operands are those of `product.block`. All ranks of the group must construct it and call
    `multiply`.

    Attributes:
        c: this rank's block of the product, on its device.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        *,
        rank: int,
        size: int,
        panel_width: int,
        dtype: torch.dtype,
        device: torch.device,
        group: Any,
        clock: Clock,
    ) -> None:
        self.blocks, self.rank, self.block = list(blocks), rank, blocks[rank]
        self.panels = cut_panels(blocks, size, panel_width)
        self.group, self.clock, self.device = group, clock, device
        rows, columns = self.block
        # NCCL transfers GPU memory, gloo host memory.
        self.wire = device if dist.get_backend(group) == "nccl" else torch.device("cpu")
        self.held = {
            seed: block(seed, rows, columns, device).to(dtype).to(self.wire)
            for seed in (SEED_A, SEED_B)
        }
        self.c = torch.zeros(rows[1] - rows[0], columns[1] - columns[0], dtype=dtype, device=device)
        self.slots = [self._make_slot(dtype) for _ in range(_DEPTH)]
        self.pieces = [
            [p for p in pieces_of(panel, blocks) if rank in (p.source, p.target)]
            for panel in self.panels
        ]

    def _make_slot(self, dtype: torch.dtype) -> dict[int, torch.Tensor]:
        """Flat buffers for A's and B's part of one panel, reused by panels of any width."""
        widest = max(stop - start for start, stop in self.panels)
        return {
            seed: torch.empty(side * widest, dtype=dtype, device=self.wire)
            for seed, side in zip((SEED_A, SEED_B), self.c.shape, strict=True)
        }

    @property
    def n_received_bytes(self) -> int:
        """Bytes that this rank receives from other ranks for one product."""
        return self.c.element_size() * sum(
            volume(piece.part)
            for pieces in self.pieces
            for piece in pieces
            if piece.target == self.rank != piece.source
        )

    def multiply(self) -> tuple[Marks, Marks]:
        """Compute C; returns the marks of the local products and of the panels' transfers.

        The marks can be read after the clock has settled. If gloo transfers a GPU's data, each
        local product is waited for, and the clock must be the host's.
        """
        is_cuda = self.wire.type == "cuda"
        feed: StreamFeed | ThreadFeed = StreamFeed(self) if is_cuda else ThreadFeed(self)
        compute: Marks = []
        self.c.zero_()
        try:
            for index in range(min(_DEPTH - 1, len(self.panels))):
                feed.start(index)
            for index in range(len(self.panels)):
                operands = feed.wait(index)
                if index + _DEPTH - 1 < len(self.panels):
                    feed.start(index + _DEPTH - 1)
                a, b = (operands[seed].to(self.device) for seed in (SEED_A, SEED_B))
                start = self.clock.mark()
                self.c.addmm_(a, b)
                if self.device != self.wire:
                    torch.cuda.synchronize(self.device)
                compute.append((start, self.clock.mark()))
        finally:
            feed.close()
        return compute, feed.marks

    def transfer(self, index: int, marks: Marks) -> dict[int, torch.Tensor]:
        """Receive a panel into its slot, and mark start and end; blocks until it has arrived (with
        NCCL, the stream)."""
        start = self.clock.mark()
        panel, (rows, columns) = self.panels[index], self.block
        origins = {SEED_A: (rows, panel), SEED_B: (panel, columns)}
        slot = self.slots[index % _DEPTH]
        panels = {seed: _shaped(slot[seed], part) for seed, part in origins.items()}
        moves = []
        for piece in self.pieces[index]:
            if piece.source == self.rank:
                held = _view(self.held[piece.matrix], self.block, piece.part)
            if piece.target == self.rank:
                buffer = _view(panels[piece.matrix], origins[piece.matrix], piece.part)
            if piece.source != self.rank:
                moves.append(dist.P2POp(dist.irecv, buffer, piece.source, self.group, index))
            elif piece.target != self.rank:
                held = held.contiguous()
                moves.append(dist.P2POp(dist.isend, held, piece.target, self.group, index))
            elif piece.part == origins[piece.matrix]:
                panels[piece.matrix] = held  # this rank holds the whole panel
            else:
                buffer.copy_(held)
        for work in start_messages(moves):
            work.wait()
        if len(self.blocks) > 1:
            marks.append((start, self.clock.mark()))
        return panels


class ThreadFeed:
    """Transfers panels in threads, so that start and end of each are marked when they happen.

    Panels may overtake each other, so the panel's index is the tag of its messages.
    """

    def __init__(self, summa: Summa) -> None:
        self.marks: Marks = []
        self._summa = summa
        self._pool = ThreadPoolExecutor(max_workers=_DEPTH - 1, thread_name_prefix="panels")
        self._futures: dict[int, Future[dict[int, torch.Tensor]]] = {}

    def start(self, index: int) -> None:
        self._futures[index] = self._pool.submit(self._summa.transfer, index, self.marks)

    def wait(self, index: int) -> dict[int, torch.Tensor]:
        return self._futures.pop(index).result()

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


class StreamFeed:
    """Transfers panels on a CUDA stream beside the one that computes."""

    def __init__(self, summa: Summa) -> None:
        self.marks: Marks = []
        self._summa = summa
        self._stream = torch.cuda.Stream(summa.device)
        self._ready: dict[int, tuple[torch.cuda.Event, dict[int, torch.Tensor]]] = {}

    def start(self, index: int) -> None:
        # Products that are already queued may still read the slot that this panel goes to.
        self._stream.wait_stream(torch.cuda.current_stream(self._summa.device))
        with torch.cuda.stream(self._stream):
            panels = self._summa.transfer(index, self.marks)
            done = torch.cuda.Event()
            done.record(self._stream)
        self._ready[index] = (done, panels)

    def wait(self, index: int) -> dict[int, torch.Tensor]:
        done, panels = self._ready.pop(index)
        torch.cuda.current_stream(self._summa.device).wait_event(done)
        return panels

    def close(self) -> None:
        self._stream.synchronize()
