"""Command `python -m unitymas.benchmarks.pages docs`, which writes a page of documentation for each environment."""

import sys

from .environments import main

if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
