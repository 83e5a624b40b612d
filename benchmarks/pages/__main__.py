"""`python -m unitymas.benchmarks.pages docs`: one documentation page per environment."""

import sys

from .environments import main

if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
