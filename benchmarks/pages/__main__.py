"""Command `python -m unitymas.benchmarks.pages docs`, which writes a page of documentation for each environment."""

import sys

from .environment_pages import main

if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
