"""Edits of the manifest: whatever it looks like, only the one table comes or goes, and every comment stays."""

from __future__ import annotations

import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omlxd.core.errors import InvalidRequest, ManifestInvalid
from omlxd.core.manifest_template import default_manifest_text
from omlxd.daemon.manifest_edit import edit_manifest, with_model, without_model
from omlxd.daemon.manifest_file import read_manifest

PATH = Path("/m/omlxd.toml")
NAMES = ("chat", "small", "qwen3.5", "a:b", "UPPER-1")


@st.composite
def manifests(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A manifest with tables in any order, comments everywhere, and the names of its models."""
    names = draw(st.lists(st.sampled_from(NAMES), unique=True, max_size=4))
    notes = iter(range(100))

    def around() -> str:
        kinds = draw(st.lists(st.sampled_from(["", "#"]), max_size=3))
        return "".join(f"# note {next(notes)}\n" if kind else "\n" for kind in kinds)

    def table(header: str, *lines: str) -> str:
        spaced = draw(st.sampled_from(["[{}]", "[ {} ]", "  [{}]", "[{}]  # here"])).format(header)
        return f"{spaced}\n" + "".join(f"{line}  # note {next(notes)}\n{around()}" for line in lines)

    tables = [table("daemon", 'max_memory = "8G"'), table("api", 'listen = "off"', "allow_origins = []")]
    tables += [table(f'models."{name}"', f'path = "/m/{index}"', "pin = false") for index, name in enumerate(names)]
    return "".join(around() + each for each in draw(st.permutations(tables))) + around(), names


@settings(max_examples=40)
@given(manifests())
def test_an_added_model_is_the_only_difference_and_taking_it_out_brings_the_text_back(
    drawn: tuple[str, list[str]],
) -> None:
    text, names = drawn
    added = with_model(text, PATH, "new.one", {"path": "~/it", "ttl": "5m", "aliases": ["n"]})
    before, after = tomllib.loads(text), tomllib.loads(added)
    assert list(after["models"]) == [*before.get("models", {}), "new.one"] or set(names) < set(after["models"])
    assert after["models"].pop("new.one") == {"path": "~/it", "ttl": "5m", "aliases": ["n"]}
    assert after == {"models": {}} | before
    assert _notes(added) == _notes(text)
    taken, gone = without_model(added, PATH, "new.one")
    assert tomllib.loads(taken).get("models", {}) == before.get("models", {})
    assert "new.one" in gone


@settings(max_examples=40)
@given(manifests())
def test_a_removed_model_takes_its_own_lines_and_no_other(drawn: tuple[str, list[str]]) -> None:
    text, names = drawn
    for name in names:
        left, gone = without_model(text, PATH, name)
        before = tomllib.loads(text)
        del before["models"][name]
        assert tomllib.loads(left).get("models", {}) == before["models"]
        assert sorted((left + gone).splitlines()) == sorted(text.splitlines())
        assert gone.count("[") == 1 + gone.count("aliases")
        text = left


def _notes(text: str) -> list[str]:
    return [line.partition("#")[2] for line in text.splitlines() if "# note" in line]


@pytest.mark.parametrize(
    "text",
    [
        'models = { chat = { path = "/m" } }\n',
        '[models]\nchat.path = "/m"\n',
        '[models]\nchat = { path = "/m" }\n',
        'models.chat.path = "/m"\n',
    ],
)
def test_models_that_are_not_tables_are_left_to_their_owner(text: str) -> None:
    with pytest.raises(InvalidRequest, match="not written as") as refused:
        without_model(text, PATH, "chat")
    assert "by hand" in str(refused.value.hint)


def test_a_bracket_at_the_beginning_of_a_line_of_text_is_no_header() -> None:
    text = '[api]\nlisten = """\n[models.chat]\n"""\n[models.chat]\npath = "/m"\n'
    with pytest.raises(InvalidRequest, match="not written as"):
        without_model(text, PATH, "chat")


def test_what_the_manifest_does_not_allow_is_not_written() -> None:
    with pytest.raises(ManifestInvalid):
        with_model(default_manifest_text(), PATH, "new", {"path": "/m", "pins": True})


def test_an_edit_that_fails_leaves_the_file_and_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "omlxd.toml"
    path.write_text("# mine\n")

    def fail(text: str) -> str:
        raise InvalidRequest("no")

    with pytest.raises(InvalidRequest):
        edit_manifest(path, fail)
    assert [each.name for each in tmp_path.iterdir()] == ["omlxd.toml"]
    assert path.read_text() == "# mine\n"


def test_edits_at_the_same_time_are_all_there(tmp_path: Path) -> None:
    path = tmp_path / "omlxd.toml"

    def add(name: str) -> None:
        edit_manifest(path, lambda text: with_model(text, path, name, {"path": "/m"}))

    names = [f"m{number}" for number in range(8)]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(add, names))
    assert sorted(read_manifest(path).models) == names
