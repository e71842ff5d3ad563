"""`python -m foci` is the `foci` command."""

from __future__ import annotations

from foci.cli import main

if __name__ == "__main__":
    main()
