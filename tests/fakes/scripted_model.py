"""A real model folder whose greedy (and sampled) answers are a script: for clients' conversations with a tool call.

It is a llama of one block that adds nothing. The embedding is the identity, and the output head maps each token to the
one that follows it, so the answer is a walk along a chain of tokens. The chat template ends each prompt with a token
that begins the answer of that turn; whatever else a prompt ends with begins the first answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from omlxd.engine.model_folders import appears_whole, no_arrays_left, write_json, write_tokenizer

CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Bern"}}</tool_call>'
CONVERSATION = ("<think>A tool knows.</think>Let me look.\n" + CALL, "It is sunny in Bern today.", "You are welcome!")
"""What the model says in its first, second and third turn, and again from the first on."""

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<unk>", "<think>", "</think>")
HEAD_DIM = 64
PIECE = 5
CERTAIN = 2.0  # times sqrt(hidden), the norm's factor: a logit of 50 beside zeros, certain at any temperature
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for tool_call in m.tool_calls or [] %}<tool_call>"
    "{{ {'name': tool_call.function.name, 'arguments': tool_call.function.arguments} | tojson }}</tool_call>"
    "{% endfor %}{# tool_call.name: what mlx-lm looks for #}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{{ '<|say_' ~ (messages | selectattr('role', 'equalto', 'assistant') | list | length) % TURNS ~ '|>' }}{% endif %}"
)


def make_scripted(folder: Path, *turns: str, context: int = 4096) -> Path:
    """Make `folder` a model that says these turns, by default `CONVERSATION`; about 6 MB; and return it.

    Args:
        folder: where to.
        turns: what it says, in the nth turn of a conversation the nth; reasoning between `<think>` and `</think>`.
        context: tokens that it claims to take; a character of a prompt is one.

    Raises:
        ValueError: two runs of five characters in the turns are alike, so that the chain has a loop.
    """
    import mlx.core as mx
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    chains = [_pieces(turn) for turn in turns or CONVERSATION]
    starts = [f"<|say_{number}|>" for number in range(len(chains))]
    said = [piece for chain in chains for piece in chain if piece not in SPECIAL]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*SPECIAL, *starts, *alphabet, *map(_byte_level, said)]
    if len(set(tokens)) != len(tokens):
        raise ValueError(f"pieces that occur twice: {sorted({each for each in tokens if tokens.count(each) > 1})}")
    ids = {token: number for number, token in enumerate(tokens)}
    size = -(-len(tokens) // HEAD_DIM) * HEAD_DIM
    following = [ids[_byte_level(chains[0][0])]] * size
    for start, chain in zip(starts, chains, strict=True):
        walk = [start, *map(_byte_level, chain), "<|im_end|>"]
        for token, successor in pairwise(walk):
            following[ids[token]] = ids[successor]

    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (*SPECIAL, *starts)])
    special = {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "unk_token": "<unk>",
        "pad_token": "<|endoftext|>",
    }
    with appears_whole(folder) as building:
        template = TEMPLATE.replace("TURNS", str(len(chains)))
        write_tokenizer(building, tokenizer, special=special, chat_template=template, context=context)
        with no_arrays_left(), mx.stream(mx.cpu):
            head = mx.zeros((size, size))
            head[mx.array(following), mx.arange(size)] = CERTAIN
            weights = {name: mx.zeros(shape) for name, shape in _block(size).items()}
            weights |= {"model.embed_tokens.weight": mx.eye(size), "lm_head.weight": head}
            weights["model.norm.weight"] = mx.ones(size)
            mx.save_safetensors(str(building / "model.safetensors"), weights, {"format": "mlx"})
            del head, weights
        write_json(building / "config.json", _config(size, context, ids["<|im_end|>"]))
    return folder


def _pieces(text: str) -> list[str]:
    """The tokens of a text, of five characters or six; the marks of reasoning are tokens of their own."""
    for mark in ("<think>", "</think>"):
        text = text.replace(mark, f"\0{mark}\0")
    pieces = []
    for part in filter(None, text.split("\0")):
        if part in SPECIAL:
            pieces.append(part)
            continue
        ends = [*range(PIECE, len(part) - 1, PIECE), len(part)]  # never one character alone: that is a byte's token
        pieces += [part[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    return pieces


def _byte_level(text: str) -> str:
    """As a byte-level tokenizer spells it: a blank is Ġ, a line break Ċ."""
    return text.replace(" ", "Ġ").replace("\n", "Ċ")


def _block(size: int) -> dict[str, Sequence[int]]:
    layer = "model.layers.0"
    return {
        f"{layer}.input_layernorm.weight": (size,),
        f"{layer}.post_attention_layernorm.weight": (size,),
        f"{layer}.self_attn.q_proj.weight": (HEAD_DIM, size),
        f"{layer}.self_attn.k_proj.weight": (HEAD_DIM, size),
        f"{layer}.self_attn.v_proj.weight": (HEAD_DIM, size),
        f"{layer}.self_attn.o_proj.weight": (size, HEAD_DIM),
        f"{layer}.mlp.gate_proj.weight": (HEAD_DIM, size),
        f"{layer}.mlp.up_proj.weight": (HEAD_DIM, size),
        f"{layer}.mlp.down_proj.weight": (size, HEAD_DIM),
    }


def _config(size: int, context: int, eos: int) -> dict[str, object]:
    return {
        "model_type": "llama",
        "hidden_size": size,
        "num_hidden_layers": 1,
        "intermediate_size": HEAD_DIM,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": HEAD_DIM,
        "rms_norm_eps": 1e-5,
        "vocab_size": size,
        "rope_theta": 10000.0,
        "max_position_embeddings": context,
        "tie_word_embeddings": False,
        "eos_token_id": eos,
        "torch_dtype": "float32",
    }
