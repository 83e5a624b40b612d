"""Prompts in sets: the texts of all roles of a workflow, as data that is checked before anything is played.

    unitymas.make("rag-nq", prompts="full")                      # written for instruction-tuned models: the default
    unitymas.make("rag-nq", prompts="few-shot")                  # full, with worked examples
    unitymas.make("rag-nq", prompts="short")                     # what the embedded tiny model was made with
    unitymas.make("rag-nq", prompts={"answerer": {"system": "…"}})     # one's own, over full; or a .yaml or .py file

A set is a mapping from roles to texts (`KEYS`); docs/prompts.md describes them. A workflow names its sets in `prompts`
(a mapping from names to sets, or the YAML file that holds it), each role says in `sees` which fields its prompt is
filled with, and `ep.act(role, {field: value})` fills it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import yaml

from ...agents.basics.hints import nearest, say_once
from ...agents.basics.json_types import JsonObject, JsonView
from ...agents.basics.unique_keys import UniqueKeys
from ...agents.roles import Role, read_reply
from ...agents.text.role_prompt import ENDS, FieldText, Wording, filled
from ...own import find

DEFAULT, WITH_EXAMPLES, OWN = "full", "few-shot", "own"
KEYS: dict[str, type] = {
    "system": str, "prompt": str, "example": str, "shots": list, "when": Mapping, "unless": Mapping, "cut": Mapping,
}  # fmt: skip
"""Entries that a prompt set may have for a role."""
MOST = 200_000  # characters of a whole set
DEEPEST = 12  # tables in tables: `role.shots[1].reply` is the deepest that a set needs

Texts: TypeAlias = Mapping[str, JsonView]
"""Unchecked prompt set: the entries of each role (`KEYS`)."""
PromptSource: TypeAlias = "Path | Mapping[str, Texts] | tuple[Path | Mapping[str, Texts], ...]"
"""Source of a workflow's prompt sets: a YAML file, the sets by name, or several of either."""


class WithPrompts(Protocol):
    """Interface of a workflow to its prompt sets: the sets, the roles, and the values that texts may use."""

    prompts: PromptSource | None
    roles: tuple[Role, ...]

    def terms(self) -> Mapping[str, object]:
        """Return values that texts may use, by name."""


class PromptError(ValueError):
    """Raised when a prompt set does not fit its workflow. The message names role, key and field."""


@dataclass(frozen=True)
class PromptSet:
    """Checked prompt set of a workflow: the texts of its roles."""

    name: str
    """Name of one of the workflow's sets, or "own"."""
    choice: str | JsonView
    """Argument of `make` that selects this set again: the name, or the user's own texts."""
    wordings: Mapping[str, Wording]
    hash: str

    def told(self, role: Role) -> Role:
        """Return the role with its texts. A role without texts is returned unchanged."""
        wording = self.wordings.get(role.name)
        return role if wording is None else replace(role, system=wording.system, wording=wording)


def choose(workflow: WithPrompts, prompts: object = None) -> PromptSet | None:
    """Return the named prompt set, or the user's own texts over it. None if the workflow has no sets and none is
    requested.
    """
    name = type(workflow).__name__
    if workflow.prompts is None:
        if prompts is not None:
            raise PromptError(
                f"{name} has no prompts in sets: its roles say what they are told (Role.system)"
            )
        return None
    sets = sets_of(workflow.prompts)
    chosen, texts, own = _resolve(prompts if prompts is not None else DEFAULT, sets, name)
    shots = WITH_EXAMPLES in (chosen, (own or {}).get("base"))
    for told, words in (own or {}).items() if not shots else ():
        if isinstance(words, Mapping) and words.get("shots"):
            raise PromptError(
                f"prompts {chosen!r}: {told}.shots are only shown in a set with `base: {WITH_EXAMPLES}`; add that line, or "
                "leave the shots out"
            )
    mine = {role.name for role in workflow.roles}
    known = mine.union(*sets.values())
    for other in texts:
        if other not in known:
            raise PromptError(
                f"prompts {chosen!r}: {name} has no role {other!r}; {nearest(str(other), sorted(mine))}"
            )
    terms = {key: str(value) for key, value in workflow.terms().items()}
    wordings = {}
    for role in workflow.roles:
        if role.name in texts:
            wordings[role.name] = _wording(
                f"prompts {chosen!r}: {role.name}", role, texts[role.name], terms, shots
            )
        elif role.sees:
            raise PromptError(
                f"prompts {chosen!r}: the role {role.name!r} has no prompts; say what it is told"
            )
    if own is not None and "base" not in own and (left := sorted(wordings.keys() - own.keys())):
        say_once(
            f"prompts: {', '.join(left)} not in this set, so told as in {DEFAULT!r} (base: {DEFAULT}, in it, says so)"
        )
    used = {name: texts[name] for name in sorted(wordings)}
    digest = hashlib.sha256(
        json.dumps([used, shots], sort_keys=True, ensure_ascii=False).encode()
    ).hexdigest()
    return PromptSet(chosen, chosen if own is None else own, wordings, digest[:16])


def sets_of(prompts: PromptSource) -> Mapping[str, Texts]:
    """Return a workflow's prompt sets by name. `few-shot` is `full` with its examples."""
    sets: dict[str, Texts] = {}
    for part in prompts if isinstance(prompts, tuple) else (prompts,):
        for name, roles in (_read_yaml(part) if isinstance(part, Path) else part).items():
            sets[name] = {**sets.get(name, {}), **roles}
    return {**sets, WITH_EXAMPLES: sets[DEFAULT]} if DEFAULT in sets else sets


def _resolve(
    prompts: object, sets: Mapping[str, Texts], workflow: str
) -> tuple[str, Texts, JsonObject | None]:
    """Return the set's name, its texts by role, and the user's part of them."""
    if isinstance(prompts, str) and prompts in sets:
        return prompts, sets[prompts], None
    own = prompts if isinstance(prompts, Mapping) else _from_file(prompts, sets, workflow)
    own = json.loads(json.dumps(_plain(own, "", [MOST])))
    base = own.get("base", DEFAULT)
    if base not in sets:
        raise PromptError(f"prompts: base is {base!r}; {nearest(str(base), sets)}")
    texts = dict(sets[base])
    for role, words in own.items():
        if role == "base":
            continue
        if not isinstance(words, Mapping):
            raise PromptError(
                f"prompts 'own': {role} must be a table of {', '.join(KEYS)}, got {words!r:.60}"
            )
        texts[role] = {**texts.get(role, {}), **words}
    return OWN, texts, own


def _from_file(prompts: object, sets: Mapping[str, object], workflow: str) -> JsonView:
    """Read a user's prompt set from a YAML file, or from `PROMPTS` of a Python file or module."""
    name = str(prompts)
    if isinstance(prompts, Path) or name.endswith((".yaml", ".yml")):
        table: object = _read_yaml(Path(name)) if not name.endswith(".py") else find(f"{name}:PROMPTS")
    elif isinstance(prompts, str) and (name.endswith(".py") or ":" in name):
        table = find(name if ":" in name else f"{name}:PROMPTS")
    else:
        what = nearest(name, sets) if isinstance(prompts, str) else f"its sets are {', '.join(sets)}"
        raise PromptError(
            f"prompts={prompts!r:.60}: {workflow} has no such set; {what}, or give a mapping, a .yaml or a .py file"
        )
    if not isinstance(table, Mapping):
        holds = "is empty" if table is None else f"holds {type(table).__name__}"
        raise PromptError(f"prompts: {name} {holds}, not a table from roles to texts")
    return table


class _PromptLoader(UniqueKeys, getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Loader of plain data, in C where PyYAML has it."""


@lru_cache(maxsize=64)
def _read(path: Path, changed: int) -> Any:
    try:
        return yaml.load(path.read_text(encoding="utf-8"), Loader=_PromptLoader)
    except UnicodeDecodeError as error:
        raise PromptError(f"prompts: {path} is not UTF-8 ({error}): save it as UTF-8") from None
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f" (line {mark.line + 1})" if mark else ""
        why = getattr(error, "problem", None) or str(error)
        raise PromptError(f"prompts: {path} is not YAML{where}: {why}") from None


def _read_yaml(path: Path) -> Any:
    try:
        return _read(path, path.stat().st_mtime_ns)
    except OSError as error:
        raise PromptError(f"prompts: {path}: {error.strerror}") from None


def _plain(value: object, place: str, left: list[int]) -> object:
    """Return a set of plain values. An error names the place of a value that is no text.

    `left` counts down the characters that a set may have. Tables count too: aliases of YAML can contain each other.
    """
    left[0] -= len(value) if isinstance(value, str) else 1
    if left[0] < 0:
        raise PromptError(f"prompts 'own': more than {MOST:,} characters in all")
    if place.count(".") + place.count("[") > DEEPEST:
        raise PromptError(f"prompts 'own': {place:.60}… contains itself, or tables in tables in tables")
    if isinstance(value, Mapping):
        return {str(k): _plain(v, f"{place}.{k}".lstrip("."), left) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v, f"{place}[{i}]", left) for i, v in enumerate(value, 1)]
    if isinstance(value, str):
        return str(value)
    raise PromptError(f"prompts 'own': {place}: {value!r:.60} is no text; write it in quotes")


# one role ----------------------------------------------------------------------------------------------


def _wording(where: str, role: Role, words: JsonView, terms: Mapping[str, str], shots: bool) -> Wording:
    """Check a role's texts. An error names what is wrong."""
    for key, value in words.items():
        if key not in KEYS:
            raise PromptError(f"{where} has no {key!r}; {nearest(str(key), KEYS)}")
        if not isinstance(value, KEYS[key]):
            raise PromptError(f"{where}.{key} must be {_kind(KEYS[key])}, got {value!r:.60}")
        for name, text in value.items() if isinstance(value, Mapping) else ():
            if not isinstance(text, str):
                raise PromptError(f"{where}.{key}.{name} must be a text, got {text!r:.60}")
    if role.sees and not words.get("prompt"):
        raise PromptError(f"{where} has no prompt; write one with its fields ({_braced(role.sees)})")
    cut = _cut(where, role, words.get("cut", {}))
    wording = Wording(
        "", _template(words.get("prompt", "")), _around(words, "when"), _around(words, "unless"), cut, terms
    )
    wording = replace(wording, terms={**terms, "format": role.reply.describe()})
    wording = replace(wording, terms={**wording.terms, "example": _example(where, role, words, wording)})
    for key in ("when", "unless"):
        _only(f"{where}.{key}", set(words.get(key, {})), {*role.sees, *terms})
    around = [
        (f"{key}.{name}", template)
        for key in ("when", "unless")
        for name, template in getattr(wording, key).items()
    ]
    for key, template in (("prompt", wording.prompt), *around):
        _only(f"{where}.{key}", template.fields, {*role.sees, *wording.terms})
    shown = wording.prompt.fields.union(*(template.fields for _, template in around))
    if role.sees and role.sees[0] not in shown:
        raise PromptError(
            f"{where}.prompt never shows {{{role.sees[0]}}}: the role would not know what it is about"
        )
    system = words.get("system", role.system)
    used = FieldText.of(system).fields
    used = used.union(
        *(table[n].fields for n in used for table in (wording.when, wording.unless) if n in table)
    )
    _only(f"{where}.system", used, set(wording.terms))
    lines = [filled(system, wording, wording.terms).strip("\n")]
    if shots:
        lines += [
            _shot(where, role, number, shot, wording) for number, shot in enumerate(words.get("shots", []), 1)
        ]
    return replace(wording, system="\n\n".join(line for line in lines if line))


def _template(text: str) -> FieldText:
    return FieldText.of(text.rstrip("\n"))


def _around(words: JsonView, key: str) -> dict[str, FieldText]:
    return {name: _template(text) for name, text in words.get(key, {}).items()}


def _kind(kind: type) -> str:
    return "a text" if kind is str else "a list" if kind is list else "a table"


def _braced(names: Iterable[str]) -> str:
    return ", ".join(f"{{{name}}}" for name in names)


def _only(where: str, names: set[str], known: set[str]) -> None:
    """Check that the workflow fills every field of a text."""
    for name in sorted(names - known):
        raise PromptError(
            f"{where}: there is no field {{{name}}}; {nearest(name, sorted(known), 'its fields are')} "
            f"(for the literal text write {{{{{name}}}}})"
        )


def _cut(where: str, role: Role, words: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return the fields that may be cut, in order."""
    _only(f"{where}.cut", set(words), set(role.sees))
    for name, end in words.items():
        if end not in ENDS:
            raise PromptError(f"{where}.cut.{name}: {end!r}; {nearest(str(end), ENDS)}")
    return tuple(words.items())


def _example(where: str, role: Role, words: JsonView, wording: Wording) -> str:
    """Check that the role's own format can read its example reply."""
    if "example" not in words:
        return ""
    _only(f"{where}.example", FieldText.of(words["example"]).fields, set(wording.terms))
    example = filled(words["example"], wording, wording.terms).strip("\n")
    _legal(f"{where}.example", role, example)
    return example


def _legal(where: str, role: Role, reply: str) -> None:
    if not read_reply(role.reply, reply, lenient=role.lenient).ok:
        raise PromptError(
            f"{where} is not a reply that the role's format reads: {reply!r:.120}; the format is {role.reply.describe()}"
        )


def _shot(where: str, role: Role, number: int, shot: object, wording: Wording) -> str:
    """Make a worked example: the role's own prompt, filled, and the reply to it."""
    where = f"{where}.shots[{number}]"
    if not isinstance(shot, Mapping) or not isinstance(shot.get("reply"), str):
        raise PromptError(f"{where} must be a table of the fields {_braced(role.sees)} and a reply")
    fields = {name: str(value).strip("\n") for name, value in shot.items() if name != "reply"}
    _only(where, set(fields), set(role.sees))
    for name, value in shot.items():
        if not isinstance(value, str):
            raise PromptError(f"{where}.{name} must be a text, got {value!r:.60}")
    reply = shot["reply"].strip("\n")
    _legal(f"{where}.reply", role, reply)
    asked = wording.ask({**dict.fromkeys(role.sees, ""), **fields})
    return f"Example {number}\n{asked}\nReply:\n{reply}"
