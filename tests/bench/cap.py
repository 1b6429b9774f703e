"""What a cap costs: nothing while everything fits below it, and time, not the request, when a prompt barely does."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from omlxd.core.costs import costs_of_config
from omlxd.daemon.model_files import read_model_folder
from tests.bench.report import Judged, Row, Target, against
from tests.bench.scratch import Scratch
from tests.bench.servers import RunningDaemon, our_daemon
from tests.bench.streaming import chat

MIB = 1024 * 1024
CLIENTS = (1, 4)
MAX_TOKENS = 32
LONG_TOKENS, TEMPLATE_TOKENS, SLACK_BYTES = 8192, 50, 20 * MIB
PROMPT = "Is there enough memory?"
PEER = "no cap, no guard"
NO_CAP = {"max_memory": 0, "prefill_memory_guard": False}
UNHARMED = Target(0.98, Judged.RATIO, at_most=False)


def run(scratch: Scratch) -> Iterator[Row]:
    """Two daemons are up at once and take turns; one is idle while the other answers."""
    yield from _throughput(scratch)
    yield from _long_prompt(scratch)


def _throughput(scratch: Scratch) -> Iterator[Row]:
    model = scratch.llama(50)
    with ExitStack() as stack:  # short rounds: a machine's mood lasts longer than a pair of them
        start = stack.enter_context
        capped = start(our_daemon(scratch.home("capped"), {"chat": model}, max_memory="1G", hard_limit="1100M"))
        free = start(our_daemon(scratch.home("free"), {"chat": model}, **NO_CAP))
        pool = start(ThreadPoolExecutor(max(CLIENTS)))
        for clients in CLIENTS:
            ours, peer = [], []
            for number in range(scratch.rounds(30, 2) + 1):
                pairs = [(capped, ours), (free, peer)]
                for daemon, found in pairs if number % 2 else reversed(pairs):
                    found.append(_tokens_per_s(daemon, pool, clients, number))
            what = f"tokens/s under a cap that holds everything, {clients} client{'s' if clients > 1 else ''}"
            yield against(what, "tok/s", ours[1:], PEER, peer[1:], UNHARMED)  # the first round warms up


def _tokens_per_s(daemon: RunningDaemon, pool: ThreadPoolExecutor, clients: int, number: int) -> float:
    prompts = [f"{number}.{client}: {PROMPT}" for client in range(clients)]
    asked = [pool.submit(chat, daemon.api, "chat", prompt, MAX_TOKENS) for prompt in prompts]
    answers = [each.result() for each in asked]
    took_s = max(answer.last_s for answer in answers) - min(answer.sent_s for answer in answers)
    return sum(answer.tokens for answer in answers) / took_s


def _long_prompt(scratch: Scratch) -> Iterator[Row]:
    """Weights, the KV cache of the prompt and its answer, and 20 MiB: less than one step of 256 tokens would take."""
    model = scratch.tiny("llama", 3, layers=2)
    files = read_model_folder(model)
    costs = costs_of_config(files.config, files.element_bytes, None, "cpu")
    cap_bytes = files.weights_bytes + costs.kv_bytes(LONG_TOKENS + 256) + SLACK_BYTES
    step_bytes = costs.prefill_transient_bytes(256, LONG_TOKENS)
    with (
        our_daemon(scratch.home("capped"), {"chat": model}, max_memory=cap_bytes, hard_limit=cap_bytes) as capped,
        our_daemon(scratch.home("free"), {"chat": model}, **NO_CAP) as free,
    ):
        for daemon in (capped, free):
            daemon.load("chat")
        ours, peer = [], []
        for number in range(scratch.rounds(4, 1)):
            pairs = [(capped, ours), (free, peer)]
            for daemon, found in pairs if number % 2 else reversed(pairs):
                prompt = f"{number} " + "x" * (LONG_TOKENS - TEMPLATE_TOKENS)
                found.append(chat(daemon.api, "chat", prompt, 4).first_token_s)
        memory = {PEER: free.status()["memory"], "capped": capped.status()["memory"]}
    note = (
        f"a step of 256 would take {step_bytes / MIB:.0f} MiB; peak {memory['capped']['peak'] / MIB:.1f} of"
        f" {cap_bytes / MIB:.1f} MiB, {memory['capped']['over_hard_samples']} of {memory['capped']['samples']} samples"
        f" over it; without a cap the peak was {memory[PEER]['peak'] / MIB:.1f} MiB"
    )
    yield against("8k prompt, cap of weights + KV + 20 MiB", "s", ours, PEER, peer, note=note)
