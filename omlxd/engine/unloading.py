"""Taking a model out of memory, and waiting until the memory is back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from omlxd.engine import mlxlm
from omlxd.engine.gauges import Gauges
from omlxd.engine.glibc import trim_heap
from omlxd.engine.resident import ResidentModel

DEADLINE_S: Final = 2.0


def give_back(model: ResidentModel, gauges: Gauges, clock: Callable[[], float]) -> None:
    """Drop all that the model holds; its prefix caches must be gone already.

    Args:
        model: nobody may use it any more.
        gauges: say when its weights are back, which is waited for within `DEADLINE_S`.
        clock: monotonic seconds.
    """
    mlxlm.synchronize()  # what others have in flight would count as growth below
    before, weights_bytes = gauges.active_bytes(), model.weights_bytes
    model.close()
    deadline_s = clock() + DEADLINE_S
    mlxlm.release_memory()
    while gauges.active_bytes() > before - weights_bytes and clock() < deadline_s:
        mlxlm.release_memory()  # a buffer may still be on its way back from the device
    trim_heap()
