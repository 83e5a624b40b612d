"""Wait until all nodes of a job have joined its Ray cluster: `python -m unitymas.trainers.launch.gather NODES`."""

from __future__ import annotations

import argparse
import sys
import time


def main() -> int:
    """Wait for the nodes. If some are missing, print which ones have joined."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("nodes", type=int)
    parser.add_argument("--wait", type=float, default=600.0, help="seconds")
    args = parser.parse_args()
    import ray

    until = time.monotonic() + args.wait
    ray.init(address="auto", log_to_driver=False)  # that of RAY_ADDRESS
    while True:
        there = [node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]]
        if len(there) >= args.nodes:
            return 0
        if time.monotonic() > until:
            print(
                f"unitymas: {len(there)} of {args.nodes} nodes joined within {args.wait:g} s: {', '.join(there)}",
                file=sys.stderr,
            )
            return 1
        time.sleep(0.2)


if __name__ == "__main__":
    sys.exit(main())
