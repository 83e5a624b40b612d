"""Server in the interpreter of a room: it waits before the interpreter runs a program, and forks a process for each.

The interpreter starts as `python program.py`. While it loads `site`, it imports this module, which serves until the host
closes the connection. In a program's process this module returns, and the interpreter continues as usual: it runs the file
as `__main__`, and ends.
"""

import importlib
import json
import os
import sys
import types


def _serve() -> None:
    config = json.loads(os.environ["UNITYMAS_ROOM"])
    room = types.ModuleType("room")
    room.__path__ = [config["room"]]
    sys.modules["room"] = room
    importlib.import_module("room.room").main(config)


_serve()
raise ImportError("as if there were no such module", name="sitecustomize")
