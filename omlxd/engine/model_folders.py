"""Model folders that we write ourselves: they appear whole or not at all, and leave no memory behind.

A folder is built beside its final place, under a hidden name, and renamed when it is finished: whoever finds the final
name finds a complete model, whenever the writer was interrupted.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@contextmanager
def appears_whole(folder: Path) -> Iterator[Path]:
    """Give a temporary folder to fill; leaving without an exception renames it to `folder`, any other way removes it.

    Args:
        folder: where the model belongs; its parents are made.

    Raises:
        OSError: `folder` is there already and not empty, or the disk refuses.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".{folder.name}.partial-", dir=folder.parent))
    try:
        yield building
        os.replace(building, folder)  # noqa: PTH105 -- the rename that makes it visible; says that it replaces
    finally:
        shutil.rmtree(building, ignore_errors=True)


@contextmanager
def no_arrays_left() -> Iterator[None]:
    """Give MLX's memory back at the end, for whoever goes on to measure; the body's own names must be gone by then."""
    import mlx.core as mx  # 20 ms

    try:
        yield
    finally:
        gc.collect()
        mx.synchronize(mx.default_stream(mx.cpu))
        mx.clear_cache()


def is_model_folder(folder: Path) -> bool:
    """Whether `folder` has the three things a model needs: configuration, tokenizer, weights."""
    wanted = ("config.json", "tokenizer.json", "tokenizer_config.json")
    return all((folder / name).is_file() for name in wanted) and any(folder.glob("model*.safetensors"))


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write `value` as the JSON file `path`, readable by people."""
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False), encoding="utf-8")


def write_tokenizer(
    folder: Path, tokenizer: Tokenizer, *, special: Mapping[str, str], chat_template: str, context: int
) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` as transformers reads them.

    Args:
        folder: the model folder.
        tokenizer: the finished fast tokenizer.
        special: the texts of `bos_token`, `eos_token`, `unk_token` and `pad_token`.
        chat_template: Jinja text.
        context: the longest prompt, in tokens.
    """
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **special,
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": context,
            "chat_template": chat_template,
        },
    )
