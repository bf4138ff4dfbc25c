"""The way in: `dsabisect` and `python -m dsabisect`. Everything else is imported inside, so that Ctrl-C is one line."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """The command line; an interruption while it is still being loaded ends like any other."""
    try:
        from dsabisect.cli import main as command_line

        command_line()
    except KeyboardInterrupt:
        os.write(2, b"interrupted\n")
        sys.exit(130)


if __name__ == "__main__":
    main()
