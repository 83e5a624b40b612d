"""The teams that play the games, and what they are paid."""

import itertools

import pytest

import unitymas
from unitymas.envs.core.tasks import TaskError
from unitymas.envs.core.trace import Trace
from unitymas.envs.core.workflow import WorkflowError
from unitymas.envs.workflows.games import GAMES
from unitymas.envs.workflows.games.game import tasks
from unitymas.envs.workflows.games.teams import GameTeam
from unitymas.rewards.games import SCALES, GameCredit, dense, waste

LINE = {"id": "line", "game": "planpath", "start": "P . . G\n. . . ."}
SMALL = {
    "planpath": {"side": 4, "walls": 0.2},
    "sokoban": {"side": 5, "boxes": 1, "carve": 15},
    "sudoku": {"side": 4, "empty": 3},
    "blocksworld": {"blocks": 3},
    "eight-queens": {"side": 4, "fixed": 1},
}


def script(**lines):
    """A team that says these lines, each role its own, the last one for ever."""
    left = {role: list(said) for role, said in lines.items()}

    def say(agent, messages):
        return left[agent].pop(0) if len(left[agent]) > 1 else left[agent][0]

    return say


def play(id, team, task=LINE, **how):
    return unitymas.rollout(id, team, tasks=[task], **how)[0]


def reachable(game, start):
    """Every state that moves lead to, with every turn there is from each: (state, moves, after, refused)."""
    turns, states = [], [start]
    seen = {start}
    for state in states:
        if game.solved(state):
            continue
        turns.append((state, (), state, False))
        for move in game.moves(state):
            after = game.play(state, move)
            turns.append((state, (move,), state if after is None else after, after is None))
            if after is not None and after not in seen:
                seen.add(after)
                states.append(after)
    return seen, turns


def pays_a_cycle(states, edges):
    """Whether any cycle of the graph has a positive sum (Bellman and Ford, all sources at once)."""
    best = dict.fromkeys(states, 0.0)
    for _ in range(len(states) + 1):
        changed = False
        for a, b, amount in edges:
            if best[a] + amount > best[b] + 1e-9:
                best[b] = best[a] + amount
                changed = True
        if not changed:
            return False
    return True


def starts(name, count):
    level = GAMES[name].level(SMALL[name])
    found = itertools.islice(tasks(GAMES[name], "train", level, 5), count)
    return [GAMES[name].parse(row["start"]) for row in found]


@pytest.mark.parametrize("name", GAMES)
def test_no_cycle_pays(name):
    """Over all states of small boards and every turn from each: the team's reward, and a mover's own besides."""
    game, scale = GAMES[name], SCALES[name]
    for start in starts(name, 2):
        states, turns = reachable(game, start)
        team = [
            (a, b, sum(dense(scale, game, a, b, max(1, len(moves)), refused).values()))
            for a, moves, b, refused in turns
        ]
        own = [
            (a, b, amount + scale.own * waste(game, a, moves, scale.most))
            for (a, b, amount), (_, moves, _, _) in zip(team, turns, strict=True)
        ]
        assert not pays_a_cycle(states, team) and not pays_a_cycle(states, own)
        assert all(scale.own * waste(game, a, moves, scale.most) <= 0 for a, moves, _, _ in turns)


def test_the_cycle_test_finds_the_published_faults():
    planpath, sokoban = GAMES["planpath"], GAMES["sokoban"]
    states, turns = reachable(planpath, starts("planpath", 1)[0])
    published = [
        (a, b, -0.01 - 0.99 * planpath.left(b) + planpath.left(a) - 0.1 * bad) for a, _, b, bad in turns
    ]
    assert pays_a_cycle(states, published)
    room = sokoban.parse("# # # # # # #\n# @ _ $ . _ #\n# _ _ _ _ _ #\n# _ _ _ _ _ #\n# # # # # # #")
    two = room._replace(goals=room.goals | {(3, 1)}, boxes=room.boxes | {(2, 2)})
    states, turns = reachable(sokoban, two)

    def on(state):
        return len(state.boxes & state.goals)

    paid = [(a, b, -0.01 + (on(b) > on(a)) * 1.0 - (on(b) < on(a)) * 0.5) for a, _, b, _ in turns]
    assert pays_a_cycle(states, paid)


def test_walking_to_and_fro_never_beats_the_shortest_path():
    straight = play("planpath-solo", script(planner=["right"]))
    waver = play("planpath-solo", script(planner=["right", "left"] * 6))
    total = [sum(credit.amount for credit in trace.credits) for trace in (straight, waver)]
    assert straight.metrics["solved"] == straight.metrics["optimal_ratio"] == 1.0
    assert total[0] > 0 > total[1] and waver.metrics["solved"] == 0.0


def test_rewards_by_hand():
    """Proposer: up (refused, corrected to right), then right (approved), then silence, then right (approved)."""
    trace = play(
        "planpath-duo",
        script(proposer=["up", "right", "?!", "right"], critic=["right", "approve", "approve", "approve"]),
    )
    got = [(act.role, trace.rewards(act.id)) for act in trace.acts()]
    moved = {"step": -0.01, "shaping": 1.0, "format": 0.0}
    assert got == [
        ("proposer", {**moved, "own": pytest.approx(-0.1)}),
        ("critic", {**moved, "own": pytest.approx(0.0)}),
        ("proposer", {**moved, "own": pytest.approx(0.0)}),
        ("critic", {**moved, "own": pytest.approx(0.0)}),
        ("proposer", {"step": -0.01, "own": pytest.approx(-0.1), "format": -1.0}),
        ("critic", {"step": -0.01, "own": pytest.approx(-0.1), "format": 0.0}),
        ("proposer", {**moved, "goal": 1.0, "own": pytest.approx(0.0)}),
        ("critic", {**moved, "goal": 1.0, "own": pytest.approx(0.0)}),
    ]
    assert trace.metrics == {
        "solved": 1.0, "steps": 4.0, "optimal_ratio": 0.75, "format_ok": 7 / 8, "score": 1.0,
    }  # fmt: skip


def test_refused_moves_and_failure():
    trace = play("planpath-solo", script(planner=["up"]), max_steps=2)
    assert [trace.rewards(act.id) for act in trace.acts()] == [
        {"step": -0.01, "invalid": -0.1, "own": pytest.approx(-0.1), "format": 0.0},
        {"step": -0.01, "invalid": -0.1, "own": pytest.approx(-0.1), "fail": -1.0, "format": 0.0},
    ]
    assert str(trace.ended) == "terminal" and trace.metrics["steps"] == 2.0
    assert "up was refused" in trace.acts()[1].messages[-1]["content"]


def test_weights_are_the_users_and_misspelt_ones_an_error():
    rich = play(
        "planpath-solo", script(planner=["right"]), reward=GameCredit(alpha=2.0, goal=5.0, shaping=0.0)
    )
    assert rich.rewards(rich.acts()[-1].id)["goal"] == 10.0
    with pytest.raises(TypeError, match="gaol"):
        GameCredit(gaol=1.0)


@pytest.mark.parametrize("name", GAMES)
@pytest.mark.parametrize("said", ["", "approve it", "yes", "<plan>approve</plan>", "APPROVE!", "up down"])
def test_malformed_replies_neither_move_nor_approve(name, said):
    expert = unitymas.make(f"{name}-duo").arena.expert

    class Expert:
        sees_reference = True

        def act(self, call):
            return expert(call)

    team = {"proposer": Expert(), "critic": lambda agent, messages: said}
    trace = unitymas.rollout(f"{name}-duo", team, tasks=1, max_steps=3)[0]
    assert {use.result["state"] for use in trace.uses("world")} == {trace.uses("world")[0].args["state"]}
    assert all(act.value is None for act in trace.acts("critic")) and trace.metrics["solved"] == 0.0


def test_plans_with_thought_and_their_limits():
    thought = "Right is free.\n<plan>right, right, right, right</plan>"
    trace = play("planpath-solo", script(planner=[thought]), moves=4)
    assert (
        trace.metrics["solved"] == 1.0 and trace.metrics["steps"] == 3.0
    )  # what follows the goal is not made
    for said in (
        thought + " or so",
        "<plan>right, right, right, right, right</plan>",
        "<plan>go</plan>",
        "right",
    ):
        assert not play("planpath-solo", script(planner=[said]), moves=4, max_steps=1).acts()[0].ok
    cut = play("planpath-solo", script(planner=[thought]), moves=4, max_steps=2)
    assert cut.metrics["steps"] == 2.0 and cut.metrics["solved"] == 0.0
    agreed = play("planpath-duo", script(proposer=[thought], critic=["Good. <plan>approve</plan>"]), moves=4)
    assert agreed.metrics["optimal_ratio"] == 1.0


def test_every_prompt_shows_the_board_as_it_is():
    trace = play("planpath-solo", script(planner=["right"]), prompts="short")
    boards = [act.messages[-1]["content"].partition("\n\n")[0] for act in trace.acts()]
    assert boards == ["P . . G\n. . . .", ". P . G\n. . . .", ". . P G\n. . . ."]


def test_anchors_name_the_state():
    from unitymas.trainers.controller.statistics.decisions import decisions_of

    one = play("planpath-solo", script(planner=["up", "down", "up", "right"]))
    acts = one.acts()
    assert acts[0].anchor == acts[1].anchor == acts[3].anchor != acts[2].anchor  # refused, down, back up
    assert acts[0].messages != acts[1].messages  # the prompt tells what was refused; the state is the same
    rows = decisions_of(one, "e", ())
    assert [row.anchor for row in rows] == [act.anchor for act in acts] and len(rows[0].anchor) == 16
    assert [n.anchor for n in Trace.from_dict(one.to_dict()).acts()] == [act.anchor for act in acts]
    plain = unitymas.rollout("rag-nq", "scripted", tasks=1, data="mini")[0]
    assert "anchor" not in plain.to_dict()["nodes"][0] and decisions_of(plain, "e", ())[0].anchor is None


def test_the_critics_anchor_holds_the_proposal():
    trace = play("planpath-duo", script(proposer=["up", "down"], critic=["up"]), max_steps=2)
    proposer, critic = trace.acts("proposer"), trace.acts("critic")
    assert proposer[0].anchor == proposer[1].anchor and critic[0].anchor != critic[1].anchor


def test_a_program_reads_the_board_and_its_faults_are_told():
    program = (
        "<code>\nimport sys\nrows = [line.split() for line in sys.stdin.read().splitlines()]\n"
        "print(', '.join(['right'] * (rows[0].index('G') - rows[0].index('P'))))\n</code>"
    )
    trace = play("planpath-tool", script(coder=[program], planner=["<plan>right, right, right</plan>"]))
    assert trace.uses("python")[0].result["printed"] == "right, right, right"
    assert "program printed:\nright, right, right" in trace.acts("planner")[0].messages[-1]["content"]
    assert trace.rewards(trace.acts("coder")[0].id)["own"] == 0.0 and trace.metrics["solved"] == 1.0
    bad = [
        "<code>\n1/0\n</code>",
        "no program",
        "<code>\nprint('hello')\n</code>",
        "<code>\nprint('left')\n</code>",
    ]
    trace = play("planpath-tool", script(coder=bad, planner=["<plan>down</plan>"]))
    heard = [act.messages[-1]["content"] for act in trace.acts("planner")]
    assert "ZeroDivisionError" in heard[0] and "there was no program" in heard[1] and "hello" in heard[2]
    assert len(heard) == 4 and all(trace.rewards(a.id)["own"] < 0 for a in trace.acts("coder"))


def test_renders_and_difficulties():
    env = unitymas.make("sokoban-solo", render_mode="rgb_array", difficulty="easy", split="test")
    env.reset(seed=3)
    before = env.render()
    for _ in range(4):
        for move in ("up", "left", "down", "right"):
            env.step(move)
    assert before.shape == env.render().shape and (before != env.render()).any()
    shown = unitymas.make("planpath-solo", render_mode="ansi", difficulty={"side": 4})
    shown.reset(seed=0)
    board = "\n".join(shown.render().splitlines()[-4:])  # the board as it stands comes last
    assert GAMES["planpath"].parse(board).height == 4
    with pytest.raises(ValueError, match="use 'ansi', 'human'"):
        unitymas.make("rag-nq", data="mini", render_mode="rgb_array")


@pytest.mark.parametrize(
    ("how", "error", "says"),
    [
        ({"game": "sokobn"}, WorkflowError, "did you mean 'sokoban'"),
        ({"difficulty": "esy"}, ValueError, "no difficulty 'esy'"),
        ({"moves": 0}, ValueError, "at least 1"),
        ({"size": 10_000_000_000, "difficulty": {"side": 2}}, TaskError, "has only"),
    ],
)
def test_bad_settings_are_named(how, error, says):
    with pytest.raises(error, match=says):
        unitymas.make("planpath-solo", **how)


def test_a_team_without_a_program_is_named():
    class Half(GameTeam):
        def make_roles(self):
            return ()

    with pytest.raises(TypeError, match="decide"):
        Half("blocksworld")


def test_bad_tasks_are_named():
    for task, says in (
        ({**LINE, "game": "sudoku"}, "is of the game 'sudoku'"),
        ({**LINE, "start": "P . ."}, "exactly one goal"),
        ({**LINE, "start": "X . ."}, "without asking anybody"),
        ({"id": "1", "start": "P G"}, "lacks game"),
    ):
        with pytest.raises((WorkflowError, ValueError), match=says):
            unitymas.make("planpath-solo", tasks=[task]).reset()
