"""Lets launchd or systemd run the daemon; knows the core only, and nothing of a running daemon."""
