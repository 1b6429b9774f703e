"""omlxd.toml(5) against the code: the same keys in the same order, the same types and defaults, and clean mdoc."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
import typing
from pathlib import Path
from types import UnionType

import pytest
from annotated_types import Ge, Le
from pydantic import BaseModel

from omlxd.core.memory import Policy
from omlxd.daemon.manifest_file import parse_manifest
from omlxd.daemon.manifest_schema import ApiTable, DaemonTable, ModelTable

PAGE = Path(__file__).parents[2] / "man" / "omlxd.toml.5"
TABLES = {"THE [daemon] TABLE": DaemonTable, "THE [api] TABLE": ApiTable, "THE [models.NAME] TABLES": ModelTable}
WORDS = {
    bool: {"flag"},
    int: {"count", "tokens", "size"},
    float: {"duration"},
    str: {"text", "memory"},
    Policy: {"text"},
    list: {"list of names"},
}
ITEM = re.compile(r"^\.It Ic (?P<key>\w+) No = Ar (?P<type>[\w ]+?) Pq default (?:Ql )?(?P<default>.+)$")

table = pytest.mark.parametrize("section", TABLES)


def items_of(section: str) -> dict[str, tuple[str, str, str]]:
    """The keys of one section of the page: type, default as TOML (or `none`), and the text below."""
    body = re.split(r"^\.Sh ", PAGE.read_text(), flags=re.MULTILINE)
    lines = next(part for part in body if part.startswith(section)).splitlines()
    items: dict[str, tuple[str, str, str]] = {}
    key = ""
    for line in lines:
        if match := ITEM.match(line):
            key = match["key"]
            items[key] = (match["type"], match["default"].replace(r"\(dq", '"').replace(r"\&", ""), "")
        elif key:
            word, default, text = items[key]
            items[key] = (word, default, f"{text}{line}\n")
    return items


def type_of(model: type[BaseModel], key: str) -> type:
    """The key's plain type, without its checks and without None."""
    annotation = model.model_fields[key].annotation
    while (origin := typing.get_origin(annotation)) is not None:
        if origin is list:
            return list
        if origin is typing.Literal:
            return str
        inner = [arg for arg in typing.get_args(annotation) if arg is not type(None)]
        assert origin in (typing.Union, UnionType, typing.Annotated)
        annotation = inner[0]
    assert isinstance(annotation, type)
    return annotation


@table
def test_the_page_has_the_keys_of_the_code_in_their_order(section: str) -> None:
    assert list(items_of(section)) == list(TABLES[section].model_fields)


@table
def test_the_page_has_the_types_of_the_code(section: str) -> None:
    for key, (word, _, _) in items_of(section).items():
        assert word in WORDS[type_of(TABLES[section], key)], key


@table
def test_the_page_has_the_defaults_of_the_code(section: str) -> None:
    for key, (_, written, _) in items_of(section).items():
        default = TABLES[section].model_fields[key].get_default(call_default_factory=True)
        assert (None if written == "none" else tomllib.loads(f"x = {written}")["x"]) == default, key


@table
def test_the_page_names_the_bounds_of_the_code(section: str) -> None:
    for key, (_, _, text) in items_of(section).items():
        for bound in TABLES[section].model_fields[key].metadata:
            if isinstance(bound, Ge | Le):
                value = bound.ge if isinstance(bound, Ge) else bound.le
                assert re.search(rf"\b{value}\b", text), (key, value)


@table
def test_every_key_of_the_page_says_what_it_means(section: str) -> None:
    for key, (_, _, text) in items_of(section).items():
        assert len(text.split()) >= 8, key


def test_the_examples_of_the_page_are_valid() -> None:
    examples = re.findall(r"^\.Bd -literal.*?\n(.*?)^\.Ed$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(examples) == 3
    for example in examples:
        parse_manifest(example, "/m/omlxd.toml")


@pytest.mark.skipif(shutil.which("mandoc") is None, reason="mandoc is not installed")
def test_mandoc_has_nothing_to_say() -> None:
    lint = subprocess.run(["mandoc", "-T", "lint", PAGE], capture_output=True, text=True, timeout=60, check=False)
    # The pages it refers to are not installed while this runs.
    assert [line for line in lint.stdout.splitlines() if "referenced manual not found" not in line] == []
    assert lint.stderr == ""
