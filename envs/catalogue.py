"""The environments that come with unitymas, by id."""

from __future__ import annotations

from typing import Any

from .registry import register

HERE = __package__
ROOT = HERE.rpartition(".")[0]
RETRIEVE = {"retrieve": f"{HERE}.tools.defaults:retrieve"}
QA = {"kind": "qa", "tools": RETRIEVE, "headline": "f1", "success": "em"}
FORMAT = f"{ROOT}.rewards.rules:FormatReward"


def register_all() -> None:
    """Register all of them."""
    mask: dict[str, Any] = {
        **QA,
        "workflow": f"{HERE}.workflows.mask:Mask",
        "expert": f"{HERE}.workflows.mask:expert",
        "reward": (f"{ROOT}.rewards.mask:MaskCredit", FORMAT),
        "description": "M-ASK: plan, then search, summarise, update and answer in turns, until the searcher ends",
    }
    register("mask-hotpotqa", dataset="hotpotqa", **mask)
    register("mask-nq", dataset="nq", **{**mask, "kind": "qa-single"})
