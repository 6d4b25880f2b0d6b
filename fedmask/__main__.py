"""``python -m fedmask`` is ``fedmask``."""

from fedmask.cli import main

if __name__ == "__main__":
    main()
