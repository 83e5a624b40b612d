"""Weights from the learner to vLLM's workers, by vLLM's own weight transfer.

The *trainer's side* lives beside the learner, the *worker's side* in each of vLLM's workers; both are registered with
vLLM's factories and chosen by name. Each worker's side checks that all weights came (arrivals.py).

- `shared`: memory that both processes map. The learner copies its weights there, cast to the engine's precision; the
  workers load them from there. For workers on this machine, CPU or GPU.
- `ipc`, `nccl`: vLLM's own, for GPUs. `ipc` hands over the learner's GPU memory, where the learner and vLLM share one GPU.
  `nccl` broadcasts to other GPUs.

This module is imported in the learner's process and, as the workers' extension, in each worker. It needs vLLM.
"""

from __future__ import annotations

import math
import os
import pickle
import socket
import tempfile
from base64 import b64encode
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor
from vllm.distributed.weight_transfer import (
    ParamMeta,
    TrainerWeightTransferEngine,
    WeightSource,
    WeightTransferEngine,
    WeightTransferEngineFactory,
    WeightTransferTrainerFactory,
)
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    WeightTransferInitInfo,
    WeightTransferInitRequest,
    WeightTransferUpdateInfo,
    WeightTransferUpdateRequest,
)
from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

from ...basics.json_types import JsonObject
from ...model.llama import Llama
from ...model.weights import to_hf
from .arrivals import Arrivals, Completeness, forget_update, pack_head
from .gpu_places import check_sender

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

SHARED = "unitymas-shared"
ALIGNED = 64  # bytes; a tensor begins where any type may


class PolicySource(WeightSource):  # type: ignore[misc]
    """Weights of a policy under their Hugging Face names, in the engine's precision, on the device that sends them."""

    def __init__(self, model: Llama, dtype: torch.dtype, device: torch.device | None = None) -> None:
        self.model, self.dtype, self.device = model, dtype, device

    def metadata(self) -> list[ParamMeta]:
        """List names, types and shapes of what iteration yields."""
        return [ParamMeta(name, self.dtype, tuple(tensor.shape)) for name, tensor in to_hf(self.model)]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in to_hf(self.model):  # ranks hand over what they gathered in the CPU's memory
            yield name, tensor.detach().to(self.device, self.dtype)

    def write(self, views: Sequence[Tensor]) -> None:
        """Copy all weights into tensors of other memory, casting on the way."""
        for (_, tensor), view in zip(to_hf(self.model), views, strict=True):
            view.copy_(tensor.detach())


class Client:
    """Control of vLLM for the trainer's side: an `AsyncLLM` whose loop is another thread's."""

    def __init__(self, llm: AsyncLLM, wait: Callable[[Coroutine[object, None, object]], object]) -> None:
        self.llm, self.wait = llm, wait
        self.version = "0"

    def init_weight_transfer_engine(self, init_info: dict[str, object]) -> None:
        """Tell the workers how weights will come."""
        self.wait(self.llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info)))

    def start_weight_update(self) -> None:
        """Let the workers make ready."""
        self.wait(self.llm.start_weight_update())

    def update_weights(self, update_info: dict[str, object]) -> None:
        """Let the workers load what has come. Handles of GPU memory travel as vLLM's client for HTTP sends them: the
        messages between vLLM's processes take no other objects than plain ones.
        """
        if (handles := update_info.pop("ipc_handles", None)) is not None:
            update_info["ipc_handles_pickled"] = b64encode(pickle.dumps(handles)).decode()
        self.wait(self.llm.update_weights(WeightTransferUpdateRequest(update_info)))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Let the workers use the new weights, and vLLM name their version."""
        self.wait(self.llm.finish_weight_update(weight_version or self.version))


class Sender:
    """Trainer's side of a kind of transfer, on the device that sends."""

    def __init__(self, kind: str, model: Llama, client: Client, dtype: torch.dtype, workers: int) -> None:
        """Shake hands with the workers."""
        self.device = None if kind == "shared" else sending_device(kind, model, workers)
        self.client, self.source = client, PolicySource(model, dtype, self.device)
        with self._there():
            self.engine = WeightTransferTrainerFactory.trainer_init(
                trainer_info(kind, self.source, workers), client=client, source=self.source
            )

    def send(self, model: Llama, version: int) -> None:
        """Give the workers a model's weights, and vLLM their version."""
        self.source.model, self.client.version = model, str(version)
        with self._there():
            if self.device is not None:
                # an update may still be computed, and vLLM reads the weights in streams of its own
                torch.cuda.synchronize()
            self.engine.send_weights()

    def _there(self) -> AbstractContextManager[object]:
        """Make the device the thread's current one: vLLM's senders know no other."""
        return nullcontext() if self.device is None else torch.cuda.device(self.device)


def sending_device(kind: str, model: Llama, workers: int) -> torch.device:
    """Return the GPU that sends: the learner's, or for weights in the CPU's memory one that fits the kind of transfer."""
    device = next(model.parameters()).device
    if device.type != "cuda":
        device = torch.device("cuda", 0 if kind == "ipc" else workers)
        if not (device.index or 0) < torch.cuda.device_count():
            raise ValueError(
                f"transfer={kind} sends from {device}, because vLLM has the {workers} GPUs before it, and torch sees "
                f"{torch.cuda.device_count()}: give this process one more GPU (groups.*.gpus), or set transfer=shared"
            )
    check_sender(kind, device.index or 0, workers)
    return device


def trainer_info(kind: str, source: PolicySource, workers: int) -> TrainerInitInfo:
    """Return vLLM's settings of the trainer's side."""
    if kind == "shared":
        return SharedTrainerInit(rank=0)
    if kind == "ipc":
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
        from vllm.distributed.weight_transfer.packed_tensor import DEFAULT_PACKED_BUFFER_SIZE_BYTES

        # a tensor must fit whole: the embeddings of a 7B Qwen are larger than vLLM's 1 GiB
        largest = max(math.prod(meta.shape) * meta.dtype.itemsize for meta in source.metadata())
        size = max(largest, DEFAULT_PACKED_BUFFER_SIZE_BYTES)
        return IPCTrainerInitInfo(rank=0, packed=True, packed_buffer_size_bytes=size)
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return NCCLTrainerInitInfo("127.0.0.1", port, workers + 1, rank=0)


# shared memory -------------------------------------------------------------------------------------------


@dataclass
class SharedInit(WeightTransferInitInfo):  # type: ignore[misc]
    """Message to the workers: where the memory is, and how the weights lie in it."""

    path: str
    names: list[str]
    types: list[str]
    shapes: list[list[int]]


@dataclass
class SharedUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Message to the workers that the memory holds new weights."""


@dataclass
class SharedTrainerInit(TrainerInitInfo):  # type: ignore[misc]
    """Settings of the trainer's side."""

    backend: ClassVar[str] = SHARED


class SharedTrainer(TrainerWeightTransferEngine[SharedTrainerInit]):  # type: ignore[misc]
    """Trainer's side: writes weights into the memory."""

    init_info_cls = SharedTrainerInit
    views: list[Tensor]

    @classmethod
    def trainer_init(
        cls, init_info: SharedTrainerInit, *, client: Client, source: WeightSource | None = None
    ) -> SharedTrainer:
        """Lay out the memory, and have the workers map it. Its name is gone before this returns, so no crash leaves it."""
        assert isinstance(source, PolicySource)
        meta = source.metadata()
        layout = SharedInit(
            "", [m.name for m in meta], [str(m.dtype)[6:] for m in meta], [list(m.shape) for m in meta]
        )
        layout.path = shared_file(_size(layout))
        try:
            engine = cls(client=client, source=source)
            engine.views = mapped(layout)
            client.init_weight_transfer_engine(asdict(layout))
        finally:
            os.unlink(layout.path)
        return engine

    def send_weights(self) -> None:
        """Give the workers the source's weights, as they are now."""
        assert isinstance(self.source, PolicySource)
        self.source.write(self.views)
        self.client.start_weight_update()
        self.client.update_weights({})
        self.client.finish_weight_update()


class SharedEngine(WeightTransferEngine[SharedInit, SharedUpdate]):  # type: ignore[misc]
    """Worker's side: loads weights from the memory, layer by layer, as from a checkpoint."""

    init_info_cls = SharedInit
    update_info_cls = SharedUpdate
    weights: list[tuple[str, Tensor]]

    def init_transfer_engine(self, init_info: SharedInit) -> None:
        """Map the memory."""
        self.weights = list(zip(init_info.names, mapped(init_info), strict=True))

    def start_weight_update(self) -> None:
        """Prepare the model's layers to be loaded anew."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: JsonObject) -> None:
        """Load the weights."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: SharedUpdate) -> None:
        """Load the weights."""
        self.model.load_weights(iter(self.weights))

    def finish_weight_update(self) -> None:
        """Put the loaded layers in place."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Let go of the memory."""
        self.weights = []


def shared_file(size: int) -> str:
    """Make a file of this size, in memory where there is room for it, else in the folder of temporary files."""
    for folder in ("/dev/shm", None):
        with suppress(OSError):  # no such folder, or too little room: a write would end the process
            fd, path = tempfile.mkstemp(prefix="unitymas-weights-", dir=folder)
            try:
                os.posix_fallocate(fd, 0, size)
                return path
            except OSError:
                os.unlink(path)
            finally:
                os.close(fd)
    raise MemoryError(
        f"no room to share {size / 2**30:.2f} GiB of weights with vLLM, neither in /dev/shm nor in {tempfile.gettempdir()}; "
        "make room, or name another folder by TMPDIR"
    )


def mapped(layout: SharedInit) -> list[Tensor]:
    """Map the memory, as one tensor for each weight."""
    if not os.path.isfile(layout.path):
        raise FileNotFoundError(
            f"{layout.path} is not there: a worker on another machine shares no memory with the learner. "
            "Set engine_options.transfer to nccl, or to files in a folder that both see"
        )
    buffer = torch.from_file(layout.path, shared=True, size=_size(layout), dtype=torch.uint8)
    views, begin = [], 0
    for kind, shape in zip(layout.types, layout.shapes, strict=True):
        dtype = getattr(torch, kind)
        length = torch.Size(shape).numel() * dtype.itemsize
        views.append(buffer[begin : begin + length].view(dtype).view(shape))
        begin += -(-length // ALIGNED) * ALIGNED
    return views


def _size(layout: SharedInit) -> int:
    lengths = (
        torch.Size(shape).numel() * getattr(torch, kind).itemsize
        for kind, shape in zip(layout.types, layout.shapes, strict=True)
    )
    return sum(-(-length // ALIGNED) * ALIGNED for length in lengths)


# in the workers ------------------------------------------------------------------------------------------


class CheckedShared(Completeness, SharedEngine):
    """Worker's side of `shared`, which refuses an update that is not complete."""


class CheckedIPC(Completeness, IPCWeightTransferEngine):  # type: ignore[misc]
    """Worker's side of `ipc`, which refuses an update that is not complete."""


class CheckedNCCL(Completeness, NCCLWeightTransferEngine):  # type: ignore[misc]
    """Worker's side of `nccl`, which refuses an update that is not complete."""


class WeightLoader:
    """An extension of vLLM's workers: they load the weights of a directory while they run, and forget failed updates."""

    model_runner: GPUModelRunner
    vllm_config: VllmConfig
    _weight_update_active: bool

    def load_from(self, folder: str, exact: bool) -> None:
        """Load a model directory. `exact`: the model is of our own decoder, whose weights are known one by one."""
        model = self.model_runner.get_model()
        arrivals = Arrivals(model, self.vllm_config, exact=exact)
        with arrivals.recorded():
            self.model_runner.reload_weights(weights_path=folder)
        arrivals.check()
        pack_head(model)

    def forget_update(self) -> None:
        """End an update that failed, so that another one can begin."""
        self._weight_update_active = False
        forget_update(self.model_runner.get_model(), self.vllm_config)


def register() -> None:
    """Make the transfers known to vLLM's factories, once in a process."""
    for kind, engine in WORKERS.items():
        with suppress(ValueError):
            WeightTransferEngineFactory.register_engine(backend_of(kind), engine)
    with suppress(ValueError):
        WeightTransferTrainerFactory.register_engine(SHARED, SharedTrainer)


def backend_of(transfer: str) -> str:
    """Return the name under which vLLM knows the worker's side of a transfer."""
    return f"unitymas-{transfer}"


WORKERS = {"shared": CheckedShared, "ipc": CheckedIPC, "nccl": CheckedNCCL}
register()
