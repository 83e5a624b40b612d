"""Submission to the leaderboard: a folder whose figures can be checked.

    unitymas submit evaluations/mine --name "My team"      packs results.json, metadata.yaml, traces.jsonl.zst, README.md
    unitymas submit --check submissions/my-team            recomputes every figure from the traces
    unitymas submit --check --verify submissions/my-team   also replays every episode from its replies

`check` returns the problems, each with the name of the file, episode or figure. Without ``verify`` it proves that figures,
traces and hashes belong together, and that each sample of each task occurs once. With ``verify`` it also proves that
provenance, keys, prompts, parsed values, tool results and metrics come from the environment. Only such an entry is *verified*
on the board. No check can prove that a model wrote the replies: this needs its weights, and `unitymas leaderboard rerun`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from ...agents.basics.hints import counted
from ...cli.arguments import Parser
from ...envs.core.trace import Trace, read_dicts, write
from ..evaluation import result_tables
from ..evaluation.evaluate import saved_results
from ..evaluation.result_types import Metadata, Results
from ..evaluation.results import episode_list, episode_row, figures, results_text
from ..pages.html import printable, write_page
from . import guard
from .as_written import metadata_text
from .checks import FILES, Inspection, measure_of, read_submission, sha256

__all__ = ["FILES", "SCHEMA", "check", "inspect", "measure_of", "pack", "read_submission", "sha256"]
SCHEMA = "unitymas.submission/1"


def pack(
    run: str | Path,
    out: str | Path,
    *,
    name: str,
    authors: str = "",
    description: str = "",
    url: str = "",
    parameters: str = "",
) -> Path:
    """Pack an evaluation's folder into a submission. The figures are computed again, from the packed traces."""
    run, out = Path(run), Path(out)
    plain = saved_results(run)
    if not plain["complete"]:
        raise ValueError(
            f"{run} is not finished: run the same `unitymas eval` again, it plays only what is owed"
        )
    wanted = [episode["key"] for episode in plain["episodes"]]
    newest = {
        t["tags"]["key"]: t
        for t in read_dicts(run / "traces.jsonl.zst")
        if t["tags"].get("key") in set(wanted)
    }
    metadata: Metadata = {
        "schema": SCHEMA, "name": name, "authors": authors, "description": description, "url": url, "env_id": plain["env_id"],
    }  # fmt: skip
    if parameters:
        metadata["parameters"] = parameters
    write_entry(out, (Trace.from_dict(newest[key]) for key in wanted), plain, metadata)
    write_page(out / "README.md", [_readme(metadata, plain)])
    return out


def write_entry(folder: Path, traces: Iterable[Trace], results: Results, metadata: Metadata) -> None:
    """Write an entry's files. Figures, episodes and checksums are computed from the traces, also in the arguments."""
    write(traces, folder / "traces.jsonl.zst")
    measure, price = measure_of(results), (results["price"][0], results["price"][1])
    rows = [episode_row(t, measure, price) for t in read_dicts(folder / "traces.jsonl.zst")]
    results["figures"] = figures(rows, measure, results["figures"]["k"])
    results["episodes"] = episode_list(rows)
    write_page(folder / "results.json", [results_text(results)])
    metadata["files"] = {name: sha256(folder / name) for name in ("results.json", "traces.jsonl.zst")}
    write_page(folder / "metadata.yaml", [metadata_text(metadata)])


def check(folder: str | Path, *, verify: bool = False) -> list[str]:
    """Return every problem of a submission. Empty: all its figures follow from its traces.

    With `verify`, its traces also follow from its replies and the environment here.
    """
    verdict = inspect(folder, verify=verify)
    return verdict.problems + verdict.unverified


def inspect(folder: str | Path, *, verify: bool = False) -> Inspection:
    """Check an entry in a separate process with limits. Nothing that the entry names is run."""
    return guard.shared().check(Path(folder), verify=verify)


def _readme(metadata: Metadata, results: Results) -> str:
    run = results["run"]
    return (
        f"# {printable(metadata['name'])}\n\n{printable(metadata['description'])}\n\n{result_tables.markdown([results])}\n"
        f"Evaluated {run['date']} with `{printable(run['command'])}`.\n\n"
        "Check it: `unitymas submit --check --verify .`; look at its episodes: `unitymas view traces.jsonl.zst`.\n"
    )


def submit_main(argv: list[str] | None = None) -> int:
    """Run ``unitymas submit``: pack an evaluation, or check submissions."""
    parser = Parser(prog="unitymas submit", description="Pack an evaluation, or check submissions.")
    parser.add_argument(
        "folders", nargs="+", type=Path, help="an evaluation's folder; with --check, submissions"
    )
    parser.add_argument("--name", help="name on the board")
    parser.add_argument("--authors", default="", help="authors of the team")
    parser.add_argument("--description", default="", help="a few words about the team")
    parser.add_argument("--url", default="", help="address with more about the team")
    parser.add_argument("--parameters", default="", help="size of its models, such as 7B")
    parser.add_argument("-o", "--out", type=Path, help="folder of the submission (default: submissions/NAME)")
    parser.add_argument("--check", action="store_true", help="recompute every figure from the traces")
    parser.add_argument(
        "--verify", action="store_true", help="with --check: play every episode again from its replies, too"
    )
    options = parser.parse_args(argv)
    if options.check:
        return max(_check_aloud(folder, options.verify) for folder in options.folders)
    if not options.name:
        parser.error("--name is needed: what should the board call it?")
    for run in _evaluations(options.folders):
        slug = "".join(c if c.isalnum() else "-" for c in options.name.lower()).strip("-")
        out = options.out or Path("submissions") / f"{slug}-{saved_results(run)['env_id']}"
        pack(
            run,
            out,
            name=options.name,
            authors=options.authors,
            description=options.description,
            url=options.url,
            parameters=options.parameters,
        )
        print(out)
    return 0


def _evaluations(folders: list[Path]) -> Iterator[Path]:
    """Yield the folders of evaluations. A suite's folder contains several."""
    for folder in folders:
        inner = sorted(path.parent for path in folder.glob("*/results.json"))
        yield from [folder] if (folder / "results.json").exists() or not inner else inner


def _check_aloud(folder: Path, verify: bool) -> int:
    verdict = inspect(folder, verify=verify)
    problems = verdict.problems + verdict.unverified
    for problem in problems[:50]:
        print(f"{folder}: {printable(problem, 400)}")
    if len(problems) > 50:
        print(f"{folder}: {counted(len(problems) - 50, 'more problem')}")
    for note in verdict.notes:
        print(f"{folder}: note: {printable(note, 400)}")
    if not problems:
        print(
            f"{folder}: every figure follows from the traces"
            + (", and every episode from the environment" if verify else "")
        )
    return 1 if problems else 0
