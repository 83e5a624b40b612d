"""Run a command: find it by its name, and say in one line what a user can mend.

Each command lives where its work is done; this file only finds it, so that `unitymas list` loads no torch.
"""

from __future__ import annotations

import errno
import importlib
import io
import os
import sys
from collections.abc import Callable

from ..agents.basics.hints import nearest
from ..own import BrokenPlugin, load, place, told
from . import shell_completion
from .verbs import COMMANDS


def run(argv: list[str] | None = None) -> int:
    """Run one command; errors that a user can mend are one line, without a traceback."""
    if shell_completion.ASKED in os.environ:
        shell_completion.complete(COMMANDS, lambda name, words: _command(name)(list(words)))
        return 0
    try:
        words = list(sys.argv[1:] if argv is None else argv)
        # what is launched reads its words where it runs
        args, modules = (words, []) if words[:1] == ["launch"] else imported(words)
    except ValueError as error:
        print(f"unitymas: {error}", file=sys.stderr)
        return 1
    if not args or args[0] in ("-h", "--help", "help"):
        print(usage())
        return 0
    if args[0] in ("-V", "--version", "version"):
        from .. import __version__

        print(f"unitymas {__version__}")
        return 0
    end = args.index("--") if "--" in args else len(args)
    name, rest = args[0], [word for i, word in enumerate(args) if i and (word != "--debug" or i > end)]
    if name == "train":
        rest += [f"--import={module}" for module in modules]  # the run's config records them
    if name not in COMMANDS:
        hint = nearest(name, COMMANDS, instead="unitymas --help lists them")
        print(f"unitymas: unknown command {name!r}; {hint}", file=sys.stderr)
        return 2
    return answered(name, lambda: _command(name)(rest), "--debug" in args)


def answered(name: str, work: Callable[[], int | None], debug: bool = False) -> int:
    """Do a command's work. Return its status; what went wrong is one line, where a user can mend it."""
    try:
        status = int(work() or 0)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # `unitymas list | head`: the interpreter must not write the rest at its end
        sys.stdout = io.StringIO()
        return 0
    except BrokenPlugin as error:
        print(f"unitymas {name}: {error}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        print(
            f"unitymas {name}: {error}; pip install 'unitymas[all]' brings what every command needs",
            file=sys.stderr,
        )
        return 1
    except (ValueError, KeyError, TypeError, OSError, RuntimeError, ImportError, MemoryError) as error:
        if debug:
            raise
        text = error.args[0] if isinstance(error, KeyError) and error.args else error
        if isinstance(error, OSError):
            text = refused(error)
        print(f"unitymas {name}: {told(error) if place(error, own=True) else text}", file=sys.stderr)
        return 1
    except Exception as error:  # in somebody's own code it is theirs to mend
        if debug or not place(error, own=True):
            raise
        print(f"unitymas {name}: {told(error)}", file=sys.stderr)
        return 1


def _command(name: str) -> Callable[[list[str]], int | None]:
    module, _, function = COMMANDS[name][0].partition(":")
    command: Callable[[list[str]], int | None] = getattr(
        importlib.import_module(f"unitymas.{module}"), function
    )
    return command


def imported(words: list[str]) -> tuple[list[str], list[str]]:
    """Import what `--import FILE.py` and `--import MODULE` name, wherever they stand. -> the command, what was imported."""
    rest: list[str] = []
    named: list[str] = []
    while words:
        word = words.pop(0)
        if word == "--import" and (not words or words[0].startswith("-")):
            raise ValueError("--import needs a file or a module: --import my_team.py")
        if word == "--import":
            named.append(words.pop(0))
        elif word.startswith("--import="):
            named.append(word.removeprefix("--import="))
        else:
            rest.append(word)
    for target in named:
        load(target)
    return rest, named


WAYS_OUT = {
    errno.EEXIST: "it is a file, and a folder is needed there; name another",
    errno.ENOTDIR: "a part of it is a file, and a folder is needed there; name another",
    errno.EISDIR: "it is a folder, and a file is needed; name a file in it",
    errno.EACCES: "this user has no permission; name another place, or ask for the right",
    errno.EPERM: "this user has no permission; name another place, or ask for the right",
    errno.EROFS: "it cannot be written to; name another place",
    errno.ENOSPC: "the disk is full; make room, or name another place",
    errno.EDQUOT: "the disk is full; make room, or name another place",
    errno.EFBIG: "the file would be larger than this user's files may be (ulimit -f); raise that, or name another place",
    errno.EADDRINUSE: "something else listens there; choose another port",
}
"""What to do about what the operating system refused."""


def refused(error: OSError) -> str:
    """What the operating system refused, about which file, and what to do."""
    if error.errno is None or not str(error).startswith("[Errno"):
        return str(error)
    about = f"{error.filename}: " if error.filename else ""
    return about + WAYS_OUT.get(error.errno, error.strerror or str(error))


def usage() -> str:
    """What there is to do."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {what}" for name, (_, what) in COMMANDS.items()]
    how = "usage: unitymas COMMAND [...]   (unitymas COMMAND --help)"
    anywhere = (
        "  --import FILE.py or MODULE   your own environments, algorithms …, imported first (or MODULE:ID for an id)",
        "  --debug                      errors with their traceback",
    )
    return "\n".join([how, "", *lines, "", "anywhere:", *anywhere])
