"""`python -m tests.bench.peers [NAME...]` installs the peers, all without names, and says what each has become."""

from __future__ import annotations

import sys

from tests.bench.peers.catalogue import PEERS
from tests.bench.peers.venvs import DEFAULT_FOLDER, TOLD, Unavailable, ensure, versions

for peer in PEERS:
    if peer.package and (peer.name in sys.argv[1:] or not sys.argv[1:]):
        try:
            at = ensure(peer.package, DEFAULT_FOLDER)
            print(f"{peer.name}: {versions(at, [peer.package.name, *TOLD])}", flush=True)
        except Unavailable as error:
            print(f"{peer.name}: {error}", flush=True)
