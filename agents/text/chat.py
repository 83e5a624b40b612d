"""Chats: conversations turned into the exact tokens that a model sees.

The tokenizer's own chat template renders a conversation. The template alone is not enough: a role's earlier reply, when
it is tokenised again, may give other tokens than those that were sampled. So a chat stores the prompt and the sampled
tokens of each node. A message names the node that wrote it (`Spoken`). If the messages before it equal those of the
node's prompt, the new prompt consists of the node's prompt tokens, its sampled tokens, and the tokens of the messages
after it. Sampled tokens are therefore never tokenised again, and the turns of a conversation share an exact token
prefix, in the engine and in training.

Two cases are rendered anew, and `Prompt.continued` is then None: a template that rewrites earlier turns (such as one
that drops old thoughts), and a reply with sampled control tokens that is shown to another agent. Only the template
writes control tokens; contents are data (`control_tokens.py`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from ..policies import Call, Message
from .control_tokens import plain_of
from .tokenizing import Tokenizer

Turn = tuple[tuple[str, object], ...]  # a message as plain data that can be compared


@dataclass(frozen=True, slots=True)
class Prompt:
    """Prompt of one call, as tokens."""

    ids: list[int]
    messages: tuple[Turn, ...]
    continued: str | None = None  # the node whose tokens this prompt begins with


@dataclass(frozen=True, slots=True)
class _Sample:
    """Prompt and sampled tokens of one node."""

    agent: str
    messages: tuple[Turn, ...]  # of the prompt
    ids: list[int]  # prompt and sample
    text: str  # of the sample
    closed: bool  # the sample ends with the closing token
    controls: bool  # the sample holds control tokens before its end


def require_template(tokenizer: object) -> None:
    """Raise `ValueError` if the tokenizer has no chat template, or one with a syntax error. Callers check this before
    they load weights.
    """
    name = getattr(tokenizer, "name_or_path", "") or "this model"
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            f"the tokenizer of {name} has no chat template: add chat_template.jinja to its directory, so that it "
            "is known how a conversation becomes tokens"
        )
    import jinja2  # torch brings it

    try:
        tokenizer.apply_chat_template([{"role": "user", "content": "q"}], tokenize=False)  # type: ignore[attr-defined]
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(
            f"the chat template of {name} cannot be read: line {error.lineno}: {error.message}; mend chat_template.jinja "
            "(or chat_template in tokenizer_config.json)"
        ) from error
    except Exception:  # a template may refuse this conversation; that is told where one is rendered
        return


def turn_end(tokenizer: Tokenizer) -> int | None:
    """Return the control token with which the chat template ends a reply; None if it writes none."""
    reply = "what the role replies"
    try:
        chat = Chat(tokenizer)
        text = chat._text(
            ((("role", "user"), ("content", "q")), (("role", "assistant"), ("content", reply))), ready=False
        )
    except (ValueError, TypeError):  # told where a conversation is rendered
        return None
    return next((id for id in chat._encode(text.rpartition(reply)[2]) if id in chat.plain.ids), None)


class Chat:
    """Chats of one tokenizer. `system` gives system prompts by agent or role."""

    remembered = 1 << 13  # episodes whose samples are stored; the oldest are dropped first
    cached = 4096  # renderings

    def __init__(
        self, tokenizer: Tokenizer, system: Mapping[str, str] | None = None, stop_ids: Iterable[int] = ()
    ) -> None:
        require_template(tokenizer)
        self.tokenizer, self.plain = tokenizer, plain_of(tokenizer)
        self.system = dict(system or {})
        self.stop_ids = frozenset(stop_ids)
        self._samples: OrderedDict[str, dict[str, _Sample]] = OrderedDict()  # episode -> node -> sample
        self._rendered: OrderedDict[tuple[Turn, ...], list[int]] = OrderedDict()

    def prompt(self, call: Call) -> Prompt:
        """Return the prompt of a call. It continues the tokens of an earlier node where this is exact."""
        messages = self._with_system(call)
        turns = tuple(map(_turn, messages))
        earlier = self._samples.get(call.episode, {})
        for i in range(len(messages) - 1, -1, -1):
            node = getattr(messages[i].get("content"), "node", "")
            sample = earlier.get(node)
            if sample is None or (sample.controls and sample.agent != call.agent):
                continue
            if sample.messages == turns[:i] and sample.text == messages[i]["content"]:
                rest = self._rest(turns, i, sample)
                if rest is not None:
                    return Prompt(sample.ids + rest, turns, node)
        return Prompt(self._render(turns), turns)

    def conversation(self, messages: Iterable[Message], *, ready: bool) -> list[int]:
        """Return the tokens of a conversation: `ready` for a reply, or complete, as an example for training."""
        return self._encode(self._text(tuple(map(_turn, self._as_known(messages))), ready))

    def remember(self, call: Call, prompt: Prompt, ids: Sequence[int], text: str) -> None:
        """Store the sample of a node, for prompts that continue it."""
        if not call.node or not ids:
            return
        nodes = self._samples.setdefault(call.episode, {})
        closed = ids[-1] in self.stop_ids
        controls = not self.plain.ids.isdisjoint(ids[:-1] if closed else ids)
        nodes[call.node] = _Sample(
            call.agent, prompt.messages, prompt.ids + list(ids), text, closed, controls
        )
        if len(self._samples) > self.remembered:
            self._samples.popitem(last=False)

    def forget(self, episode: str) -> None:
        """Drop the samples of an episode that is over."""
        self._samples.pop(episode, None)

    def _with_system(self, call: Call) -> list[Message]:
        system = self.system.get(call.agent) or self.system.get(call.role) or call.system
        messages = list(call.messages)
        if system and messages and messages[0]["role"] == "system":
            messages[0] = {"role": "system", "content": f"{system}\n\n{messages[0]['content']}"}
        elif system:
            messages = [{"role": "system", "content": system}, *messages]
        return self._as_known(messages)

    def _as_known(self, messages: Iterable[Message]) -> list[Message]:
        """Return messages of roles that the template shows, in an order that it takes. Others become the user's words."""
        known: list[Message] = []
        joins = False  # the next words of the user belong to the last message
        for message in messages:
            refused = (message["role"] == "tool" and not self._knows_tools) or (
                message["role"] == "system" and not self._knows_system
            )
            now = {**message, "role": "user"} if refused else message
            if known and now["role"] == known[-1]["role"] == "user" and (joins or not self._knows_repeats):
                now = {"role": "user", "content": f"{known.pop()['content']}\n\n{now['content']}"}
            joins = refused and message["role"] == "system"
            known.append(now)
        return known

    @cached_property
    def _knows_tools(self) -> bool:
        """Tell whether the template shows messages of role "tool"."""
        return self._shows(("user", "q"), ("assistant", "a"), ("tool", "what the tool gave"))

    @cached_property
    def _knows_system(self) -> bool:
        """Tell whether the template shows a system message. Some templates refuse it, and some drop it silently."""
        return self._shows(("system", "what the system says"), ("user", "q"), which=0)

    @cached_property
    def _knows_repeats(self) -> bool:
        """Tell whether the template allows two user messages in a row. Some require that roles alternate."""
        return self._shows(("user", "q"), ("user", "what the user adds"))

    def _shows(self, *lines: tuple[str, str], which: int = -1) -> bool:
        """Tell whether the template shows one of these lines (default: the last)."""
        turns = tuple((("role", role), ("content", content)) for role, content in lines)
        try:
            return lines[which][1] in self._text(turns)
        except ValueError:
            return False

    def _render(self, turns: tuple[Turn, ...]) -> list[int]:
        """Return the tokens of a conversation, ready for a reply. They are cached for further samples of the same prompt."""
        if turns not in self._rendered:
            self._rendered[turns] = self._encode(self._text(turns))
            if len(self._rendered) > self.cached:
                self._rendered.popitem(last=False)
        return list(self._rendered[turns])

    def _rest(self, turns: tuple[Turn, ...], i: int, sample: _Sample) -> list[int] | None:
        """Return the tokens that follow the text of message i; None if the template changes the text before them."""
        before = self._text(turns[:i]) + self.plain.hide_text(sample.text, "assistant")
        whole = self._text(turns)
        if not whole.startswith(before):
            return None
        rest = self._encode(whole[len(before) :])
        return rest[1:] if sample.closed and rest and rest[0] in self.stop_ids else rest

    def _text(self, turns: Sequence[Turn], ready: bool = True) -> str:
        """Return the text that the template makes of a conversation whose control tokens are hidden."""
        messages = self.plain.hide(map(dict, turns))
        try:
            text: str = self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=ready, tokenize=False
            )
        except Exception as error:  # templates refuse what they do not know in many ways
            roles = ", ".join(str(m.get("role")) for m in messages)
            raise ValueError(f"the chat template cannot render messages of roles {roles}: {error}") from error
        return text

    def _encode(self, text: str) -> list[int]:
        return self.plain.encode(self.plain.show(text))


def _turn(message: Message) -> Turn:
    return tuple(
        (k, str(v) if isinstance(v, str) and type(v) is not str else v)
        for k, v in message.items()
        if k != "node"
    )
