"""Where the key of the TCP door comes from, and what web pages may do there."""

from __future__ import annotations

from pathlib import Path

import pytest

from omlxd.core.errors import ManifestInvalid, StartFailed
from omlxd.core.manifest import ApiSettings
from omlxd.daemon.api_key import KEY_VARIABLE, api_key_of
from omlxd.daemon.manifest_file import parse_manifest
from tests.fakes.daemon import running
from tests.fakes.wire import fetch

MODELS = {"chat": {"mib": 10}}
APP = "https://app.example"


@pytest.mark.parametrize(
    ("variable", "in_file", "in_manifest", "key"),
    [
        ("from-the-variable", "from-the-file", None, "from-the-variable"),
        (None, "from-the-file\n", None, "from-the-file"),
        (None, None, "from-the-manifest", "from-the-manifest"),
        ("", None, None, None),
    ],
)
def test_the_variable_comes_before_the_file_and_the_manifest(
    tmp_path: Path, variable: str | None, in_file: str | None, in_manifest: str | None, key: str | None
) -> None:
    path = tmp_path / "key"
    if in_file is not None:
        path.write_text(in_file)
    settings = ApiSettings(api_key=in_manifest, api_key_file=str(path) if in_file else None)
    assert api_key_of(settings, {} if variable is None else {KEY_VARIABLE: variable}) == key


@pytest.mark.parametrize("content", [b"", b"short", b"with a space secret", b"\xff\xfesecret-secret", b"x" * 5000])
def test_a_file_without_a_key_keeps_the_daemon_from_starting_and_is_not_quoted(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "key").write_bytes(content)
    with pytest.raises(StartFailed) as refused:
        api_key_of(ApiSettings(api_key_file=str(tmp_path / "key")), {})
    assert "does not hold a key" in refused.value.message
    assert "secret" not in str(refused.value.to_json())


def test_a_file_that_is_missing_and_a_bad_variable_are_told(tmp_path: Path) -> None:
    with pytest.raises(StartFailed, match="cannot be read"):
        api_key_of(ApiSettings(api_key_file=str(tmp_path / "nowhere")), {})
    with pytest.raises(StartFailed, match=f"`{KEY_VARIABLE}` is not a key"):
        api_key_of(ApiSettings(), {KEY_VARIABLE: "secret one"})


def test_nobody_asks_for_a_key_where_nothing_listens_on_tcp(tmp_path: Path) -> None:
    off = ApiSettings(listen="off", api_key_file=str(tmp_path / "nowhere"))
    assert api_key_of(off, {KEY_VARIABLE: "bad one"}) is None


def test_a_file_is_looked_for_beside_the_manifest() -> None:
    assert parse_manifest("[api]\napi_key_file = 'api.key'", "/m/omlxd.toml").api.api_key_file == "/m/api.key"


def test_beyond_this_machine_a_key_of_the_environment_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "[api]\nlisten = '0.0.0.0:80'"
    with pytest.raises(ManifestInvalid):
        parse_manifest(text, "/m/omlxd.toml")
    monkeypatch.setenv(KEY_VARIABLE, "from-the-variable")
    assert parse_manifest(text, "/m/omlxd.toml").api.api_key is None


async def test_the_daemon_asks_for_the_key_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("from-the-file\n")
    async with running(tmp_path, MODELS, api={"api_key_file": str(tmp_path / "key")}) as daemon:
        assert (await fetch(daemon.tcp, "GET", "/v1/models")).status == 401
        headers = {"authorization": "Bearer from-the-file"}
        assert (await fetch(daemon.tcp, "GET", "/v1/models", headers=headers)).status == 200


async def test_only_pages_of_the_listed_origins_may_read_answers(tmp_path: Path) -> None:
    async with running(tmp_path, MODELS, api={"allow_origins": [APP], "api_key": "sesame-open-now"}) as daemon:
        asked = {"Origin": APP, "Access-Control-Request-Method": "POST"}
        preflight = await fetch(daemon.tcp, "OPTIONS", "/v1/chat/completions", headers=asked)
        assert (preflight.status, preflight.headers["access-control-allow-origin"]) == (204, APP)
        assert "authorization" in preflight.headers["access-control-allow-headers"]
        own = "authorization,content-type,x-stainless-arch,x-stainless-os"  # of the JavaScript packages
        asked["Access-Control-Request-Headers"] = own
        preflight = await fetch(daemon.tcp, "OPTIONS", "/v1/chat/completions", headers=asked)
        assert preflight.headers["access-control-allow-headers"] == own
        refused = await fetch(daemon.tcp, "GET", "/v1/models", headers={"Origin": APP})
        assert (refused.status, refused.headers["access-control-allow-origin"]) == (401, APP)
        key = {"authorization": "Bearer sesame-open-now"}
        answer = await fetch(daemon.tcp, "GET", "/v1/models", headers={"Origin": APP, **key})
        assert (answer.status, answer.headers["vary"]) == (200, "Origin")
        for origin in ("https://evil.example", "http://app.example", f"{APP}.evil.example"):
            for method in ("OPTIONS", "GET"):
                foreign = await fetch(daemon.tcp, method, "/v1/models", headers={"Origin": origin, **key})
                assert (foreign.status, "access-control-allow-origin" in foreign.headers) == (403, False)
        rebound = await fetch(daemon.tcp, "OPTIONS", "/v1/models", headers={"Origin": APP, "Host": "evil.example"})
        assert (rebound.status, "access-control-allow-origin" in rebound.headers) == (403, False)


async def test_by_default_no_answer_can_be_read_by_another_page(tmp_path: Path) -> None:
    async with running(tmp_path, MODELS) as daemon:
        answer = await fetch(daemon.tcp, "GET", "/v1/models", headers={"Origin": "http://localhost:3000"})
        assert answer.status == 200
        assert not [name for name in answer.headers if name.startswith("access-control")]
