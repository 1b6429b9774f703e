"""The daemon's process with memory in it that belongs to no model: `python -m tests.acceptance.ballasted_daemon ...`.

It takes the options of `python -m omlxd.daemon`. Whenever the file `ballast` of the home names another number of bytes,
so many are held in an MLX array, and the number stands in `ballast.held`.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

from omlxd.daemon.__main__ import main

ASKED, HELD = "ballast", "ballast.held"
LOOK_EACH_S = 0.01


def _hold(home: Path) -> None:
    held, arrays = "", []
    while True:
        if (home / ASKED).exists() and (asked := (home / ASKED).read_text()) not in ("", held):
            import mlx.core as mx

            arrays.clear()
            mx.clear_cache()
            arrays.append(mx.ones(int(asked), mx.uint8))
            mx.eval(arrays)
            (home / HELD).write_text(held := asked)
        time.sleep(LOOK_EACH_S)


if __name__ == "__main__":
    at = Path(sys.argv[sys.argv.index("--home") + 1])
    threading.Thread(target=_hold, args=[at], daemon=True).start()
    sys.exit(main())
