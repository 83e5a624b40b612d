"""Entries that no run of the harness writes, though every figure in them is right: each is refused by name.

`odd_values` changes every value of an honest entry, one at a time; `--fuzz 20000` tries them all. What is listed here
lies beside the values: bytes, frames, spelling, files, and the records of replies.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from unitymas.benchmarks.leaderboard import checks as checking
from unitymas.envs.core.trace import compressor

from .forging import Entry, honest
from .odd_values import forge, oddities, only_words

Odd = Callable[[Entry], Any]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return honest(tmp_path_factory.mktemp("honest"), tasks=1, k=2)


def test_every_value_is_checked(source: Path, tmp_path: Path, fuzz: int) -> None:
    """Whatever is changed is refused, but for words of its makers within their bounds."""
    every = list(oddities(Entry(source, tmp_path / "all")))
    assert len(every) > 2500
    chosen = random.Random(0).sample(every, min(fuzz // 6, len(every)))
    tried = 0
    for odd in chosen:
        entry = Entry(source, tmp_path / "entry")
        if forge(entry, odd):
            tried += 1
            verdict = checking.inspect(entry.folder, verify=True)
            accepted = not verdict.problems and not verdict.unverified
            assert not accepted or only_words(odd), (odd.place, odd.name)
            assert not any("checking" in problem for problem in verdict.problems), (odd, verdict.problems)
        shutil.rmtree(entry.folder)
    assert tried > len(chosen) / 2
    print(f"{tried} tried")


# beside the values ------------------------------------------------------------------------------------


def packed(change: Callable[[list[bytes]], list[bytes]]) -> Odd:
    """Other frames as the archive of its episodes."""

    def odd(e: Entry) -> None:
        e.sign()
        e.write()
        path = e.folder / "traces.jsonl.zst"
        lines = [json.dumps(t, separators=(",", ":")).encode() + b"\n" for t in e.traces]
        path.write_bytes(b"".join(change(lines)))
        e.seal()

    return odd


def spelled(file: str, change: Callable[[str], str]) -> Odd:
    """Another text with the same values."""

    def odd(e: Entry) -> None:
        e.sign()
        e.write()
        path = e.folder / file
        text = path.read_text()
        path.write_text(change(text))
        assert path.read_text() != text
        if file != "metadata.yaml":
            e.seal()

    return odd


def line(change: Callable[[str], str]) -> Odd:
    """Another spelling of one episode."""

    def odd(e: Entry) -> None:
        def respelled(lines: list[bytes]) -> list[bytes]:
            text = lines[0].decode()
            assert change(text) != text
            return [pack(change(text).encode()), *map(pack, lines[1:])]

        packed(respelled)(e)

    return odd


def noted(**entries: Any) -> Odd:
    """Other entries in the record of a model's reply."""

    def odd(e: Entry) -> None:
        e.node()["meta"].update(entries)
        e.sign()
        e.write()

    return odd


def changed(change: Odd) -> Odd:
    def odd(e: Entry) -> None:
        change(e)
        e.sign()
        e.write()

    return odd


def beside(make: Callable[[Path], Any]) -> Odd:
    """One more thing in the folder."""

    def odd(e: Entry) -> None:
        make(e.folder)

    return odd


def pack(content: bytes) -> bytes:
    return compressor()(content)


def loose(content: bytes, **how: Any) -> bytes:
    import zstandard

    return bytes(zstandard.ZstdCompressor(**{"write_checksum": True, **how}).compress(content))


def stored(content: bytes, size: int = 1) -> bytes:
    """A frame of blocks of a few bytes, not packed at all."""
    frame = pack(content)
    head = frame[: 4 + 1 + {0: 1, 1: 2, 2: 4, 3: 8}[frame[4] >> 6]]
    cuts = [content[i : i + size] for i in range(0, len(content), size)]
    blocks = [((len(cut) << 3) | (cut is cuts[-1])).to_bytes(3, "little") + cut for cut in cuts]
    return head + b"".join(blocks) + frame[-4:]


def hollow(content: bytes) -> bytes:
    """A frame with blocks of nothing, which repeat a byte of one's choice no time."""
    frame = pack(content)
    head = 4 + 1 + {0: 1, 1: 2, 2: 4, 3: 8}[frame[4] >> 6]
    return frame[:head] + b"".join(bytes((2, 0, 0, byte)) for byte in b"smuggled") + frame[head:]


SKIPPED = b"\x50\x2a\x4d\x18\x08\x00\x00\x00smuggled"
EMPTY = loose(b"")
LINK = "README.md"


def linked(folder: Path) -> None:
    (folder / LINK).unlink()
    (folder / LINK).symlink_to("/etc/passwd")


def piped(folder: Path) -> None:
    (folder / LINK).unlink()
    os.mkfifo(folder / LINK)


def swap_players(e: Entry) -> None:
    for t in e.traces:
        t["tags"]["team"] = dict(reversed(t["tags"]["team"].items()))


def more_tags(e: Entry) -> None:
    e.traces[0]["tags"]["mood"] = "good"


def tags_turned(e: Entry) -> None:
    e.traces[0]["tags"] = dict(reversed(e.traces[0]["tags"].items()))


def timed(value: Any) -> Odd:
    return changed(lambda e: e.traces[0]["tags"].update(seconds=value))


def turned_episodes(e: Entry) -> None:
    e.traces.reverse()


def keys_turned(e: Entry) -> None:
    e.traces[0] = dict(reversed(e.traces[0].items()))


def noted_by_the_expert(e: Entry) -> None:
    e.node("decomposer")["meta"]["tokens_out"] = 3


def noted_by_a_tool(e: Entry) -> None:
    e.use()["meta"]["raised"] = "KeyError: x (there.py:1)"


def versions(e: Entry) -> None:
    e.node(episode=1)["meta"]["version"] = 7


def thinking_that_ends(e: Entry) -> None:
    e.node()["meta"].update(thinking="open", tokens_out=60)
    e.node()["reply"] = "so </think>" + e.node()["reply"]


def seat(**more: Any) -> Odd:
    return changed(lambda e: e.roles["answerer"].update(more))


def sampled(**more: Any) -> Odd:
    return changed(lambda e: e.roles["answerer"]["sampling"].update(more))


def run(**more: Any) -> Odd:
    return changed(lambda e: e.results["run"].update(more))


def stated(place: str, **more: Any) -> Odd:
    return changed(lambda e: e.results["provenance"][place].update(more))


TWICE = '"schema":"unitymas.trace/1",'
ODD: list[tuple[str, Odd, str]] = [
    ("a frame to be skipped, first", packed(lambda ls: [SKIPPED, *map(pack, ls)]), "no frame of zstd begins here"),
    ("a frame to be skipped, last", packed(lambda ls: [*map(pack, ls), SKIPPED]), "no frame of zstd begins here"),
    ("a frame to be skipped, between", packed(lambda ls: [pack(ls[0]), SKIPPED, pack(ls[1])]), "no frame of zstd"),
    ("a frame of nothing", packed(lambda ls: [*map(pack, ls), EMPTY]), "must hold one episode"),
    ("two episodes in a frame", packed(lambda ls: [pack(b"".join(ls))]), "must hold one episode"),
    ("one episode in two frames", packed(lambda ls: [pack(ls[0][:50]), pack(ls[0][50:]), pack(ls[1])]), "must hold one"),
    ("a blank line", packed(lambda ls: [*map(pack, ls), pack(b"\n")]), "not JSON"),
    ("bytes behind", packed(lambda ls: [*map(pack, ls), b"smuggled"]), "no frame of zstd begins here"),
    ("a byte behind", packed(lambda ls: [*map(pack, ls), b"\0"]), "no frame of zstd begins here"),
    ("no checksum", packed(lambda ls: [loose(one, write_checksum=False) for one in ls]), "must have a checksum"),
    ("no size", packed(lambda ls: [loose(one, write_content_size=False) for one in ls]), "does not say how many"),
    ("packed loosely", packed(lambda ls: [stored(one, 1000) for one in ls]), "are enough"),
    ("blocks of a byte", packed(lambda ls: [stored(one) for one in ls]), "are enough"),
    ("blocks of nothing", packed(lambda ls: [hollow(one) for one in ls]), "with an empty block"),
    ("not packed", packed(lambda ls: ls), "no frame of zstd begins here"),
    ("no line break at the end", packed(lambda ls: [pack(ls[0]), pack(ls[1][:-1])]), "ends with a line break"),
    ("blanks in an episode", line(lambda t: t.replace('","', '", "', 1)), "not as the harness writes it"),
    ("blanks behind an episode", line(lambda t: t.replace("\n", " \n")), "not as the harness writes it"),
    ("a number with an exponent", line(lambda t: t.replace('"sample":0', '"sample":0e0', 1)), "sample must be integer"),
    ("a float with more noughts", line(lambda t: t.replace("0.0", "0.000", 1)), "not as the harness writes it"),
    ("letters as escapes", line(lambda t: t.replace("schema", "\\u0073chema", 1)), "not as the harness writes it"),
    ("a key twice", line(lambda t: t.replace(TWICE, TWICE * 2, 1)), "stands there twice"),
    ("a slash as an escape", line(lambda t: t.replace("trace/1", "trace\\/1", 1)), "not as the harness writes it"),
    ("other line breaks", line(lambda t: t.replace("\n", "\r\n")), "not as the harness writes it"),
    ("keys of an episode turned", changed(keys_turned), "not as the harness writes it"),
    ("episodes turned", changed(turned_episodes), "does not stand where"),
    ("one more tag", changed(more_tags), "the harness writes seconds, team, players, key"),
    ("a whole number of seconds", timed(3), "is not the time that an episode took"),
    ("no seconds", timed(None), "is not the time that an episode took"),
    ("minus no seconds", timed(-0.0), "is not the time that an episode took"),
    ("a whole log-prob", noted(tokens={"text": ["a"] * 5, "logprob": [-1] * 5}), "are written with a point"),
    ("a long log-prob", noted(tokens={"text": ["a"] * 5, "logprob": [-1.23456] * 5}), "four digits behind it"),
    ("tags turned", changed(tags_turned), "the harness writes seconds, team, players, key"),
    ("players turned", changed(swap_players), "tags.team: "),
    ("blanks in the results", spelled("results.json", lambda t: t.replace(": ", ":  ", 1)), "as `unitymas submit` writes"),
    ("no line break", spelled("results.json", lambda t: t[:-1]), "as `unitymas submit` writes"),
    ("blanks behind", spelled("results.json", lambda t: t + "\n \n"), "as `unitymas submit` writes"),
    ("one line", spelled("results.json", lambda t: json.dumps(json.loads(t))), "as `unitymas submit` writes"),
    ("a mark of its order", spelled("results.json", lambda t: "\ufeff" + t), "results.json"),
    ("a float spelled out", spelled("results.json", lambda t: t.replace("0.95", "0.950", 1)), "as `unitymas submit` writes"),
    ("an exponent", spelled("results.json", lambda t: t.replace("0.95", "95e-2", 1)), "as `unitymas submit` writes"),
    ("a comment", spelled("metadata.yaml", lambda t: "# smuggled\n" + t), "as `unitymas submit` writes"),
    ("a comment behind", spelled("metadata.yaml", lambda t: t + "# smuggled\n"), "as `unitymas submit` writes"),
    ("quotes", spelled("metadata.yaml", lambda t: t.replace("An honest team", "'An honest team'")), "as `unitymas submit`"),
    ("a document's end", spelled("metadata.yaml", lambda t: t + "...\n"), "as `unitymas submit` writes"),
    ("a tag", spelled("metadata.yaml", lambda t: t.replace("An honest", "!!str An honest")), "as `unitymas submit`"),
    ("one more file", beside(lambda f: (f / "more.bin").write_bytes(b"x")), "'more.bin' does not belong there"),
    ("a hidden file", beside(lambda f: (f / ".more").write_bytes(b"x")), "'.more' does not belong there"),
    ("a folder", beside(lambda f: (f / "traces").mkdir()), "'traces' does not belong there"),
    ("a name with another accent", beside(lambda f: (f / "README.m\u0501").write_text("x")), "does not belong there"),
    ("a link for a text", beside(linked), "README.md is a link"),
    ("a pipe for a text", beside(piped), "README.md is no regular file"),
    ("a text that is none", beside(lambda f: (f / LINK).write_bytes(b"\xff")), "README.md is not UTF-8"),
    ("a huge text", beside(lambda f: (f / LINK).write_bytes(b"x" * 1_000_001)), "README.md is larger than"),
    ("an unknown name in a record", noted(mood="good"), "has 'mood', which does not belong there"),
    ("a name of training in a record", noted(sample="episode/1"), "has 'sample', which does not belong there"),
    ("a forced reply", noted(forced=True), "has 'forced', which does not belong there"),
    ("a price for a local model", noted(cost=0.5), "has 'cost', which does not belong there"),
    ("an unknown finish reason", noted(finish_reason="won"), "finish_reason must be one of"),
    ("a huge cut of the prompt", noted(prompt_cut={"passages": 10**9}), "prompt_cut.passages must be at most"),
    ("a cut that no prompt allows", noted(prompt_cut={"passages": 10**6}), "is cut as"),
    ("a cut of no field", noted(prompt_cut={"mood": 12}), "is cut as"),
    ("a cut by a word's part", noted(prompt_cut={"passages": 3}), "is cut as"),
    ("no cut at all", noted(prompt_cut={}), "is cut as"),
    ("thinking of another kind", noted(thinking="deep"), "thinking must be 'open'"),
    ("thinking that ends", changed(thinking_that_ends), "said to be open"),
    ("an overflow with a reply", noted(finish_reason="overflow"), "a prompt that does not fit has no reply"),
    ("tokens of another number", noted(tokens={"text": ["a"], "logprob": [-1.0]}), "texts and log-probs, for 5 tokens"),
    ("tokens that are certain and more", noted(tokens={"text": ["a"] * 5, "logprob": [0.1] * 5}), "must be at most 0"),
    ("tokens with more", noted(tokens={"text": [], "logprob": [], "ids": []}), "has 'ids', which does not belong"),
    ("tokens as a float", noted(tokens_in=40.0), "tokens_in must be"),
    ("a version that changes", changed(versions), "no evaluation changes it"),
    ("a version as a text", noted(version="0"), "version must be integer"),
    ("a record of the expert", changed(noted_by_the_expert), "meta: recorded"),
    ("a record of a tool", changed(noted_by_a_tool), "meta: recorded"),
    ("one more word about a model", seat(mood="good"), "has 'mood', which does not belong there"),
    ("weights in words", seat(weights="theirs"), "weights must match"),
    ("a template in words", seat(template_sha="theirs"), "template_sha must match"),
    ("another kind of numbers", seat(dtype="float64"), "dtype must be 'bfloat16'"),
    ("sampling with more", sampled(min_p=0.5), "has 'min_p', which does not belong there"),
    ("sampling of a choice", sampled(choices=["1852"]), "choices must be None"),
    ("top_p over one", sampled(top_p=1.5), "top_p must be at most 1"),
    ("a day to come", run(date="2199-01-01T00:00:00+00:00"), "is still to come"),
    ("no such day", run(date="2026-02-31T00:00:00+00:00"), "is no date"),
    ("a day elsewhere", run(date="2026-01-31T12:00:00+01:00"), "is no date"),
    ("a day by parts of seconds", run(date="2026-01-31T12:00:00.5+00:00"), "is no date"),
    ("one more fact of the run", run(mood="good"), "has 'mood', which does not belong there"),
    ("part of a processor", run(cpus=0.5), "cpus must be"),
    ("a library of one's own", stated("libraries", theirs="1.0"), "has 'theirs', which does not belong there"),
    ("a version of no library", stated("libraries", numpy="<script>"), "numpy must match"),
    ("one more fact of the data", stated("data", mood="good"), "has 'mood', which does not belong there"),
    ("one more fact of the world", stated("env", mood="good"), "has 'mood', which does not belong there"),
    ("true for one", changed(lambda e: e.results.update(complete=1)), "complete must be True"),
]  # fmt: skip


@pytest.mark.parametrize(("odd", "sentence"), [(o, s) for _, o, s in ODD], ids=[name for name, *_ in ODD])
def test_an_odd_entry_is_named(source: Path, tmp_path: Path, odd: Odd, sentence: str) -> None:
    entry = Entry(source, tmp_path / "odd")
    odd(entry)
    verdict = checking.inspect(entry.folder, verify=True)
    assert any(sentence in problem for problem in verdict.problems), verdict.problems[:5]


def test_what_nobody_changed_is_verified(source: Path, tmp_path: Path) -> None:
    """The helpers above, without a change; and frames as another version of zstd may write them."""
    for name, odd in (
        ("same", packed(lambda lines: [pack(one) for one in lines])),
        ("level", packed(lambda lines: [loose(one, level=4) for one in lines])),
    ):
        entry = Entry(source, tmp_path / name)
        odd(entry)
        verdict = checking.inspect(entry.folder, verify=True)
        assert (verdict.problems, verdict.unverified) == ([], []), name
        assert verdict.notes == (
            [] if name == "same" else ["2 episodes packed by another version of zstd than ours"]
        )


def test_a_prompt_that_was_cut_is_verified(source: Path, tmp_path: Path) -> None:
    """What a model without the room leaves out is what its role may lack, by so many characters as whole lines have."""
    from unitymas.agents.text.role_prompt import shortened
    from unitymas.envs.core.drivers import call_for
    from unitymas.envs.registry import make_arena

    entry = Entry(source, tmp_path / "cut")
    arena = make_arena("rag-nq", split="test", data="mini")
    trace = entry.traces[0]
    execution = arena.start(arena.task(trace["task_id"]), trace["seed"])
    replies = {node["id"]: node["reply"] for node in trace["nodes"] if node["kind"] == "act"}
    while all(node.agent != "answerer" for node in execution.pending):
        for node in execution.pending:
            if node.kind == "use":
                arena.toolbox.call(execution, node)
            else:
                execution.answer(node, replies[node.id])
    (node,) = execution.pending
    for asked in (1, 7, 60):
        gone = shortened(call_for(execution, node, "").messages, asked)[1]
        assert gone
        entry.node()["meta"]["prompt_cut"] = dict(gone)
        entry.sign()
        entry.write()
        verdict = checking.inspect(entry.folder, verify=True)
        assert (verdict.problems, verdict.unverified) == ([], []), (asked, gone)
