"""The routed M-ASK: what is open when, what the desk shows, what calls cost."""

import pytest

import unitymas
from unitymas.envs.core.drivers import play
from unitymas.envs.workflows.mask import Step, steps_in, told
from unitymas.envs.workflows.mask_router import MOVES, STOP, Desk
from unitymas.rewards.routing import CallCost

ROWS = [{"id": "t", "question": "Who made The Door?", "answers": ["Ann Lee"]}]
SAID = {
    "searcher": "<search>door</search>",
    "summarizer": "<evidence>Ann Lee</evidence>",
    "updater": "<add>t1</add>",
    "answerer": "<final_answer>Ann Lee</final_answer>",
    "planner": "<q1>who</q1><a1>unknown</a1><final_answer>Ann</final_answer>",
}


def routed(*moves, **make):
    """An episode whose router says these moves."""
    env = unitymas.make("mask-router-hotpotqa", tasks=ROWS, tools={"retrieve": lambda query, k: []}, **make)
    order = iter(moves)
    team = unitymas.Team({"*": lambda agent, messages: SAID.get(agent) or next(order)}).bind(env.arena.roles)
    return play(env.arena.start(env.arena.task("t"), 0), team, env.arena)


def test_a_move_is_open_when_what_it_needs_is_there():
    desk = Desk("q")
    assert desk.open() == ("planner", "searcher", "answerer")
    desk.query = "x"
    assert "retrieve" in desk.open() and "summarizer" not in desk.open()
    desk.passages = ({"id": "1", "title": "t", "text": "x"},)
    desk.evidence = desk.answer = "y"
    assert desk.open() == MOVES and STOP in MOVES


def test_a_prompt_gives_back_the_steps_that_it_tells():
    steps = [Step("Who made a | b?", "unknown"), Step("Where: t3", "Oslo: the north")]
    assert steps_in(told(steps)) == steps
    assert steps_in(Desk("q", steps, query="a | b").shown()["steps"]) == steps
    assert steps_in(told([])) == []


def test_the_shortest_way_and_what_it_costs():
    trace = routed("searcher", "answerer", "stop")
    assert trace.outcome["answer"] == "Ann Lee" and trace.outcome["stopped"]
    assert trace.metrics["calls"] == 2 and trace.metrics["router_calls"] == 3 and trace.metrics["f1"] == 1
    router = [trace.rewards(n.id) for n in trace.acts("router")]
    assert [r["calls"] for r in router] == [
        pytest.approx(-0.025),
        pytest.approx(-0.025),
        pytest.approx(-0.005),
    ]
    assert [r.get("outcome") for r in router] == [None, None, 1.0]  # the outcome once, on the last move


def test_a_closed_or_malformed_move_moves_nobody_and_costs_a_turn():
    trace = routed("retrieve", "stop", "dance", "answerer", "stop", max_moves=5)
    assert [n.role or n.tool for n in trace.nodes if n.role != "router"] == ["answerer"]
    assert trace.metrics["router_calls"] == 5 and trace.metrics["format_ok"] < 1


def test_out_of_moves_hands_in_the_latest_answer():
    trace = routed("answerer", "searcher", "searcher", max_moves=3)
    assert trace.outcome["answer"] == "Ann Lee" and not trace.outcome["stopped"]


def test_a_cost_must_not_pay():
    with pytest.raises(ValueError, match="must not be negative"):
        CallCost(each=-1.0)
