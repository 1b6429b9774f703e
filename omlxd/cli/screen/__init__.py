"""`omlxd status` live: the daemon on a full screen, drawn anew with each event and once a second."""
