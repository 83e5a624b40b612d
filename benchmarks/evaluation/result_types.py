"""Types of the files that an evaluation writes: `results.json`, and the additions of a leaderboard entry."""

from __future__ import annotations

from typing import TypeAlias, TypedDict

from ...agents.basics.json_types import JsonObject, JsonView

TraceJson: TypeAlias = JsonView
"""Episode as stored in files (trace.schema.json)."""

LabelledTrace: TypeAlias = tuple[str, TraceJson]
"""Episode with the label of the file that it comes from."""

NodeJson: TypeAlias = JsonView
"""Node of an episode as stored in files."""
SeatDict: TypeAlias = JsonObject
"""Identity of an agent's player: its name, and the facts that distinguish it from other players."""


class EstimateDict(TypedDict):
    """Figure, its interval, and the name of its estimator."""

    value: float
    low: float | None
    high: float | None
    tasks: int
    estimator: str
    interval: str
    level: float


class FiguresDict(TypedDict):
    """All figures of an evaluation."""

    tasks: int
    episodes: int
    k: int
    headline: str
    success: str
    score: EstimateDict
    score_without_errors: EstimateDict | None
    pass_at: dict[str, EstimateDict]
    pass_hat: dict[str, EstimateDict]
    metrics: dict[str, EstimateDict]
    endings: dict[str, int]
    failures: dict[str, int]
    per_episode: dict[str, float]
    roles: dict[str, dict[str, float]]
    tools: dict[str, dict[str, float]]
    timing: dict[str, float]


class MeasureDict(TypedDict):
    """Measure by which an evaluation ranks."""

    headline: str
    success_metric: str
    relation: str
    threshold: float


class WorldDict(TypedDict):
    """Environment of an evaluation, with a hash of its code."""

    env_id: str
    code_hash: str
    config: JsonObject
    budget: JsonObject
    tools: dict[str, str]
    index: str | None


class DataDict(TypedDict):
    """Tasks of an evaluation."""

    name: str
    split: str
    fingerprint: str
    tasks_hash: str
    tasks: int


class Provenance(TypedDict):
    """Facts that are needed to run an evaluation again."""

    env: WorldDict
    data: DataDict
    roles: dict[str, SeatDict]
    """Player of each agent."""
    seed: int
    libraries: dict[str, str]
    git: Checkout | None


class Checkout(TypedDict):
    """Checkout that the package runs from."""

    commit: str
    dirty: bool


class RunDict(TypedDict):
    """Place and time of an evaluation."""

    date: str
    command: str
    python: str
    system: str
    cpus: int | None
    gpu: str | None


class EpisodeEntry(TypedDict):
    """Entry of one episode, with enough facts to name an episode that was changed."""

    task: str
    sample: int
    key: str
    score: float
    solved: bool
    digest: str


class Results(TypedDict, total=False):
    """Contents of `results.json`. A verdict holds them without the episodes."""

    schema: str
    env_id: str
    figures: FiguresDict
    measure: MeasureDict
    complete: bool
    price: list[float]
    provenance: Provenance
    run: RunDict
    episodes: list[EpisodeEntry]


class Metadata(TypedDict, total=False):
    """Contents of `metadata.yaml`. All values are texts."""

    schema: str
    name: str
    authors: str
    description: str
    url: str
    parameters: str
    env_id: str
    files: dict[str, str]
    """SHA-256 of each file."""
