"""What is imported for good costs the garbage collector nothing, neither while it is imported nor later."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

COLLECTIONS_OF_ALL = """
import gc, sys
seen = []
gc.callbacks.append(lambda phase, info: phase == "stop" and info["generation"] == 2 and seen.append(list(sys.modules)))
"""


def run(code: str, *arguments: str) -> None:
    """In a process of its own, whose collector nobody else has touched."""
    subprocess.run([sys.executable, "-c", code, *arguments], check=True, timeout=120)


def test_what_is_made_inside_is_left_out_and_older_garbage_is_not_kept_with_it() -> None:
    run("""
import gc, weakref
from omlxd.engine.lasting_imports import lasting_imports

class Thing: pass

garbage, frozen = Thing(), gc.get_freeze_count()
garbage.itself, gone = garbage, weakref.ref(garbage)
del garbage
with lasting_imports():
    assert gone() is None and not gc.isenabled()
    made = [[] for _ in range(1000)]
assert gc.get_freeze_count() >= frozen + 1000 and gc.isenabled()
gc.disable()
with lasting_imports():
    pass
assert not gc.isenabled()
""")


@pytest.mark.mlx
def test_nobody_waits_for_a_collection_of_the_libraries() -> None:
    run(
        COLLECTIONS_OF_ALL
        + """
from omlxd.engine import mlxlm
mlxlm.import_libraries()
assert not any("mlx.core" in modules for modules in seen)
assert gc.get_freeze_count() > 50_000
"""
    )


def test_nobody_waits_for_a_collection_of_the_daemons_own_modules(tmp_path: Path) -> None:
    run(
        COLLECTIONS_OF_ALL
        + """
from omlxd.daemon.__main__ import main
assert main(["--home", sys.argv[1]]) == 78  # there is no manifest
assert not any("uvicorn" in modules for modules in seen)
assert gc.get_freeze_count() > 10_000
""",
        str(tmp_path),
    )
