"""Resume of a run: its config is read and changed, and keys that cannot change are checked.

    config, changes = resumed("runs/mine", overrides=["steps=80"])

A run continues from its newest complete checkpoint (checkpoint.py). Its directory is checked before it is used.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path

import yaml

from ...agents.basics.manifest import Damaged, read_signed
from ..config.reader import ConfigError, ConfigTree, build, leaves, merge, parse_yaml, to_dict, written
from ..config.resolve import asked, load_imports, optimizer_steps, settled
from ..config.schema import RunConfig
from . import checkpoint
from .reporting.loggers import rows_of

KEPT = (
    "env.id", "env.data", "env.split", "env.size", "seed", "recipe", "groups.*.model", "policies.*.init",
    "policies.*.adapter*", "policies.*.group", "policies.*.critic", "policies.*.algorithm.name",
    "policies.*learning.moments", "policies.*learning.parameters",
)  # fmt: skip
"""Keys that cannot change, because the learned parameters depend on them."""


LATER = {"checkpoints_best", "controllers", "imports", "overlap", "players", "restart_pause"}
"""Keys that runs of older versions do not write."""


class NothingToResume(ConfigError):
    """Raised when a run has no checkpoint."""


def resumed(
    directory: str | Path, *, file: str | Path | None = None, overrides: Sequence[str] = (), **fields: object
) -> tuple[RunConfig, list[str]]:
    """Return a run's config with the given changes, checked as a new config is, and a list of the changes in words."""
    saved = read_config(directory)
    tree = follow_length(to_dict(saved))
    wanted = asked(None, file, overrides, **fields)
    for section in ("groups", "policies"):
        if (common := (wanted.get(section) or {}).get("*")) is not None:
            own = {name: merge(common, wanted[section].get(name) or {}) for name in tree[section]}
            wanted[section] = {k: v for k, v in wanted[section].items() if k != "*"} | own
    tree = merge(tree, wanted)
    load_imports(tree)
    config = settled(tree)
    before, after = dict(leaves(written(to_dict(saved)))), dict(leaves(written(to_dict(config))))
    changes = []
    for key in [*before, *(key for key in after if key not in before)]:
        old, new = before.get(key), after.get(key)
        if old == new:
            continue
        if any(fnmatch(key, kept) for kept in KEPT):
            raise ConfigError(
                f"{key}: a run that goes on cannot change it ({old} → {new}), for what it learned stands on it; "
                "leave it out, or begin a new run"
            )
        changes.append(f"{key} {old} → {new}")
    return config, changes


def going_on(
    id: str | None,
    preset: str | None,
    directory: str | Path | None,
    anew: bool,
    *,
    file: str | Path | None = None,
    overrides: Sequence[str] = (),
    **fields: object,
) -> tuple[RunConfig, list[str]]:
    """Return the config with which a run continues, and its changes in words. Refuse a run that cannot continue."""
    if directory is None:
        raise ConfigError("resume: say which run, directory=…")
    if preset is not None:
        raise ConfigError(f"preset {preset!r}: a run that goes on has its policies already; leave it out")
    if id is not None:
        fields = merge(fields, {"env": {"id": id}})
    config, changes = resumed(directory, file=file, overrides=overrides, **fields)
    if not anew:
        check_unfinished(directory, newest(directory), config.steps)
    return config, changes


def check_continues(
    directory: str | Path,
    overlap: str,
    hosted: Mapping[str, Collection[str]],
    changes: Sequence[str] = (),
) -> None:
    """Refuse a config with which the newest checkpoint could not be loaded, before a model is. `hosted` are the
    policies and critics of each group.
    """
    marks = checkpoint.finished(Path(directory) / "checkpoints")
    if not marks:
        return
    if (marks[-1] / "overlap.json").exists() and overlap == "off":
        raise ConfigError(
            "overlap=off: this run plays ahead of its updates, and has episodes that wait for their step; leave overlap "
            "out, or begin a new run"
        )
    if not (marks[-1] / "overlap.json").exists() and overlap != "off":
        raise ConfigError(
            f"overlap={overlap}: this run was synchronous so far, and cannot begin to play ahead; leave overlap out, or begin "
            "a new run"
        )
    for group, policies in hosted.items():
        about = marks[-1] / group / "group.json"
        held = checkpoint.read_json(about)["policies"] if about.exists() else []
        if sorted(held) != sorted(policies):
            causes = ", ".join(c for c in changes if c.startswith(("policies.", "map.", "groups.")))
            because = f"with {causes} " if causes else "by this config "
            raise ConfigError(
                f"groups.{group}: its checkpoint holds {', '.join(held) or 'nothing'}, and {because}it would hold "
                f"{', '.join(sorted(policies))}: a run that goes on keeps its policies and their critics; leave the change out, or "
                "begin a new run"
            )


def read_config(directory: str | Path) -> RunConfig:
    """Read the resolved config that a run wrote. A damaged one is refused, and never filled with defaults."""
    path = Path(directory) / "config.yaml"
    if not path.is_file():
        raise ConfigError(f"{directory} is no run directory: it holds no config.yaml")
    try:
        tree = parse_yaml(read_signed(path))
    except (yaml.YAMLError, RecursionError) as error:
        raise Damaged(f"{path} is damaged: {error}") from error
    names = {f.name for f in dataclasses.fields(RunConfig)} - LATER
    missing = sorted(names - set(tree if isinstance(tree, Mapping) else ()))
    if missing:
        raise Damaged(f"{path} is not whole: it lacks {', '.join(missing)}, and a run writes every key")
    try:
        config: RunConfig = build(RunConfig, tree)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    return config


def follow_length(tree: ConfigTree) -> ConfigTree:
    """Let a learning rate that falls over the whole run fall over its new length."""
    whole = optimizer_steps(tree["steps"], tree["epochs"], tree["minibatches"])
    for policy in tree["policies"].values():
        for learning in (policy["learning"], policy["critic_learning"]):
            if learning and learning.get("horizon") == whole and learning.get("schedule") != "constant":
                learning["horizon"] = 0
    return tree


def newest(directory: str | Path) -> Path:
    """Return the checkpoint to continue from. The error tells if the run has none."""
    checkpoint_folder = checkpoint.latest(Path(directory) / "checkpoints")
    if checkpoint_folder is None:
        raise NothingToResume(
            f"{directory} holds no checkpoint: the run ended before its first, and nothing can be resumed. "
            "Begin it anew, with the same config and in the same place, by --anew (train(…, resume=True, anew=True))"
        )
    return checkpoint_folder


def way_on(directory: str | Path, verified: bool = True) -> str:
    """Return how far an interrupted run came, and the command that continues it or begins it again.

    Without `verified` no checkpoint is read, because that takes long for large models.
    """
    where = Path(directory)
    if not (where / "metrics.jsonl").exists():
        return "nothing had begun and nothing is left behind; the same command begins the run"
    command = shlex.join(["unitymas", "train", "--resume", str(where)])
    finished = None if verified else checkpoint.finished(where / "checkpoints")
    mark = checkpoint.latest(where / "checkpoints") if finished is None else next(reversed(finished), None)
    if mark is None:
        return f"{where} holds no checkpoint yet; begin it again with: {command} --anew"
    return f"{where} stands at step {checkpoint.step_of(mark)}; go on with: {command}"


def check_unfinished(directory: str | Path, mark: Path, steps: int) -> None:
    """Refuse to resume a run that has done all of its steps, or more."""
    done = checkpoint.step_of(mark)
    if steps < done:
        raise ConfigError(
            f"steps: {directory} has done {done} steps, and steps={steps} is fewer; give more than {done}, or leave it out"
        )
    book = Path(directory) / "metrics.jsonl"
    rows = rows_of(book) if book.exists() else []
    if done == steps and rows and rows[-1].get("ending") == "done":
        more = shlex.join(["unitymas", "train", "--resume", str(directory), "steps=N"])
        raise ConfigError(f"{directory} has done all of its {steps} steps; for more of them: {more}")
