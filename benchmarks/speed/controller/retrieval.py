"""Speed of retrieval: build and search of a BM25 index, compared with bm25s in the same run.

    unitymas bench retrieval --passages 1000000

Passages are generated articles like those of the mini world: a few templates, many rare names. Queries are questions about
them. One in ten has only common words, which is the hard case for an inverted index. Every measurement runs in a separate
process with one thread, so that its peak memory is known. Times are wall-clock times and processor times.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import resource
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from ....cli.arguments import COUNT, Parser
from ....envs.tools.retrieval import Analyzer, Bm25Index, Passage
from ..clock import stopwatch

SYLLABLES = [
    a + b for a in ("br", *"dfg", "gr", *"hklmnpr", "st", "tr", *"vz") for b in (*"aeiou", "ai", "or", "el")
]
TRADES = (
    "architect",
    "painter",
    "composer",
    "engineer",
    "botanist",
    "explorer",
    "novelist",
    "surgeon",
    "pilot",
)
THINGS = (
    "bridge",
    "opera",
    "museum",
    "novel",
    "railway",
    "garden",
    "theatre",
    "telescope",
    "harbour",
    "cathedral",
)
TEMPLATES = (
    (
        "{a} is a {trade} who was born in {b} in {y}. After studying with {c}, {a} moved to {d} and designed the {thing} "
        "of {b}, which opened in {z}. It is the largest {thing} in the province of {e}."
    ),
    (
        "{a} is a town in the province of {b}, founded in {y} by the {trade} {c}. The town is known for its {thing}, built "
        "by {d} in {z}, and for a yearly market. The river {e} flows through {a}."
    ),
    (
        "The {thing} of {a} was completed in {y} by {b}, a {trade} from {c}. It replaced an older {thing} that burned down "
        "in {z}. The company {d} owns it, and the head of the company is {e}."
    ),
)
QUESTIONS = (
    "In which year was the {thing} of {a} completed, and by which {trade}?",
    "Who founded the town of {a}?",
    "Where was the {trade} {a} born?",
    "Which company owns the {thing} designed by {a} from {b}?",
)
COMMON = (
    "Which {trade} designed the largest {thing} in the province?",
    "A town known for its {thing} on the river",
)


def name(rng: random.Random) -> str:
    """Return a random name."""
    return " ".join(
        "".join(rng.choices(SYLLABLES, k=rng.choice((2, 2, 3)))).title() for _ in range(rng.choice((1, 2)))
    )


def fill(template: str, rng: random.Random, names: list[str]) -> str:
    """Return a template with random names in its fields."""
    slots = dict(zip("abcde", rng.choices(names, k=5), strict=True))
    return template.format(
        trade=rng.choice(TRADES),
        thing=rng.choice(THINGS),
        y=rng.randrange(1400, 2030),
        z=rng.randrange(1400, 2030),
        **slots,
    )


def world(seed: int) -> tuple[random.Random, list[str]]:
    """Return the generator and the names of a seed."""
    rng = random.Random(seed)
    return rng, [name(rng) for _ in range(300_000)]


def passages(count: int) -> Iterator[Passage]:
    """Yield generated passages."""
    rng, names = world(0)
    for position in range(count):
        title = names[position % len(names)]
        text = fill(TEMPLATES[position % len(TEMPLATES)].replace("{a}", title, 1), rng, names)
        yield Passage(id=str(position), title=title, text=text)


def questions(count: int) -> list[str]:
    """Return questions about the passages."""
    _, names = world(0)
    rng = random.Random(1)
    return [fill(rng.choice(COMMON if place % 10 == 9 else QUESTIONS), rng, names) for place in range(count)]


def measure_build(count: int, path: str) -> dict[str, float]:
    """Measure the build of an index on disk."""
    # the time to make the passages, which is not the index's work
    making, making_cpu = stopwatch(lambda: sum(1 for _ in passages(count)))
    seconds, cpu = stopwatch(lambda: Bm25Index.build(passages(count), path))
    size = sum(file.stat().st_size for file in Path(path).iterdir())
    return {"build_s": seconds - making, "build_cpu_s": cpu - making_cpu, "index_gb": size / 1e9}


def measure_search(count: int, path: str) -> dict[str, float]:
    """Measure the search in an index on disk."""
    index = Bm25Index.open(path)
    return time_queries(lambda query: index(query, 5), questions(count))


def measure_bm25s(count: int, queries: int) -> dict[str, float]:
    """Measure build and search of bm25s."""
    import bm25s

    analyze, bare = Analyzer(), bm25s.BM25(method="lucene")
    kept = list(passages(count))
    seconds, cpu = stopwatch(
        lambda: bare.index([analyze(f"{one['title']} {one['text']}") for one in kept], show_progress=False)
    )
    figures = time_queries(
        lambda query: bare.retrieve([analyze(query)], corpus=kept, k=5, show_progress=False),
        questions(queries),
    )
    return {"build_s": seconds, "build_cpu_s": cpu, **figures}


def measure_small(count: int, queries: int) -> dict[str, float]:
    """Measure the search of a small index in memory."""
    index = Bm25Index.build(passages(count))
    return time_queries(lambda query: index(query, 5), questions(queries))


def time_queries(ask: Callable[[str], object], queries: list[str]) -> dict[str, float]:
    """Measure queries, one at a time."""
    for query in queries[:20]:
        ask(query)
    wall, cpu = np.array([stopwatch(lambda query=query: ask(query)) for query in queries]).T  # type: ignore[misc]
    p50, p99 = np.percentile(wall, [50, 99]) * 1000
    return {
        "queries_per_s": len(queries) / wall.sum(),
        "p50_ms": p50,
        "p99_ms": p99,
        "queries_per_cpu_s": len(queries) / cpu.sum(),
        "cpu_p99_ms": np.percentile(cpu, 99) * 1000,
    }


def _child(measure: Callable[..., dict[str, float]], args: tuple[object, ...], out: Connection) -> None:
    figures = measure(*args)
    figures["peak_gb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6  # Linux counts in KB
    out.send(figures)


def alone(measure: Callable[..., dict[str, float]], *args: object) -> dict[str, float]:
    """Run a measurement in a new process, and return its figures."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(measure, args, sender))
    process.start()
    sender.close()
    figures: dict[str, float] = receiver.recv()
    process.join()
    return {key: round(value, 4) for key, value in figures.items()}


def main(argv: list[str] | None = None) -> int:
    """Read the arguments and measure."""
    parser = Parser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--passages", type=COUNT, default=1_000_000)
    parser.add_argument("--queries", type=COUNT, default=2000)
    parser.add_argument(
        "--bare-queries", type=COUNT, default=200, help="queries for bm25s, which takes longer"
    )
    parser.add_argument("--dir", help="where to put the index (default: a temporary directory)")
    options = parser.parse_args(argv)
    os.environ["OMP_NUM_THREADS"] = "1"  # for the measuring processes
    with tempfile.TemporaryDirectory(dir=options.dir) as directory:
        path = f"{directory}/index"
        plan: dict[str, tuple[Any, ...]] = {
            "build": (measure_build, options.passages, path),
            "search": (measure_search, options.queries, path),
            "bare bm25s": (measure_bm25s, options.passages, options.bare_queries),
            "small (300 passages, in memory)": (measure_small, 300, options.queries),
        }
        results = {}
        for title, (measure, *args) in plan.items():
            results[title] = alone(measure, *args)
            print(f"{title}: {json.dumps(results[title])}", flush=True)
    ratio = results["search"]["queries_per_cpu_s"] / results["bare bm25s"]["queries_per_cpu_s"]
    print(f"queries per second of CPU time, ours / bare bm25s: {ratio:.1f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
