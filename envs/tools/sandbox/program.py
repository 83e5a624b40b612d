"""Process of a program: the preparation before the interpreter runs the program, and the end of the process.

The interpreter itself runs a script, as `python program.py`. This module handles its end. The interpreter calls
`sys.excepthook` for an exception or SystemExit, joins threads, and calls the exit handlers, ours last. Our handler does the
visible rest of an interpreter's end, but does not free the interpreter, which would take a third of the time of a case. A
function is called here, and its return value is reported.

A report of this process is never a verdict. It says that the source did not compile, that an exception ended the program,
or what a function returned: a value as text, which the judge compares outside of the room. The expected value never enters
the room, so a forged return value is the same as a returned one. Each case has a new key for the channel, so the judge
detects a program that writes to the channel itself. This module runs inside the room.
"""

from __future__ import annotations

import atexit
import gc
import io
import json
import os
import signal
import sys
import traceback
import types
import weakref
from collections.abc import Callable
from typing import Any

from .values import decode, encode

PROGRAM_FILE = "program.py"
_FAILED_FLUSH = 120  # exit status of an interpreter that could not write its last output
_CHILDREN = 0.5  # seconds that child processes have to finish their output


class Channel:
    """Channel to the judge: lines of JSON, each after the key. Child processes of the program cannot write to it."""

    def __init__(self, descriptor: int, key: bytes) -> None:
        self._descriptor, self._key, self._process = descriptor, key, os.getpid()
        # made now, because there may be no memory later
        self._out_of_memory = key + b'{"raised": "MemoryError"}\n'

    def tell(self, **facts: str) -> None:
        """Report facts to the judge."""
        self._write(self._key + json.dumps(facts).encode() + b"\n")

    def out_of_memory(self) -> None:
        """Report that memory ran out."""
        self._write(self._out_of_memory)

    def _write(self, line: bytes) -> None:
        while line and os.getpid() == self._process:
            line = line[os.write(self._descriptor, line) :]


def warm_up(isolated: bool) -> None:
    """Import the modules that every program's process needs, once, in the server."""
    import warnings  # noqa: F401

    for name in ("readline", "rlcompleter"):  # an interpreter with PYTHONINSPECT, as ours, imports them
        try:
            __import__(name)
        except ImportError:
            sys.modules.pop(name, None)
    atexit._clear()
    _reopen_stdin()
    if isolated:
        _name_the_user()


def prepare(fn_name: str | None, arguments: str, channel: Channel) -> None:
    """Prepare the sealed process of a program, so that it equals a new interpreter. If the case is a call, make it here."""
    preloaded = set(sys.modules)
    sys.argv = [PROGRAM_FILE]
    sys.orig_argv[:] = ["python", PROGRAM_FILE]
    for name in [name for name in sys.modules if name.split(".")[0] == __package__]:
        del sys.modules[name]
    # a new one, because the server's belongs to its frozen objects, which are never freed
    main = types.ModuleType("__main__")
    main.__dict__.update(sys.modules["__main__"].__dict__)
    sys.modules["__main__"] = main
    end = _End(channel, preloaded)
    atexit.register(end.leave)
    end.watch_exceptions()
    if fn_name is not None:
        _call(fn_name, arguments, channel, end)


class _End:
    """End of the program, and the last steps in its process."""

    def __init__(self, channel: Channel, preloaded: set[str]) -> None:
        self.channel, self.preloaded = channel, preloaded
        self.status = 0
        self.interrupted = False
        self.hook: Callable[..., object] = sys.__excepthook__

    def watch_exceptions(self) -> None:
        """Watch for the exception that ends the program. A hook that the program sets is called after ours."""
        end = self

        class Module(types.ModuleType):
            def __new__(cls, *names: str) -> Any:  # the import system makes its modules by `type(sys)(name)`
                return types.ModuleType(*names)

            @property
            def excepthook(self) -> Callable[..., object]:
                return end.hook

            @excepthook.setter
            def excepthook(self, hook: Callable[..., object]) -> None:
                end.hook = hook

            @excepthook.deleter
            def excepthook(self) -> None:
                end.hook = sys.__excepthook__

        Module.__name__ = Module.__qualname__ = "module"
        sys.excepthook = self.ended_by
        sys.__class__ = Module

    def ended_by(self, kind: type[BaseException], error: BaseException, trace: object) -> None:
        """Handle the end by an uncaught exception or by SystemExit."""
        if isinstance(error, SystemExit):
            self.status = _exit_status(error.code)
            return
        self.status, self.interrupted = 1, isinstance(error, KeyboardInterrupt)
        try:
            self.hook(kind, error, trace)
        except SystemExit as left:  # the interpreter treats this as the program's end
            self.status = _exit_status(left.code)
            return
        except BaseException:
            self._tell(error, trace)
            raise
        self._tell(error, trace)

    def _tell(self, error: BaseException, trace: object) -> None:
        try:
            if isinstance(error, MemoryError):
                self.channel.out_of_memory()
            elif trace is None:  # no line of the program was run
                self.channel.tell(compile=_last_line(error))
            else:
                self.channel.tell(raised=_last_line(error))
        except MemoryError:
            self.channel.out_of_memory()

    def leave(self) -> None:
        """Do what an interpreter does after the last exit handler: write buffers, call `__del__`, set the exit status."""
        status = self.status
        try:
            status = status if _flush() else _FAILED_FLUSH
            atexit._clear()  # ours is the last; the program's handlers hold its names
            if gc.isenabled():  # as the interpreter does; it also orders what is finalized next: a text's buffer before its file
                gc.collect()
            self._release()
            _flush()  # a failure this late does not change an interpreter's status
            sys.stdout = sys.stderr = None
            self.hook = sys.__excepthook__  # the last object that holds the program's names
            gc.collect()
            _await_children()
            if self.interrupted:
                signal.signal(signal.SIGINT, signal.SIG_DFL)
                os.kill(os.getpid(), signal.SIGINT)
                status = 130  # process 1 of a namespace is not killed by its own signals
        finally:
            os._exit(status)

    def _release(self) -> None:
        """Delete the program's own modules, so that open files are written and `__del__` is called."""
        for name in ("last_type", "last_value", "last_traceback", "last_exc"):
            sys.__dict__.pop(name, None)
        for name in ("stdin", "stdout", "stderr"):
            setattr(sys, name, getattr(sys, f"__{name}__"))
        ours = [name for name in sys.modules if name not in self.preloaded or name == "__main__"]
        left = []
        for name in ours:
            module = sys.modules[name]
            if not _is_library(module):
                left.append(weakref.ref(module))
                sys.modules.pop(name, None)
        del module
        gc.collect()
        for reference in left:
            survivor = reference()
            if survivor is not None:
                _clear(survivor.__dict__)
        gc.collect()


def _is_library(module: object) -> bool:
    """Tell whether the program imported a module. Its own file and modules that it made itself do not count."""
    if getattr(module, "__name__", "") == "__main__":
        return False
    file = getattr(module, "__file__", None)
    if not file:
        return getattr(module, "__spec__", None) is not None
    return not file.startswith(os.getcwd())


def _clear(names: dict[str, object]) -> None:
    """Clear a module as the interpreter does: first the names that begin with one underscore."""
    for private in (True, False):
        for name in list(names):
            if name != "__builtins__" and (name.startswith("_") and not name.startswith("__")) is private:
                names[name] = None


def _flush() -> bool:
    """Write all buffered output, and tell whether this was possible."""
    flushed = True
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not getattr(stream, "closed", False):
                stream.flush()
        except BaseException as error:
            flushed = False
            if stream is sys.stdout:
                _complain(error, stream)
    return flushed


def _complain(error: BaseException, stream: object) -> None:
    try:
        print(f"Exception ignored in: {stream!r}", file=sys.stderr)
        traceback.print_exception(type(error), error, error.__traceback__)
    except BaseException:  # no stream is left for a message
        return


def _await_children() -> None:
    """Give child processes time to write their output, because they end together with the program."""
    import time

    end = time.monotonic() + _CHILDREN
    try:
        while time.monotonic() < end:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.002)
    except ChildProcessError:
        return


def _exit_status(code: object) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF if -(1 << 63) <= code < 1 << 63 else 0xFF
    print(code, file=sys.stderr)
    return 1


def _call(fn_name: str, arguments: str, channel: Channel, end: _End) -> None:
    """Load the program as a module `program`, call one of its functions, and end the process."""
    path = os.path.abspath(PROGRAM_FILE)
    sys.path.insert(0, os.path.dirname(path))
    try:
        with open(path, "rb") as file:
            code = compile(file.read(), path, "exec", dont_inherit=True)
    except BaseException as error:
        end.ended_by(type(error), error.with_traceback(None), None)
    else:
        try:
            _run(code, path, fn_name, arguments, channel)
        except BaseException as error:
            trace = error.__traceback__
            while (
                trace is not None
                and trace.tb_next is not None
                and trace.tb_frame.f_code.co_filename == __file__
            ):
                trace = trace.tb_next
            end.ended_by(type(error), error.with_traceback(trace), trace)
    threading = sys.modules.get("threading")
    if threading is not None:
        threading._shutdown()
    atexit._run_exitfuncs()


def _run(code: types.CodeType, path: str, fn_name: str, arguments: str, channel: Channel) -> None:
    module = types.ModuleType("program")
    module.__dict__.update(__file__=path, __builtins__=__builtins__)
    sys.modules["program"] = module
    _offer_type_names(module)
    exec(code, module.__dict__)
    function = _find(module, fn_name)
    channel.tell(value=encode(function(*decode(arguments))))


def _offer_type_names(module: types.ModuleType) -> None:
    """Offer the names of `typing`, because starter code of judges uses `List[int]` without an import."""
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


def _find(module: types.ModuleType, fn_name: str) -> Callable[..., object]:
    """Return the function `name`, `Class.name`, or the method `name` of a class Solution, as in starter code."""
    target: object = module
    names = fn_name.split(".")
    if len(names) == 1 and not hasattr(module, fn_name) and hasattr(module, "Solution"):
        names = ["Solution", fn_name]
    for name in names:
        if not hasattr(target, name):
            raise NameError(f"the program defines no function {fn_name!r}")
        target = getattr(target, name)
        if isinstance(target, type) and name != names[-1]:
            target = target()
    return target  # type: ignore[return-value]


def _last_line(error: BaseException) -> str:
    try:
        return traceback.format_exception_only(type(error), error)[-1].strip()[:2000]
    except Exception:  # a hostile __str__
        return type(error).__name__


def _reopen_stdin() -> None:
    """Open stdin again. The interpreter opened it on a pipe, which cannot seek; a program's input is a file, which can."""
    raw: Any = open(0, "rb", closefd=False)  # noqa: SIM115 (kept for good)
    raw.raw.name = "<stdin>"
    text: Any = io.TextIOWrapper(raw, encoding=sys.stdin.encoding, errors=sys.stdin.errors, newline="\n")
    text.mode = "r"
    sys.stdin = sys.__stdin__ = text  # type: ignore[misc]


def _name_the_user() -> None:
    """Replace the functions of `pwd` and `grp` by ones with one user and one group, as a room has no /etc/passwd."""
    try:
        import grp
        import pwd
    except ImportError:
        return
    user = pwd.struct_passwd(("user", "x", 1000, 1000, "user", "/tmp", "/bin/sh"))
    group = grp.struct_group(("user", "x", 1000, []))

    def only(entry: tuple[object, ...], place: int, missing: str) -> Callable[[object], object]:
        def find(key: object) -> object:
            if type(key) is not type(entry[place]):
                raise TypeError(f"expected {type(entry[place]).__name__}, not {type(key).__name__}")
            if key != entry[place]:
                raise KeyError(f"{missing} not found: {key!r}")
            return entry

        return find

    for module, entry, by_number, by_name, all_ in (
        (pwd, user, "getpwuid", "getpwnam", "getpwall"),
        (grp, group, "getgrgid", "getgrnam", "getgrall"),
    ):
        setattr(module, by_number, only(entry, 2, f"{by_number}(): id"))
        setattr(module, by_name, only(entry, 0, f"{by_name}(): name"))
        setattr(module, all_, lambda entry=entry: [entry])
