"""One registry: names, places, plug-ins, and one error for a name that nobody registered."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest

from unitymas.agents.named_parts import Registry, UnknownName
from unitymas.own import BrokenPlugin


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Registry[object]:
    points = [EntryPoint("fine", "json:loads", "g"), EntryPoint("broken", "no_such_module_anywhere:x", "g")]
    monkeypatch.setattr("unitymas.own.entry_points", lambda group: points if group == "g" else [])
    return Registry("part", "g", "unitymas.agents", {"near": ".hints:nearest", "thing": object})


def test_names_places_and_plug_ins_are_found(parts: Registry[object]) -> None:
    import json

    from unitymas.agents.hints import nearest

    assert parts.names() == ["broken", "fine", "near", "thing"]
    assert (
        parts.find("near") is nearest and parts.find("thing") is object and parts.find("fine") is json.loads
    )
    assert parts.find("json:dumps") is json.dumps


def test_a_broken_plug_in_fails_by_name_and_alone(parts: Registry[object]) -> None:
    assert "broken" in parts and parts.find("thing") is object
    with pytest.raises(BrokenPlugin, match="plug-in 'broken'"):
        parts.find("broken")


@pytest.mark.parametrize("kind", [UnknownName, ValueError, KeyError])
def test_an_unknown_name_is_answered_with_the_nearest(parts: Registry[object], kind: type[Exception]) -> None:
    with pytest.raises(kind, match=r"^unknown part 'thingg': did you mean 'thing'\?$"):
        parts.find("thingg")


def test_a_name_is_given_once(parts: Registry[object]) -> None:
    parts.register("thing", object)  # the same again is no mistake
    with pytest.raises(ValueError, match="a part named 'thing' is already registered"):
        parts.register("thing", int)
    parts.unregister("thing")
    parts.register("thing", int)
    assert parts.find("thing") is int
