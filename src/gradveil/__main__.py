"""``python -m gradveil`` is the command line."""

from gradveil.cli import main

if __name__ == "__main__":
    main()
