"""Makes a folder of random weights for any config that mlx-lm has a class for.

`python -m tests.bench.family_folders FOLDER CONFIG` takes the config as JSON.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omlxd.engine.demo_models import make_tiny

VOCAB = 512


def make_family(folder: Path, config: Mapping[str, Any]) -> Path:
    """The folder, with a tokenizer of one token per byte; float32.

    Args:
        folder: where to; must not be there yet.
        config: as config.json holds it; its vocabulary becomes `VOCAB`.
    """
    import mlx.core as mx

    from omlxd.engine import mlxlm

    mlxlm.import_libraries()
    from mlx.utils import tree_flatten
    from mlx_lm.utils import _get_classes

    config = {**config, "vocab_size": VOCAB}
    tokenizer = make_tiny(folder.with_suffix(".tokenizer"), size_bytes=1_000_000, vocab=VOCAB)
    model_class, arguments = _get_classes(config)
    model = model_class(arguments.from_dict(config))
    model.set_dtype(mx.float32)
    folder.mkdir()
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, folder)
    shutil.rmtree(tokenizer)
    del model
    mlxlm.release_memory()
    return folder


if __name__ == "__main__":
    folder, config = sys.argv[1:]
    make_family(Path(folder), json.loads(config))
