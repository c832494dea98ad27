"""The command line: one file per command.

What a command says of itself is in ``NAME.py``, which imports nothing slow, so that help comes at once; what it does is
in ``_NAME.py``.
"""

import sys


def main() -> None:
    """Run the command line."""
    try:
        from gradveil.cli.app import run
    except ModuleNotFoundError as error:
        sys.exit(f"error: the command line needs {error.name}: pip install 'gradveil[audit]'")
    run()
