"""The server in a room's interpreter: it stops before a program is run, and forks one process for each program.

The interpreter is started as `python program.py`. While it loads `site`, it finds this module, which serves until
the host hangs up. A program's process returns from here, and the interpreter goes on as if nothing had
been: it runs the file as `__main__`, and ends as it always does.
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
