"""Small models with random weights that mlx-lm loads: for tests, and to fill the memory in the demo.

Their text is nonsense in printable ASCII: the output head is zero but for the rows of printable characters, so greedy
text never ends by itself and a request runs until its `max_tokens`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omlxd.core.errors import InvalidRequest
from omlxd.engine.model_folders import appears_whole, no_arrays_left, write_json, write_tokenizer
from omlxd.engine.tiny_layouts import Layout, Storage, fit_layout

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<unk>")
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MIN_VOCAB = 256 + len(SPECIAL_TOKENS)


def make_tiny(
    folder: Path,
    *,
    kind: str = "llama",
    size_bytes: int = 5_000_000,
    layers: int | None = None,
    dtype: str = "float32",
    bits: int | None = None,
    group_size: int = 64,
    shards: int = 1,
    vocab: int = 512,
    context: int = 32768,
    window: int = 512,
    seed: int = 0,
) -> Path:
    """Make `folder` a model of random weights, the same for the same arguments, and return it.

    Args:
        folder: where to; must not be there yet, or be empty.
        kind: `llama`, `qwen2`, `qwen3`, `gemma3_text`, `qwen3_moe` or `mamba2`.
        size_bytes: bytes of weights, met within 10 % for a llama of 1 MB or more.
        layers: number of blocks; by default 2 to 16, growing with the size.
        dtype: `float32` (fastest on the CPU), `bfloat16` or `float16`.
        bits: quantise the matrices to that many bits; None leaves them in `dtype`.
        group_size: weights that share one scale, when quantised.
        shards: number of safetensors files; more than one gets an index.
        vocab: number of token ids, at least 260.
        context: the longest prompt the configuration claims, in tokens.
        window: sliding window of gemma3_text, in tokens.
        seed: of the random weights; MLX's global random state is left alone.

    Raises:
        InvalidRequest: the folder holds something, or no such model can be made.
    """
    if folder.is_dir() and any(folder.iterdir()):
        raise InvalidRequest(f"`{folder}` is there already", hint="remove it, or choose another folder")
    if vocab < MIN_VOCAB:
        raise InvalidRequest(f"{vocab} token ids are too few for one per byte", hint=f"at least {MIN_VOCAB}")
    import mlx.core as mx  # 20 ms

    storage = Storage(dtype=dtype, bits=bits, group_size=group_size)
    layout = fit_layout(
        kind, size_bytes=size_bytes, layers=layers, vocab=vocab, context=context, window=window, storage=storage
    )
    with appears_whole(folder) as building:
        token_ids = _write_tokenizer(building, vocab=vocab, context=context)
        printable = [token_ids[chr(code)] for code in range(33, 127)] + [token_ids["Ġ"]]  # Ġ is the byte-level blank
        # on the CPU: one seed gives the same model whatever the backend
        with no_arrays_left(), mx.stream(mx.cpu):
            _write_weights(building, layout, storage, printable=printable, shards=shards, seed=seed)
        config = {**layout.config, "eos_token_id": token_ids["<|im_end|>"], "torch_dtype": dtype}
        if bits:
            config["quantization"] = {"group_size": group_size, "bits": bits}
        write_json(building / "config.json", config)
    return folder


def _write_tokenizer(folder: Path, *, vocab: int, context: int) -> dict[str, int]:
    """A tokenizer with one token per byte; returns its vocabulary."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers  # 20 ms

    tokens = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokens += [f"<extra_{number}>" for number in range(len(tokens), vocab)]
    ids = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    end_of_text, start, end, unknown = SPECIAL_TOKENS
    special = {"bos_token": start, "eos_token": end, "unk_token": unknown, "pad_token": end_of_text}
    write_tokenizer(folder, tokenizer, special=special, chat_template=CHAT_TEMPLATE, context=context)
    return ids


def _write_weights(
    folder: Path, layout: Layout, storage: Storage, *, printable: Sequence[int], shards: int, seed: int
) -> None:
    """Write the tensors, one file at a time, so that no more than one shard is ever in memory."""
    import mlx.core as mx

    index: dict[str, str] = {}
    key_of = dict(zip(layout.shapes, mx.random.split(mx.random.key(seed), len(layout.shapes)), strict=True))
    for number, names in enumerate(_split(layout, storage, shards), start=1):
        file = "model.safetensors" if shards == 1 else f"model-{number:05d}-of-{shards:05d}.safetensors"
        tensors: dict[str, Any] = {}
        for name in names:
            value = _tensor(layout, name, key_of[name], printable).astype(getattr(mx, storage.dtype))
            tensors |= _stored(name, value, storage)
            mx.eval(tensors)
        mx.save_safetensors(str(folder / file), tensors, {"format": "mlx"})
        index |= dict.fromkeys(tensors, file)
        del tensors, value  # before the next file's are made
    if shards > 1:
        total = {"total_size": storage.total_bytes(layout.shapes)}
        write_json(folder / "model.safetensors.index.json", {"metadata": total, "weight_map": index})


def _split(layout: Layout, storage: Storage, shards: int) -> list[list[str]]:
    """Tensor names in `shards` runs of about equal bytes."""
    total_bytes = storage.total_bytes(layout.shapes)
    parts: list[list[str]] = [[] for _ in range(shards)]
    before_bytes = 0
    for name, shape in layout.shapes.items():
        parts[before_bytes * shards // total_bytes].append(name)
        before_bytes += storage.tensor_bytes(name, shape)
    if not all(parts):
        raise InvalidRequest(f"so small a model does not divide into {shards} files", hint="ask for fewer shards")
    return parts


def _tensor(layout: Layout, name: str, key: Any, printable: Sequence[int]) -> Any:
    """The numbers of one tensor: variance-preserving noise where it multiplies, neutral values elsewhere."""
    import mlx.core as mx

    shape = layout.shapes[name]
    if name == "lm_head.weight":
        head = mx.zeros(shape)
        head[mx.array(list(printable))] = mx.random.normal((len(printable), shape[1]), key=key) * 0.5
        return head
    if name.endswith("A_log"):
        return mx.log(mx.arange(1, shape[0] + 1, dtype=mx.float32))
    if name.endswith(".bias"):
        return mx.zeros(shape)
    if len(shape) == 1:  # norms (gemma's are 1 + weight), and mamba2's D and dt_bias
        return mx.zeros(shape) if layout.config["model_type"] == "gemma3_text" else mx.ones(shape)
    inputs = shape[1] if "conv1d" in name else shape[-1]
    return mx.random.uniform(-1.0, 1.0, shape, key=key) * math.sqrt(3.0 / inputs)


def _stored(name: str, value: Any, storage: Storage) -> dict[str, Any]:
    """One tensor as it goes into the file: itself, or its quantised triple."""
    import mlx.core as mx

    if not storage.is_quantized(name, value.shape):
        return {name: value}
    stem = name.removesuffix("weight")
    packed, scales, biases = mx.quantize(value, group_size=storage.group_size, bits=storage.bits)
    return {name: packed, f"{stem}scales": scales, f"{stem}biases": biases}
