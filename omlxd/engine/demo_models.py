"""The models of the demo and of the tests: one real, the others made on the spot from random numbers.

Neither needs mlx_lm: making them costs no second of imports and leaves the process's file limits alone (importing
mlx_lm lowers them, for children too). Only `mlx.core` and `tokenizers` are imported, inside the functions.
"""

from __future__ import annotations

from omlxd.engine.model_folders import is_model_folder
from omlxd.engine.smollm2 import ensure_smollm2
from omlxd.engine.tiny_models import make_tiny

__all__ = ["ensure_smollm2", "is_model_folder", "make_tiny"]
