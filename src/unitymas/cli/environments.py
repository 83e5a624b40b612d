"""`unitymas list | info | play | validate`."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ..agents.basics.hints import counted, nearest
from ..agents.model_settings import add_arguments, settings_of
from ..agents.roles import form_in_words
from ..agents.team import Team, TeamLike
from ..envs.core.drivers import arena_of, call_for, rollout, told_to
from ..envs.env_spec import EnvSpec
from ..envs.faces.aec import WorkflowEnv
from ..envs.faces.render import clip, harmless
from ..envs.registry import list_envs, make, spec
from ..own import load
from .arguments import COUNT, Parser, number, parse_team


def list_main(argv: Sequence[str]) -> int:
    """List the environments, one in each line."""
    parser = Parser("unitymas list", description=list_main.__doc__)
    parser.add_argument(
        "pattern",
        nargs="?",
        default="",
        help="show only ids that contain this text; MODULE: or FILE.py: before it is imported first",
    )
    args = parser.parse_args(argv)
    where, _, pattern = args.pattern.rpartition(":")
    if where:
        load(where)
    found = [id for id in list_envs() if pattern in id]
    width = max(map(len, found), default=0)
    for id in found:
        known = spec(id)
        print(
            f"{id:<{width}}  v{known.version}  {counted(len(known.role_names), 'role'):<7}  {known.description}"
        )
    if not found:
        hint = nearest(pattern, list_envs(), instead="unitymas list shows all")
        raise ValueError(f"no environment's id contains {pattern!r}; {hint}")
    return 0


def info_main(argv: Sequence[str]) -> int:
    """Show an environment: roles, reply formats, rewards, data, and a sample of what each role reads."""
    parser = Parser("unitymas info", description=info_main.__doc__)
    parser.add_argument("id", help="an environment")
    parser.add_argument("--data", default="mini", help="'mini' (default), or a prepared data set")
    args = parser.parse_args(argv)
    print(info_text(args.id, args.data))
    return 0


def info_text(id: str, data: str | None = "mini") -> str:
    """Return the text of `unitymas info`, which is also the source of the environment's page in the docs."""
    known = spec(id)
    env = make(id, data=None if known.tasks is not None else data)
    arena = env.arena
    lines = [f"{known.id}: {known.description}", ""]
    lines.append(
        f"data      {arena.data.name} ({arena.data.split}, {counted(len(arena.data), 'task')}, {arena.data.fingerprint})"
    )
    lines.append(f"tools     {', '.join(arena.toolbox.tools) or 'none'}")
    lines.append(f"reward    {', '.join(rule.name for rule in arena.rules) or 'none'}")
    lines.append(f"headline  {known.headline}" + (f", solved: {known.success}" if known.success else ""))
    lines.append("config    " + (", ".join(f"{k}={v}" for k, v in _config(known).items()) or "none"))
    lines.append("")
    for role in arena.workflow.roles:
        seats = f" × {role.instances}" if role.instances > 1 else ""
        lines.append(f"{role.name}{seats}   replies with {harmless(form_in_words(role.reply))}")
    seen: set[str] = set()
    trace = rollout(arena, "scripted", tasks=1)[0] if arena.expert else None
    if trace is not None:
        lines += ["", "a sample observation per role (scripted episode):"]
    for node in trace.acts() if trace else ():
        if node.role not in seen:
            seen.add(node.role or "")
            lines += ["", f"--- {node.role}"]
            lines += [f"[{m['role']}] {clip(m['content'], 1200)}" for m in node.messages]
            lines.append(f"[reply] {clip(node.text or '')}")
    return "\n".join(lines)


def _config(known: EnvSpec) -> dict[str, object]:
    import inspect

    from ..envs.registry import resolve

    parameters = inspect.signature(resolve(known.workflow)).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
    return {**defaults, **known.config}


def play_main(argv: Sequence[str]) -> int:
    """Play an episode turn by turn."""
    parser = Parser("unitymas play", description=play_main.__doc__)
    parser.add_argument("id", help="an environment")
    parser.add_argument(
        "--team", default="human", help="players: human (default), scripted, tiny, …; or role=player,*=player"
    )
    parser.add_argument("--task", help="a task's id")
    parser.add_argument("--seed", type=int, default=0, help="seed of the episode (default 0)")
    parser.add_argument(
        "--data", default=None, help="'mini', or a prepared data set (default: the prepared one, else mini)"
    )
    parser.add_argument("--split", default=None, help="train (default), validation or test")
    parser.add_argument(
        "--prompts", default=None, help="full, few-shot, short, or a file (default: by the team)"
    )
    parser.add_argument(
        "--watch",
        type=number(0, kind=float),
        default=0.0,
        metavar="SECONDS",
        help="pause between turns in seconds",
    )
    parser.add_argument(
        "--concurrency", type=COUNT, help="largest number of open requests to each model (default 32)"
    )
    add_arguments(parser)
    args = parser.parse_args(argv)
    given = {
        k: v
        for k, v in (("data", args.data), ("split", args.split), ("prompts", args.prompts))
        if v is not None
    }
    env = make(args.id, **given)
    play_episode(
        env,
        Team(parse_team(args.team), **settings_of(args).told()),
        task=args.task,
        seed=args.seed,
        pause=args.watch,
    )
    return 0


def play_episode(env: WorkflowEnv, team: TeamLike, task: str | None, seed: int, pause: float = 0.0) -> None:
    """Play an episode through the PettingZoo interface and print it. A person's role is asked at the terminal."""
    from ..agents.policies import Answer, HumanPolicy
    from ..envs.faces.human import EpisodeView, Left

    team = Team.of(team)
    env = WorkflowEnv(told_to(env.arena, team), env.render_mode)
    bound = team.bind(env.arena.roles, expert=env.arena.expert)
    mine = {agent for agent, policy in bound.policies.items() if isinstance(policy, HumanPolicy)}
    env.reset(seed=seed, options={"task_id": task} if task else None)
    table, left = EpisodeView(), False
    table.say((f"{env}  task {env.trace.task_id}", "bold"))
    for agent in env.agent_iter():
        if env.terminations[agent] or env.truncations[agent]:
            env.step(None)
            continue
        table.journal(env.trace.nodes, env.trace.rewards, mine)
        play = env.execution
        node = play.node(env.infos[agent]["node"])
        if agent in mine:
            try:
                said: str | Answer = table.ask(node, env.arena.roles[agent].lenient)
            except Left:
                left = True
                break
        else:
            said = bound.ask(call_for(play, node, "play", reference=bound.sees(agent)))
        env.step(said.text if isinstance(said, Answer) else said)
        time.sleep(pause)
    table.journal(env.trace.nodes, env.trace.rewards, mine)
    table.close(env.trace, left)
    env.close()


def validate_main(argv: Sequence[str]) -> int:
    """Check environments: the expert gets full marks on every mini task, and the fool neither crashes one nor
    scores.
    """
    parser = Parser("unitymas validate", description=validate_main.__doc__)
    parser.add_argument("id", help="an environment, or all")
    parser.add_argument("--tasks", type=COUNT, default=64, help="number of tasks (default 64)")
    parser.add_argument("--split", default="validation", help="part of the data set (default: validation)")
    args = parser.parse_args(argv)
    wrong = 0
    for id in list_envs() if args.id == "all" else [args.id]:
        began = time.perf_counter()
        problems = validate(id, args.tasks, args.split)
        wrong += bool(problems)
        print(f"{'FAIL' if problems else 'ok':<5} {id:<28} {time.perf_counter() - began:5.1f} s")
        for problem in problems[:5]:
            print(f"      {harmless(problem)}")
    return 1 if wrong else 0


def validate(id: str, tasks: int = 64, split: str = "validation") -> list[str]:
    """Return what is wrong with an environment; normally an empty list."""
    known = spec(id)
    where = {"split": split} if known.tasks is not None else {"split": split, "data": "mini"}
    arena = arena_of(id, **where)
    problems = []
    for trace in rollout(arena, "scripted", tasks=tasks):
        score = trace.metrics.get(known.success or known.headline, 0.0)
        if trace.error:
            problems.append(f"expert, task {trace.task_id}: {trace.error}")
        elif score < 1.0 - 1e-9:
            problems.append(
                f"expert, task {trace.task_id}: {known.success or known.headline} is {score:.3g}, not 1"
            )
    for trace in rollout(arena, "fool", tasks=tasks):
        score = trace.metrics.get(known.success or known.headline, 0.0)
        if trace.error:
            problems.append(f"fool, task {trace.task_id}: {trace.error}")
        elif score > 0:
            problems.append(
                f"fool, task {trace.task_id}: {known.success or known.headline} is {score:.3g}, not 0"
            )
    return problems
