"""Catalogue of the environments that come with unitymas."""

from __future__ import annotations

from collections.abc import Callable, Mapping

HERE = __package__
REWARDS = f"{HERE.rpartition('.')[0]}.rewards"
FORMAT = f"{REWARDS}.rules:FormatReward"
QA: Mapping[str, object] = {
    "kind": "qa",
    "tools": {"retrieve": f"{HERE}.tools.defaults:retrieve"},
    "headline": "f1",
    "success": "em",
    "reward": (f"{REWARDS}.outcome:AnswerF1", FORMAT),
}
MATH: Mapping[str, object] = {
    "kind": "math",
    "headline": "accuracy",
    "reward": (f"{REWARDS}.outcome:Accuracy", FORMAT),
}
CODE: Mapping[str, object] = {
    "kind": "code",
    "tools": {"verify": f"{HERE}.tools.defaults:verify"},
    "headline": "pass_rate",
    "success": "all_passed",
    "reward": (f"{REWARDS}.outcome:CodeCredit", FORMAT),
}
SINGLE_HOP = ("nq", "squad")
"""Data sets whose questions need one passage. The mini world has questions of this kind, too."""


def _reward(*rules: str, **fields: object) -> dict[str, object]:
    return {"reward": tuple(f"{REWARDS}.{rule}" for rule in rules), **fields}


TEAMS: tuple[tuple[str, tuple[str, ...], str, Mapping[str, object], str, Mapping[str, object]], ...] = (
    ("mask", ("hotpotqa", "musique", "nq"), "mask:Mask", QA,
     "M-ASK: plan, then search, summarise, update and answer in turns, until the searcher ends",
     _reward("mask:MaskCredit", "rules:FormatReward")),
    ("mask-router", ("hotpotqa",), "mask_router:MaskRouter", QA,
     "M-ASK whose router chooses who acts next, when to retrieve, and when to stop",
     _reward("routing:RoutedF1", "routing:CallCost", "rules:FormatReward")),
    ("tool-qa", ("hotpotqa", "nq"), "tool_qa:ToolQa", QA,
     "one agent that calls the search tool by itself, and answers when it knows enough",
     _reward("outcome:AnswerEM", "rules:FormatReward", headline="em")),
    ("rag", ("hotpotqa", "nq"), "rag:Rag", QA, "decompose the question, retrieve for each part, answer", {}),
    ("rag", ("squad",), "rag:Rag", QA, "turn the question into one search, read, answer",
     {"config": {"max_queries": 1, "top_k": 1}}),  # a question is asked on one paragraph, in its own words
    ("rag-evidence", ("hotpotqa", "nq"), "rag:RagEvidence", QA,
     "decompose, retrieve, three evidence agents side by side, answer", {}),
    ("rag-summary", ("hotpotqa", "nq"), "rag:RagSummary", QA,
     "decompose, retrieve, one summary of all parts, answer", {}),
    ("rag-rewrite", ("hotpotqa", "nq"), "rag:RagRewrite", QA,
     "rewrite the question as a query, retrieve, select, answer", {}),
    ("search-router", ("hotpotqa",), "peers:SearchRouter", QA,
     "Dr. MAS: a verifier routes to the searcher or to the answerer",
     _reward("outcome:AnswerEM", "outcome:SearchFormat", headline="em")),
    ("code", ("deepcoder", "mbpp"), "code:Code", CODE, "reflective code: plan, code, verify, reflect", {}),
    ("coder-tester", ("deepcoder",), "coder_tester:CoderTester", CODE,
     "Stronger-MAS: one writes the program, the other the tests",
     _reward("outcome:CoderTesterCredit", "rules:FormatReward")),
    ("math", ("deepscaler", "gsm8k"), "math:Math", MATH, "solve, verify, refine, finalise", {}),
    ("solver-verifier", ("deepscaler",), "peers:SolverVerifier", MATH,
     "Dr. MAS: solve, verify, solve again if rejected", _reward("outcome:Accuracy", "outcome:DrMasFormat")),
    ("debate", ("deepscaler",), "peers:Debate", MATH,
     "MARTI: debaters side by side in rounds, majority vote", _reward("outcome:OwnAccuracy", "rules:FormatReward")),
    ("chain", ("deepscaler",), "peers:Chain", MATH,
     "MARTI: generate, verify, refine, majority vote", _reward("outcome:OwnAccuracy", "rules:FormatReward")),
)  # fmt: skip
"""Teams on data sets: beginning of the id, data sets, workflow, fields of its kind, description, and fields that differ."""

GAMES = {
    "planpath": "walk a grid with walls to the goal",
    "sokoban": "push boxes onto goals",
    "sudoku": "fill a grid from its clues",
    "blocksworld": "restack blocks",
    "eight-queens": "place queens that do not attack each other",
}
GAME_TEAMS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "solo": ("Solo", "one planner", ("world",)),
    "duo": ("Duo", "a proposer and a critic", ("world",)),
    "tool": ("ToolTeam", "a coder whose program suggests, a planner who decides", ("world", "python")),
}


def register_all(register: Callable[..., object]) -> None:
    """Call `register` for every environment."""
    flows = f"{HERE}.workflows"
    for prefix, datasets, flow, kind, description, own in TEAMS:
        fields = {
            **kind,
            "expert": f"{flows}.{flow.partition(':')[0]}:expert",
            "description": description,
            **own,
        }
        for dataset in datasets:
            hops = {"kind": "qa-single"} if dataset in SINGLE_HOP else {}
            register(f"{prefix}-{dataset}", workflow=f"{flows}.{flow}", dataset=dataset, **{**fields, **hops})
    for game, what in GAMES.items():
        for team, (workflow, who, tools) in GAME_TEAMS.items():
            register(
                f"{game}-{team}",
                workflow=f"{flows}.games.teams:{workflow}",
                config={"game": game},
                reward=(f"{REWARDS}.games:GameCredit", FORMAT),
                tasks="make_tasks",
                tools={name: f"{flows}.games.simulator:{name}" for name in tools},
                expert=f"{flows}.games.teams:expert",
                headline="solved",
                description=f"{what}: {who}",
            )
