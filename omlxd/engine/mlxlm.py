"""mlx-lm and MLX as libraries: import, lazy load, a prefill step, what is in flight, and what is given back.

With `kv_caches`, `decode_lanes` and `patient_reading` all that leans on mlx-lm's internals;
`tests/engine/test_mlxlm_contract.py` says what moved when an upgrade breaks it. All functions but the import, and those
about tokenizers, run on the engine's thread.
"""

from __future__ import annotations

import gc
import glob
import resource
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omlxd.engine.blas import adopt_openblas
from omlxd.engine.lasting_imports import lasting_imports
from omlxd.engine.patient_reading import patiently

if TYPE_CHECKING:
    import mlx.core as mx


_importing = threading.Lock()  # the engine's thread, and a thread that reads a tokenizer


def import_libraries() -> None:
    """Import MLX and mlx-lm (1 to 2 s), with OpenBLAS if there is one, and keep the process's limit of open files.

    mlx-lm sets RLIMIT_NOFILE to (2048, 4096) on import; the lowered hard limit could not be raised again by a
    user's process, so the call is suppressed while it is imported.
    """
    with _importing:
        if "mlx_lm.utils" in sys.modules:
            return
        adopt_openblas()
        set_rlimit = resource.setrlimit
        resource.setrlimit = lambda *_: None
        try:
            with lasting_imports():
                import mlx_lm.generate
                import mlx_lm.sample_utils
                import mlx_lm.utils  # noqa: F401
        finally:
            resource.setrlimit = set_rlimit


def stream() -> Any:
    """mlx-lm's generation stream; a thread-local one, so it is this thread's."""
    from mlx_lm.generate import generation_stream

    return generation_stream


def synchronize() -> None:
    """Wait until nothing is in flight on the engine's streams."""
    import mlx.core as mx

    mx.synchronize(stream())
    mx.synchronize()


def load_lazy(folder: Path) -> tuple[Any, dict[str, Any]]:
    """The model with its weights still on disk, and its config. Code from the folder is never run.

    MLX's modules are made of random numbers that nobody evaluates, and so is the state that they were drawn from: left
    lazy, it would hold a chain of all draws of all loads (1.7 KB for each tensor, for ever).
    """
    import mlx.core as mx
    from mlx_lm.utils import load_model

    try:
        with _without_glob_characters(folder) as plain:
            model, config = load_model(plain, lazy=True, trust_remote_code=False)
    finally:
        mx.eval(mx.random.state)
    return model, dict(config)


@contextmanager
def _without_glob_characters(folder: Path) -> Iterator[Path]:
    # mlx-lm looks for the weights with an unescaped glob over the whole path; the files stay open after it.
    if glob.escape(str(folder)) == str(folder):
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="omlxd-") as place:
        plain = Path(place) / "model"
        plain.symlink_to(folder.resolve(), target_is_directory=True)
        yield plain


def load_config(folder: Path) -> dict[str, Any]:
    """The model's config as mlx-lm reads it: with what `generation_config.json` says of the end of a text."""
    from mlx_lm.utils import load_config as load

    return dict(load(folder))


def load_tokenizer(folder: Path, config: dict[str, Any]) -> Any:
    """mlx-lm's tokenizer wrapper, with the end-of-text ids of the model's config; on any thread."""
    from mlx_lm.utils import load_tokenizer as load

    with patiently(folder):
        return load(folder, eos_token_ids=config.get("eos_token_id"))


def every_array(model: Any) -> list[mx.array]:
    """All arrays of the module tree once, also private ones (RoPE tables) that `parameters()` leaves out.

    A lazy array may not cross threads, and evaluating only the parameters would leave those lazy.
    """
    import mlx.core as mx
    from mlx.utils import tree_flatten

    found = [value for _, value in tree_flatten(model.parameters())]
    for module in model.modules():
        found += [value for value in dict(module).values() if isinstance(value, mx.array)]
        found += [value for value in vars(module).values() if isinstance(value, mx.array)]
    return list({id(array): array for array in found}.values())


def prefill_chunk(model: Any, cache: list[Any], tokens: Sequence[int]) -> None:
    """Run `tokens` through the model into `cache`; no logits are computed, since only the caches are evaluated."""
    import mlx.core as mx

    with mx.stream(stream()):
        model(mx.array([list(tokens)]), cache=cache)
        mx.eval([layer.state for layer in cache])


def free_one_by_one(arrays: list[Any]) -> None:
    """Empty a list of arrays that nobody else holds any more.

    The interpreter's lock is held while an array is freed, 0.2 s for a GB: whoever answers meanwhile gets his turn
    between two of them, and not behind the whole model.
    """
    while arrays:
        arrays.pop()


def release_memory() -> None:
    """Collect garbage, wait for the device, then give MLX's freed buffers back.

    The order matters: clearing before synchronizing is behind kernel panics on Metal.
    """
    import mlx.core as mx

    gc.collect()
    synchronize()
    mx.clear_cache()


def end_thread() -> None:
    """The last act of the thread that ran MLX; without it the process often ends in SIGABRT."""
    import mlx.core as mx

    mx.clear_streams()
