from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from omlxd.core.errors import InvalidRequest
from omlxd.engine import tiny_models
from omlxd.engine.demo_models import is_model_folder, make_tiny
from omlxd.engine.tiny_layouts import KINDS

pytestmark = pytest.mark.mlx


def tensors_of(folder: Path) -> dict:
    import mlx.core as mx

    return {name: array for file in folder.glob("*.safetensors") for name, array in mx.load(str(file)).items()}


def same_tensors(one: Path, other: Path) -> bool:
    import mlx.core as mx

    left, right = tensors_of(one), tensors_of(other)
    return left.keys() == right.keys() and all(bool(mx.array_equal(left[name], right[name])) for name in left)


def generate(folder: Path, text: str, *, max_tokens: int) -> tuple[str, int]:
    from mlx_lm import load, stream_generate

    model, tokenizer = load(str(folder))
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)
    answers = list(stream_generate(model, tokenizer, prompt, max_tokens=max_tokens))
    return "".join(answer.text for answer in answers), answers[-1].generation_tokens


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_loads_and_generates_printable_text_to_max_tokens(tiny_model, kind, bits):
    text, tokens = generate(tiny_model(kind, 1_500_000, bits=bits), "Why is the sky blue?", max_tokens=60)
    assert tokens == 60
    assert len(text) == 60
    assert text.isascii()
    assert text.isprintable()


def test_a_sliding_window_shorter_than_the_prompt_works(tiny_model):
    folder = tiny_model("gemma3_text", 1_500_000, window=32)
    assert generate(folder, "long " * 40, max_tokens=20)[1] == 20


def test_the_tokenizer_gives_any_text_back(tiny_model):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model())
    text = "naïve  <Köln> 東京 🙂\n\ttab"
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("size_bytes", [1_000_000, 1_700_000, 3_000_000, 5_000_000, 12_000_000, 40_000_000])
@pytest.mark.parametrize(
    "options",
    [{}, {"dtype": "bfloat16"}, {"bits": 4}, {"layers": 5, "size_bytes_factor": 2}],
    ids=["float32", "bfloat16", "4-bit", "five-layers"],
)
def test_a_llama_is_as_big_as_asked_for(tmp_path, size_bytes, options):
    wanted = size_bytes * options.pop("size_bytes_factor", 1)
    folder = make_tiny(tmp_path / "model", size_bytes=wanted, **options)
    stored_bytes = sum(array.nbytes for array in tensors_of(folder).values())
    assert stored_bytes == pytest.approx(wanted, rel=0.1)


@pytest.mark.parametrize("kind", KINDS)
def test_the_predicted_bytes_are_those_in_the_file(tmp_path, kind):
    from omlxd.engine.tiny_layouts import Storage, fit_layout

    for storage in (Storage("float32", None, 64), Storage("bfloat16", 4, 32)):
        options = {"size_bytes": 2_000_000, "layers": 2, "vocab": 300, "context": 4096, "window": 64}
        layout = fit_layout(kind, **options, storage=storage)
        folder = tmp_path / storage.dtype
        make_tiny(folder, kind=kind, **options, dtype=storage.dtype, bits=storage.bits, group_size=storage.group_size)
        stored_bytes = sum(array.nbytes for array in tensors_of(folder).values())
        assert stored_bytes == storage.total_bytes(layout.shapes)


def test_one_seed_makes_one_model_and_another_seed_another(tmp_path):
    first, again, other = (
        make_tiny(tmp_path / name, size_bytes=1_000_000, seed=seed) for name, seed in (("a", 7), ("b", 7), ("c", 8))
    )
    assert same_tensors(first, again)
    assert not same_tensors(first, other)
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (first / file).read_bytes() == (again / file).read_bytes()


def test_making_a_model_leaves_the_global_random_state_alone(tmp_path):
    import mlx.core as mx

    mx.random.seed(3)
    expected = mx.random.uniform(shape=(4,)).tolist()
    mx.random.seed(3)
    make_tiny(tmp_path / "model", size_bytes=1_000_000)
    assert mx.random.uniform(shape=(4,)).tolist() == expected


def test_shards_hold_the_same_model_and_an_index_that_names_every_tensor(tmp_path, tiny_model):
    whole = tiny_model(size_bytes=2_000_000)
    folder = make_tiny(tmp_path / "sharded", size_bytes=2_000_000, shards=3)
    assert same_tensors(whole, folder)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == tensors_of(folder).keys()
    assert set(index["weight_map"].values()) == {file.name for file in folder.glob("*.safetensors")}
    assert len(set(index["weight_map"].values())) == 3
    assert generate(folder, "hello", max_tokens=10) == generate(whole, "hello", max_tokens=10)


@pytest.mark.parametrize("interruption", [RuntimeError, KeyboardInterrupt])
def test_an_interrupted_make_leaves_nothing(tmp_path, monkeypatch, interruption):
    import mlx.core as mx

    save, written = mx.save_safetensors, []

    def save_one_then_break(path, *args):
        if written:
            raise interruption
        save(path, *args)
        written.append(path)

    monkeypatch.setattr(mx, "save_safetensors", save_one_then_break)
    with pytest.raises(interruption):
        make_tiny(tmp_path / "models" / "tiny", size_bytes=2_000_000, shards=2)
    assert len(written) == 1
    assert list((tmp_path / "models").iterdir()) == []


def test_while_it_is_made_no_folder_of_that_name_exists(tmp_path, monkeypatch):
    folder, seen = tmp_path / "tiny", []
    write_json = tiny_models.write_json

    def look_then_write(path, value):
        seen.append(folder.exists())
        write_json(path, value)

    monkeypatch.setattr(tiny_models, "write_json", look_then_write)
    make_tiny(folder, size_bytes=1_000_000)
    assert seen == [False]
    assert is_model_folder(folder)
    assert list(tmp_path.iterdir()) == [folder]


def test_a_folder_that_holds_something_is_not_touched(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InvalidRequest, match="is there already"):
        make_tiny(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "gpt9"}, "no tiny model of kind `gpt9`"),
        ({"dtype": "int3"}, "no dtype `int3`"),
        ({"vocab": 100}, "100 token ids are too few"),
        ({"size_bytes": 10_000}, "takes at least"),
        ({"size_bytes": 1_000_000, "shards": 50}, "does not divide into 50 files"),
    ],
)
def test_what_cannot_be_made_is_refused_and_leaves_nothing(tmp_path, options, message):
    with pytest.raises(InvalidRequest, match=message) as refusal:
        make_tiny(tmp_path / "model", **options)
    assert refusal.value.hint
    assert list(tmp_path.iterdir()) == []


ALONE = """
import sys
from pathlib import Path
from omlxd.engine.demo_models import ensure_smollm2, make_tiny
assert "mlx" not in sys.modules and "tokenizers" not in sys.modules, "heavy imports at import time"
make_tiny(Path(sys.argv[1]), size_bytes=20_000_000, shards=2, bits=4)
import mlx.core as mx
assert "mlx_lm" not in sys.modules, "mlx_lm was imported"
assert (mx.get_active_memory(), mx.get_cache_memory()) == (0, 0), (mx.get_active_memory(), mx.get_cache_memory())
"""


def test_making_a_model_imports_no_mlx_lm_and_leaves_no_memory(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", ALONE, str(tmp_path / "m")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
