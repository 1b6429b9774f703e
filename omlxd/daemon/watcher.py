"""What every watcher of the daemon is: one task of its own, which looks until it is stopped."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import ClassVar


class Watcher(ABC):
    """Looks at the daemon again and again; what it looks at is its subclass's.

    Attributes:
        task_name: of its task, for a look at what the event loop runs.
    """

    task_name: ClassVar[str]
    _task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to watch, where there is something to watch; the second call does nothing."""
        if self._task is None and self._has_something_to_watch:
            self._task = asyncio.create_task(self._watch(), name=self.task_name)

    async def stop(self) -> None:
        """End the watch; idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    @property
    def _has_something_to_watch(self) -> bool:
        return True

    @abstractmethod
    async def _watch(self) -> None:
        """Look until cancelled."""
