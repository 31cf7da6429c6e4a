"""The `tileops` command, also as `python -m tileops`."""

from __future__ import annotations

import sys

_EXTRA = {"typer": "cli", "rich": "cli", "numpy": "cli", "safetensors": "cli", "tomli": "cli", "skimage": "demo"}


def main() -> None:
    """Run the command; say which pip line brings a library that is missing."""
    try:
        from tileops.cli import app

        app()
    except ModuleNotFoundError as error:
        extra = _EXTRA.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        sys.stderr.write(
            f"tileops: {error.name} is not installed; it comes with: pip install 'tileops-core[{extra}]'\n"
        )
        sys.exit(2)


if __name__ == "__main__":
    main()
