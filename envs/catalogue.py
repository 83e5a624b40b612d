"""Catalogue of the environments that come with unitymas."""

from __future__ import annotations

from collections.abc import Callable

Register = Callable[..., object]

HERE = __package__
ROOT = HERE.rpartition(".")[0]
FORMAT = f"{ROOT}.rewards.rules:FormatReward"
RETRIEVE = {"retrieve": f"{HERE}.tools.defaults:retrieve"}
VERIFY = {"verify": f"{HERE}.tools.defaults:verify"}
QA: dict[str, object] = {
    "kind": "qa",
    "tools": RETRIEVE,
    "headline": "f1",
    "success": "em",
    "reward": (f"{ROOT}.rewards.outcome:AnswerF1", FORMAT),
}
MATH: dict[str, object] = {
    "kind": "math",
    "headline": "accuracy",
    "reward": (f"{ROOT}.rewards.outcome:Accuracy", FORMAT),
}
CODE: dict[str, object] = {
    "kind": "code",
    "tools": VERIFY,
    "headline": "pass_rate",
    "success": "all_passed",
    "reward": (f"{ROOT}.rewards.outcome:CodeCredit", FORMAT),
}


def register_all(register: Register) -> None:
    """Call `register` for every environment."""
    _search(register)
    _tool_calling(register)
    _rag(register)
    _code_and_math(register)
    _peers(register)
    _games(register)


def _flow(module: str, name: str) -> dict[str, object]:
    return {"workflow": f"{HERE}.workflows.{module}:{name}", "expert": f"{HERE}.workflows.{module}:expert"}


def _search(register: Register) -> None:
    mask: dict[str, object] = {
        **QA,
        **_flow("mask", "Mask"),
        "reward": (f"{ROOT}.rewards.mask:MaskCredit", FORMAT),
        "description": "M-ASK: plan, then search, summarise, update and answer in turns, until the searcher ends",
    }
    register("mask-hotpotqa", dataset="hotpotqa", **mask)
    register("mask-musique", dataset="musique", **mask)
    register("mask-nq", dataset="nq", **{**mask, "kind": "qa-single"})
    register(
        "mask-router-hotpotqa",
        dataset="hotpotqa",
        **{
            **QA,
            **_flow("mask_router", "MaskRouter"),
            "reward": (f"{ROOT}.rewards.routing:RoutedF1", f"{ROOT}.rewards.routing:CallCost", FORMAT),
            "description": "M-ASK whose router chooses who acts next, when to retrieve, and when to stop",
        },
    )


def _tool_calling(register: Register) -> None:
    fields: dict[str, object] = {
        **QA,
        **_flow("tool_qa", "ToolQa"),
        "reward": (f"{ROOT}.rewards.outcome:AnswerEM", FORMAT),
        "headline": "em",
        "description": "one agent that calls the search tool by itself, and answers when it knows enough",
    }
    register("tool-qa-hotpotqa", dataset="hotpotqa", **fields)
    register("tool-qa-nq", dataset="nq", **{**fields, "kind": "qa-single"})


def _rag(register: Register) -> None:
    shapes = {
        "rag": ("Rag", "decompose the question, retrieve for each part, answer"),
        "rag-evidence": ("RagEvidence", "decompose, retrieve, three evidence agents side by side, answer"),
        "rag-summary": ("RagSummary", "decompose, retrieve, one summary of all parts, answer"),
        "rag-rewrite": ("RagRewrite", "rewrite the question as a query, retrieve, select, answer"),
    }
    for prefix, (name, description) in shapes.items():
        fields: dict[str, object] = {**QA, **_flow("rag", name), "description": description}
        register(f"{prefix}-hotpotqa", dataset="hotpotqa", **fields)
        register(f"{prefix}-nq", dataset="nq", **{**fields, "kind": "qa-single"})
    one_search = {"max_queries": 1, "top_k": 1}  # a question is asked on one paragraph, in its own words
    rag = {**QA, **_flow("rag", "Rag"), "config": one_search, "kind": "qa-single"}
    register(
        "rag-squad", dataset="squad", description="turn the question into one search, read, answer", **rag
    )


def _code_and_math(register: Register) -> None:
    code = {**CODE, **_flow("code", "Code"), "description": "reflective code: plan, code, verify, reflect"}
    math = {**MATH, **_flow("math", "Math"), "description": "solve, verify, refine, finalise"}
    register("code-deepcoder", dataset="deepcoder", **code)
    register("code-mbpp", dataset="mbpp", **code)
    register("math-deepscaler", dataset="deepscaler", **math)
    register("math-gsm8k", dataset="gsm8k", **math)


def _peers(register: Register) -> None:
    solo = (f"{ROOT}.rewards.outcome:OwnAccuracy", FORMAT)
    register(
        "solver-verifier-deepscaler",
        dataset="deepscaler",
        **{
            **MATH,
            **_flow("peers", "SolverVerifier"),
            "reward": (f"{ROOT}.rewards.outcome:Accuracy", f"{ROOT}.rewards.outcome:DrMasFormat"),
            "description": "Dr. MAS: solve, verify, solve again if rejected",
        },
    )
    register(
        "search-router-hotpotqa",
        dataset="hotpotqa",
        **{
            **QA,
            **_flow("peers", "SearchRouter"),
            "reward": (f"{ROOT}.rewards.outcome:AnswerEM", f"{ROOT}.rewards.outcome:SearchFormat"),
            "headline": "em",
            "description": "Dr. MAS: a verifier routes to the searcher or to the answerer",
        },
    )
    for name, workflow, description in (
        ("debate", "Debate", "MARTI: debaters side by side in rounds, majority vote"),
        ("chain", "Chain", "MARTI: generate, verify, refine, majority vote"),
    ):
        fields = {**MATH, **_flow("peers", workflow), "reward": solo, "description": description}
        register(f"{name}-deepscaler", dataset="deepscaler", **fields)
    register(
        "coder-tester-deepcoder",
        dataset="deepcoder",
        **{
            **CODE,
            **_flow("coder_tester", "CoderTester"),
            "reward": (f"{ROOT}.rewards.outcome:CoderTesterCredit", FORMAT),
            "description": "Stronger-MAS: one writes the program, the other the tests",
        },
    )


def _games(register: Register) -> None:
    games = {
        "planpath": "walk a grid with walls to the goal",
        "sokoban": "push boxes onto goals",
        "sudoku": "fill a grid from its clues",
        "blocksworld": "restack blocks",
        "eight-queens": "place queens that do not attack each other",
    }
    teams: dict[str, tuple[str, str, tuple[str, ...]]] = {
        "solo": ("Solo", "one planner", ("world",)),
        "duo": ("Duo", "a proposer and a critic", ("world",)),
        "tool": ("ToolTeam", "a coder whose program suggests, a planner who decides", ("world", "python")),
    }
    for game, what in games.items():
        for team, (workflow, who, tools) in teams.items():
            register(
                f"{game}-{team}",
                workflow=f"{HERE}.workflows.games.teams:{workflow}",
                config={"game": game},
                reward=(f"{ROOT}.rewards.games:GameCredit", FORMAT),
                tasks="make_tasks",
                tools={name: f"{HERE}.workflows.games.simulator:{name}" for name in tools},
                expert=f"{HERE}.workflows.games.teams:expert",
                headline="solved",
                description=f"{what}: {who}",
            )
