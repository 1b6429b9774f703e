"""The command line: talks to the daemon over its socket and draws what it says."""
