"""The manifest file: what a good one means, and that a bad one tells everything that is wrong with it."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omlxd.core.errors import ManifestInvalid, NotPermitted, OmlxError
from omlxd.core.manifest import ApiSettings, DaemonSettings, Manifest, ModelSettings
from omlxd.core.manifest_template import default_manifest_text
from omlxd.core.memory import Policy
from omlxd.daemon.manifest_file import parse_manifest, read_manifest
from omlxd.daemon.manifest_schema import ApiTable, DaemonTable, ModelTable
from omlxd.daemon.manifest_source import MAX_MANIFEST_BYTES
from omlxd.daemon.model_check import check_models

EXAMPLES = Path(__file__).parents[2] / "examples"


def problems_of(text: str) -> tuple[str, ...]:
    with pytest.raises(ManifestInvalid) as invalid:
        parse_manifest(text, "/home/me/.omlxd/omlxd.toml")
    assert invalid.value.hint
    return invalid.value.problems


def test_an_empty_manifest_has_the_defaults() -> None:
    assert parse_manifest("", "/m/omlxd.toml") == Manifest(path="/m/omlxd.toml")


def test_every_key_arrives_in_its_own_unit() -> None:
    text = """
        [daemon]
        max_memory = "8G"
        hard_limit = 9_000_000_000
        poll_interval = "250ms"
        policy = "reference"
        prefill_memory_guard = false
        drain_timeout = 5
        load_timeout = "1m30s"
        park_deadline = "10m"
        stall_timeout = "2m"
        fair_wait = "4s"
        prefill_chunk = 512
        max_batch = 4
        max_waiting = 0
        prefix_cache = "1G"
        keep_awake = false
        log_level = "debug"
        log_max_size = "1M"
        log_backups = 0
        [api]
        listen = "[::1]:0"
        api_key = "0123456789"
        [models.chat]
        path = "/models/chat"
        pin = true
        preload = true
        aliases = ["default", "gpt-4o-mini"]
        ttl = "10m"
        max_context = 8192
        [models."qwen3.5"]
        repo = "mlx-community/Qwen3.5-4B"
    """
    assert parse_manifest(text, "/m/omlxd.toml") == Manifest(
        daemon=DaemonSettings(
            max_memory="8G",
            hard_limit=9_000_000_000,
            poll_interval_s=0.25,
            policy=Policy.REFERENCE,
            prefill_memory_guard=False,
            drain_timeout_s=5.0,
            load_timeout_s=90.0,
            park_deadline_s=600.0,
            stall_timeout_s=120.0,
            fair_wait_s=4.0,
            prefill_chunk_tokens=512,
            max_batch=4,
            max_waiting=0,
            prefix_cache="1G",
            keep_awake=False,
            log_level="debug",
            log_max_size_bytes=2**20,
            log_backups=0,
        ),
        api=ApiSettings(listen="[::1]:0", api_key="0123456789"),
        models={
            "chat": ModelSettings(
                "chat",
                path="/models/chat",
                pin=True,
                preload=True,
                aliases=("default", "gpt-4o-mini"),
                ttl_s=600.0,
                max_context=8192,
            ),
            "qwen3.5": ModelSettings("qwen3.5", repo="mlx-community/Qwen3.5-4B"),
        },
        path="/m/omlxd.toml",
    )


@pytest.mark.parametrize(
    ("written", "folder"),
    [("models/a", "/etc/omlx/models/a"), ("/abs/a", "/abs/a"), ("~/models/a", f"{Path.home()}/models/a")],
)
def test_a_path_is_relative_to_the_manifest_and_knows_home(written: str, folder: str) -> None:
    manifest = parse_manifest(f'[models.a]\npath = "{written}"', "/etc/omlx/omlxd.toml")
    assert manifest.models["a"].path == folder


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[daemon]\nmax_memory = '8 gigs'", "daemon.max_memory: `8 gigs` is not a size; write `8G`, `8GB`"),
        ("[daemon]\nmax_memory = '0.5'", "daemon.max_memory: `0.5` has no unit; write `0.5G`"),
        ("[daemon]\nmax_memory = 8", "daemon.max_memory: `8` is 8 B, too little for a memory limit; did you mean"),
        ("[daemon]\nhard_limit = 12", "daemon.hard_limit: `12` is 12 B, too little for a memory limit"),
        ("[daemon]\nmax_memory = -1", "daemon.max_memory: `-1` is out of range"),
        ("[daemon]\nmax_memory = 8.5", "daemon.max_memory: `8.5` is not a size"),
        ("[daemon]\nmax_memory = true", "daemon.max_memory: `true` is not a size"),
        ("[daemon]\nmax_memory = '120%'", "daemon.max_memory: `120%` is out of range"),
        ("[daemon]\nhard_limit = 'auto'", "daemon.hard_limit: `auto` is not a size"),
        ("[daemon]\nmax_memory = '8G'\nhard_limit = '4G'", "daemon.hard_limit: is below `max_memory` (8G)"),
        ("[daemon]\npoll_interval = '0s'", "daemon.poll_interval: must be between 10 ms and 1 h"),
        ("[daemon]\npoll_interval = true", "daemon.poll_interval: `true` is not a duration"),
        ("[daemon]\npoll_interval = 'often'", "daemon.poll_interval: `often` is not a duration; write `500ms`"),
        ("[daemon]\npoll_interval = nan", "daemon.poll_interval: `nan` is out of range"),
        ("[daemon]\npolicy = 'kind'", 'daemon.policy: `"kind"` is not a policy; there is `graceful`, `reference`'),
        ("[daemon]\nprefill_memory_guard = 'yes'", 'daemon.prefill_memory_guard: must be `true` or `false`'),
        ("[daemon]\nprefill_memory_guard = 1", "daemon.prefill_memory_guard: must be `true` or `false`, not `1`"),
        ("[daemon]\nprefill_chunk = 15", "daemon.prefill_chunk: `15` is too small; the least is 16"),
        ("[daemon]\nprefill_chunk = 8193", "daemon.prefill_chunk: `8193` is too large; the most is 8192"),
        ("[daemon]\nmax_batch = '32'", 'daemon.max_batch: must be a whole number, not `"32"`'),
        ("[daemon]\nmax_batch = 2.0", "daemon.max_batch: must be a whole number, not `2.0`"),
        ("[daemon]\nlog_level = 'loud'", 'daemon.log_level: must be `debug`, `info`, `warning` or `error`'),
        ("[daemon]\nlog_max_size = '1K'", "daemon.log_max_size: must be between 64.0 KiB and 1.00 TiB"),
        ("[daemon]\nlog_max_size = '10%'", "daemon.log_max_size: `10%` is a part of the machine's memory"),
        ("[daemon]\nmax_memori = '8G'", "daemon.max_memori: unknown key; did you mean `max_memory`? (line 2)"),
        ("[daemon]\nttl = '1m'", "daemon.ttl: unknown key; it belongs in a [models.NAME] table"),
        ("[api]\nwhatever = 1", "api.whatever: unknown key; there are `listen`, `api_key`, `api_key_file`, `allow"),
        ("max_memory = '8G'", "max_memory: unknown key; it belongs in [daemon] (line 1)"),
        ("[model.chat]\npath = 'x'", "model: unknown key; did you mean `models`? (line 1)"),
        ("daemon = 3", "daemon: must be a table, as `[daemon]`, not `3`"),
        ("models = []", "models: must be a table, as `[models]`, not a list"),
        ("[models]\nchat = 'x'", 'models.chat: must be a table, as `[models.chat]`, not `"x"`'),
        ("[[models]]\nname = 'x'", "models: must be a table"),
        ("[api]\napi_key = '12345678'\napi_key_file = 'k'", "api.api_key_file: stands beside `api_key`; keep one"),
        ("[api]\napi_key_file = 3", "api.api_key_file: must be the path of a file that holds the key"),
        ("[api]\nallow_origins = ['app.example']", 'api.allow_origins[0]: `"app.example"` is not an origin; write'),
        ("[api]\nallow_origins = ['https://a.example/x']", "api.allow_origins[0]: "),
        ("[api]\nallow_origins = ['*']", "api.allow_origins[0]: "),
        ("[api]\nlisten = 8321", "api.listen: must be text in quotes"),
        ("[api]\nlisten = '8321'", "api.listen: `8321` is not an address to listen on; write"),
        ("[api]\nlisten = '0.0.0.0:80'", "api.listen: `0.0.0.0:80` can be reached from other machines; set `api_key`"),
        ("[api]\nlisten = '[::]:80'", "api.listen: `[::]:80` can be reached from other machines"),
        ("[models.a]\npin = true", "models.a: needs `path"),
        ("[models.a]\npath = 'x'\nrepo = 'o/n'", "models.a: has both `path` and `repo`; keep one (line 1)"),
        ("[models.a]\npth = 'x'", "models.a.pth: unknown key; did you mean `path`? (line 2)"),
        ("[models.qwen3.5]\npath = 'x'", 'models.qwen3.5: unknown table; a name with a dot needs quotes: `'),
        ("[models.a]\npath = ''", "models.a.path: must be the path of a model folder, in quotes"),
        ('[models.a]\npath = "a\\u0000b"', "models.a.path: must be the path of a model folder, in quotes"),
        ("[models.a]\npath = '~no-such-user-here/x'", "models.a.path: `~no-such-user-here/x` begins"),
        ("[models.a]\nrepo = 'name'", 'models.a.repo: `"name"` is not a repository; write `"organisation/name"`'),
        ("[models.a]\nrepo = '../../etc'", 'models.a.repo: `"../../etc"` is not a repository'),
        ("[models.a]\npath = 'x'\nttl = 0", "models.a.ttl: must be between 1 s and 3650 d"),
        ("[models.a]\npath = 'x'\nmax_context = 0", "models.a.max_context: `0` is too small"),
        ("[models.a]\npath = 'x'\naliases = 'b'", 'models.a.aliases: must be a list, as `["b"]`'),
        ("[models.a]\npath = 'x'\naliases = ['b c']", 'models.a.aliases[0]: `"b c"` is not a model name'),
        ("[models.a]\npath = 'x'\naliases = ['a']", "models.a.aliases[0]: `a` is already the model `a`"),
        ("[models.a]\npath = 'x'\naliases = ['b', 'b']", "models.a.aliases[1]: `b` is already an alias of `a`"),
        ("[models.-a]\npath = 'x'", "models.-a: `-a` is not a model name"),
        ("[models.'a/b']\npath = 'x'", 'models."a/b": `a/b` is not a model name'),
        ("[models.'']\npath = 'x'", 'models."": `` is not a model name'),
    ],
)  # fmt: skip
def test_one_mistake_is_one_problem_that_names_its_key(text: str, problem: str) -> None:
    (found,) = problems_of(text)
    assert found.startswith(problem)
    assert re.search(r" \(line \d+\)$", found)


def test_a_name_with_a_dot_is_told_its_quotes() -> None:
    (found,) = problems_of("[models.qwen3.5]\npath = 'x'")
    assert found.endswith('needs quotes: `[models."qwen3.5"]` (line 1)')


def test_an_alias_that_another_model_has_is_named() -> None:
    (found,) = problems_of("[models.a]\npath='x'\naliases=['z']\n[models.b]\npath='x'\naliases=['z']")
    assert found == "models.b.aliases[0]: `z` is already an alias of `a` (line 6)"


def test_every_problem_is_told_at_once_in_the_order_of_the_file() -> None:
    text = """
        [daemon]
        poll_interval = "often"
        polices = "x"
        [models.a]
        pin = "yes"
        aliases = ["b"]
        [models.b]
        path = "x"
        [api]
        listen = "nowhere"
    """
    assert [problem.split(":")[0] for problem in problems_of(text)] == [
        "daemon.poll_interval",
        "daemon.polices",
        "models.a",
        "models.a.pin",
        "models.a.aliases[0]",
        "api.listen",
    ]


@pytest.mark.parametrize("key", ["short", "with a space in it", "schlüssel-schlüssel", "line\\nbreak-secret"])
def test_a_bad_key_is_not_repeated(key: str) -> None:
    (found,) = problems_of(f'[api]\napi_key = "{key}"')
    assert found == "api.api_key: must be 8 to 512 printable ASCII characters without spaces (line 2)"


@pytest.mark.parametrize("key", ["api_key = '0123456789'", "api_key_file = 'key'"])
def test_a_key_opens_other_addresses(key: str) -> None:
    manifest = parse_manifest(f"[api]\nlisten = '0.0.0.0:80'\n{key}", "/m/omlxd.toml")
    assert manifest.api.address is not None
    assert not manifest.api.address.is_loopback


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[daemon]\nmax_memory 8G", "line 2, column 12: Expected '=' after a key in a key/value pair"),
        ("[daemon]\n\n[models.a", "line 3, column 1: the table heading that begins here is not closed"),
        ("[daemon]\n  policy =\n\n", "line 2, column 11: `policy` has no value"),
        ("[daemon]\n  policy =", "line 2: `policy` has no value"),
        ("[m.a]\npin = tru", "line 2, column 7: `pin` has no valid value; write `true` or `false`"),
        ("[m.a]\npin = True # so\n", "line 2, column 7: `pin` has no valid value; write `true` or `false`"),
        ("[m.a]\npath = ~/models/a\n", "line 2, column 8: `path` has no valid value; text needs quotes"),
        ("[m.a]\nttl = 10m\n", "line 2, column 9: something stands behind the value of `ttl`; text needs quotes"),
        ("[m.a]\naliases = [\n 'x', # ]\n \"]\",\n\n", "line 2, column 11: the list that begins here is not closed"),
        ("[m.a]\naliases = ['x',\npath = 'a'", "line 2: the list that begins here is not closed before line 3"),
        ("a = ['x'\n\n[m.b]\n", "line 1: the list that begins here is not closed before line 3"),
        ("a = ['x',\r\n[m.b]\r\n", "line 1: the list that begins here is not closed before line 2"),
        ("a = ['x',\n[m.\"b\"]\n", "line 1: the list that begins here is not closed before line 2"),
        ("a = ['x'\n'y']\n", "line 2, column 1: a comma or `]` is missing, in the list that begins on line 1"),
        ("a = ['x', y]\n", "line 1, column 11: Invalid value"),
        ("a = ['x',\n y]\n", "line 2, column 2: Invalid value, in the list that begins on line 1"),
        ("a = [\n{ b = 1\n", "line 2, column 1: the inline table that begins here is not closed"),
        ("a = { b = 1", "line 1, column 5: the inline table that begins here is not closed"),
        ("a = { b = 1\n[m.b]\n", "line 1, column 5: the inline table that begins here is not closed"),
        ("a = { b = 1 c = 2 }\n", "line 1, column 13: a comma or `}` is missing"),
        ('[m.a]\npath = """[\n[m.b]\n', "line 2, column 8: the text in quotes that begins here is not closed"),
        ("[m.a]\npath = ''''x''''\nrepo = '''\"\n", "line 3, column 8: the text in quotes that begins here is not"),
        ("[m.a]\npath = \"''\"\nx = [\n", "line 3, column 5: the list that begins here is not closed"),
        ('[m.a]\npath = """\n]\n', "line 2, column 8: the text in quotes that begins here is not closed"),
        ('[m.a]\npath = "a', "line 2, column 8: the text in quotes that begins here is not closed"),
        ('[m.a]\npath = "a\n', "line 2, column 8: the text in quotes that begins here is not closed"),
        ("[m.a]\npath = 'a\r\n", "line 2, column 8: the text in quotes that begins here is not closed"),
        ('[m.a]\naliases = ["a", "b', "line 2, column 17: the text in quotes that begins here is not closed"),
        ('[m.a]\naliases = ["a", "b\n', "line 2, column 17: the text in quotes that begins here is not closed"),
        ('[m.a]\npath = "a\x01"\n', "line 2, column 10: Illegal character"),
        ("[a]\n[a]", "line 2, column 3: Cannot declare ('a',) twice"),
        ("a = " + "[" * 100_000, "file: is nested too deeply"),
        ("a = " + "9" * 5000, "file: Exceeds the limit (4300 digits)"),
    ],
)
def test_what_is_not_toml_is_shown_by_line_and_column(text: str, problem: str) -> None:
    (found,) = problems_of(text)
    assert found.startswith(problem)


@pytest.mark.parametrize("written", ["sesame-0123", "0123-sesame", '"sesame-0123', "{ sesame", "['sesame-0123'"])
def test_a_key_without_its_quotes_is_not_repeated(written: str) -> None:
    (found,) = problems_of(f"[api]\napi_key = {written}\n[models.a]\npath = 'x'\n")
    assert "sesame" not in found


def test_a_missing_manifest_points_to_init(tmp_path: Path) -> None:
    with pytest.raises(ManifestInvalid, match="does not exist") as missing:
        read_manifest(tmp_path / "omlxd.toml")
    assert missing.value.hint == "`omlxd init` writes one"


def test_a_folder_a_pipe_and_a_huge_file_are_no_manifest(tmp_path: Path) -> None:
    pipe, huge = tmp_path / "pipe", tmp_path / "huge"
    os.mkfifo(pipe)
    huge.write_bytes(b"#" * (MAX_MANIFEST_BYTES + 1))
    for path, what in ((tmp_path, "is a folder"), (pipe, "is not a regular file"), (huge, "is larger than 1 MiB")):
        with pytest.raises(ManifestInvalid, match=what):
            read_manifest(path)


@pytest.mark.parametrize("path", ["a\0b", "x" * 5000, "/dev/null/omlxd.toml"])
def test_an_impossible_path_is_a_problem_of_the_manifest(path: str) -> None:
    with pytest.raises(ManifestInvalid, match="cannot be read"):
        read_manifest(path)


def test_bytes_that_are_not_utf8_are_located(tmp_path: Path) -> None:
    (tmp_path / "m.toml").write_bytes(b"[daemon]\n# caf\xe9\n")
    with pytest.raises(ManifestInvalid) as invalid:
        read_manifest(tmp_path / "m.toml")
    assert invalid.value.problems == ("line 2: is not UTF-8 text (byte 15)",)


def test_a_byte_order_mark_and_crlf_are_harmless(tmp_path: Path) -> None:
    (tmp_path / "m.toml").write_bytes(b'\xef\xbb\xbf[daemon]\r\nmax_memory = "8G"\r\n')
    assert read_manifest(tmp_path / "m.toml").daemon.max_memory == "8G"


def test_a_manifest_that_may_not_be_read_is_not_permitted(
    open_folder: Path, as_ordinary_user: Callable[[], AbstractContextManager[None]]
) -> None:
    path = open_folder / "m.toml"
    path.write_text("")
    with as_ordinary_user():
        assert read_manifest(path) == Manifest(path=str(path))
    path.chmod(0)
    with as_ordinary_user(), pytest.raises(NotPermitted, match="may not be read"):
        read_manifest(path)


@given(st.binary(max_size=300))
def test_any_bytes_are_a_manifest_or_a_problem(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any.toml"
    path.write_bytes(content)
    with contextlib.suppress(OmlxError):
        assert read_manifest(path).path == str(path)


VALUES = st.recursive(
    st.one_of(st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.datetimes(), st.none()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)),
    max_leaves=4,
)
TABLES = st.fixed_dictionaries(
    {},
    optional={
        "daemon": st.dictionaries(st.sampled_from([*DaemonTable.model_fields, "other"]), VALUES, max_size=4),
        "api": st.dictionaries(st.sampled_from([*ApiTable.model_fields, "other"]), VALUES, max_size=2),
        "models": st.dictionaries(
            st.text(max_size=4),
            st.dictionaries(st.sampled_from([*ModelTable.model_fields, "other"]), VALUES),
            max_size=2,
        ),
        "other": VALUES,
    },
)


@settings(max_examples=50)
@given(TABLES)
def test_values_of_any_type_under_any_key_are_a_manifest_or_problems(tables: dict[str, object]) -> None:
    problems: tuple[str, ...] = ()
    try:
        parse_manifest(as_toml(tables), "/m/omlxd.toml")
    except ManifestInvalid as invalid:
        problems = invalid.problems
    assert all(": " in problem and problem.isprintable() for problem in problems)


def as_toml(tables: dict[str, object]) -> str:
    """TOML of the tables; leaves out what TOML cannot say (null)."""
    import tomli_w

    def sayable(value: object) -> object:
        if isinstance(value, dict):
            return {key: sayable(inner) for key, inner in value.items() if inner is not None}
        if isinstance(value, list):
            return [sayable(inner) for inner in value if inner is not None]
        return value

    return tomli_w.dumps(sayable(tables))  # type: ignore[arg-type]


def test_what_init_writes_changes_nothing() -> None:
    assert parse_manifest(default_manifest_text(), "/m") == Manifest(path="/m")


def test_the_template_shows_every_key_with_its_default() -> None:
    text = re.sub(r"^#(?=\w+ = )", "", default_manifest_text(), flags=re.MULTILINE)
    text = text.replace('hard_limit = "12G"\n', "").replace('min_available = "2G"\n', "")
    text = text.replace('api_key = "a long random text"\n', "").replace('api_key_file = "api.key"\n', "")
    text = text.replace('restore = "loaded"\n', "")
    text = text.replace('max_keep_alive = "1h"\n', "")
    assert parse_manifest(text, "/m") == Manifest(path="/m")
    for key in [*DaemonTable.model_fields, *ApiTable.model_fields]:
        assert re.search(rf"^#?{key} = ", default_manifest_text(), re.MULTILINE), key
    for key in ModelTable.model_fields:
        assert re.search(rf"\b{key} = ", default_manifest_text()), key


def test_the_models_of_the_template_can_be_uncommented() -> None:
    text = re.sub(r"^# (?=\[|\w+ = )", "", default_manifest_text(), flags=re.MULTILINE)
    assert parse_manifest(text, "/m").names() == ("chat", "small", "default")


def test_the_full_example_has_every_key() -> None:
    manifest = read_manifest(EXAMPLES / "omlxd.toml")
    assert set(manifest.models) == {"chat", "qwen3.5", "small"}
    text = (EXAMPLES / "omlxd.toml").read_text()
    for key in [*DaemonTable.model_fields, *ApiTable.model_fields, *ModelTable.model_fields]:
        assert re.search(rf"^{'#' if key == 'api_key_file' else ''}{key} = ", text, re.MULTILINE), key


def test_the_defaults_that_the_full_example_claims_are_the_defaults() -> None:
    claimed = re.findall(r"^(\w+) = .*# default$", (EXAMPLES / "omlxd.toml").read_text(), re.MULTILINE)
    text = "".join(
        line + "\n" for line in (EXAMPLES / "omlxd.toml").read_text().splitlines() if line.endswith("# default")
    )
    assert len(claimed) >= 5
    assert parse_manifest("[daemon]\n" + text, "/m") == Manifest(path="/m")


def test_the_small_example_is_two_models_under_8_gib() -> None:
    manifest = read_manifest(EXAMPLES / "two-models.toml")
    assert (manifest.daemon.max_memory, manifest.names()) == ("8G", ("chat", "small", "default"))


def test_check_tells_what_is_wrong_with_each_model(tmp_path: Path) -> None:
    manifest = parse_manifest("[models.a]\npath = 'nowhere'\n[models.b]\nrepo = 'no/such'", tmp_path / "omlxd.toml")
    away, remote = check_models(manifest)
    assert (away.name, away.path, away.exists) == ("a", str(tmp_path / "nowhere"), False)
    assert away.problems == (f"`{tmp_path}/nowhere` does not exist; check `path` in the manifest",)
    assert (remote.name, remote.path, remote.exists) == ("b", None, False)
    assert "`omlxd pull no/such`" in remote.problems[0]
