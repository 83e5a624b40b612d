"""Failures are told apart by type: what the team did, what nobody did, and where."""

from __future__ import annotations

import pickle

import pytest

import unitymas
from unitymas.agents.basics.failures import (
    Boundary,
    Ended,
    Failure,
    Infrastructure,
    ModelFailure,
    ToolError,
    WorkflowError,
    is_transient,
)
from unitymas.agents.remote import RemoteError
from unitymas.envs.core import execution, ledger, workflow
from unitymas.envs.tools.retrieval.serving.pool import RetrieverUnavailable
from unitymas.envs.tools.sandbox.runner import SandboxError


@pytest.mark.parametrize(
    ("kind", "boundary", "transient"),
    [
        (ToolError, Boundary.TOOL, False),
        (WorkflowError, Boundary.ENVIRONMENT, False),
        (ledger.RewardError, Boundary.REWARD, False),
        (Infrastructure, Boundary.SERVER, True),
        (SandboxError, Boundary.SERVER, True),
        (RetrieverUnavailable, Boundary.SERVER, True),
        (ModelFailure, Boundary.POLICY, True),
        (RemoteError, Boundary.POLICY, True),
    ],
)
def test_every_kind_says_where_and_whose(kind: type[Failure], boundary: Boundary, transient: bool) -> None:
    assert issubclass(kind, Failure) and kind.boundary is boundary
    # the text claims the opposite, and changes nothing
    assert is_transient(kind("ToolError: the server timed out, 503")) is transient


def test_errors_of_other_code_are_nobodys_weather() -> None:
    assert not is_transient(None) and not is_transient(RuntimeError("Infrastructure: the server is down"))


def test_there_is_one_of_each() -> None:
    assert execution.Ended is Ended and workflow.ToolError is unitymas.ToolError is ToolError
    assert unitymas.Infrastructure is Infrastructure
    assert pickle.loads(pickle.dumps(Ended.ERROR)) is Ended.ERROR


def test_a_failed_episode_is_plain_json_and_names_its_boundary() -> None:
    def down(query: str, k: int = 3) -> list[object]:
        raise Infrastructure("nobody there")

    def fails(agent: str, messages: object) -> str:
        raise ModelFailure("no answer")

    (tool,) = unitymas.rollout("rag-nq", "scripted", tasks=1, tools={"retrieve": down}, data="mini")
    (policy,) = unitymas.rollout("rag-nq", fails, tasks=1, data="mini")
    assert [(t.ended, t.reason, type(t.to_dict()["reason"])) for t in (tool, policy)] == [
        (Ended.ERROR, Boundary.TOOL, str),
        (Ended.ERROR, Boundary.POLICY, str),
    ]
