"""`omlxd add`, `rm` and `find`: the manifest's entries, and the models of this machine."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from omlxd.core.errors import ManifestInvalid
from omlxd.daemon.manifest_file import read_manifest
from tests.cli.conftest import Omlxd
from tests.cli.fake_daemon import FakeDaemon, as_error, as_json, status_json
from tests.fakes.daemon import model_folder

MIB = 2**20
MANIFEST = """\
# mine; do not touch
[daemon]
max_memory = "100M"   # enough

[api]
listen = "off"

# the one for talks
[models.chat]
path = "{folder}"     # on the big disk
aliases = ["default"]
# at night
ttl = "10m"

# the other one
[models."qwen3.5"]
path = "{folder}-2"
"""


@pytest.fixture
def models(home: Path) -> Path:
    """A folder with three models, one of them not complete, and a manifest of two others."""
    folder = home / "found"
    model_folder(folder / "org" / "one", 10 * MIB)
    model_folder(folder / "large", 500 * MIB)
    broken = model_folder(folder / "half", MIB)
    (broken / "tokenizer.json").unlink()
    for name in ("a", "a-2"):
        model_folder(home / "mine" / name, MIB)
    (home / "omlxd.toml").write_text(MANIFEST.format(folder=home / "mine" / "a"))
    return folder


@pytest.fixture
def cached(home: Path) -> dict[str, str]:
    """A Hugging Face cache with one whole model and one whose download was interrupted; the variables that name it."""
    hub = home / "hub"
    for name, whole in (("org/whole", True), ("org/part", False)):
        stored = hub / f"models--{name.replace('/', '--')}"
        snapshot = model_folder(stored / "snapshots" / "abc123", 3 * MIB)
        (stored / "refs").mkdir()
        (stored / "refs" / "main").write_text("abc123")
        if not whole:
            (snapshot / "model.safetensors").unlink()
    return {"HF_HUB_CACHE": str(hub), "HOME": str(home / "nobody")}


def test_add_writes_one_table_and_leaves_every_other_byte(omlxd: Omlxd, home: Path, models: Path) -> None:
    before = (home / "omlxd.toml").read_text()
    (home / "omlxd.toml").chmod(0o640)
    done = omlxd("add", "one", str(models / "org" / "one"), "--preload", "--ttl", "5m", "--alias", "uno")
    assert (done.returncode, done.stdout) == (
        0,
        f"added `one` (10.0 MiB, fp16, context 4096) to {home / 'omlxd.toml'}\n",
    )
    assert "`omlxd start` starts it" in done.stderr
    after = (home / "omlxd.toml").read_text()
    assert after.startswith(before.rstrip())
    added = read_manifest(home / "omlxd.toml").models["one"]
    assert (added.path, added.preload, added.ttl_s, added.aliases) == (str(models / "org/one"), True, 300.0, ("uno",))
    assert stat.S_IMODE((home / "omlxd.toml").stat().st_mode) == 0o640


def test_add_begins_a_manifest_where_there_is_none(omlxd: Omlxd, home: Path) -> None:
    folder = model_folder(home / "m", MIB)
    assert omlxd("add", "m", str(folder)).returncode == 0
    assert list(read_manifest(home / "omlxd.toml").models) == ["m"]
    assert stat.S_IMODE((home / "omlxd.toml").stat().st_mode) == 0o600
    assert "# omlxd's manifest" in (home / "omlxd.toml").read_text()


def test_add_follows_a_link_to_the_manifest(omlxd: Omlxd, home: Path, models: Path) -> None:
    (home / "omlxd.toml").rename(home / "real.toml")
    (home / "omlxd.toml").symlink_to("real.toml")
    assert omlxd("add", "one", str(models / "org" / "one")).returncode == 0
    assert (home / "omlxd.toml").is_symlink()
    assert "one" in read_manifest(home / "real.toml").models


@pytest.mark.parametrize(
    ("arguments", "status", "message", "hint"),
    [
        (["chat", "{m}/org/one"], 2, "there is a model `chat` already", "`omlxd rm chat` first"),
        (["default", "{m}/org/one"], 2, "`default` is an alias of `chat`", "choose another name"),
        (["again", "{m}/../mine/a"], 2, "this model is in the manifest as `chat`", "`--force` adds it twice"),
        (["x", "{m}/org/onee"], 1, "does not exist", "did you mean `{m}/org/one`?"),
        (["x", "{m}/half"], 1, "has no tokenizer", "fetch tokenizer.json"),
        (["x", "org/absent"], 1, "neither a folder here nor in the Hugging Face cache", "`omlxd pull org/absent`"),
        (["x y", "{m}/org/one"], 78, "has 1 problem", "correct the"),
        (["x", "{m}/org/one", "--ttl", "soon"], 78, "has 1 problem", "correct the"),
        (["x", "{m}/org/one", "--alias", "chat"], 78, "has 1 problem", "correct the"),
        (["x", "{m}/large", "--pin"], 5, "takes 500 MiB, more than the limit", "leave out `--pin`"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_added_is_refused_and_nothing_written(
    omlxd: Omlxd, home: Path, models: Path, arguments: list[str], status: int, message: str, hint: str
) -> None:
    before = (home / "omlxd.toml").read_text()
    done = omlxd("add", *(each.format(m=models) for each in arguments), HF_HUB_CACHE=str(home / "hub"))
    assert done.returncode == status
    assert message in done.stderr
    assert hint.format(m=models) in done.stderr
    assert (home / "omlxd.toml").read_text() == before
    assert sorted(path.name for path in home.iterdir()) == ["found", "mine", "omlxd.toml"]


def test_a_folder_of_the_home_that_was_meant_is_named(omlxd: Omlxd, home: Path, models: Path) -> None:
    done = omlxd("add", "x", "found/large", HF_HUB_CACHE=str(home / "hub"))
    assert done.returncode == 1
    assert f"hint: did you mean `{home}/found/large`?" in done.stderr


def test_a_model_that_does_not_fit_is_added_with_a_warning(omlxd: Omlxd, models: Path) -> None:
    done = omlxd("add", "big", str(models / "large"))
    assert done.returncode == 0
    assert "warning: `big` needs " in done.stderr
    assert "`omlxd plan big`" in done.stderr


def test_a_model_that_still_leaves_is_not_counted_beside_itself(
    omlxd: Omlxd, home: Path, models: Path, fake: FakeDaemon
) -> None:
    status = status_json() | {"manifest": str(home / "omlxd.toml")}
    status["memory"] |= {"soft_limit": 15 * MIB, "hard_limit": 400 * MIB, "unaccounted": 0}
    leaving = {"name": "one", "state": "loaded", "running": 1, "removed": True, "committed_bytes": 10 * MIB}
    status["models"] = [status["models"][0] | leaving]
    fake.routes["GET /v1/control/status"] = as_json(status)
    fake.routes["POST /v1/control/reload"] = as_json({"warnings": []})
    done = omlxd("add", "one", str(models / "org" / "one"), "--max-context", "1024")
    assert (done.returncode, "warning:" in done.stderr) == (0, False), done.stderr
    other = omlxd("add", "other", str(models / "org" / "one"), "--max-context", "1024", "--force")
    assert "warning: `other` needs" in other.stderr
    assert "beside 10.0 MiB of `one`" in other.stderr


def test_a_manifest_that_is_written_otherwise_is_left_to_its_owner(omlxd: Omlxd, home: Path, models: Path) -> None:
    text = f'models = {{ chat = {{ path = "{home}/mine/a" }} }}\n'
    (home / "omlxd.toml").write_text(text)
    assert omlxd("rm", "chat").returncode == 2
    assert (home / "omlxd.toml").read_text() == text


def test_rm_takes_the_entry_and_its_comment_and_shows_them(omlxd: Omlxd, home: Path, models: Path) -> None:
    done = omlxd("rm", "chat")
    assert done.returncode == 0
    assert "  | # the one for talks\n  | [models.chat]\n" in done.stdout
    folder = home / "mine" / "a"
    left = MANIFEST.format(folder=folder)
    begin, end = left.index("# the one for talks"), left.index("# the other one")
    assert (home / "omlxd.toml").read_text() == left[:begin] + left[end:]
    assert folder.is_dir()


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["caht"], 4, "did you mean `chat`?"),
        (["default"], 2, "`omlxd rm chat` removes the model"),
        (["chat", "--files", "--yes"], 2, "omlxd deletes nothing elsewhere"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_rm_refuses_what_was_hardly_meant(
    omlxd: Omlxd, home: Path, models: Path, arguments: list[str], status: int, message: str
) -> None:
    before = (home / "omlxd.toml").read_text()
    done = omlxd("rm", *arguments)
    assert done.returncode == status
    assert message in done.stderr
    assert (home / "omlxd.toml").read_text() == before
    assert (home / "mine" / "a" / "config.json").exists()


def test_rm_deletes_the_files_of_a_repository_only_when_it_may(
    omlxd: Omlxd, home: Path, cached: dict[str, str]
) -> None:
    assert omlxd("add", "w", "org/whole", **cached).returncode == 0
    stored = Path(cached["HF_HUB_CACHE"]) / "models--org--whole"
    asked = omlxd("rm", "w", "--files", **cached)
    assert asked.returncode == 2
    assert "`omlxd rm w --files --yes` does not ask" in asked.stderr
    assert stored.is_dir()
    done = omlxd("rm", "w", "--files", "--yes", **cached)
    assert (done.returncode, stored.exists()) == (0, False)
    assert f"deleted {stored} (3.00 MiB)" in done.stdout
    assert (stored.parent / "models--org--part").is_dir()


def test_rm_keeps_files_that_another_entry_uses_or_a_link_points_to(
    omlxd: Omlxd, home: Path, cached: dict[str, str]
) -> None:
    (home / "models").mkdir()
    (home / "models" / "linked").symlink_to(model_folder(home / "far", MIB))
    (home / "models" / "near").symlink_to(model_folder(home / "models" / "real", MIB))
    (home / "omlxd.toml").write_text(
        '[models.w]\nrepo = "org/whole"\n[models.again]\nrepo = "org/whole"\n[models.l]\npath = "models/linked"\n'
        '[models.n]\npath = "models/near"\n'
    )
    elsewhere = "omlxd deletes nothing elsewhere"
    for name, message in (("w", "`again` uses the same files"), ("l", elsewhere), ("n", elsewhere)):
        done = omlxd("rm", name, "--files", "--yes", **cached)
        assert done.returncode == 2
        assert message in done.stderr
    assert (home / "far" / "config.json").exists()


def test_find_shows_the_models_of_a_folder_and_whether_they_fit(omlxd: Omlxd, models: Path) -> None:
    done = omlxd("find", str(models))
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["NAME", "SIZE", "WEIGHTS", "CONTEXT", "FITS", "WHERE"]
    assert [line.split()[-1] for line in lines[1:]] == [str(models / "large"), str(models / "org" / "one")]
    assert "no" in lines[1].split()
    assert "yes, 4096 tokens" in lines[2]
    assert "1 left out as not complete" in done.stderr
    assert "has no tokenizer" in omlxd("find", str(models), "--all").stdout


def test_find_looks_into_the_cache_and_beside_the_models_of_the_manifest(
    omlxd: Omlxd, home: Path, models: Path, cached: dict[str, str]
) -> None:
    found = json.loads(omlxd("find", "--json", **cached).stdout)["models"]
    assert {each["name"]: each["repo"] or Path(each["path"]).name for each in found} == {
        None: "org/whole",
        "chat": "a",
        "qwen3.5": "a-2",
    }
    whole = next(each for each in found if each["repo"])
    assert (whole["weights_bytes"], whole["quantisation"], whole["fits"]) == (3 * MIB, "fp16", True)


def test_find_sees_a_model_behind_a_link_and_does_not_follow_links_in_circles(
    omlxd: Omlxd, home: Path, models: Path
) -> None:
    linked = home / "linked"
    linked.mkdir()
    (linked / "model").symlink_to(models / "org" / "one")
    (linked / "circle").symlink_to(home)
    found = json.loads(omlxd("find", "--json", str(linked)).stdout)["models"]
    assert [each["path"] for each in found] == [str(linked / "model")]


def test_find_without_a_model_says_where_to_get_one(omlxd: Omlxd, home: Path) -> None:
    (home / "empty").mkdir()
    done = omlxd("find", str(home / "empty"))
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.startswith(f"no models were found in `{home / 'empty'}`\n`omlxd pull")

    (home / "me" / "models").mkdir(parents=True)
    looked = omlxd("find", HF_HUB_CACHE=str(home / "hub"), HOME=str(home / "me"), OMLXD_HOME=str(home / "empty"))
    assert looked.stderr.splitlines()[0] == (
        f"no models were found in the Hugging Face cache `{home / 'hub'}` (does not exist),"
        f" `{home / 'empty' / 'models'}` (does not exist), `~/models`, `~/.lmstudio/models` (does not exist),"
        " `~/.cache/lm-studio/models` (does not exist)"
    )


def test_a_running_daemon_takes_up_what_was_added_to_its_manifest(
    omlxd: Omlxd, home: Path, models: Path, fake: FakeDaemon
) -> None:
    (home / "omlxd.toml").rename(home / "its.toml")
    status = status_json() | {"manifest": str(home / "its.toml")}
    fake.routes["GET /v1/control/status"] = as_json(status)
    fake.routes["POST /v1/control/reload"] = as_json({"schema": 1, "changes": [], "warnings": ["mind the gap"]})
    done = omlxd("add", "one", str(models / "org" / "one"))
    assert done.returncode == 0, done.stderr
    assert "one" in read_manifest(home / "its.toml").models
    assert "warning: mind the gap\nthe running daemon has taken it up\n" in done.stderr

    for option, loads in (("--pin", "loads it now"), ("--preload", "loads it now if there is room")):
        assert omlxd("rm", "one").returncode == 0
        done = omlxd("add", "one", str(models / "org" / "one"), option)
        assert done.stderr.endswith(f"taken it up, and {loads}; `omlxd status` shows how far it is\n")

    fake.routes["POST /v1/control/reload"] = as_error(ManifestInvalid("it is not so"))
    removed = omlxd("rm", "one")
    assert removed.returncode == 0
    assert "the running daemon has not taken it up (it is not so)" in removed.stderr

    (home / "other.toml").write_text("")
    other = omlxd("add", "one", str(models / "org" / "one"), "--manifest", str(home / "other.toml"))
    assert f"`omlxd restart --manifest {home / 'other.toml'}` takes this one" in other.stderr
