"""Code of one's own: the command line sees it, plug-ins are found, other registries know our names."""

import subprocess
import sys
import warnings

import gymnasium
import pettingzoo
import pytest

import unitymas
from unitymas.cli import main
from unitymas.envs import registry
from unitymas.own import OwnCodeError, find, load
from unitymas.trainers.algorithms import find_algorithm, list_algorithms
from unitymas.trainers.recipes import list_recipes, make_recipe

TEAM = """
import unitymas
from unitymas import Outcome, Role, Tags, Workflow


class Capitals(Workflow):
    roles = (Role("guesser", reply=Tags("answer")),)

    async def run(self, ep):
        guess = await ep.act("guesser", f"Question: {ep.task.question}")
        return Outcome(answer=guess.value)


def right(trace, task):
    return float(trace.outcome["answer"] == task.reference["answers"][0])


def expert(call):
    return f"<answer>{call.task.reference['answers'][0]}</answer>"


ROWS = [{"id": c, "question": f"The capital of {c}?", "answers": [a]} for c, a in (("fr", "Paris"), ("it", "Rome"))]


def register_all(name="own-capitals"):
    unitymas.register(name, workflow=Capitals, reward=right, tasks=ROWS, expert=expert)
"""
ALGORITHM = """
from dataclasses import dataclass

from unitymas.trainers.algorithms import GroupRelative
from unitymas.trainers.recipes import Default


@dataclass(frozen=True, kw_only=True)
class Mine(GroupRelative):
    name = "mine"


class Steps(Default):
    pass
"""

RULES = """class Short:
    name = "short"
    def on_end(self, trace):
        return []


class Needy(Short):
    def __init__(self, weight):
        self.weight = weight
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A directory of a user's, whose modules and environments are forgotten afterwards."""
    ids, modules = set(unitymas.list_envs()), set(sys.modules)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", str(tmp_path))])
    (tmp_path / "own_team.py").write_text(TEAM + "\n\nregister_all()\n")
    (tmp_path / "own_algorithm.py").write_text(ALGORITHM)
    (tmp_path / "own_pkg").mkdir()
    (tmp_path / "own_pkg" / "__init__.py").touch()
    (tmp_path / "own_pkg" / "teams.py").write_text(TEAM + '\n\nregister_all("own-packed")\n')
    yield tmp_path
    for id in set(unitymas.list_envs()) - ids:
        registry.unregister(id)
    for name in set(sys.modules) - modules:
        if name.startswith("own_"):
            del sys.modules[name]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("list own-cap --import own_team.py", "own-capitals"),
        ("--import=own_team list own", "own-capitals"),
        ("list own_team.py:own", "own-capitals"),
        ("info own-packed --import own_pkg.teams", "own-packed-v0"),
        ("info own_pkg.teams:own-packed", "reward    right"),
        ("play own_team:own-capitals --team scripted", "right 1"),
        ("validate own_team.py:own-capitals", "ok "),
        ("validate own_pkg/teams.py:own-packed", "ok "),
        ("eval own_team:own-capitals --team scripted -k 1 -q", "1.000"),
        ("view evaluations --import own_team.py --help", "usage: unitymas view"),
        (
            "train own_team:own-capitals --dry-run policies.*.algorithm.name=own_algorithm:Mine",
            "own_algorithm:Mine",
        ),
        (
            "train own-capitals --import own_team.py --dry-run recipe=own_algorithm.py:Steps",
            "own_algorithm.py:Steps",
        ),
    ],
)
def test_every_command_sees_it(words, says, here, capsys):
    try:
        code = main(words.split())
    except SystemExit as ended:
        code = ended.code
    assert code == 0 and says in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("list --import own_taem.py", "unitymas: there is no file {here}/own_taem.py"),
        ("list --import own_taem", "unitymas: there is no module 'own_taem'"),
        ("info own_team:own-capital", "did you mean own-capitals? (own_team registers none of this name)"),
        ("info own_taem:own-capitals", "unitymas info: there is no module 'own_taem'"),
        ("list --import", "unitymas: --import needs a file or a module"),
        ("list --import own_bad.py", "unitymas: own_bad.py cannot be imported: NameError: name 'y' is not defined (own_bad.py:3)"),
        ("list --import own_bad", "NameError: name 'y' is not defined (own_bad.py:3)"),
        ("list --import own_syntax.py", "SyntaxError: invalid syntax (own_syntax.py:2)"),
        ("list --import own_exits.py", "own_exits.py cannot be imported: it ends the program (sys.exit(3)) (own_exits.py:2); put"),
        ("list --import own_null.py", "source code string cannot contain null bytes (own_null.py)"),
        ("list --import own_folder", "own_folder is a folder without __init__.py"),
        ("list --import own_folder/", "'own_folder/' is no module"),
        (
            "eval own_team:own-capitals --team scripted -q reward=own_rules:Short",
            "reward 'short' is called as on_end(trace, task): too many positional arguments (own_rules.py:3)",
        ),
        (
            "eval own_team:own-capitals --team scripted -q reward=own_rules:Needy",
            "reward Needy is made without arguments, and that cannot be: missing a required argument: 'weight'",
        ),
        ("view own_empty.jsonl --no-open", "unitymas view: own_empty.jsonl: no episode there"),
        ("list --import own_needs.py", "cannot be imported: ModuleNotFoundError: No module named 'not_installed' (own_needs.py:1)"),
        (
            "train own_team:own-capitals --dry-run policies.*.algorithm.name=own_algorithm:Mien",
            "own_algorithm has no 'Mien'",
        ),
        (
            "train own_team:own-capitals --dry-run policies.*.algorithm.name=own_team:Capitals",
            "must be a class derived from Algorithm",
        ),
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_line(words, says, here, capsys):
    (here / "own_bad.py").write_text("x = 1\ndef f():\n    return y\nf()\n")
    (here / "own_syntax.py").write_text("x = 1\ndef f(:\n")
    (here / "own_needs.py").write_text("import not_installed\n")
    (here / "own_exits.py").write_text("import sys\nsys.exit(3)\n")
    (here / "own_null.py").write_bytes(b"x = 1\0\n")
    (here / "own_folder").mkdir()
    (here / "own_rules.py").write_text(RULES)
    (here / "own_empty.jsonl").write_text("half a line, as a kill leaves it")
    assert main(words.split()) != 0
    said = capsys.readouterr().err.strip()
    assert says.format(here=here) in said and len(said.splitlines()) == 1


def test_a_file_is_one_module_however_it_is_named(here):
    assert load("own_team.py") is load("own_team") is load(str(here / "own_team.py"))
    assert find("own_team:Capitals") is find("own_team.py:Capitals")
    (here / "random.py").write_text("shadow = True\n")  # a name that the standard library has
    assert load("random.py").shadow and not hasattr(sys.modules["random"], "shadow")
    with pytest.raises(OwnCodeError, match="no entry point"):
        find("own_team")


def test_an_environment_of_ones_own_is_trained_with_a_score(here, capsys):
    words = "train own_team:own-capitals --preset shared steps=1 k=2 tasks_per_step=2 eval.tasks=2 log.console=plain"
    assert main(words.split()) == 0
    assert "validation score" in capsys.readouterr().out
    assert "train/right" in (here / "runs" / "own-capitals-1" / "metrics.jsonl").read_text()


# plug-ins -----------------------------------------------------------------------------------------------


@pytest.fixture
def installed(here, monkeypatch):
    """Two packages as an installer leaves them: one works, one is broken."""
    monkeypatch.syspath_prepend(str(here))
    monkeypatch.setattr(registry, "_plugins_loaded", False)
    (here / "own_plugin.py").write_text(TEAM + ALGORITHM)
    (here / "own_broken.py").write_text("import not_installed\n")
    for name, module, load_ in (
        ("works", "own_plugin", "register_all"),
        ("broken", "own_broken", "register_all"),
    ):
        info = here / f"own_{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: own-{name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(
            f"[unitymas.envs]\n{name} = {module}:{load_}\n"
            f"[unitymas.algorithms]\n{name}-algorithm = {module}:Mine\n"
            f"[unitymas.recipes]\n{name}-recipe = {module}:Steps\n"
        )
    return here


def test_plug_ins_are_found_and_a_broken_one_breaks_nothing(installed, capsys):
    registry.say_once.cache_clear()
    assert "own-capitals" in unitymas.list_envs()
    said = capsys.readouterr().err
    assert said.count("the plug-in 'broken' (own_broken:register_all) is broken: ModuleNotFoundError") == 1
    assert unitymas.rollout("own-capitals", "scripted")[0].metrics["score"] == 1.0
    assert {"works-algorithm", "broken-algorithm", "grpo"} <= set(list_algorithms())
    assert find_algorithm("works-algorithm").__name__ == "Mine"
    assert {"works-recipe", "broken-recipe"} <= set(list_recipes())
    assert type(make_recipe("works-recipe", {})).__name__ == "Steps"
    for ask in (lambda: find_algorithm("broken-algorithm"), lambda: make_recipe("broken-recipe", {})):
        with pytest.raises(OwnCodeError, match=r"the plug-in 'broken-\w+' .* is broken: .*'not_installed'"):
            ask()


def test_importing_the_package_survives_a_broken_plug_in(installed):
    code = (
        f"import sys; sys.path[:0] = {sys.path!r}\n"
        "import gymnasium, pettingzoo, unitymas\n"  # the others are loaded: ours registers at once
        "gymnasium.make('unitymas/own-capitals-v0'); pettingzoo.make('aec', 'unitymas/own-capitals-v0')"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.strip().splitlines()[0].startswith("unitymas: the plug-in 'broken'")


# other registries ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("id", unitymas.list_envs())
def test_every_id_is_a_name_of_gymnasium_and_pettingzoo(id):
    known = unitymas.spec(id)
    how = {"size": 2} if known.tasks is not None else {"size": 2, "data": "mini"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        aec = pettingzoo.make("aec", f"unitymas/{known.id}", **how)
        env = gymnasium.make(f"unitymas/{known.id}", **how)
        aec.reset(seed=0)
        observation, _ = env.reset(seed=0)
        assert str(aec) == known.id and observation["messages"]
        over, steps = False, 0
        while not over:
            observation, reward, terminated, truncated, _ = env.step("x")
            over, steps = terminated or truncated, steps + 1
        assert isinstance(reward, float) and steps <= 100


def test_names_of_ones_own_come_and_go(here):
    load("own_team")
    assert "unitymas/own-capitals-v0" in gymnasium.registry
    env = gymnasium.make("unitymas/own-capitals-v0", role="guesser", render_mode="ansi")
    env.reset(seed=0)
    assert env.step("<answer>Atlantis</answer>")[1:3] == (0.0, True) and "guesser" in env.render()
    registry.unregister("own-capitals")
    assert "unitymas/own-capitals-v0" not in gymnasium.registry
    with pytest.raises(Exception, match="own-capitals"):
        pettingzoo.make("aec", "unitymas/own-capitals-v0")
