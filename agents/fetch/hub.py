"""Models of the Hugging Face Hub: downloaded when they are named for the first time, and from then on read from its cache.

`huggingface_hub` keeps the cache and heeds `HF_HOME`, `HF_HUB_OFFLINE`, `HF_TOKEN` and `HF_ENDPOINT`. A revision that is
there as a whole is used without asking the network again; pin one (`@REVISION`) where it must not differ between machines.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

FILES = (("*.json", "*.jinja", "*.txt", "*.model"), ("*.safetensors",))
"""Files that are downloaded, of the repository's top folder: no pickled weights, and no code. The weights come last: so
where they are, all other files are, even if a download was cut short."""
OTHERS = ("*/*", "consolidated*")
"""Copies of the weights in other layouts."""
WEIGHTS = ("model.safetensors.index.json", "model.safetensors")
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")


def folder(repo: str, revision: str = "") -> Path:
    """Return the directory of a hub model in the cache. A model that is not completely there is downloaded.

    A model without a chat template may be what another program left of a download. So the hub is asked for the rest,
    if it can be asked.
    """
    here = cached(repo, revision)
    if here is not None and _has_template(here):
        return here
    try:
        where = _download(repo, revision)
    except FileNotFoundError:
        if here is None:
            raise
        return here
    if missing := lacks(where):
        raise FileNotFoundError(
            f"{_called(repo, revision)} lacks {missing} ({where}): either its download was cut short, and the same command "
            "with a network completes it, or the repository holds no model as *.safetensors with a tokenizer"
        )
    return where


def cached(repo: str, revision: str = "") -> Path | None:
    """Return the directory of a hub model without using the network, or None if it is not completely there."""
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


def name_in_cache(where: Path) -> str:
    """Return the name by which any machine finds a model: ORG/NAME of a directory in the hub's cache, else the path."""
    repo, snapshots, _ = where.parts[-3:] if len(where.parts) > 2 else ("", "", "")
    if snapshots == "snapshots" and repo.startswith("models--"):
        return repo.removeprefix("models--").replace("--", "/")
    return str(where)


def lacks(where: Path) -> str:
    """Return the files that a model's directory needs and does not have."""
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


def _has_template(where: Path) -> bool:
    """Tell whether a model's directory has a chat template."""
    if any(where.glob("chat_template*")):
        return True
    try:
        return "chat_template" in (where / "tokenizer_config.json").read_text(encoding="utf-8")
    except (OSError, ValueError):
        return False


def _called(repo: str, revision: str) -> str:
    return f"hf:{repo}@{revision}" if revision else f"hf:{repo}"


def _download(repo: str, revision: str) -> Path:
    """Download from the hub, with its own progress bar. Any error is one line that says what to do."""
    from huggingface_hub import constants, snapshot_download

    name, page = _called(repo, revision), f"{constants.ENDPOINT}/{repo}"
    if constants.HF_HUB_OFFLINE:
        raise FileNotFoundError(
            f"{name} is not whole in the cache ({constants.HF_HUB_CACHE}), and HF_HUB_OFFLINE forbids to download it: "
            "unset that, or bring the cache from a machine with a network"
        )
    print(f"downloading {name} from {page} to {constants.HF_HUB_CACHE}, once", file=sys.stderr, flush=True)
    try:
        where, wanted = Path(), revision or None
        for files in FILES:
            where = Path(
                snapshot_download(
                    repo, revision=wanted, allow_patterns=list(files), ignore_patterns=list(OTHERS)
                )
            )
            wanted = where.name  # the same commit, whatever is pushed meanwhile
        return where
    except (
        Exception
    ) as error:  # httpx or requests, proxies, disks: each library version has errors of its own
        if refusal := _refusal(error, repo, revision):
            raise FileNotFoundError(refusal) from error
        later = "later" if status_of(error) else "with a network"
        raise FileNotFoundError(
            f"{name} is not on this machine, neither as a folder nor in the cache ({constants.HF_HUB_CACHE}), and could "
            f"not be downloaded: {reason_of(error)}. Try again {later}, or bring the cache from a machine that has it"
        ) from error


def unverified(repo: str, revision: str = "") -> str:
    """Ask the hub whether it has a model, and download nothing. Return why this is unknown, or an empty text if it has it.

    A model that the hub does not have, or refuses, is an error.
    """
    from huggingface_hub import HfApi, constants

    if cached(repo, revision) is not None:
        return ""
    if constants.HF_HUB_OFFLINE:
        return f"not whole in the cache ({constants.HF_HUB_CACHE}), and HF_HUB_OFFLINE forbids to ask the hub"
    try:
        hub = HfApi(constants.ENDPOINT)
        if hub.model_info(repo, revision=revision or None, timeout=10).gated:
            hub.auth_check(repo)
    except Exception as error:
        if refusal := _refusal(error, repo, revision):
            raise FileNotFoundError(refusal) from error
        return f"not in the cache ({constants.HF_HUB_CACHE}), and the hub did not answer: {reason_of(error)}"
    return ""


def _refusal(error: Exception, repo: str, revision: str) -> str:
    """Return the hub's reason for refusing a model, in one line with what to do. Empty if the error is another one."""
    from huggingface_hub import constants, errors, get_token

    name, page, status = _called(repo, revision), f"{constants.ENDPOINT}/{repo}", status_of(error)
    token = "your token (HF_TOKEN, or that of: hf auth login)" if get_token() else ""
    if isinstance(error, errors.GatedRepoError):
        return f"{name} is gated: accept its terms at {page}, then set HF_TOKEN to a token of that account (or: hf auth login)"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{name}: {repo} has no revision {revision!r}; see {page}/commits/main"
    if status == 401 and token:
        return f"{name}: {constants.ENDPOINT} refuses {token}: {reason_of(error)}; renew it, or remove it if the model is public"
    if status == 401 or isinstance(error, errors.RepositoryNotFoundError):
        private = f"{token} may not read it" if token else "is private: set HF_TOKEN"
        return f"no model at {name}: there is no folder {repo} here, and {page} does not exist (or {private})"
    if status == 403:
        return f"{name}: {constants.ENDPOINT} forbids it: {reason_of(error)}; set HF_TOKEN to a token that may read {page}"
    return ""


def status_of(error: Exception) -> int:
    """Return the HTTP status of the hub's answer, or 0 if no answer came."""
    cause: BaseException | None = error
    while cause is not None:
        if (response := getattr(cause, "response", None)) is not None:
            return int(response.status_code)
        cause = cause.__cause__ or cause.__context__
    return 0


def reason_of(error: Exception) -> str:
    """Return the first line of what an error says, with the sentence of the hub if it sent one."""
    lines = str(error.__cause__ or error).strip().partition("\n")[0].rstrip(".")
    for one in (error, error.__cause__):
        if told := getattr(one, "server_message", None):
            return f"{lines} ({' '.join(str(told).split())})"
    return lines
