"""The commented manifest that `omlxd init` writes: every key with its default, and two models to uncomment."""

from __future__ import annotations

from typing import Final


def default_manifest_text() -> str:
    """A valid manifest that changes nothing: a line that begins with `#key =` shows the default of that key."""
    return _TEXT


_TEXT: Final = """\
# omlxd's manifest: the models, and how much memory they may have together.
# A commented key shows its default, or an example where its comment says what holds without it.
# `omlxd check` checks this file, `man omlxd.toml` explains it.

[daemon]
# What the models may use together: `auto`, a size (8G = 8 * 2**30 bytes, 8GB = 8 * 10**9 bytes),
# or a part of the machine's memory (75%). 0 = no limit.
max_memory = "auto"

# What loading and prompts may never pass. Left out: all of the memory but 4 GiB, or `max_memory` if that is more.
#hard_limit = "12G"

# What other programs must leave the system. With less, idle models go and nothing new runs. Left out: 2G on macOS,
# 1G elsewhere. 0 = do not look at it.
#min_available = "2G"

# How often the enforcer looks, and what it does when memory is over the limit.
#poll_interval = "1s"
#policy = "graceful"
#prefill_memory_guard = true

# How long running requests may finish when the daemon stops; how long a load may wait for memory that nobody gives
# back; how long requests may wait for a model that does not fit beside others in use, before those make way; how
# long a request that gave its memory back waits for it again, before it ends with the text it has.
#drain_timeout = "30s"
#load_timeout = "60s"
#fair_wait = "10s"
#park_deadline = "300s"

# How long the engine may take no step while it has work, before `/health` calls it a stall.
#stall_timeout = "60s"

# Tokens of one prefill step at most; requests of one model that run together; requests that may wait.
#prefill_chunk = 256
#max_batch = 32
#max_waiting = 256

# What ended requests may leave in memory for prompts that begin the same way, all models together. It only ever
# takes what nothing else needs. "auto" = an eighth of `max_memory`; 0 = nothing.
#prefix_cache = "auto"

# What is loaded at the start beside the pins and preloads of this file: "none"; "pinned" = what was pinned at run
# time; "loaded" = also what was loaded when the daemon ended. Left out: "loaded" for `omlxd restart`, else "pinned".
#restore = "loaded"

# On macOS: whether the machine is kept from falling asleep of idleness while requests are in flight.
#keep_awake = true

# The log: debug, info, warning or error; the size at which its file is rotated; the old files that are kept.
#log_level = "info"
#log_max_size = "20M"
#log_backups = 5

[api]
# Where OpenAI-style clients connect. "off" = the Unix socket only. Beyond this machine `api_key` is required.
listen = "127.0.0.1:8321"
#api_key = "a long random text"
#api_key_file = "api.key"

# Web pages of these origins may use it from a browser; of other hosts none may.
#allow_origins = []

# The longest a request's `keep_alive` may keep its model beyond the model's `ttl`; without it the `ttl` is the most.
#max_keep_alive = "1h"

# One table for each model, as `omlxd add` writes it. Its name is what you type: `omlxd run chat "Hello"`.
#
# [models.chat]
# path = "~/models/Qwen3-8B-4bit"    # a folder; or: repo = "mlx-community/Qwen3-8B-4bit" (`omlxd pull`)
# pin = true                         # never unloaded to make room
# preload = true                     # loaded when the daemon starts
# aliases = ["default"]              # other names for it
#
# [models.small]
# path = "~/models/SmolLM2-135M-Instruct"
# ttl = "10m"                        # unloaded after ten minutes without a request
# max_context = 8192                 # tokens of prompt and answer together
"""
