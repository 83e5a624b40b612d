"""Index of a corpus file on disk, built by `unitymas data index CORPUS`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from .....agents.basics.hints import counted
from .....agents.names import model_path
from .....cli.arguments import Parser
from ..retriever import Passage, RetrievalError
from .bm25 import Bm25Index
from .corpus import ProgressCallback, read_corpus
from .dense import DenseIndex
from .embedders import Embedder, HashEmbedder, SentenceEncoder
from .index_files import read_manifest
from .terms import Analyzer


def open_index(path: str | Path, *, verify: bool = True) -> Bm25Index | DenseIndex:
    """Open the index at `path`, of either kind."""
    kind = read_manifest(Path(path)).get("kind")
    return DenseIndex.open(path, verify=verify) if kind == "dense" else Bm25Index.open(path, verify=verify)


def index_corpus(
    corpus: str | Path,
    path: str | Path,
    *,
    embedder: Embedder | None = None,
    stem: str = "",
    split: str | None = None,
    fields: dict[str, str] | None = None,
    overwrite: bool = False,
    progress: ProgressCallback | None = None,
) -> Bm25Index | DenseIndex:
    """Build an index of the file or folder `corpus` at `path`: BM25, or with an embedder a dense index."""
    passages = _some(read_corpus(corpus, split=split, fields=fields, progress=progress), corpus)
    if embedder is not None:
        return DenseIndex.build(passages, embedder, path, overwrite=overwrite)
    return Bm25Index.build(passages, path, analyze=Analyzer(stem=stem), overwrite=overwrite, resumable=True)


def index_main(argv: Sequence[str] | None = None) -> int:
    """Run `unitymas data index`."""
    parser = Parser(prog="unitymas data index", description="Build a retrieval index on disk.")
    parser.add_argument(
        "corpus",
        help="a .jsonl, .tsv (also .gz) or .parquet file, a folder of such, or a folder saved by `datasets`",
    )
    parser.add_argument("--out", help="the index directory (default: CORPUS.index)")
    parser.add_argument(
        "--dense",
        metavar="ENCODER",
        help="build a dense index: 'hash', or a sentence encoder: a folder, or hf:ORG/NAME",
    )
    parser.add_argument(
        "--stem", default="", metavar="LANGUAGE", help="stem words, e.g. english (needs PyStemmer)"
    )
    parser.add_argument("--split", help="the split to take of a saved data set with several")
    for field in ("id", "title", "text"):
        parser.add_argument(f"--{field}", metavar="COLUMN", help=f"the column of the {field}")
    parser.add_argument("--overwrite", action="store_true", help="replace an index that is already there")
    options = parser.parse_args(argv)
    out = options.out or f"{options.corpus.rstrip('/')}.index"
    fields = {field: getattr(options, field) for field in ("id", "title", "text") if getattr(options, field)}
    embedder = _embedder(options.dense) if options.dense else None
    with _progress_bar(f"indexing {Path(options.corpus).name}") as progress:
        index = index_corpus(
            options.corpus,
            out,
            embedder=embedder,
            stem=options.stem,
            split=options.split,
            fields=fields,
            overwrite=options.overwrite,
            progress=progress,
        )
    print(f"{counted(len(index), 'passage')} indexed in {out} ({index.fingerprint})")
    return 0


def _embedder(name: str) -> Embedder:
    return HashEmbedder() if name == "hash" else SentenceEncoder(model_path(name))


def _some(passages: Iterator[Passage], corpus: str | Path) -> Iterator[Passage]:
    """Yield the passages. Raise an error if there is none."""
    empty = True
    for passage in passages:
        empty = False
        yield passage
    if empty:
        raise RetrievalError(f"{corpus} holds no passages")


@contextmanager
def _progress_bar(title: str) -> Iterator[ProgressCallback]:
    """Show a progress bar on the terminal. The function that it yields takes (done, total)."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    shown = -1
    with Progress(*columns, transient=True) as bar:
        task = bar.add_task(title)

        def tell(done: int, total: int) -> None:
            nonlocal shown
            if done * 1000 // max(total, 1) != shown:
                shown = done * 1000 // max(total, 1)
                bar.update(task, completed=done, total=total)

        yield tell
        bar.update(task, description="writing the index")
