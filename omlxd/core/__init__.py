"""Pure decisions and the data that all parts share: standard library only, no I/O, no clock."""
