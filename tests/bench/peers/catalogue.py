"""The peers: what they are installed from, how each is started as its documentation says, and what it cannot do."""

from __future__ import annotations

import http.client
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.bench.peers.venvs import Package, ensure
from tests.bench.servers import Address

GIB = 1024**3


@dataclass(frozen=True, slots=True)
class Needs:
    """What a workload asks of a server.

    Attributes:
        several: more than one model behind one address.
        limit_bytes: a limit, of whatever kind the server has; None for none.
        keep: the model that is to stay resident, for servers that have to be told.
    """

    several: bool = False
    limit_bytes: int | None = None
    keep: str = ""

    def ours(self) -> dict[str, object]:
        """The settings of our daemon."""
        return {} if self.limit_bytes is None else {"max_memory": self.limit_bytes}


@dataclass(frozen=True, slots=True)
class Launch:
    """All that a command line is made from."""

    bin_folder: Path
    models: Mapping[str, Path]
    needs: Needs
    home: Path
    port: int

    @property
    def first(self) -> Path:
        """The folder of the first model."""
        return next(iter(self.models.values()))


@dataclass(frozen=True, slots=True)
class Peer:
    """A server to be compared with.

    Attributes:
        name: of the product.
        package: None when it comes with our own environment.
        command: its command line; writes into the home what it needs there.
        names: what it calls the models.
        several: why it cannot serve several models; empty when it can.
        limit: what its limit is, or what it does without one.
        load: a call that brings a model, for a server that answers 404 until it was made.
    """

    name: str
    package: Package | None
    command: Callable[[Launch], list[str]]
    names: Callable[[Launch], Mapping[str, str]]
    several: str = ""
    limit: str = ""
    load: Callable[[Address, str, Path], None] | None = None

    def lacks(self, needs: Needs) -> str:
        """Why it cannot do this; empty when it can."""
        return self.several if needs.several else ""

    def remark(self, needs: Needs) -> str:
        """What is to be known of its figures."""
        return self.limit if needs.limit_bytes is not None else ""

    def bin_folder(self, environments: Path) -> Path:
        """Where its programs are; installs it first. Raises Unavailable."""
        return ensure(self.package, environments) / "bin" if self.package else Path(sys.executable).parent


def _own_names(launch: Launch) -> dict[str, str]:
    return {name: name for name in launch.models}


def _mlx_lm_server(launch: Launch) -> list[str]:
    """One model at a time, and the one that is asked for takes the place of the other."""
    chosen = [] if launch.needs.several else ["--model", str(launch.first)]
    port = ["--port", str(launch.port), "--log-level", "ERROR"]
    return [str(launch.bin_folder / "python"), "-m", "mlx_lm.server", *chosen, *port]


def _flyto(launch: Launch) -> list[str]:
    """A folder of models, named as their folders are."""
    shelf = launch.home / "models"
    shelf.mkdir()
    for name, folder in launch.models.items():
        (shelf / name).symlink_to(folder)
    base = launch.home / "base"
    base.mkdir()
    if launch.needs.limit_bytes:
        ceiling = {"memory_guard_tier": "custom", "memory_guard_custom_ceiling_gb": launch.needs.limit_bytes / GIB}
        (base / "settings.json").write_text(json.dumps({"memory": ceiling}))
    command = [str(launch.bin_folder / "omlx"), "serve", "--model-dir", str(shelf), "--port", str(launch.port)]
    return [*command, "--base-path", str(base)]


def _vllm_mlx(launch: Launch) -> list[str]:
    command = [str(launch.bin_folder / "vllm-mlx"), "serve"]
    if launch.needs.several:
        entries = [{"name": name, "path": str(folder)} for name, folder in launch.models.items()]
        config = launch.home / "models.yaml"
        budget = {"memory_budget_gb": (launch.needs.limit_bytes or 8 * GIB) / GIB}
        config.write_text(json.dumps({"manager": budget, "models": entries}))  # JSON is YAML
        command += ["--models-config", str(config)]
    else:
        command += [str(launch.first), "--served-model-name", next(iter(launch.models))]
    return [*command, "--continuous-batching", "--port", str(launch.port)]


def _rapid_mlx(launch: Launch) -> list[str]:
    """The others are loaded by a call of their own when somebody wants them: see `load_rapid_mlx`."""
    command = [str(launch.bin_folder / "rapid-mlx"), "serve", str(launch.first), "--port", str(launch.port)]
    limit = ["--resident-memory-limit-gb", str(launch.needs.limit_bytes / GIB)] if launch.needs.limit_bytes else []
    return [*command, "--served-model-name", next(iter(launch.models)), *limit]


def load_rapid_mlx(address: Address, model: str, folder: Path) -> None:
    """Its call that loads a model; the size is told, since it charges 4 GiB for one whose name has none."""
    size_gb = sum(file.stat().st_size for file in folder.glob("*.safetensors")) / GIB
    body = {"model": model, "model_path": str(folder), "estimated_size_gb": size_gb}
    connection = http.client.HTTPConnection(*address, timeout=60)
    try:
        connection.request("POST", "/v1/models/load", json.dumps(body), {"Content-Type": "application/json"})
        connection.getresponse().read()
    except (OSError, http.client.HTTPException):
        pass  # the question that follows tells it
    finally:
        connection.close()


def _mlx_openai_server(launch: Launch) -> list[str]:
    """Several models are processes below it; of those that are loaded on demand it keeps one."""
    command = [str(launch.bin_folder / "mlx-openai-server"), "launch"]
    if not launch.needs.several:
        named = ["--model-path", str(launch.first), "--served-model-name", next(iter(launch.models))]
        return [*command, "--model-type", "lm", "--host", "127.0.0.1", "--port", str(launch.port), *named]
    entries = [
        {"model_path": str(folder), "model_type": "lm", "served_model_name": name}
        | ({"on_demand": True} if launch.needs.limit_bytes and name != launch.needs.keep else {})
        for name, folder in launch.models.items()
    ]
    config = launch.home / "config.yaml"
    server = {"host": "127.0.0.1", "port": launch.port}
    config.write_text(json.dumps({"server": server, "models": entries}))  # JSON is YAML
    return [*command, "--config", str(config)]


MLX_OPENAI_SERVER_NEEDS = [
    "aiofiles<26",
    "aiohttp",
    "click<8.4",
    "dill<0.5",
    "fastapi<0.130",
    "httpx<1",
    "json_repair<0.60",
    "loguru<0.8",
    "mlx-lm<0.32",
    "mlx[cpu]",
    "numpy<2.4",
    "openai<3",
    "openai-harmony<0.1",
    "outlines<1.2",
    "pillow<13",
    "pydantic<3",
    "PyYAML<7",
    "python-multipart<0.0.25",
    "rich<15",
    "uvicorn<0.40",
    "xxhash<4",
]
"""What it needs for text; of all that it asks for, some wants CUDA on Linux."""

MLX_LM = Peer(
    "mlx_lm.server",
    None,
    _mlx_lm_server,
    lambda launch: {
        name: str(path) if launch.needs.several else "default_model" for name, path in launch.models.items()
    },
    limit="has no limit; keeps one model",
)
FLYTO = Peer("flyto-mlx", Package("flyto-mlx", "0.7.0", ["mlx[cpu]"]), _flyto, _own_names)
VLLM_MLX = Peer("vllm-mlx", Package("vllm-mlx", "0.6.0", ["mlx[cpu]"]), _vllm_mlx, _own_names)
RAPID_MLX = Peer(
    "rapid-mlx",
    Package("rapid-mlx", "0.16.10", ["mlx[cpu]"]),
    _rapid_mlx,
    _own_names,
    load=load_rapid_mlx,
    limit="the client loads a model that is not there by a call of its own",
)
MLX_OPENAI_SERVER = Peer(
    "mlx-openai-server",
    Package("mlx-openai-server", "1.8.1", MLX_OPENAI_SERVER_NEEDS, bare=True),
    _mlx_openai_server,
    _own_names,
    limit="has no limit; one model on demand, in a process of its own",
)
PEERS = (MLX_LM, FLYTO, VLLM_MLX, RAPID_MLX, MLX_OPENAI_SERVER)
