"""Starts omlxd at boot: launchd and systemd."""
