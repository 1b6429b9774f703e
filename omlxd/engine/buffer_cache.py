"""MLX's buffer cache: freed buffers that it keeps, and that must fit under the hard limit beside what is live."""

from __future__ import annotations

from omlxd.engine import mlxlm
from omlxd.engine.gauges import Gauges


def leave_room(gauges: Gauges, hard_bytes: int, transient_bytes: int, stays_bytes: int = 0) -> None:
    """Before a step: let the cache take only what the step leaves of the hard limit.

    A step frees buffers and takes others of sizes that it cannot reuse: what it holds and what it has freed add up,
    and passed the hard limit by 2.8 MB in the middle of a step that had been promised all that was left. Half of
    the promise is kept free besides, since buffers that nobody holds are the cheapest to do without: else both
    together were seen 3.9 MB over a hard limit that was 20 MB above the soft one.

    What is live now says too little: the rows of a batch that somebody has joined are copied in the next step, and each
    256 tokens all of them grow (7.4 MB over the limit were seen when 12 rows were padded to 2,000 tokens).

    Args:
        gauges: memory now, and the knob.
        hard_bytes: the hard limit, 0 for none.
        transient_bytes: what the step was promised, 0 when that is not known.
        stays_bytes: what may stay behind it: all that was promised, allocated or not.
    """
    kept_free_bytes, held_bytes = transient_bytes * 3 // 2, max(gauges.active_bytes(), stays_bytes)
    if hard_bytes and kept_free_bytes and gauges.cap_cache(hard_bytes - held_bytes - kept_free_bytes):
        _give_back()


def drop(gauges: Gauges) -> int:
    """Give all of it back; the bytes that this freed."""
    before_bytes = gauges.cache_bytes()
    if not before_bytes:
        return 0
    _give_back()
    return before_bytes - gauges.cache_bytes()


def _give_back() -> None:
    import mlx.core as mx

    mlxlm.synchronize()  # clearing before is behind kernel panics on Metal
    mx.clear_cache()
