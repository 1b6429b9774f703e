"""The exact peak of active memory while something runs, in the process that runs it."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TypeVar

from omlxd.engine.gauges import Gauges

T = TypeVar("T")


class Peak:
    """MLX's own peak over many steps, though the engine begins to measure anew with each of them.

    Args:
        gauges: of the engine; whenever it resets MLX's peak, that is looked at first.
    """

    def __init__(self, gauges: Gauges) -> None:
        self._highest_bytes = 0
        reset = gauges.reset_peak

        def look_and_reset() -> None:
            self._look()
            reset()

        gauges.reset_peak = look_and_reset  # type: ignore[method-assign]

    async def of(self, work: Awaitable[T]) -> tuple[T, int]:
        """The result of the work, and the highest that active memory was meanwhile."""
        import mlx.core as mx

        mx.reset_peak_memory()
        self._highest_bytes = 0
        result = await work
        self._look()
        return result, self._highest_bytes

    def _look(self) -> None:
        import mlx.core as mx

        self._highest_bytes = max(self._highest_bytes, mx.get_peak_memory())
