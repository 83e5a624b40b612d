"""Checks of a submission, in one pass over its files; `guard` runs it in a process of its own.

First the files are read within bounds and checked against their schemas. Then all derived values are computed again: figures
from episodes, keys and seeds from their inputs, provenance from the environment, and with ``verify`` each episode from its
replies. The entry is rejected unless each sample of each task has exactly one episode.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta, timezone
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import yaml

from ...agents.basics.hints import counted
from ...agents.basics.json_types import JsonObject
from ...agents.policies import Policy
from ...envs.core.arena import Arena
from ...envs.core.drivers import derive
from ...envs.registry import UnknownEnv, spec
from ...envs.untrusted import Refused, json_value, open_regular, read_text
from ..evaluation import identity
from ..evaluation.result_types import Metadata, Results, TraceJson
from ..evaluation.results import EpisodeRow, Measure, canonical, episode_row, figures, results_text
from ..evaluation.stats import Success
from . import speakers
from .as_written import frames, metadata_text, respelled, strangers, unlike
from .claimed_environment import NotVerified, mislabelled, players, remake, tasks_of, untrue
from .json_schema import schema_of, violations
from .replay_episodes import LAST_DIGITS, Mismatch, ToolDown, differences, reenact, written

FILES = ("results.json", "metadata.yaml", "traces.jsonl.zst", "README.md")
MOST = {
    "results.json": 100_000_000,
    "metadata.yaml": 64_000,
    "traces.jsonl.zst": 2_000_000_000,
    "README.md": 1_000_000,
}
"""Largest number of bytes of each file."""
MOST_UNPACKED = 8_000_000_000
"""Largest number of bytes of all episodes together."""
MOST_CLAIMED = 1_000_000
"""Largest number of characters of results.json, without its episodes."""
MAX_LINE = 40_000_000
"""Largest number of bytes of one episode, unpacked."""
MOST_PROBLEMS = 200
TAGS = ("seconds", "team", "players", "key")
"""Tags of an episode, in the order in which an evaluation writes them."""
SKETCH = 2000
"""Number of episodes that are compared with other entries: those with the smallest hashes, so that copies agree."""
_DEEPEST = {"results.json": 32, "metadata.yaml": 8}


@dataclass
class Inspection:
    """Result of a check.

    `problems` are reasons to reject the entry. `unverified` gives reasons why it could not be replayed here. `notes` are
    remarks for readers on an entry that passed.
    """

    problems: list[str] = field(default_factory=list)
    unverified: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    metadata: Metadata = field(default_factory=Metadata)
    results: Results = field(default_factory=Results)
    """Claimed results, without the list of episodes."""
    digests: list[str] = field(default_factory=list)
    """Hashes of episodes, which are equal in two entries with the same replies."""
    scripted: bool = False
    """Flag: all players come with unitymas, and were asked again."""

    def to_dict(self) -> JsonObject:
        """Return the result as plain JSON."""
        return asdict(self)


def inspect(folder: Path, *, verify: bool) -> Inspection:
    """Check a submission in this process. `guard.Guard` does so with limits of time and memory."""
    verdict = Inspection()
    try:
        for problem in islice(_problems(folder, verify, verdict), MOST_PROBLEMS):
            verdict.problems.append(problem)
    except Refused as error:
        verdict.problems.append(str(error))
    except NotVerified as error:
        verdict.unverified.append(str(error))
    return verdict


def read_submission(folder: Path) -> tuple[Results, Metadata]:
    """Read the claimed results and metadata, and check their schemas. `Refused` names the first fault."""
    try:
        text = read_text(folder / "results.json", MOST["results.json"])
        results = json_value(text, "results.json", deepest=_DEEPEST["results.json"])
        metadata = plain_yaml(read_text(folder / "metadata.yaml", MOST["metadata.yaml"]), "metadata.yaml")
    except (Refused, OSError) as error:
        raise Refused(f"results.json or metadata.yaml cannot be read: {error}") from None
    whole = {"results": results, "metadata": metadata}
    if broken := next(violations(whole, schema_of("submission")), None):
        raise Refused(broken)
    return results, metadata


def plain_yaml(text: str, name: str) -> Any:
    """Parse YAML with texts, lists and tables, a few levels deep. Aliases and repeated keys are refused. Scalars are texts."""
    depth = 0
    try:
        for event in yaml.parse(text, Loader=yaml.BaseLoader):
            if isinstance(event, yaml.AliasEvent):
                raise Refused(f"{name} uses aliases, which can make a small file mean an enormous one")
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > _DEEPEST["metadata.yaml"]:
                raise Refused(f"{name}: nested more than {_DEEPEST['metadata.yaml']} levels deep")
        return yaml.load(text, Loader=_Texts)
    except Refused:
        raise
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise Refused(f"{name}: not YAML ({str(error):.200})") from None


class _Texts(yaml.BaseLoader):
    """YAML loader in which every scalar is a text and no key is repeated."""


def _table(loader: _Texts, node: yaml.MappingNode) -> dict[object, object]:
    table: dict[object, object] = loader.construct_mapping(node, deep=True)
    if len(table) < len(node.value):
        raise yaml.YAMLError(f"a key stands twice in the table at line {node.start_mark.line + 1}")
    return table


_Texts.add_constructor("tag:yaml.org,2002:map", _table)


def measure_of(results: Results) -> Measure:
    """Return the measure of a result."""
    told = results["measure"]
    return Measure(told["headline"], told["success_metric"], Success(told["relation"], told["threshold"]))


def sha256(file: Path | BinaryIO) -> str:
    """Return the hash of a file's bytes."""
    if isinstance(file, Path):
        with open(file, "rb") as opened:
            return sha256(opened)
    digest = hashlib.sha256()
    while block := file.read(1 << 20):
        digest.update(block)
    file.seek(0)
    return digest.hexdigest()


def _problems(folder: Path, verify: bool, verdict: Inspection) -> Iterator[str]:
    there = {name for name in FILES if (folder / name).is_symlink() or (folder / name).exists()}
    if missing := [name for name in FILES if name not in there]:
        yield f"{folder} lacks {', '.join(missing)}"
        return
    results, metadata = read_submission(folder)
    verdict.metadata = metadata
    claims = len(json.dumps({**results, "episodes": []}))
    if claims > MOST_CLAIMED:  # a board holds those of all entries
        yield f"results.json: {claims:,} characters beside its episodes; at most {MOST_CLAIMED:,} are read"
        return
    verdict.results = results.copy()
    del verdict.results["episodes"]
    if metadata["env_id"] != results["env_id"]:
        yield f"metadata.yaml is about {metadata['env_id']}, results.json about {results['env_id']}"
    with open_regular(folder / "results.json", MOST["results.json"]) as file:
        yield from _signed("results.json", sha256(file), metadata)
    yield from _spelled(folder, results, metadata)
    with open_regular(folder / "traces.jsonl.zst", MOST["traces.jsonl.zst"]) as file:
        yield from _signed("traces.jsonl.zst", sha256(file), metadata)
        check = Check(results, verdict)
        yield from check.claims()
        if verify and not verdict.problems:
            check.prepare()
            yield from check.provenance()
        yield from check.episodes(file)
    yield from check.end()
    yield from strangers(folder, FILES)


def _spelled(folder: Path, results: Results, metadata: Metadata) -> Iterator[str]:
    """Check that the text files are written exactly as we write them, except for README.md."""
    for name, ours in (("results.json", results_text(results)), ("metadata.yaml", metadata_text(metadata))):
        yield from unlike(name, read_text(folder / name, MOST[name]), ours)
    read_text(folder / "README.md", MOST["README.md"])


def _signed(name: str, checksum: str, metadata: Metadata) -> Iterator[str]:
    told = metadata["files"][name]
    if checksum != told:
        yield f"{name}: its SHA-256 is {checksum[:16]}…, but metadata.yaml says {told[:16]}…"


class Check:
    """Check of a submission, after its schemas, against its episodes."""

    def __init__(self, results: Results, verdict: Inspection) -> None:
        self.results, self.verdict = results, verdict
        self.told = results["provenance"]
        self.order = [(e["task"], e["sample"]) for e in results["episodes"]]
        self.unlike = self.packed_otherwise = 0
        self.measure, self.price = measure_of(results), (results["price"][0], results["price"][1])
        self.k, self.seed = results["figures"]["k"], self.told["seed"]
        self.rows: list[EpisodeRow] = []
        self.claimed = {(e["task"], e["sample"]): e for e in results["episodes"]}
        self.world = identity.digest(self.told["env"])
        self.players = identity.players_hash(self.told["roles"])
        self.team = speakers.SeatedTeam(self.told["roles"])
        self.arena: Arena | None = None
        self.again: dict[str, Policy] = {}
        self.shape = schema_of("trace")

    def claims(self) -> Iterator[str]:
        """Check the claims alone: each task must have each sample once."""
        if self.told["env"]["env_id"] != self.results["env_id"]:
            yield f"provenance.env.env_id: {self.told['env']['env_id']}, but the results are about {self.results['env_id']}"
        try:
            declared = Measure.of_spec(spec(self.results["env_id"]))
        except UnknownEnv:
            declared = self.measure
        if not exactly(asdict(self.measure), asdict(declared)):
            yield (
                f"measure: the environment is ranked by {declared.headline} ({declared}), "
                f"not by {self.measure.headline} ({self.measure})"
            )
        yield from _dated(self.results["run"]["date"])
        yield from self.team.claims()
        if len(self.claimed) < len(self.results["episodes"]):
            yield "results.json names an episode twice"
        samples: dict[str, set[int]] = defaultdict(set)
        for task, sample in self.claimed:
            samples[task].add(sample)
        wanted = set(range(self.k))
        for task, numbers in samples.items():
            if numbers != wanted:
                yield (
                    f"task {task:.80}: samples {_few(sorted(numbers))} are there; "
                    f"k={self.k} means each of 0 to {self.k - 1}, once"
                )
        if self.order != sorted(self.order):
            yield "results.json: its episodes do not stand in their order, by task and sample"
        if len(samples) != self.told["data"]["tasks"]:
            yield f"provenance.data.tasks: {self.told['data']['tasks']} are claimed, {len(samples)} have episodes"

    def prepare(self) -> None:
        """Make the environment. If that is not possible, store the reason and continue with the other checks."""
        try:
            self.arena = remake(self.results)
            self.again = players(self.arena, self.results)
        except NotVerified as error:
            self.arena = None
            self.verdict.unverified.append(str(error))

    def provenance(self) -> Iterator[str]:
        """Yield the parts of the provenance that differ when they are computed again."""
        if self.arena is None:
            return
        tasks = tasks_of(self.arena, self.results)
        yield from untrue(self.arena, tasks, self.results)
        yield from mislabelled(self.arena, self.again, self.results)
        first = {task.id for task in tasks}
        played = {task for task, _ in self.claimed}
        if odd := sorted(played - first):
            yield (
                f"task {odd[0]:.80} is not among the first {len(tasks)} of the {self.arena.data.split} split, which "
                "are what an evaluation of so many tasks plays"
            )
        elif missing := sorted(first - played):
            yield f"task {missing[0]:.80} of the {self.arena.data.split} split has no episode"
        self.tasks = {task.id: task for task in tasks}

    def episodes(self, file: BinaryIO) -> Iterator[str]:
        """Yield the faults of the episodes, each with the episode's name."""
        lines = frames(file, "traces.jsonl.zst", most=MOST_UNPACKED, longest=MAX_LINE)
        for number, (line, packed_alike) in enumerate(lines, 1):
            self.packed_otherwise += not packed_alike
            trace = json_value(line, f"traces.jsonl.zst, line {number}")
            if broken := list(islice(violations(trace, self.shape), 3)):
                yield f"traces.jsonl.zst: episode {number} is no trace ({'; '.join(broken)})"
                return
            if nobody := next((n["id"] for n in trace["nodes"] if not _whose(n)), None):
                yield f"traces.jsonl.zst: episode {number} is no trace (node {nobody:.60} has neither role nor tool)"
                return
            row = episode_row(trace, self.measure, self.price)
            self.rows.append(row)
            name = f"episode {row.task:.80}#{row.sample}"
            if self.order[number - 1 : number] != [(row.task, row.sample)]:
                yield f"{name}, order: it does not stand where results.json has it"
            if line != respelled(trace):
                yield f"{name}: its line is not as the harness writes it (blanks, spelling or the order of keys)"
            yield from (f"{name}, {problem}" for problem in self._episode(trace, row))
            if self.arena is not None and row.task in self.tasks:
                yield from (f"{name}, {problem}" for problem in self._again(trace, line))

    def end(self) -> Iterator[str]:
        """Check the facts that depend on all episodes."""
        for task, sample in self.claimed:
            yield f"episode {task:.80}#{sample} is in results.json but has no trace"
        if not self.rows:
            yield "traces.jsonl.zst holds no episode"
            return
        try:
            numbers = figures(self.rows, self.measure, self.k)
        except ValueError as error:
            yield f"figures: they cannot be computed ({error})"
            return
        numbers = json.loads(json.dumps(numbers))
        yield from _compare("figures", self.results["figures"], numbers)
        if self.unlike or not exactly(self.results["figures"], numbers):
            self.verdict.notes.append(
                f"numbers of {counted(self.unlike, 'episode')}, or figures, differ from ours in their last digits"
            )
        if self.packed_otherwise:
            self.verdict.notes.append(
                f"{counted(self.packed_otherwise, 'episode')} packed by another version of zstd than ours"
            )
        self.verdict.results["figures"] = numbers
        if self.arena is not None:
            self.verdict.unverified += self.team.strangers(self.again)
        self.verdict.digests = sorted(self.team.digests)[:SKETCH]
        self.verdict.scripted = self.told["roles"].keys() == self.again.keys()
        yield from self.team.copies(self.verdict.notes)
        if self.seed != 0:
            self.verdict.notes.append(f"seed {self.seed}, chosen by its makers")

    def _episode(self, trace: TraceJson, row: EpisodeRow) -> Iterator[str]:
        claim = self.claimed.pop((row.task, row.sample), None)
        if claim is None:
            yield "which has a trace, is not in results.json (or is there twice)"
            return
        for key in ("digest", "score", "solved", "key"):
            if not exactly(claim[key], getattr(row, key)):
                yield f"{key}: results.json says {claim[key]!r:.40}, its trace gives {getattr(row, key)!r:.40}"
        env, data = self.told["env"], self.told["data"]
        tags = trace["tags"]
        for key, told, again in (
            ("env_id", env["env_id"], trace["env_id"]), ("code_hash", env["code_hash"], trace["code_hash"]),
            ("config", env["config"], trace["config"]),
            ("data", {k: data[k] for k in ("name", "split", "fingerprint")}, trace["data"]),
            ("seed", derive(self.seed, row.task, row.sample), trace["seed"]),
            ("tags.players", self.players, tags.get("players")),
        ):  # fmt: skip
            if not exactly(told, again):
                yield f"{key}: the provenance gives {told!r:.60}, its trace says {again!r:.60}"
        if type(seconds := tags.get("seconds")) is not float or str(seconds).startswith("-"):
            yield f"tags.seconds: {seconds!r:.40} is not the time that an episode took, a number with a point"
        if list(tags) != list(TAGS):
            yield f"tags: {list(tags)!r:.80}, but the harness writes {', '.join(TAGS)}"
        yield from self.team.labels(tags.get("team"))
        for node in trace["nodes"]:
            yield from self.team.reply(node)
        self.team.remember(trace)

    def _again(self, trace: TraceJson, line: bytes) -> Iterator[str]:
        assert self.arena is not None
        task = self.tasks[trace["task_id"]]
        key = identity.sample_key(self.world, self.players, task, self.seed, trace["sample"])
        if trace["tags"].get("key") != key:
            yield f"key: its trace says {trace['tags'].get('key')!r:.40}, what it hashes gives {key!r}"
        try:
            again = written(reenact(self.arena, trace, tools_again=True, players=self.again), trace["tags"])
            if list(trace["tags"].get("team") or ()) != list(self.arena.roles):
                yield "tags.team: its players do not stand in the order of the environment's agents"
            unlike = list(differences(trace, again))
            yield from unlike
            self.unlike += not unlike and again["error"] == trace["error"] and line != respelled(again)
        except Mismatch as error:
            yield str(error)
        except ToolDown as error:
            self.verdict.unverified.append(f"not verified: a tool failed on this machine ({str(error):.200})")
            self.arena = None
        except Exception as error:
            yield f"it cannot be played again ({type(error).__name__}: {str(error):.200})"


def _whose(node: Mapping[str, object]) -> bool:
    """Tell whether an act has a role, and a use a tool."""
    return isinstance(node["tool" if node["kind"] == "use" else "role"], str)


def _compare(name: str, told: object, again: object) -> Iterator[str]:
    """Yield every value that differs, by its path. Timings are compared, too, because they come from the same traces."""
    if isinstance(told, Mapping) and isinstance(again, Mapping):
        for key in sorted({*told, *again}, key=str):
            where = f"{name}.{key!s:.60}"
            if key not in told or key not in again:
                yield f"{where} is {'missing' if key in again else 'not a figure that the traces give'}"
            else:
                yield from _compare(where, told[key], again[key])
    elif isinstance(told, float) and isinstance(again, float):
        near = abs(told - again) <= LAST_DIGITS * max(1.0, abs(again))
        if not near or (told == again and not exactly(told, again)):  # 0 has no sign
            yield f"{name}: results.json says {told}, the traces give {again}"
    elif not exactly(told, again):
        yield f"{name}: results.json says {told!r:.60}, the traces give {again!r:.60}"


def exactly(told: object, again: object) -> bool:
    """Tell whether two values have the same text: 1, 1.0 and true differ."""
    return canonical(told) == canonical(again)


def _dated(date: str) -> Iterator[str]:
    """Check that a date is valid, in UTC with seconds, and not in the future."""
    try:
        told = datetime.fromisoformat(date)
    except ValueError:
        told = None
    if (
        told is None
        or told.tzinfo is None
        or told.astimezone(timezone.utc).isoformat(timespec="seconds") != date
    ):
        yield f"run.date: {date!r:.60} is no date as 2026-01-31T12:00:00+00:00 is one"
    elif told > datetime.now(timezone.utc) + timedelta(days=1):
        yield f"run.date: {date} is still to come"


def _few(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:8])) + (" …" if len(numbers) > 8 else "")
