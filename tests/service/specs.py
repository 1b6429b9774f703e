"""Services for the tests, one with all that is awkward in paths and values."""

from __future__ import annotations

from pathlib import Path

from omlxd.service.spec import ServiceSpec

PLAIN = ServiceSpec(
    name="omlxd",
    command=("/opt/omlxd/bin/python", "-P", "-m", "omlxd.daemon", "--home", "/Users/me/.omlxd"),
    error_file=Path("/Users/me/.omlxd/logs/daemon.err"),
    environment={"HF_HOME": "/Volumes/models/huggingface"},
)
AWKWARD = ServiceSpec(
    name="omlxd-0a1b2c3d",
    command=("/opt/my envs/ümlaut 100%/python", "-m", "omlxd.daemon", "--home", '/srv/a "b" $HOME \\ %h <&>'),
    error_file=Path('/srv/a "b" $HOME \\ %h <&>/logs/daemon.err'),
    environment={"WORDS": 'two words, 50% of "them", $HOME and \\', "EMPTY": ""},
    stop_timeout_s=90.0,
)
