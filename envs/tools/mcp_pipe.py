"""Pipe between an MCP server and the protocol's library, which would read a line of any length into memory.

    python mcp_pipe.py MOST PROGRAM ARGUMENTS…

The pipe starts the server and forwards its standard output. If a line is longer than MOST bytes, it ends the server and
itself. It runs in a process of its own and needs only the standard library.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys


def main() -> int:
    """Run the server, and forward its lines."""
    most, command = int(sys.argv[1]), sys.argv[2:]
    try:
        server = subprocess.Popen(command, stdout=subprocess.PIPE)  # it inherits our stdin and stderr
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        return 127
    for name in ("SIGTERM", "SIGINT", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), lambda *_: server.kill())
    assert server.stdout is not None
    line = 0  # bytes of the current line
    while chunk := os.read(server.stdout.fileno(), 1 << 16):
        first, end, _ = chunk.partition(b"\n")
        longest = line + len(first)
        line = len(chunk) - chunk.rfind(b"\n") - 1 if end else longest
        if longest > most:
            server.kill()
            print(f"{command[0]}: a line of its output is longer than {most:,} bytes", file=sys.stderr)
            return 1
        try:
            while chunk:
                chunk = chunk[os.write(1, chunk) :]
        except OSError:  # the reader has gone
            server.kill()
            return 0
    return server.wait()


if __name__ == "__main__":
    raise SystemExit(main())
