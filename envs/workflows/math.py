"""Math by four roles in a fixed order: solver -> verifier -> refiner -> finalizer.

Each role acts once, and no episode ends early. Each role sees the unchanged replies of the roles before it. Only the
finalizer's `<final_answer>` is graded.
"""

from __future__ import annotations

from ...agents.policies import Call
from ...agents.roles import Role, Tags
from ..core.tasks import MATH
from ..core.workflow import Episode, Outcome, Workflow
from .parts import PROMPTS

STATUS = ("correct", "incorrect", "uncertain")
ERRORS = ("none", "calculation", "reasoning", "missing_case", "misread_problem", "format", "unclear")

ROLES = (
    Role("solver", reply=Tags("solution", "answer"), sees=("problem",)),
    Role(
        "verifier",
        reply=Tags("status", "error_type", "feedback", status=STATUS, error_type=ERRORS),
        sees=("problem", "solution"),
    ),
    Role("refiner", reply=Tags("refined_solution", "answer"), sees=("problem", "solution", "feedback")),
    Role("finalizer", reply=Tags("final_solution", "final_answer"), sees=("problem", "solution")),
)


class Math(Workflow):
    """Team of four roles, which act one after the other."""

    roles = ROLES
    schema = MATH
    prompts = PROMPTS / "math.yaml"

    async def run(self, ep: Episode) -> Outcome:
        """Play one episode."""
        problem = ep.task.problem
        solved = await ep.act("solver", {"problem": problem})
        checked = await ep.act("verifier", {"problem": problem, "solution": solved.text})
        seen = {"problem": problem, "solution": solved.text, "feedback": checked.text}
        refined = await ep.act("refiner", seen)
        final = await ep.act("finalizer", {"problem": problem, "solution": refined.text})
        value = final.value if final.ok else {}
        return Outcome(answer=value.get("final_answer", ""))


def expert(call: Call) -> str:
    """Return the task's own solution, which each role confirms."""
    reference = call.task.reference
    answer, steps = reference["answer"], reference.get("solution") or f"The answer is {reference['answer']}."
    return {
        "solver": f"<solution>{steps}</solution><answer>{answer}</answer>",
        "verifier": "<status>correct</status><error_type>none</error_type><feedback>ok</feedback>",
        "refiner": f"<refined_solution>{steps}</refined_solution><answer>{answer}</answer>",
        "finalizer": f"<final_solution>{steps}</final_solution><final_answer>{answer}</final_answer>",
    }[call.role]
