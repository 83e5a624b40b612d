"""Models of the Hugging Face Hub: downloaded when they are named for the first time, and from then on read from its cache.

`huggingface_hub` keeps the cache and heeds `HF_HOME`, `HF_HUB_OFFLINE`, `HF_TOKEN` and `HF_ENDPOINT`. A revision that is
there as a whole is used without asking the network again; pin one (`@REVISION`) where it must not differ between machines.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model")
"""Files that are downloaded, of the repository's top folder: no pickled weights, and no code."""
OTHERS = ("*/*", "consolidated*")
"""Copies of the weights in other layouts."""
WEIGHTS = ("model.safetensors.index.json", "model.safetensors")
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")


def folder(repo: str, revision: str = "") -> Path:
    """The directory of a model of the hub, as the cache holds it; downloaded if it is not there as a whole."""
    here = cached(repo, revision)
    if here is not None:
        return here
    where = _download(repo, revision)
    if missing := lacks(where):
        raise FileNotFoundError(
            f"{_called(repo, revision)} lacks {missing} ({where}): either its download was cut short, and the same command "
            "with a network completes it, or the repository holds no model as *.safetensors with a tokenizer"
        )
    return where


def cached(repo: str, revision: str = "") -> Path | None:
    """The same without the network; None where it is not there as a whole."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        where = Path(
            snapshot_download(
                repo, revision=revision or None, local_files_only=True, allow_patterns=["config.json"]
            )
        )
    except HFValidationError as error:
        raise ValueError(f"{repo!r} cannot be a model of the hub: {error}") from error
    except OSError:
        return None
    return None if lacks(where) else where


def lacks(where: Path) -> str:
    """Files that a model's directory lacks to be loaded; empty if nothing."""
    if not (where / "config.json").is_file():
        return "config.json"
    index, single = (where / name for name in WEIGHTS)
    try:
        shards = (
            set(json.loads(index.read_text())["weight_map"].values()) if index.is_file() else {single.name}
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"a readable {index.name}"
    for shard in sorted(shards):
        if not (where / str(shard)).is_file():
            return str(shard)
    return (
        ""
        if any((where / name).is_file() for name in TOKENIZERS)
        else f"a tokenizer ({', '.join(TOKENIZERS)})"
    )


def _called(repo: str, revision: str) -> str:
    return f"hf:{repo}@{revision}" if revision else f"hf:{repo}"


def _download(repo: str, revision: str) -> Path:
    """Ask the hub, with its own progress bar; whatever goes wrong is one line that says what to do."""
    from huggingface_hub import constants, errors, snapshot_download

    name, page = _called(repo, revision), f"{constants.ENDPOINT}/{repo}"
    if constants.HF_HUB_OFFLINE:
        raise FileNotFoundError(
            f"{name} is not whole in the cache ({constants.HF_HUB_CACHE}), and HF_HUB_OFFLINE forbids to download it: "
            "unset that, or bring the cache from a machine with a network"
        )
    print(f"downloading {name} from {page} to {constants.HF_HUB_CACHE}, once", file=sys.stderr, flush=True)
    try:
        return Path(
            snapshot_download(
                repo, revision=revision or None, allow_patterns=list(FILES), ignore_patterns=list(OTHERS)
            )
        )
    except errors.GatedRepoError as error:
        raise FileNotFoundError(
            f"{name} is gated: accept its terms at {page}, then set HF_TOKEN to a token of that account (or: hf auth login)"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise FileNotFoundError(
            f"{name}: {repo} has no revision {revision!r}; see {page}/commits/main"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise FileNotFoundError(
            f"no model at {name}: there is no folder {repo} here, and {page} does not exist (or is private: set HF_TOKEN)"
        ) from error
    except (
        Exception
    ) as error:  # httpx or requests, proxies, disks: each library version has errors of its own
        reason = str(error.__cause__ or error).strip().partition("\n")[0]
        raise FileNotFoundError(
            f"{name} is not on this machine, neither as a folder nor in the cache ({constants.HF_HUB_CACHE}), and could "
            f"not be downloaded: {reason}. Try again with a network, or bring the cache from a machine that has one"
        ) from error
