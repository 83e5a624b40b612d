"""The environments that come with unitymas, by id."""

from __future__ import annotations

from typing import Any

from .registry import register

HERE = __package__
ROOT = HERE.rpartition(".")[0]
FORMAT = f"{ROOT}.rewards.rules:FormatReward"
RETRIEVE = {"retrieve": f"{HERE}.tools.defaults:retrieve"}
VERIFY = {"verify": f"{HERE}.tools.defaults:verify"}
QA: dict[str, Any] = {
    "kind": "qa",
    "tools": RETRIEVE,
    "headline": "f1",
    "success": "em",
    "reward": (f"{ROOT}.rewards.outcome:AnswerF1", FORMAT),
}
MATH: dict[str, Any] = {
    "kind": "math",
    "headline": "accuracy",
    "reward": (f"{ROOT}.rewards.outcome:Accuracy", FORMAT),
}
CODE: dict[str, Any] = {
    "kind": "code",
    "tools": VERIFY,
    "headline": "pass_rate",
    "success": "all_passed",
    "reward": (f"{ROOT}.rewards.outcome:CodeCredit", FORMAT),
}


def register_all() -> None:
    """Register all of them."""
    _search()
    _rag()
    _code_and_math()


def _flow(module: str, name: str) -> dict[str, Any]:
    return {"workflow": f"{HERE}.workflows.{module}:{name}", "expert": f"{HERE}.workflows.{module}:expert"}


def _search() -> None:
    mask: dict[str, Any] = {
        **QA,
        **_flow("mask", "Mask"),
        "reward": (f"{ROOT}.rewards.mask:MaskCredit", FORMAT),
        "description": "M-ASK: plan, then search, summarise, update and answer in turns, until the searcher ends",
    }
    register("mask-hotpotqa", dataset="hotpotqa", **mask)
    register("mask-musique", dataset="musique", **mask)
    register("mask-nq", dataset="nq", **{**mask, "kind": "qa-single"})


def _rag() -> None:
    shapes = {
        "rag": ("Rag", "decompose the question, retrieve for each part, answer"),
        "rag-evidence": ("RagEvidence", "decompose, retrieve, three evidence agents side by side, answer"),
        "rag-summary": ("RagSummary", "decompose, retrieve, one summary of all parts, answer"),
        "rag-rewrite": ("RagRewrite", "rewrite the question as a query, retrieve, select, answer"),
    }
    for prefix, (name, description) in shapes.items():
        fields: dict[str, Any] = {**QA, **_flow("rag", name), "description": description}
        register(f"{prefix}-hotpotqa", dataset="hotpotqa", **fields)
        register(f"{prefix}-nq", dataset="nq", **{**fields, "kind": "qa-single"})


def _code_and_math() -> None:
    register(
        "code-deepcoder",
        dataset="deepcoder",
        **{**CODE, **_flow("code", "Code"), "description": "reflective code: plan, code, verify, reflect"},
    )
    register(
        "math-deepscaler",
        dataset="deepscaler",
        **{**MATH, **_flow("math", "Math"), "description": "solve, verify, refine, finalise"},
    )
