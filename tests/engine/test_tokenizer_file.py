"""Tokenizer files in slices: the same content and the same tokenizers as the libraries read, whatever is in them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omlxd.engine import patient_reading, tokenizer_file
from omlxd.engine.patient_reading import patiently
from omlxd.engine.tokenizer_file import build, read_in_slices

TEXT = ["the lazy dog jumps over the quick brown fox", 'Grüße, 日本 and [brackets], {braces}, "quotes"\\\n'] * 4
ODD = ['"', "\\", "],", "},", "],\n", "\n    }", '",\n', "é", "\x7f", "}\n", "日"]


@pytest.fixture(autouse=True)
def _small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices of an entry or two, so that every file has many."""
    monkeypatch.setattr(tokenizer_file, "SLICE_CHARACTERS", 20)


def trained(**options: Any) -> dict[str, Any]:
    """A byte-level BPE tokenizer with merges and tokens of its own, as its file holds it."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    made = Tokenizer(models.BPE(**options))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.post_processor = processors.ByteLevel(trim_offsets=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(TEXT, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False))
    made.add_special_tokens([AddedToken("<|end|>", special=True, normalized=False), "<|start|>"])
    made.add_tokens([AddedToken("<tool>", lstrip=True, rstrip=True, single_word=True), "later"])
    return dict(json.loads(made.to_str()))


def written(folder: Path, content: dict[str, Any], **style: Any) -> Path:
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(content, **style), encoding="utf-8")
    return path


STYLES: list[dict[str, Any]] = [
    {"indent": 2, "ensure_ascii": False},
    {"indent": 2},
    {"indent": 1},
    {"indent": "\t"},
    {},
    {"separators": (",", ":")},
]


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("merges", ["pairs", "texts"])
def test_a_file_is_read_as_json_reads_it_however_it_is_written(
    merges: str, style: dict[str, Any], tmp_path: Path
) -> None:
    content = trained()
    if merges == "texts":
        content["model"]["merges"] = [" ".join(pair) for pair in content["model"]["merges"]]
    found = read_in_slices(written(tmp_path, content, **style))
    assert found == content
    assert list(found["model"]["vocab"].items()) == list(content["model"]["vocab"].items())


@given(
    vocab=st.dictionaries(st.text() | st.sampled_from(ODD), st.integers(0, 10**6), max_size=40),
    merges=st.lists(st.tuples(st.text() | st.sampled_from(ODD), st.text()), max_size=40),
    style=st.sampled_from(STYLES),
)
def test_no_token_looks_like_the_end_of_a_slice(
    vocab: dict[str, int],
    merges: list[tuple[str, str]],
    style: dict[str, Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    scores = [[word, number / 7] for word, number in vocab.items()]
    contents: list[dict[str, Any]] = [
        {"model": {"type": "BPE", "vocab": vocab, "merges": [list(pair) for pair in merges]}, "added_tokens": []},
        {"added_tokens": [{"content": word, "id": at} for at, word in enumerate(vocab)], "model": {"vocab": scores}},
        {"vocab": [" ".join(pair) for pair in merges], "merges": {"deep": [merges]}, "model": []},
    ]
    for content in contents:
        path = written(tmp_path_factory.mktemp("odd"), content, **style)
        assert read_in_slices(path) == json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "text", ["", "{", '{"model": {"vocab": {\n"a": 1,\n"b" 2\n}}}', '{"a": 1} x', '{"a" 1}', "[1,]"]
)
def test_what_is_no_json_is_told_in_jsons_words(text: str, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(text)
    with pytest.raises(json.JSONDecodeError):
        read_in_slices(path)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"ignore_merges": True},
        {"byte_fallback": True, "fuse_unk": True, "unk_token": "<|end|>"},
        {"continuing_subword_prefix": "##", "end_of_word_suffix": "</w>"},
    ],
)
def test_a_tokenizer_of_parts_is_the_one_that_the_library_makes_of_the_file(
    options: dict[str, Any], tmp_path: Path
) -> None:
    from tokenizers import Tokenizer

    content = trained()
    content["model"] |= options
    if "end_of_word_suffix" in options:  # merges of such a model would need words with the suffix in its vocabulary
        content["model"]["merges"] = []
    path = written(tmp_path, content, indent=2)
    made, expected = build(read_in_slices(path)), Tokenizer.from_file(str(path))
    assert made is not None
    assert json.loads(made.to_str()) == json.loads(expected.to_str())
    for text in TEXT:
        assert made.encode(f"{text}<|end|> <tool> later").ids == expected.encode(f"{text}<|end|> <tool> later").ids


def test_what_only_the_library_can_make_is_left_to_it() -> None:
    content = trained()
    assert build({**content, "model": {**content["model"], "type": "Unigram"}}) is None
    assert build({**content, "model": {**content["model"], "new_option": 1}}) is None
    assert build({**content, "model": []}) is None
    moved = [{**each, "id": each["id"] + 1} for each in content["added_tokens"]]
    assert build({**content, "added_tokens": moved}) is None


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tokenizer's folder as `save_pretrained` writes it."""
    written(tmp_path, trained(), indent=2, ensure_ascii=False)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "bos_token": "<|start|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.mlx
@pytest.mark.parametrize("kind", ["PreTrainedTokenizerFast", "Qwen2Tokenizer", "GPT2Tokenizer", "LlamaTokenizer"])
def test_the_libraries_read_the_same_tokenizer_in_slices_as_by_themselves(kind: str, folder: Path) -> None:
    from mlx_lm.tokenizer_utils import load

    config = {"tokenizer_class": kind, "eos_token": "<|end|>", "bos_token": "<|start|>", "chat_template": "{{ 1 }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    plain = load(folder)
    with patiently(folder):
        made = load(folder)
    assert type(made._tokenizer) is type(plain._tokenizer)
    assert json.loads(made.backend_tokenizer.to_str()) == json.loads(plain.backend_tokenizer.to_str())
    assert made.get_vocab() == plain.get_vocab()
    assert made.eos_token_ids == plain.eos_token_ids
    assert type(made._detokenizer) is type(plain._detokenizer)
    assert made.encode(TEXT[0]) == plain.encode(TEXT[0])


@pytest.mark.mlx
def test_the_file_is_parsed_once_and_the_libraries_names_are_their_own_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    from mlx_lm.tokenizer_utils import load

    def names() -> list[object]:
        modules = [sys.modules[name] for name in patient_reading.JSON_READERS]
        backend = sys.modules[patient_reading.BACKEND]
        return [*(each.json for each in modules), backend.TokenizerFast, vars(backend.TokenizersBackend)["get_vocab"]]

    before, parsed = names(), []

    def counted(path: Path) -> dict[str, Any]:
        parsed.append(path)
        return read_in_slices(path)

    monkeypatch.setattr(patient_reading, "read_in_slices", counted)
    with patiently(folder):
        load(folder)
    assert parsed == [folder / "tokenizer.json"]
    assert names() == before
    with pytest.raises(KeyError), patiently(folder):
        raise KeyError
    assert names() == before


def test_other_files_and_changes_by_one_reader_do_not_matter_to_the_next(folder: Path) -> None:
    reading = patient_reading._Reading(folder / "tokenizer.json")
    expected = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    with (folder / "tokenizer.json").open(encoding="utf-8") as file:
        first = reading.load(file)
    first["model"]["vocab"].clear()
    first["added_tokens"][0].clear()
    first.pop("decoder")
    with (folder / "tokenizer.json").open(encoding="utf-8") as file:
        assert reading.load(file) == expected
    with (folder / "tokenizer_config.json").open(encoding="utf-8") as file:
        assert reading.load(file)["eos_token"] == "<|end|>"
    assert reading.tokenizer(str(folder / "tokenizer_config.json")) is None


def test_a_folder_without_such_a_file_is_left_to_the_libraries(tmp_path: Path) -> None:
    with patiently(tmp_path):
        pass


@pytest.mark.mlx
def test_a_vocabulary_with_gaps_between_its_ids_is_told_whole(tmp_path: Path, folder: Path) -> None:
    from tokenizers import Tokenizer

    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    content["model"] |= {"vocab": {"a": 0, "b": 7}, "merges": []}
    content["added_tokens"] = []
    made = Tokenizer.from_str(json.dumps(content))
    wrapped = type("Wrapped", (), {"_tokenizer": made})()
    reading = patient_reading._Reading(folder / "tokenizer.json")
    ask: Callable[[Any], dict[str, int]] = lambda each: each._tokenizer.get_vocab()  # noqa: E731
    assert reading.vocabulary(wrapped, ask) == {"a": 0, "b": 7}
