"""The command line: one file per command.

The options and help of a command are in ``NAME.py``, which imports nothing slow, so that help appears at once; what the
command does is in ``_NAME.py``.
"""

import sys


def main() -> None:
    """Run the command line."""
    try:
        from gradveil.cli.app import run
    except ModuleNotFoundError as error:
        sys.exit(f"error: the command line needs {error.name}: pip install 'gradveil[audit]'")
    run()
