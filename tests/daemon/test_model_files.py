"""Model folders: exact weight bytes from the headers, and one clear error for every way to be broken."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omlxd.core.errors import LoadFailed, NotPermitted, OmlxError
from omlxd.core.estimate import weights_bytes
from omlxd.core.manifest import ModelSettings
from omlxd.daemon.manifest_file import parse_manifest
from omlxd.daemon.model_check import check_models
from omlxd.daemon.model_files import folder_fingerprint, hub_cache, model_folder, read_model_folder
from omlxd.daemon.model_support import architectures_in

CONFIG = {"model_type": "llama", "vocab_size": 260, "max_position_embeddings": 2048, "hidden_size": 8}
WEIGHTS = {"embed.weight": ("F32", [260, 8]), "norm.weight": ("BF16", [8]), "scale": ("U32", [])}
WEIGHTS_BYTES = 260 * 8 * 4 + 8 * 2 + 4


def safetensors(tensors: Mapping[str, tuple[str, list[int]]], metadata: bool = True) -> bytes:
    """A whole safetensors file with zeros in it."""
    sizes = {"F32": 4, "U32": 4, "BF16": 2, "U8": 1}
    header: dict[str, Any] = {"__metadata__": {"format": "mlx"}} if metadata else {}
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + sizes[dtype]
        for size in shape:
            end = begin + (end - begin) * size
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    return framed(json.dumps(header).encode()) + bytes(end)


def framed(header: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header


def one_tensor(**changes: object) -> bytes:
    tensor = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}
    return framed(json.dumps({"w": tensor}).encode()) + bytes(8)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


def write_model(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "model.safetensors").write_bytes(safetensors(WEIGHTS))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def write_shards(folder: Path, count: int = 3) -> None:
    (folder / "model.safetensors").unlink()
    for number in range(1, count + 1):
        name = f"model-{number:05d}-of-{count:05d}.safetensors"
        (folder / name).write_bytes(safetensors({f"layer.{number}": ("F32", [number, 10])}))
    index = {f"layer.{n}": f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def failure(folder: Path) -> LoadFailed:
    with pytest.raises(LoadFailed) as failed:
        read_model_folder(folder)
    assert failed.value.hint
    assert not failed.value.message.endswith(".")
    json.dumps(failed.value.to_json())
    return failed.value


def test_a_whole_folder_tells_all_that_is_known_before_a_load(folder: Path) -> None:
    files = read_model_folder(folder)
    assert files.path == folder
    assert files.config == CONFIG
    assert files.weights_bytes == WEIGHTS_BYTES
    assert (files.model_type, files.context_length, files.vocab_size, files.tensors) == ("llama", 2048, 260, 3)


def test_shards_are_summed(folder: Path) -> None:
    write_shards(folder)
    files = read_model_folder(folder)
    assert (files.weights_bytes, files.tensors) == (4 * 10 * (1 + 2 + 3), 3)


def test_weights_that_mlx_lm_does_not_load_are_not_counted(folder: Path) -> None:
    (folder / "adapter.safetensors").write_bytes(safetensors({"lora": ("F32", [100])}))
    assert read_model_folder(folder).weights_bytes == WEIGHTS_BYTES


def test_a_tensor_that_stands_in_two_files_is_loaded_once() -> None:
    def header(size: int) -> dict[str, object]:
        return {"w": {"data_offsets": [4, 4 + size]}, "__metadata__": {"format": "mlx"}}

    assert weights_bytes([header(100), header(60)]) == 60


@pytest.mark.parametrize(
    ("config", "context_length", "vocab_size"),
    [
        ({"n_positions": 1024, "vocab_size": 5}, 1024, 5),
        ({"text_config": {"max_position_embeddings": 4096, "vocab_size": 7}}, 4096, 7),
        ({"max_position_embeddings": -1, "text_config": [1], "vocab_size": None}, None, None),
        ({"max_position_embeddings": 1e6, "vocab_size": 10**30}, None, None),
        ({}, None, None),
    ],
)
def test_context_and_vocabulary_are_read_where_the_config_says_them(
    folder: Path, config: dict[str, object], context_length: int | None, vocab_size: int | None
) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    files = read_model_folder(folder)
    assert (files.context_length, files.vocab_size) == (context_length, vocab_size)


def replace_by(name: str, content: bytes | str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)

    return damage


def config_with(**changes: object) -> Callable[[Path], None]:
    return replace_by("config.json", json.dumps(CONFIG | changes))


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def folder_in_place_of(name: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).mkdir()

    return damage


def pipe_in_place_of(name: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return damage


def dangling(name: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).symlink_to(folder / "nowhere")

    return damage


def shards_without(name: str, index: bool = True) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        write_shards(folder)
        (folder / name).unlink()
        if not index:
            (folder / "model.safetensors.index.json").unlink()

    return damage


def index_of(content: str) -> Callable[[Path], None]:
    return replace_by("model.safetensors.index.json", content)


WEIGHT_FILE = "model.safetensors"
WHOLE = safetensors(WEIGHTS)


@pytest.mark.parametrize(
    ("damage", "kind", "says"),
    [
        (lambda folder: shutil.rmtree(folder), "missing_folder", "does not exist"),
        (without("config.json"), "no_config", "has no config.json"),
        (dangling("config.json"), "no_config", "a link to a file that does not exist"),
        (replace_by("config.json", ""), "bad_config", "is not JSON"),
        (replace_by("config.json", '{"model_type": '), "bad_config", "is not JSON"),
        (replace_by("config.json", b"\xff\xfe\xfa"), "bad_config", "is not JSON"),
        (replace_by("config.json", "[" * 100_000), "bad_config", "is not JSON"),
        (replace_by("config.json", '{"a": ' + "9" * 5000 + "}"), "bad_config", "is not JSON"),
        (replace_by("config.json", "[1, 2]"), "bad_config", "does not hold a JSON object"),
        (replace_by("config.json", "{}"), "bad_config", "without `model_type`"),
        (replace_by("config.json", '{"model_type": 3}'), "bad_config", "without `model_type`"),
        (replace_by("config.json", '{"model_type": "\\ud800"}'), "bad_config", "impossible `model_type`: `\\ud800`"),
        (folder_in_place_of("config.json"), "bad_config", "is a folder, not a file"),
        (pipe_in_place_of("config.json"), "bad_config", "is not a regular file"),
        (without(WEIGHT_FILE), "no_weights", "has no `model*.safetensors`"),
        (replace_by(WEIGHT_FILE, safetensors({})), "no_weights", "has weight files without a tensor"),
        (folder_in_place_of(WEIGHT_FILE), "bad_header", "is a folder, not a file"),
        (pipe_in_place_of(WEIGHT_FILE), "bad_header", "is not a regular file"),
        (dangling(WEIGHT_FILE), "missing_shard", "a link to a file that does not exist"),
        (replace_by(WEIGHT_FILE, b""), "truncated_shard", "is 0 bytes long"),
        (replace_by(WEIGHT_FILE, b"12345"), "truncated_shard", "is 5 bytes long"),
        (replace_by(WEIGHT_FILE, WHOLE[:50]), "truncated_shard", "ends inside its header (42 of"),
        (replace_by(WEIGHT_FILE, WHOLE[:-1]), "truncated_shard", "cut off: 1 B are missing at its end"),
        (replace_by(WEIGHT_FILE, b"\xff" * 100), "bad_header", "says that its header has 18446744073709551615 bytes"),
        (replace_by(WEIGHT_FILE, bytes(100)), "bad_header", "says that its header has 0 bytes"),
        (replace_by(WEIGHT_FILE, framed(b"not json")), "bad_header", "a header that is not JSON"),
        (replace_by(WEIGHT_FILE, framed(b"[" * 100_000)), "bad_header", "a header that is not JSON"),
        (replace_by(WEIGHT_FILE, framed(b"[1]")), "bad_header", "not a table of tensors"),
        (replace_by(WEIGHT_FILE, framed(b'{"w": 3}')), "bad_header", "without dtype, shape and offsets: `w`"),
        (replace_by(WEIGHT_FILE, framed(b'{"\\u001b": {}}')), "bad_header", "offsets: `\\x1b`"),
        (replace_by(WEIGHT_FILE, one_tensor(shape=[3])), "bad_header", "shape and bytes do not agree: `w`"),
        (replace_by(WEIGHT_FILE, one_tensor(shape=[-2, -1])), "bad_header", "impossible shape"),
        (replace_by(WEIGHT_FILE, one_tensor(shape=[True, 2])), "bad_header", "impossible shape"),
        (replace_by(WEIGHT_FILE, one_tensor(shape=[10**30])), "bad_header", "impossible shape"),
        (replace_by(WEIGHT_FILE, one_tensor(data_offsets=[8, 0])), "bad_header", "impossible shape or place"),
        (replace_by(WEIGHT_FILE, one_tensor(data_offsets=[0, 8.0])), "bad_header", "impossible shape or place"),
        (replace_by(WEIGHT_FILE, one_tensor(data_offsets=[2**40, 2**40 + 8])), "truncated_shard", "1.00 TiB are"),
        (shards_without("model-00002-of-00003.safetensors"), "missing_shard", "`model-00002-of-00003.safetensors`"),
        (shards_without("model-00003-of-00003.safetensors", index=False), "missing_shard", "`model-00003-of-00003"),
        (index_of('{"weight_map": {"other": "gone.safetensors", "x": "b"}}'), "missing_shard", "`b` and 1 more"),
        (index_of('{"weight_map": {"other": "\\ud800"}}'), "missing_shard", "`\\ud800`"),
        (index_of('{"weight_map": [1]}'), "bad_header", "is not an index of weights"),
        (index_of('{"weight_map": {"a": 1}}'), "bad_header", "is not an index of weights"),
        (index_of("nonsense"), "bad_header", "is not JSON"),
        (without("tokenizer.json"), "no_tokenizer", "has no tokenizer"),
        (dangling("tokenizer.json"), "no_tokenizer", "has no tokenizer"),
        (folder_in_place_of("tokenizer.json"), "no_tokenizer", "has no tokenizer"),
        (replace_by("tokenizer.json", "junk"), "bad_tokenizer", "is not JSON"),
        (replace_by("tokenizer.json", "junk" * 2**19), "bad_tokenizer", "does not hold a JSON object"),
        (replace_by("tokenizer.json", "[]"), "bad_tokenizer", "does not hold a JSON object"),
        (replace_by("tokenizer_config.json", '{"a":'), "bad_tokenizer", "is not JSON"),
        (config_with(model_type="frobnicate"), "unsupported_model", "the model type `frobnicate`"),
        (config_with(model_type="../../os"), "unsupported_model", "the model type `../../os`"),
        (config_with(vocab_size="x"), "bad_config", "`vocab_size` is not a positive number: `\"x\"`"),
        (config_with(hidden_size=0), "bad_config", "`hidden_size` is not a positive number: `0`"),
        (config_with(num_hidden_layers=[1]), "bad_config", "`num_hidden_layers` is not"),
        (config_with(head_dim=True), "bad_config", "`head_dim` is not a positive number: `true`"),
        (config_with(text_config={"intermediate_size": {}}), "bad_config", "`text_config.intermediate_size` is not"),
    ],
)  # fmt: skip
def test_each_damage_has_its_kind_its_words_and_a_hint(
    folder: Path, damage: Callable[[Path], None], kind: str, says: str
) -> None:
    damage(folder)
    failed = failure(folder)
    assert failed.details["kind"] == kind
    assert says in failed.message


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "mistral"},  # another type's module
        {"model_type": "phi-msft"},
        {"model_type": "bailing_hybrid", "architectures": ["BailingMoeV3ForCausalLM"]},
        {"architectures": [3, None]},
        {"intermediate_size": [8, 16], "num_key_value_heads": [1, 2], "head_dim": None},  # one value a layer
        {"num_attention_heads": 0, "vocab_size": 260.0},
        {"eos_token_id": [1, 2], "hidden_size": None},
        {"model_type": "own", "model_file": "own.py"},  # refused by the engine, in its own words
    ],
    ids=str,
)
def test_an_odd_config_that_mlx_lm_may_load_is_left_to_it(folder: Path, changes: dict[str, object]) -> None:
    config_with(**changes)(folder)
    assert read_model_folder(folder, thorough=True).weights_bytes == WEIGHTS_BYTES


def test_every_type_of_the_installed_mlx_lm_passes(folder: Path) -> None:
    utils = pytest.importorskip("mlx_lm.utils")
    for model_type in (*utils.MODEL_REMAPPING, "llama", "qwen3", "gemma3"):
        config_with(model_type=model_type)(folder)
        read_model_folder(folder)


def test_an_mlx_lm_that_looks_different_forbids_nothing(tmp_path: Path) -> None:
    assert architectures_in(tmp_path) is None
    (tmp_path / "models").mkdir()
    (tmp_path / "utils.py").write_text("def models(): ...")
    assert architectures_in(tmp_path) is None
    (tmp_path / "utils.py").write_text("MODEL_REMAPPING = {")
    assert architectures_in(tmp_path) is None


def test_a_large_tokenizer_is_read_whole_only_by_check(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"a": "' + "x" * 2**20)
    assert read_model_folder(folder).tensors == 3
    (report,) = check_models(parse_manifest(f"[models.a]\npath = '{folder}'", "/m"))
    (problem,) = report.problems
    assert problem.endswith("is not JSON; the file is damaged; fetch it again")


def test_a_file_in_place_of_the_folder_is_told_apart(folder: Path) -> None:
    assert failure(folder / "config.json").details["kind"] == "not_a_folder"


@pytest.mark.parametrize("path", ["a\0b", "x" * 5000])
def test_an_impossible_path_is_a_failed_load(path: str) -> None:
    assert "`" in failure(Path(path)).message


@pytest.mark.parametrize(
    ("other", "hint"), [("model.gguf", "GGUF"), ("pytorch_model.bin", "mlx_lm.convert"), ("x.txt", "fetch its weights")]
)
def test_without_safetensors_the_hint_depends_on_what_is_there(folder: Path, other: str, hint: str) -> None:
    (folder / WEIGHT_FILE).rename(folder / other)
    assert hint in (failure(folder).hint or "")


def test_a_stale_index_beside_whole_weights_is_harmless(folder: Path) -> None:
    index_of(json.dumps({"weight_map": dict.fromkeys(WEIGHTS, "model-00001-of-00002.safetensors")}))(folder)
    assert read_model_folder(folder).weights_bytes == WEIGHTS_BYTES


@pytest.mark.parametrize("name", ["config.json", WEIGHT_FILE, "."])
def test_what_may_not_be_read_is_not_permitted(
    name: str, open_folder: Path, as_ordinary_user: Callable[[], AbstractContextManager[None]]
) -> None:
    folder = write_model(open_folder / "model")
    with as_ordinary_user():
        assert read_model_folder(folder).tensors == 3
    (folder / name).chmod(0)
    with as_ordinary_user(), pytest.raises(NotPermitted) as refused:
        read_model_folder(folder)
    (folder / name).chmod(0o700)
    assert refused.value.message == f"`{folder / name}` may not be read"
    assert refused.value.hint


def test_the_fingerprint_changes_with_any_file_and_only_then(folder: Path) -> None:
    first = read_model_folder(folder).fingerprint
    assert read_model_folder(folder).fingerprint == folder_fingerprint(folder) == first
    os.utime(folder / WEIGHT_FILE, ns=(0, 0))
    touched = folder_fingerprint(folder)
    (folder / "added").write_text("")
    assert len({first, touched, folder_fingerprint(folder), folder_fingerprint(folder / "none")}) == 4


def test_a_file_put_back_with_its_old_time_is_another_file(folder: Path) -> None:
    first = folder_fingerprint(folder)
    shutil.copy2(folder / WEIGHT_FILE, folder / "copy")
    (folder / "copy").replace(folder / WEIGHT_FILE)
    assert folder_fingerprint(folder) != first


@given(
    name=st.sampled_from(["config.json", WEIGHT_FILE, "model.safetensors.index.json", "tokenizer.json"]),
    cuts=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 30), st.binary(max_size=30)), max_size=4),
)
@settings(max_examples=300)
def test_any_damaged_bytes_are_read_or_refused_with_our_own_error(
    tmp_path_factory: pytest.TempPathFactory, name: str, cuts: list[tuple[int, int, bytes]]
) -> None:
    folder = tmp_path_factory.getbasetemp() / "fuzzed"
    if not folder.exists():
        write_model(folder)
    originals = {
        "config.json": json.dumps(CONFIG).encode(),
        WEIGHT_FILE: WHOLE,
        "model.safetensors.index.json": json.dumps({"weight_map": dict.fromkeys(WEIGHTS, WEIGHT_FILE)}).encode(),
        "tokenizer.json": b"{}",
    }
    damaged = originals[name]
    for at, length, inserted in cuts:
        damaged = damaged[:at] + inserted + damaged[at + length :]
    for other, content in originals.items():
        (folder / other).write_bytes(damaged if other == name else content)
    try:
        outcome: object = read_model_folder(folder).weights_bytes
    except OmlxError as failed:
        outcome = failed.message
        json.dumps(failed.to_json())
        failed.message.encode()
    assert outcome is not None


REPO = ModelSettings("chat", repo="org/name")


def write_snapshot(cache: Path, revision: str = "0123abc") -> Path:
    stored = cache / "models--org--name"
    (stored / "refs").mkdir(parents=True)
    (stored / "refs" / "main").write_text(revision)
    (stored / "snapshots").mkdir()
    return write_model(stored / "snapshots" / revision)


def test_a_repo_is_the_snapshot_that_main_names(tmp_path: Path) -> None:
    snapshot = write_snapshot(tmp_path)
    assert model_folder(REPO, {"HF_HUB_CACHE": str(tmp_path)}) == snapshot
    assert read_model_folder(snapshot).weights_bytes == WEIGHTS_BYTES


def test_a_path_is_itself(tmp_path: Path) -> None:
    assert model_folder(ModelSettings("chat", path=str(tmp_path)), {}) == tmp_path


@pytest.mark.parametrize("revision", ["../../etc", "", "gone", "x" * 200, "\0", "é"])
def test_a_repo_whose_reference_leads_nowhere_is_not_downloaded(tmp_path: Path, revision: str) -> None:
    write_snapshot(tmp_path)
    (tmp_path / "models--org--name" / "refs" / "main").write_text(revision)
    with pytest.raises(LoadFailed, match="`org/name` is not in the Hugging Face cache") as failed:
        model_folder(REPO, {"HF_HUB_CACHE": str(tmp_path)})
    assert failed.value.details["kind"] == "not_downloaded"
    assert failed.value.hint == "`omlxd pull org/name` fetches it"


@pytest.mark.parametrize(
    ("environment", "cache"),
    [
        ({"HF_HUB_CACHE": "/c", "HF_HOME": "/h"}, "/c"),
        ({"HF_HOME": "/h", "XDG_CACHE_HOME": "/x"}, "/h/hub"),
        ({"XDG_CACHE_HOME": "/x", "HOME": "/u"}, "/x/huggingface/hub"),
        ({"HOME": "/u"}, "/u/.cache/huggingface/hub"),
        ({"HF_HOME": "~/hf"}, f"{Path.home()}/hf/hub"),
        ({"HF_HOME": "~no-such-user-here"}, "~no-such-user-here/hub"),
    ],
)
def test_the_cache_lies_where_the_environment_says(environment: dict[str, str], cache: str) -> None:
    assert hub_cache(environment) == Path(cache)


def test_check_reports_size_type_and_what_is_larger_than_the_limit(folder: Path) -> None:
    manifest = parse_manifest(f"[models.a]\npath = '{folder}'\npin = true", "/m")
    (fine,) = check_models(manifest, soft_bytes=WEIGHTS_BYTES)
    assert (fine.exists, fine.weights_bytes, fine.model_type, fine.context_length) == (
        True,
        WEIGHTS_BYTES,
        "llama",
        2048,
    )
    assert fine.problems == ()
    (large,) = check_models(manifest, soft_bytes=WEIGHTS_BYTES - 1)
    (problem,) = large.problems
    assert problem.startswith("its weights take 8.14 KiB, more than `max_memory` (8.14 KiB); raise `max_memory`")
