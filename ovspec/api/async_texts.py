"""Texts for asyncio: a model's engine thread generates them in a batch for tasks of any event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing

from ovspec.base.errors import OvspecError
from ovspec.engine.engine_thread import EngineThread, Job
from ovspec.engine.results import Piece, Result
from ovspec.engine.row import Row

RowsToJoin = tuple[EngineThread, list[Row]]  # rows, and the thread with their batch


class AsyncTextStream:
    """A text during its generation; iterate over it once with ``async for`` for a ``Piece`` per round.

    Prefill starts with the iteration. Cancelling the task or calling ``aclose`` ends the text.
    """

    def __init__(self, make_rows_to_join: Callable[[], RowsToJoin]) -> None:
        self._finished_rows: list[Row] = []
        self._pieces = stream_pieces(make_rows_to_join, self._finished_rows)

    def __aiter__(self) -> AsyncIterator[Piece]:
        return self._pieces

    async def aclose(self) -> None:
        """End the text here."""
        await self._pieces.aclose()

    async def result(self) -> Result:
        """Finish the text, and return it with its statistics.

        Raises OvspecError if the stream was closed or failed before the end of the text.
        """
        async for _ in self._pieces:
            pass
        if not self._finished_rows:
            raise OvspecError("The stream ended before the text was finished; request the text again.")
        return await asyncio.to_thread(self._finished_rows[0].result)


async def stream_pieces(make_rows_to_join: Callable[[], RowsToJoin], finished_rows: list[Row]) -> AsyncGenerator[Piece]:
    """Generate the row from ``make_rows_to_join``; add it to ``finished_rows`` at its end.

    A separate function, so that an abandoned stream is closed at once.
    """
    engine, [row] = await asyncio.to_thread(make_rows_to_join)
    async with aclosing(generate_rounds(engine, [row])) as rounds:
        async for round_pieces in rounds:
            for _, piece in round_pieces:
                if piece.finish_reason:
                    finished_rows.append(row)
                yield piece


async def generate_results(engine: EngineThread, rows: list[Row]) -> list[Result]:
    """Generate rows without streaming; return their results."""
    async with aclosing(generate_rounds(engine, rows)) as rounds:
        async for _ in rounds:
            pass
    return await asyncio.to_thread(lambda: [row.result() for row in rows])  # may check schemas for seconds


async def generate_rounds(engine: EngineThread, rows: list[Row]) -> AsyncGenerator[list[tuple[int, Piece]]]:
    """Have the engine generate rows; yield each round's list of (index of the row, piece).

    Unfinished rows leave the batch when the generator is closed or its task is cancelled.
    """
    event_loop = asyncio.get_running_loop()
    deliveries = asyncio.Queue[list[tuple[int, Piece]] | OvspecError]()

    def deliver_round(pieces_or_error: list[tuple[int, Piece]] | OvspecError) -> None:
        try:
            event_loop.call_soon_threadsafe(deliveries.put_nowait, pieces_or_error)
        except RuntimeError:  # the loop is closed, so nobody is waiting
            engine.cancel_job(job)

    job = Job(rows, deliver_round)
    rows_left = len(rows)
    engine.submit(job)
    try:
        while rows_left:
            pieces_or_error = await deliveries.get()
            if isinstance(pieces_or_error, OvspecError):
                rows_left = 0
                raise pieces_or_error
            rows_left -= sum(piece.finish_reason is not None for _, piece in pieces_or_error)
            yield pieces_or_error
    finally:
        if rows_left:
            engine.cancel_job(job)
