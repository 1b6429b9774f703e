"""`python -m omlxd` is the same as `omlxd`."""

from omlxd.cli.main import main

if __name__ == "__main__":
    main()
