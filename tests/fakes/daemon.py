"""A whole daemon in the test's own loop, over a fake engine and model folders that have a size but no weights."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omlxd.core.manifest import Restore
from omlxd.daemon.app import StopOrder
from omlxd.daemon.home import Home
from omlxd.daemon.keep_awake import SleepAssertion
from omlxd.daemon.lifecycle import DaemonConfig, Ended, Ready, serve
from omlxd.engine.orders import MIB
from tests.fakes.engine import FakeEngine
from tests.fakes.wire import Answer, fetch

TIMEOUT_S = 30.0
CONFIG = {  # a token takes 1 KiB, as in the fake engine
    "model_type": "llama",
    "max_position_embeddings": 4096,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "vocab_size": 1000,
    "torch_dtype": "float16",
}


@dataclass
class RunningDaemon:
    """A daemon that answers."""

    home: Home
    ready: Ready
    engine: FakeEngine
    stop: StopOrder
    task: asyncio.Task[Ended] = field(repr=False)

    @property
    def tcp(self) -> tuple[str, int]:
        host, _, port = str(self.ready.api).rpartition(":")
        return host, int(port)

    async def ask(self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> Answer:
        """One request over the Unix socket."""
        return await fetch(self.home.socket, method, path, body, headers)

    async def control(self, method: str, path: str, body: Any = None) -> Any:
        """The JSON of a control call that must succeed."""
        answer = await self.ask(method, f"/v1/control/{path}", body)
        assert answer.status == 200, answer.body
        return answer.json

    async def until(self, state: str) -> Any:
        """`status`, as soon as the daemon is in this state."""
        async with asyncio.timeout(TIMEOUT_S):
            while (status := await self.control("GET", "status"))["state"] != state:
                pass
        return status

    async def states(self) -> dict[str, str]:
        """Each model's state."""
        return {model["name"]: model["state"] for model in (await self.control("GET", "models"))["models"]}

    async def ended(self) -> Ended:
        """Wait for the end."""
        async with asyncio.timeout(TIMEOUT_S):
            return await asyncio.shield(self.task)

    def log(self) -> list[dict[str, Any]]:
        """The lines of the log file."""
        return [json.loads(line) for line in self.home.log.read_text().splitlines()]


def manifest(
    folder: Path, models: Mapping[str, Mapping[str, Any]], *, daemon: Mapping[str, Any] | None = None, **api: Any
) -> str:
    """A manifest whose models have a `mib` (their size) beside their keys; writes their folders."""
    tables = {"daemon": {"max_memory": "100M", "hard_limit": "200M", **(daemon or {})}}
    tables["api"] = {"listen": "127.0.0.1:0", **api}
    for name, keys in models.items():
        keys = dict(keys)
        path = model_folder(folder / name, int(keys.pop("mib", 10) * MIB))
        tables[f"models.{name}"] = {"path": str(path), **keys}
    return "".join(
        f"[{table}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items()) + "\n"
        for table, keys in tables.items()
    )


def model_folder(path: Path, weights_bytes: int) -> Path:
    """A folder that looks whole: config, tokenizer, and a sparse safetensors file of this many bytes of tensors."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(CONFIG))
    (path / "tokenizer.json").write_text("{}")
    header = json.dumps({"w": {"dtype": "U8", "shape": [weights_bytes], "data_offsets": [0, weights_bytes]}}).encode()
    with (path / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + weights_bytes)
    return path


@asynccontextmanager
async def running(
    folder: Path,
    models: Mapping[str, Mapping[str, Any]] | str,
    *,
    engine: FakeEngine | None = None,
    daemon: Mapping[str, Any] | None = None,
    api: Mapping[str, Any] | None = None,
    max_memory: str | None = None,
    restore: Restore | None = None,
    restarted: bool = False,
    assertion: SleepAssertion | None = None,
    wait_ready: bool = True,
) -> AsyncIterator[RunningDaemon]:
    """A daemon with its home in `folder`; stopped at the end unless it has ended already."""
    home = Home(folder / "home")
    home.root.mkdir(mode=0o700, exist_ok=True)
    text = models if isinstance(models, str) else manifest(folder, models, daemon=daemon, **(api or {}))
    home.manifest.write_text(text)
    engine = engine or FakeEngine("thread")
    stop, told = StopOrder(), asyncio.get_running_loop().create_future()
    config = DaemonConfig(home, max_memory=max_memory, restore=restore, restarted=restarted)
    task = asyncio.create_task(serve(config, engine=engine, on_ready=told.set_result, assertion=assertion, stop=stop))
    await asyncio.wait({task, told}, return_when=asyncio.FIRST_COMPLETED, timeout=TIMEOUT_S)
    if task.done():
        await task
    made = RunningDaemon(home, told.result(), engine, stop, task)
    try:
        if wait_ready:
            await made.until("ready")
        yield made
    finally:
        stop.ask(now=True)
        await made.ended()
