"""A leaderboard submission: a folder that proves its own figures.

    unitymas submit evaluations/mine --name "My team"      packs results.json, metadata.yaml, traces.jsonl.zst, README.md
    unitymas submit --check submissions/my-team            recomputes every figure from the traces
    unitymas submit --check --verify submissions/my-team   also plays every episode again from its replies

`check` gives the problems it finds, each with the name of the file, episode or figure. Without ``verify``
it proves that figures, traces and hashes belong together. With it, it also proves that prompts, parsed
values, tool results and metrics are the environment's own; only such an entry is called *verified* on the
board. What no check can prove is that a model wrote the replies: that takes its weights.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from ..envs.arena import Arena
from ..envs.registry import make_arena, spec
from ..envs.trace import Trace, read_dicts, write
from ..hints import counted
from . import tables
from .evaluate import saved_results
from .identity import tasks_hash, world
from .page import asset, printable, write_page
from .reenact import Mismatch, differences, reenact
from .results import EpisodeRow, Measure, episode_list, episode_row, figures
from .schema import violations
from .stats import Success

SCHEMA = "unitymas.submission/1"
FILES = ("results.json", "metadata.yaml", "traces.jsonl.zst", "README.md")
MAX_BYTES = {"traces.jsonl.zst": 2_000_000_000, "results.json": 200_000_000, "metadata.yaml": 1_000_000}
MAX_LINE = 200_000_000
"""Larger files, and longer episodes, are refused before they are read: a board's builder reads what
strangers send."""


def pack(
    run: str | Path, out: str | Path, *, name: str, authors: str = "", description: str = "", url: str = ""
) -> Path:
    """Pack an evaluation's folder into a submission. The figures are computed afresh from exactly the
    packed traces."""
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
    out.mkdir(parents=True, exist_ok=True)
    write((Trace.from_dict(newest[key]) for key in wanted), out / "traces.jsonl.zst")
    measure, price = measure_of(plain), tuple(plain["price"])
    rows = [episode_row(t, measure, price) for t in read_dicts(out / "traces.jsonl.zst")]
    plain = {
        **plain,
        "figures": figures(rows, measure, plain["figures"]["k"]),
        "episodes": episode_list(rows),
    }
    write_page(out / "results.json", [json.dumps(plain, indent=1, sort_keys=True) + "\n"])
    metadata = {
        "schema": SCHEMA, "name": name, "authors": authors, "description": description, "url": url,
        "env_id": plain["env_id"],
        "files": {file: sha256(out / file) for file in ("results.json", "traces.jsonl.zst")},
    }  # fmt: skip
    write_page(out / "metadata.yaml", [yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True)])
    write_page(out / "README.md", [_readme(metadata, plain)])
    return out


def check(folder: str | Path, *, verify: bool = False) -> list[str]:
    """Every problem of a submission; an empty list means that all its figures follow from its traces."""
    return list(_problems(Path(folder), verify))


def measure_of(results: Mapping[str, Any]) -> Measure:
    """The measure that a result was computed by."""
    told = results["measure"]
    return Measure(told["headline"], told["success_metric"], Success(told["relation"], told["threshold"]))


def sha256(path: Path) -> str:
    """Of a file's bytes."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def longest_line(path: Path) -> int:
    """How long the longest line of a compressed file is, without ever holding one (beyond `MAX_LINE` it
    stops)."""
    import zstandard

    longest = current = 0
    with (
        open(path, "rb") as file,
        zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True) as plain,
    ):
        try:
            while longest <= MAX_LINE and (block := plain.read(1 << 20)):
                *whole, rest = block.split(b"\n")
                for piece in whole:
                    longest, current = max(longest, current + len(piece)), 0
                current += len(rest)
                longest = max(longest, current)
        except zstandard.ZstdError:  # torn or no zstandard file; whoever reads it says so
            pass
    return longest


def read_submission(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Its results and metadata, as they claim."""
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    text = (folder / "metadata.yaml").read_text(encoding="utf-8")
    if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text)):
        raise ValueError("metadata.yaml uses aliases, which can make a small file mean an enormous one")
    return results, yaml.safe_load(text)


def _problems(folder: Path, verify: bool) -> Iterator[str]:
    if missing := [name for name in FILES if not (folder / name).is_file()]:
        yield f"{folder} lacks {', '.join(missing)}"
        return
    for name, most in MAX_BYTES.items():
        if (folder / name).stat().st_size > most:
            yield f"{name} is larger than {most:,} bytes"
            return
    if (length := longest_line(folder / "traces.jsonl.zst")) > MAX_LINE:
        yield f"traces.jsonl.zst: one episode has more than {length:,} bytes; at most {MAX_LINE:,} are read"
        return
    try:
        results, metadata = read_submission(folder)
    except (ValueError, yaml.YAMLError) as error:
        yield f"results.json or metadata.yaml cannot be read: {error}"
        return
    broken = list(
        violations({"results": results, "metadata": metadata}, json.loads(asset("submission.schema.json")))
    )
    if broken:
        yield from broken
        return
    for name, told in metadata["files"].items():
        if name in FILES and (found := sha256(folder / name)) != told:
            yield f"{name}: its SHA-256 is {found[:16]}…, but metadata.yaml says {told[:16]}…"
    if metadata["env_id"] != results["env_id"]:
        yield f"metadata.yaml is about {metadata['env_id']}, results.json about {results['env_id']}"
    yield from _recompute(folder, results, verify)


def _recompute(folder: Path, results: dict[str, Any], verify: bool) -> Iterator[str]:
    measure, price = measure_of(results), tuple(results["price"])
    try:
        declared = Measure.of_spec(spec(results["env_id"]))
    except KeyError:
        declared = None
    if declared is not None and measure != declared:
        yield f"measure: the environment is ranked by {declared.headline} ({declared}), not by {measure.headline} ({measure})"
    claimed = {(e["task"], e["sample"]): e for e in results["episodes"]}
    rows: list[EpisodeRow] = []
    arena = _arena(results) if verify else None
    if isinstance(arena, str):
        yield f"cannot be verified here: {arena}"
        arena = None
    try:
        for trace in read_dicts(folder / "traces.jsonl.zst"):
            row = episode_row(trace, measure, price)
            rows.append(row)
            yield from _episode_problems(trace, row, claimed.pop((row.task, row.sample), None), results)
            if arena is not None:
                yield from _reenacted(arena, trace)
    except (KeyError, TypeError, ValueError) as error:
        yield f"traces.jsonl.zst: episode {len(rows) + 1} is no trace ({type(error).__name__}: {error})"
        return
    for task, sample in claimed:
        yield f"episode {task}#{sample} is in results.json but has no trace"
    if rows:
        yield from _compare("figures", results["figures"], figures(rows, measure, results["figures"]["k"]))
    else:
        yield "traces.jsonl.zst holds no episode"


def _episode_problems(
    trace: Mapping[str, Any], row: EpisodeRow, claim: Mapping[str, Any] | None, results: Mapping[str, Any]
) -> Iterator[str]:
    name = f"episode {row.task}#{row.sample}"
    if claim is None:
        yield f"{name} has a trace but is not in results.json (or is there twice)"
        return
    for key, found in (
        ("digest", row.digest),
        ("score", row.score),
        ("solved", row.solved),
        ("key", row.key),
    ):
        if claim[key] != found:
            yield f"{name}, {key}: results.json says {claim[key]!r:.40}, its trace gives {found!r:.40}"
    env, data = results["provenance"]["env"], results["provenance"]["data"]
    for key, told, found in (
        ("env_id", env["env_id"], trace["env_id"]), ("code_hash", env["code_hash"], trace["code_hash"]),
        ("data", {k: data[k] for k in ("name", "split", "fingerprint")}, trace["data"]), ("config", env["config"], trace["config"]),
    ):  # fmt: skip
        if told != found:
            yield f"{name}, {key}: the provenance says {told!r:.60}, its trace {found!r:.60}"


def _compare(name: str, told: Any, found: Any) -> Iterator[str]:
    """Every leaf that differs, by its path; timings are compared too, for they come from the same traces."""
    if isinstance(told, Mapping) and isinstance(found, Mapping):
        for key in sorted({*told, *found}):
            if key not in told or key not in found:
                yield f"{name}.{key} is {'missing' if key in found else 'not a figure that the traces give'}"
            else:
                yield from _compare(f"{name}.{key}", told[key], found[key])
    elif isinstance(told, (int, float)) and isinstance(found, (int, float)):
        if abs(told - found) > 1e-9 * max(1.0, abs(found)):
            yield f"{name}: results.json says {told}, the traces give {found}"
    elif told != found:
        yield f"{name}: results.json says {told!r:.60}, the traces give {found!r:.60}"


def _arena(results: Mapping[str, Any]) -> Arena | str:
    """The environment of a submission on this machine, or why it is not there."""
    env, data = results["provenance"]["env"], results["provenance"]["data"]
    # settings of the workflow are in the config and can be made again; exchanged tools, rewards and tasks cannot
    modified = [name for name in env["config"].get("modified", []) if name not in env["config"]]
    if modified:
        return f"the environment was modified ({', '.join(modified)})"
    config = {name: value for name, value in env["config"].items() if name != "modified"}
    try:
        own = spec(env["env_id"]).tasks is not None
        where = {"split": data["split"]} | ({} if own else {"data": data["name"]})
        arena = make_arena(env["env_id"], **where, **config)
    except (ImportError, KeyError, OSError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    if arena.data.fingerprint != data["fingerprint"]:
        return f"this machine's {data['name']} has fingerprint {arena.data.fingerprint}, the submission's {data['fingerprint']}"
    if world(arena)["code_hash"] != env["code_hash"]:
        return f"the environment's code is {arena.code_hash} here, and was {env['code_hash']}"
    chosen = [arena.task(id) for id in dict.fromkeys(e["task"] for e in results["episodes"])]
    in_order = (
        sorted(chosen, key=lambda task: list(arena.task_ids).index(task.id))
        if len(chosen) < 10_000
        else chosen
    )
    if tasks_hash(in_order) != data["tasks_hash"]:
        return "the tasks of its episodes are not the tasks that its provenance names"
    return arena


def _reenacted(arena: Arena, trace: Mapping[str, Any]) -> Iterator[str]:
    name = f"episode {trace['task_id']}#{trace.get('sample', 0)}"
    try:
        yield from (
            f"{name}, {difference}"
            for difference in differences(trace, reenact(arena, trace, tools_again=True))
        )
    except Mismatch as error:
        yield f"{name}: {error}"


def _readme(metadata: Mapping[str, Any], results: Mapping[str, Any]) -> str:
    run = results["run"]
    return (
        f"# {printable(metadata['name'])}\n\n{printable(metadata['description'])}\n\n{tables.markdown([results])}\n"
        f"Evaluated {run['date']} with `{printable(run['command'])}`.\n\n"
        "Check it: `unitymas submit --check --verify .`; look at its episodes: `unitymas view traces.jsonl.zst`.\n"
    )


def submit_main(argv: list[str] | None = None) -> int:
    """``unitymas submit``: pack an evaluation, or check submissions."""
    parser = argparse.ArgumentParser(
        prog="unitymas submit", description="Pack an evaluation, or check submissions."
    )
    parser.add_argument(
        "folders", nargs="+", type=Path, help="an evaluation's folder; with --check, submissions"
    )
    parser.add_argument("--name", help="what the board calls it")
    parser.add_argument("--authors", default="")
    parser.add_argument("--description", default="")
    parser.add_argument("--url", default="")
    parser.add_argument("-o", "--out", type=Path, help="default: submissions/NAME")
    parser.add_argument("--check", action="store_true", help="recompute every figure from the traces")
    parser.add_argument(
        "--verify", action="store_true", help="with --check: also play every episode again from its replies"
    )
    given = parser.parse_args(argv)
    if given.check:
        return max(_check_aloud(folder, given.verify) for folder in given.folders)
    if not given.name:
        parser.error("--name is needed: what should the board call it?")
    for run in _evaluations(given.folders):
        slug = "".join(c if c.isalnum() else "-" for c in given.name.lower()).strip("-")
        out = given.out or Path("submissions") / f"{slug}-{saved_results(run)['env_id']}"
        pack(run, out, name=given.name, authors=given.authors, description=given.description, url=given.url)
        print(out)
    return 0


def _evaluations(folders: list[Path]) -> Iterator[Path]:
    """The folders themselves, or of a suite the ones in them."""
    for folder in folders:
        inner = sorted(path.parent for path in folder.glob("*/results.json"))
        yield from [folder] if (folder / "results.json").exists() or not inner else inner


def _check_aloud(folder: Path, verify: bool) -> int:
    problems = check(folder, verify=verify)
    for problem in problems[:50]:
        print(f"{folder}: {printable(problem, 400)}")
    if len(problems) > 50:
        print(f"{folder}: {counted(len(problems) - 50, 'more problem')}")
    if not problems:
        print(
            f"{folder}: every figure follows from the traces"
            + (", and every episode from the environment" if verify else "")
        )
    return 1 if problems else 0
