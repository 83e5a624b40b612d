"""Each published allocation against tables computed by hand, edge cases included."""

import pytest

import unitymas
from unitymas.envs.core.drivers import play
from unitymas.envs.core.execution import Budget
from unitymas.envs.tools.tool import Result, Tool
from unitymas.rewards import rules, shaping

QA = [{"id": "t", "question": "Who made The Door?", "answers": ["Ann Lee"]}]
MATH = [{"id": "m", "problem": "2 + 2?", "answer": "4"}]
CODE = [
    {
        "id": "c", "problem": "Double it.", "solution": "print(2*int(input()))",
        "visible_tests": [{"input": "1", "output": "2"}], "hidden_tests": [{"input": "3", "output": "6"}] * 4,
    }
]  # fmt: skip


def episode(id, rows, script, **make):
    """Play one scripted episode; `script` maps an agent to its replies in order."""
    env = unitymas.make(id, tasks=rows, **make)
    said = {agent: iter(replies) for agent, replies in script.items()}
    team = unitymas.Team({"*": lambda agent, messages: next(said[agent])}).bind(env.arena.roles)
    return play(env.arena.start(env.arena.task(rows[0]["id"]), 0), team, env.arena)


def table(trace):
    """(agent, turn) -> {component: amount}, zeros left out."""
    rows = {}
    for node in trace.acts():
        rows[node.agent, node.turn] = {k: pytest.approx(v) for k, v in trace.rewards(node.id).items() if v}
    return rows


def no_docs(query, k):
    return []


# M-ASK ------------------------------------------------------------------------------------------------

PLAN = "<q1>Who made The Door?</q1><a1>unknown</a1><final_answer>Ann</final_answer>"


def mask(script, **make):
    return episode("mask-hotpotqa", QA, script, tools={"retrieve": no_docs}, **make)


def test_mask_pays_absolute_f1_to_plan_and_answers_and_gains_to_the_rest():
    trace = mask(
        {
            "planner": [PLAN],
            "answerer": ["<final_answer>Bob</final_answer>", "<final_answer>Ann</final_answer>", "<final_answer>Ann Lee</final_answer>"],
            "searcher": ["<search>door</search>", "<search>lee</search>", "<end>"],
            "summarizer": ["<evidence>Ann</evidence>", "<evidence>Ann Lee</evidence>"],
            "updater": ["<update>t1</update>", "<add>t2</add>"],
        }
    )  # fmt: skip
    half = 2 / 3  # F1 of "Ann" against "Ann Lee"
    assert table(trace) == {
        ("planner", 0): {"plan": half},
        ("answerer", 0): {},
        ("searcher", 1): {"gain": half}, ("summarizer", 1): {"gain": half}, ("updater", 1): {"gain": half},
        ("answerer", 1): {"answer": half},
        ("searcher", 2): {"gain": 1 - half}, ("summarizer", 2): {"gain": 1 - half}, ("updater", 2): {"gain": 1 - half},
        ("answerer", 2): {"answer": 1.0},
        ("searcher", 3): {},
    }  # fmt: skip
    assert trace.metrics["f1"] == 1.0 and trace.metrics["ended_by_searcher"] == 1.0
    assert trace.metrics["updates"] == trace.metrics["adds"] == 1.0


def test_mask_end_at_once_earns_format_only():
    trace = mask(
        {"planner": [PLAN], "answerer": ["<final_answer>Ann Lee</final_answer>"], "searcher": ["<end>"]}
    )
    assert table(trace) == {
        ("planner", 0): {"plan": 2 / 3}, ("answerer", 0): {"answer": 1.0}, ("searcher", 1): {},
    }  # fmt: skip
    assert len(trace.acts()) == 3 and trace.ended == "terminal"


def test_mask_malformed_replies_cost_one_each_and_the_episode_goes_on():
    trace = mask(
        {
            "planner": ["no tags"], "answerer": ["Ann Lee", "Ann Lee"], "searcher": ["<end> I am done"],
        }
    )  # fmt: skip
    assert table(trace) == {
        ("planner", 0): {"format": -1.0},
        ("answerer", 0): {"answer": 1.0, "format": -1.0},
        ("searcher", 1): {"format": -1.0},  # neither a search nor a clean end: it ends, and costs
    }
    assert trace.outcome["ended_by_searcher"]


def test_mask_losing_the_answer_costs_the_turn_that_lost_it():
    trace = mask(
        {
            "planner": [PLAN], "answerer": ["<final_answer>Ann Lee</final_answer>", "<final_answer>Bob</final_answer>"],
            "searcher": ["<search>x</search>"], "summarizer": ["No useful information"], "updater": ["<update>t9</update>"],
        },
        max_turns=1,
    )  # fmt: skip
    assert table(trace)["searcher", 1] == {"gain": -1.0} and table(trace)["updater", 1] == {"gain": -1.0}
    assert (
        "\nt2: x | No useful information\n" in trace.acts("answerer")[1].messages[-1]["content"]
    )  # t9: appended


def test_mask_truncation_pays_what_is_known():
    trace = mask(
        {
            "planner": [PLAN],
            "answerer": ["<final_answer>Ann Lee</final_answer>"],
            "searcher": ["<search>x</search>"],
        },
        budget=Budget(requests=4),
    )
    assert trace.ended == "truncated" and table(trace)["answerer", 0] == {"answer": 1.0}
    assert trace.metrics["f1"] == 0.0  # no outcome was reached


# RAG, math ----------------------------------------------------------------------------------------------


def test_rag_gives_the_outcome_to_every_act_in_full_and_format_apart():
    trace = episode(
        "rag-evidence-nq", QA,
        {
            "decomposer": ['{"sub_queries": ["one", "", "two"]}'], "answerer": ["<final_answer>Ann</final_answer>"],
            "evidence_1": ["<sub_evidence>x</sub_evidence>"], "evidence_2": ["nothing"],
        },
        tools={"retrieve": no_docs},
    )  # fmt: skip
    outcome = {"outcome": 2 / 3}
    assert table(trace) == {
        ("decomposer", 0): outcome, ("evidence_1", 0): outcome,
        ("evidence_2", 0): {**outcome, "format": -1.0}, ("answerer", 0): outcome,
    }  # fmt: skip


def test_rag_without_a_legal_decomposition_answers_from_the_question():
    script = {"decomposer": ["what?"], "answerer": ["<final_answer>Ann Lee</final_answer>"]}
    trace = episode("rag-hotpotqa", QA, script, tools={"retrieve": no_docs})
    assert [n.kind for n in trace.nodes] == ["act", "act"]
    assert table(trace) == {
        ("decomposer", 0): {"outcome": 1.0, "format": -1.0},
        ("answerer", 0): {"outcome": 1.0},
    }


def test_math_pays_accuracy_to_all_four():
    script = {
        "solver": ["<solution>s</solution><answer>5</answer>"],
        "verifier": ["<status>Incorrect</status><error_type>calculation</error_type><feedback>f</feedback>"],
        "refiner": ["<refined_solution>s</refined_solution>"],
        "finalizer": ["<final_solution>s</final_solution><final_answer>4</final_answer>"],
    }
    trace = episode("math-deepscaler", MATH, script)
    one = {"outcome": 1.0}
    assert table(trace) == {
        ("solver", 0): one, ("verifier", 0): one, ("refiner", 0): {**one, "format": -1.0}, ("finalizer", 0): one,
    }  # fmt: skip


def test_math_without_a_legal_final_answer_is_wrong():
    script = {
        "solver": ["<solution>s</solution><answer>4</answer>"],
        "verifier": ["<status>maybe</status><error_type>none</error_type><feedback>f</feedback>"],
        "refiner": ["<refined_solution>s</refined_solution><answer>4</answer>"], "finalizer": ["4"],
    }  # fmt: skip
    trace = episode("math-deepscaler", MATH, script)
    assert trace.metrics["accuracy"] == 0.0
    assert table(trace)["verifier", 0] == {"format": -1.0} and table(trace)["solver", 0] == {}


# code -----------------------------------------------------------------------------------------------------


def judge(rates):
    """A verifier with given hidden pass rates; the visible test passes when the rate is 1."""
    left = iter(rates)

    def verify(program, fn_name):
        rate = next(left)
        shown = {"passed": int(rate == 1), "total": 1, "verdicts": [], "first_failure": ""}
        return Result(shown, {"pass_rate": rate})

    return Tool(verify, name="verify")


def code(rates, turns):
    script = {
        "planner": ["<pseudocode>p</pseudocode>"] * turns, "coder": ["<code>c</code>"] * turns,
        "reflector": ["<reflection>r</reflection>"] * turns,
    }  # fmt: skip
    return episode("code-deepcoder", CODE, script, tools={"verify": judge(rates)})


def test_code_solved_at_turn_0_has_no_reflector():
    trace = code([1.0], 1)
    assert table(trace) == {("planner", 0): {"progress": 1.0}, ("coder", 0): {"progress": 1.0}}


def test_code_pays_differences_and_the_reflector_for_the_next_program():
    trace = code([0.25, 0.75, 0.5], 3)
    assert table(trace) == {
        ("planner", 0): {"progress": 0.25}, ("coder", 0): {"progress": 0.25}, ("reflector", 0): {"progress": 0.5},
        ("planner", 1): {"progress": 0.5}, ("coder", 1): {"progress": 0.5}, ("reflector", 1): {"progress": -0.25},
        ("planner", 2): {"progress": -0.25}, ("coder", 2): {"progress": -0.25},
    }  # fmt: skip
    assert trace.metrics["pass_rate"] == 0.5 and trace.metrics["all_passed"] == 0.0
    coder = [sum(trace.rewards(n.id).values()) for n in trace.acts("coder")]
    assert sum(coder) == pytest.approx(0.5)  # telescopes to the last pass rate


def test_code_hidden_tests_reach_nobody():
    trace = code([0.25, 1.0], 2)
    seen = " ".join(m["content"] for n in trace.acts() for m in n.messages)
    assert "3 -> 6" not in seen and "1 -> 2" in seen


# the peers' -------------------------------------------------------------------------------------------------


def test_a_malformed_verdict_is_a_rejection():
    script = {"solver": ["\\boxed{3}", "\\boxed{4}"], "verifier": ["approved!"]}
    trace = episode("solver-verifier-deepscaler", MATH, script)
    assert len(trace.acts("solver")) == 2 and trace.metrics["accuracy"] == 1.0
    assert table(trace)["verifier", 0] == {"outcome": 1.0, "format": -0.1}


def test_search_router_always_answers():
    script = {
        "verifier": ["<verify>no</verify>"] * 3, "searcher": ["<search>x</search>"] * 3,
        "answerer": ["<final_answer>Ann Lee</final_answer>"],
    }  # fmt: skip
    trace = episode("search-router-hotpotqa", QA, script, tools={"retrieve": no_docs})
    assert trace.outcome == {"answer": "Ann Lee", "searches": 3}


def test_debate_pays_each_for_its_own_and_the_majority_counts():
    script = {
        "debater_1": ["\\boxed{4}", "\\boxed{4}"],
        "debater_2": ["\\boxed{5}", "\\boxed{4}"],
        "debater_3": ["?", "\\boxed{5}"],
    }
    trace = episode("debate-deepscaler", MATH, script)
    assert trace.metrics["accuracy"] == 1.0
    assert table(trace)["debater_2", 0] == {} and table(trace)["debater_2", 1] == {"own": 1.0}
    assert table(trace)["debater_3", 0] == {"format": -1.0}


def test_tester_earns_its_golden_rate_and_the_coders_pass_rate():
    left = iter(
        [
            ({"passed": 0, "total": 2}, {"pass_rate": 0.5, "golden": 0.5}),
            ({"passed": 1, "total": 1}, {"pass_rate": 1.0, "golden": 1.0}),
        ]
    )

    def verify(program, fn_name, tests):
        shown, kept = next(left)
        return Result({**shown, "verdicts": [], "first_failure": ""}, kept)

    tests = '{"tests": [{"input": "1", "output": "2"}]}'
    script = {"coder": ["<code>c</code>"] * 2, "tester": [tests] * 2}
    trace = episode("coder-tester-deepcoder", CODE, script, tools={"verify": Tool(verify, name="verify")})
    assert table(trace) == {
        ("coder", 0): {"passes": 1.0}, ("tester", 0): {"golden": 0.5, "passes": 0.5},
        ("coder", 1): {"passes": 2.0}, ("tester", 1): {"golden": 1.0, "passes": 1.0},
    }  # fmt: skip


# rules of one's own ---------------------------------------------------------------------------------------

CHAIN = {"generator": ["\\boxed{4}"], "verifier": ["\\boxed{4}"], "refiner": ["\\boxed{5}"]}


@pytest.mark.parametrize(
    ("rule", "amounts"),
    [
        (lambda trace, task: 2, [2.0, 2.0, 2.0]),
        (lambda trace, task: {"generator": 1.0, "refiner": -1.0}, [1.0, 0, -1.0]),
        (rules.TrajectoryReward(lambda trace, task: 3.0, share="split"), [1.0, 1.0, 1.0]),
        (rules.TrajectoryReward(lambda trace, task: 3.0, roles=("refiner",)), [0, 0, 3.0]),
        (rules.RoleReward({"verifier": lambda trace, task: 0.5}), [0, 0.5, 0]),
        (rules.TurnReward(lambda trace, node, task: float(node.value == "4")), [1.0, 1.0, 0]),
        (shaping.Mixed(lambda t, k: 1.0, lambda t, n, k: float(n.value == "4"), alpha={"refiner": 0.5}, beta=2.0), [3.0, 3.0, 0.5]),
        (shaping.Influence(lambda t, n, k: float(n.value == "4"), "margin", alpha=1.0), [0, 0, -1.0]),
        (shaping.Influence(lambda t, n, k: float(n.value == "4"), "quality", alpha=0.5), [0, 0.5, 0]),
        (shaping.Propagated(rules.RoleReward({"refiner": lambda trace, task: 1.0}), discount=0.5), [0.25, 0.5, 1.0]),
    ],
)  # fmt: skip
def test_rules(rule, amounts):
    trace = episode("chain-deepscaler", MATH, CHAIN, reward=[rule])
    assert [sum(trace.rewards(n.id).values()) for n in trace.acts()] == [pytest.approx(a) for a in amounts]


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        (lambda trace, task: float("nan"), "must be a finite number"),
        (lambda trace, task: "a lot", "give a number, a dict by node, agent or role, or Credits"),
        (lambda trace, task: {"nobody": 1}, "names 'nobody'"),
        (lambda trace, task: [("9.9", "x", 1.0)], "credits node '9.9'"),
        (lambda trace, task: [1.0], "is no Credit"),
    ],
)
def test_bad_rewards_name_themselves(rule, says):
    with pytest.raises(ValueError, match=says):
        episode("chain-deepscaler", MATH, CHAIN, reward=[rule])


def test_rescoring_needs_no_generation():
    env = unitymas.make("chain-deepscaler", tasks=MATH, reward=[lambda trace, task: 1.0])
    trace = episode("chain-deepscaler", MATH, CHAIN)
    env.arena.rescore(trace)
    assert {c.amount for c in trace.credits} == {1.0}
