"""The last trusted lines before a judged program runs, and the first after it: in the program's process.

What this process says about itself is never a verdict. It may say that the source did not compile
(said before a line of the program has run), that an exception ended it, and what a function returned:
a value as JSON, which the judge compares outside, with an expectation that was never in here. To forge
a returned value is thus no more than to return it. The channel's key, new for each case, lets the judge
notice a program that writes to the channel itself. Runs inside of the room.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
import types
from collections.abc import Callable
from typing import Any

from .sandbox_values import decode, encode

PROGRAM_FILE = "program.py"
_RECURSION = 1000  # frames a program has under a bare interpreter


class Channel:
    """One line of JSON per fact, each led by the key. Processes that the program forks have no say."""

    def __init__(self, descriptor: int, key: bytes) -> None:
        self._descriptor, self._key, self._process = descriptor, key, os.getpid()
        self._out_of_memory = key + b'{"raised": "MemoryError"}\n'  # ready made: nothing may be left by then

    def tell(self, **facts: str) -> None:
        self._write(self._key + json.dumps(facts).encode() + b"\n")

    def out_of_memory(self) -> None:
        self._write(self._out_of_memory)

    def _write(self, line: bytes) -> None:
        while line and os.getpid() == self._process:
            line = line[os.write(self._descriptor, line) :]


def run(source: str, fn_name: str | None, arguments: str, channel: Channel) -> int:
    """Compile and run the program as a bare interpreter would; its exit status."""
    _fresh_streams()
    try:
        code = compile(source.encode(errors="surrogatepass"), PROGRAM_FILE, "exec", dont_inherit=True)
    except MemoryError:
        channel.out_of_memory()
        return 1
    except Exception as error:
        channel.tell(compile=_last_line(error))
        return 1
    module = types.ModuleType("__main__" if fn_name is None else "program")
    module.__dict__.update(__file__=PROGRAM_FILE, __builtins__=__builtins__)
    sys.modules[module.__name__] = module
    sys.argv = [PROGRAM_FILE]
    sys.setrecursionlimit(_RECURSION + _depth())

    def work() -> None:
        if fn_name is None:
            exec(code, module.__dict__)
        else:
            _offer_type_names(module)
            exec(code, module.__dict__)
            function = _find(module, fn_name)
            channel.tell(value=encode(function(*decode(arguments))))

    status = _guarded(work, channel)
    return _finish(channel) or status


def _guarded(work: Callable[[], None], channel: Channel) -> int:
    """An uncaught exception is told, and printed as the interpreter prints it, without our frames."""
    try:
        work()
    except SystemExit as leaving:
        return _exit_status(leaving.code)
    except MemoryError:
        channel.out_of_memory()
        return 1
    except BaseException as error:
        try:
            channel.tell(raised=_last_line(error))
            while (
                error.__traceback__ is not None
                and error.__traceback__.tb_frame.f_code.co_filename == __file__
            ):
                error = error.with_traceback(error.__traceback__.tb_next)
            traceback.print_exception(type(error), error, error.__traceback__)
        except MemoryError:
            channel.out_of_memory()
        except BaseException:  # a hostile __str__, a closed stderr: the fact above stands
            return 1
        return 1
    return 0


def _finish(channel: Channel) -> int:
    """Threads, exit handlers, buffers: what an interpreter sees to at its end."""

    def work() -> None:
        threading = sys.modules.get("threading")
        if threading is not None:
            threading._shutdown()
        import atexit

        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None and not stream.closed:
                stream.flush()

    return _guarded(work, channel)


def _exit_status(code: Any) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    print(code, file=sys.stderr)
    return 1


def _fresh_streams() -> None:
    for name, descriptor, mode, errors in (
        ("stdin", 0, "r", "surrogateescape"),
        ("stdout", 1, "w", "surrogateescape"),
        ("stderr", 2, "w", "backslashreplace"),
    ):
        stream = open(descriptor, mode, encoding="utf-8", errors=errors, closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _offer_type_names(module: types.ModuleType) -> None:
    """Starter code of judges says `List[int]` without importing it."""
    import typing

    for name in (
        "Any",
        "Callable",
        "Dict",
        "Iterable",
        "Iterator",
        "List",
        "Optional",
        "Sequence",
        "Set",
        "Tuple",
        "Union",
    ):
        setattr(module, name, getattr(typing, name))


def _find(module: types.ModuleType, fn_name: str) -> Callable[..., Any]:
    """`name`, `Class.name`, or `name` of a class called Solution, as the starter code has it."""
    found: Any = module
    names = fn_name.split(".")
    if len(names) == 1 and not hasattr(module, fn_name) and hasattr(module, "Solution"):
        names = ["Solution", fn_name]
    for name in names:
        if not hasattr(found, name):
            raise NameError(f"the program defines no function {fn_name!r}")
        found = getattr(found, name)
        if isinstance(found, type) and name != names[-1]:
            found = found()
    return found  # type: ignore[no-any-return]


def _last_line(error: BaseException) -> str:
    try:
        return traceback.format_exception_only(type(error), error)[-1].strip()[:2000]
    except Exception:  # a hostile __str__
        return type(error).__name__


def _depth() -> int:
    frame, depth = sys._getframe(), 0
    while frame is not None:
        frame, depth = frame.f_back, depth + 1  # type: ignore[assignment]
    return depth
