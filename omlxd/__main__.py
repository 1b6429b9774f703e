"""`python -m omlxd` is the same as `omlxd`."""

from omlxd.cli.entry import main

if __name__ == "__main__":
    main()
