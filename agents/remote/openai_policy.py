"""A policy behind an OpenAI-compatible endpoint: `openai:MODEL@URL`.

    OpenAIPolicy.of("openai:gpt-4o-mini@https://api.openai.com/v1")
    OpenAIPolicy("Qwen/Qwen3-8B", "http://localhost:8000/v1", temperature=0.7)

Requests run in an event loop of their own, so calls may come from any loop. Replies are streamed where the server can.
An endpoint that has never answered gets 15 s. A failure that cannot pass is an error at once, with the server's words
(`connection.py`). Rollouts, evaluations and training then stop. They also stop where calls in a row fail alike
(`failures.py`), and when the budget is spent (`spending.py`).

The key comes from the environment: OPENAI_API_KEY_ and the host's name in capitals (OPENAI_API_KEY_API_DEEPSEEK_COM), else
OPENAI_API_KEY. It is in no trace, no log and no error.

The server makes tokens of the messages. Contents go to it unchanged. For models in this process, control tokens in
contents (`<|im_end|>` in a passage) are plain text (`control_tokens.py`). For a server this cannot be promised from here.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import parse_qsl, urlsplit, urlunsplit

from ..answers import Answer, ReplyMeta
from ..basics.hints import say_once
from ..basics.json_types import JsonObject
from ..basics.threads import Background
from ..names import endpoint_of
from ..policies import Call, Message
from ..spending import Bill, Price, Spending, Unlimited, cost
from ..text.reply_readers import reply_end, split_thinking
from .completion import Completion
from .connection import Connection

LOOP = Background("openai")
SECRETS = re.compile(r"key|token|secret|sig|pass|pwd|auth|cred|code", re.I)
GUESS = 256  # tokens of a reply, before any is known


class OpenAIPolicy:
    """Policy that answers calls by chat completions."""

    first_answer = 15.0  # seconds within which an endpoint must have answered any request at all

    def __init__(
        self,
        model: str,
        url: str = "https://api.openai.com/v1",
        *,
        api_key: str | None = None,
        deadline: float = 120.0,
        concurrency: int = 32,
        requests_per_minute: float | None = None,
        tokens_per_minute: float | None = None,
        price: Price | None = None,
        spending: Spending | None = None,
        stream: bool = True,
        system: Mapping[str, str] | None = None,
        choices: str = "parse",
        **options: Any,
    ) -> None:
        """Set up the endpoint. `options` go into every request (temperature, top_p …).

        `deadline` is the longest time of one call in seconds, retries included, without the time in the queue. `price`
        is dollars for a million tokens in and out. `spending` counts them, and may be shared by several policies.
        `choices="guided"` lets a vLLM server allow only the choices; "parse" lists them in the prompt and reads the
        reply.
        """
        if choices not in ("parse", "guided"):
            raise ValueError(f'choices must be "parse" or "guided", not {choices!r}')
        self.model, self.url = model, checked_url(url)
        self.deadline, self.choices, self.options = deadline, choices, options
        self.concurrency, self.price, self.stream = concurrency, price, stream
        self.spending = spending if spending is not None else Spending()
        self.system = dict(system or {})
        self._connection = Connection(
            model, self.url, key_for(self.url) if api_key is None else checked_key(api_key, "api_key"),
            deadline=deadline, first_answer=self.first_answer, concurrency=concurrency,
            requests_per_minute=requests_per_minute, tokens_per_minute=tokens_per_minute,
        )  # fmt: skip
        self._logprobs = False
        self._sent = self._counted_in = self._replies = self._counted_out = 0

    @classmethod
    def of(cls, name: str, **how: Any) -> OpenAIPolicy:
        """Make a policy of `openai:MODEL@URL`; the URL may be left out."""
        model, url = endpoint_of(name)
        if not model or (not url and "@" in model):
            shown = f"openai:{model.partition('@')[0]}@…"  # the rest may hold a password
            raise ValueError(
                f"{shown!r} is not of the form openai:MODEL@URL, with an http(s) URL such as http://host/v1"
            )
        return cls(model, url or "https://api.openai.com/v1", **how)

    def fix_shapes(self) -> None:
        """Refuse: an endpoint cannot promise equal bits, which a deterministic evaluation needs."""
        raise ValueError(
            f"{self!r}: a remote model does not promise the same reply twice; leave `deterministic` out"
        )

    def keep_tokens(self) -> None:
        """Request log-probs from now on, for the viewer."""
        self._logprobs = True

    async def act(self, call: Call) -> Answer:
        """Answer one call. Cancelling it ends its request."""
        return await asyncio.wrap_future(LOOP.run(self._act(call)))

    async def close(self) -> None:
        """Close idle connections."""
        await asyncio.wrap_future(LOOP.run(self._connection.close()))

    async def _act(self, call: Call) -> Answer:
        body = self._body(call)
        completion, dollars = await self._paid(call.role, body)
        if "stop" in self._connection.without:  # the server does not know it, so the reply is cut here
            self._cut(completion, call)
        elif "stop" in body and stopped_thinking(completion):
            # the server cannot continue the reply, so the whole reply is requested and cut here
            del body["stop"]
            completion, more = await self._paid(call.role, body)
            dollars += more
            self._cut(completion, call)
        return self._answer(call, completion, dollars)

    def _cut(self, completion: Completion, call: Call) -> None:
        """Cut a reply after its first stop string outside of thinking."""
        end = reply_end(completion.text, call.stop)
        if end is not None:
            completion.text, completion.reason = completion.text[:end], "stop"

    def _tell_empty(self, completion: Completion) -> None:
        """Print why a reply is empty, once for each reason. The role's format judges it like any other reply."""
        advice = {"length": "; give a larger max_tokens", "tool_calls": "; no tools were offered"}
        why = completion.ending if completion.ending != "stop" else completion.reason
        after = " after its thinking" if completion.thinking or completion.text.strip() else ""
        say_once(
            f"{self!r}: a reply is empty{after} (finish_reason {self._connection.told(why)!r:.60}){advice.get(why, '')}"
        )

    async def _paid(self, role: str, body: JsonObject) -> tuple[Completion, float]:
        """Request one completion, within the budget. Return it with its dollars, failed attempts included."""
        size = len(json.dumps(body["messages"]))
        longest = body.get("max_tokens") or body.get("max_completion_tokens")
        if self.spending.limited and not longest:
            raise Unlimited(
                f"{role}: a reply of {self.model!r} may have any length, so the budget cannot hold; give the largest number "
                "of tokens (max_tokens)"
            )
        guess = self._guess(size, longest)
        bill = Bill()
        await self.spending.hold(guess)
        try:

            def wasted(pieces: int) -> None:
                bill.add(Bill(1, guess.tokens_in, pieces, cost(self.price, guess.tokens_in, pieces), 1))

            completion = await self._connection.complete(body, guess.tokens_in + guess.tokens_out, wasted)
            bill.add(self._billed(completion, guess, size))
        finally:
            self.spending.book(role, guess, bill)
        return completion, bill.dollars

    def _guess(self, size: int, most: int | None) -> Bill:
        """Estimate the tokens of a call: its length in the tokens of earlier calls, and the longest possible reply."""
        rate = self._counted_in / self._sent if self._sent else 1 / 3
        tokens_in = int(size * rate) + 8
        tokens_out = most or (self._counted_out // self._replies + 1 if self._replies else GUESS)
        return Bill(1, tokens_in, tokens_out, cost(self.price, tokens_in, tokens_out))

    def _billed(self, completion: Completion, guess: Bill, size: int) -> Bill:
        if completion.tokens_in is None or completion.tokens_out is None:
            spoken = (len(completion.text) + len(completion.thinking)) // 3 + 1
            return Bill(1, guess.tokens_in, spoken, cost(self.price, guess.tokens_in, spoken), 1)
        spent, spoken = completion.tokens_in, completion.tokens_out
        self._sent, self._counted_in = self._sent + size, self._counted_in + spent
        self._replies, self._counted_out = self._replies + 1, self._counted_out + spoken
        return Bill(1, spent, spoken, cost(self.price, spent, spoken))

    def _body(self, call: Call) -> JsonObject:
        messages = [_plain(m) for m in call.messages]
        system = self.system.get(call.agent) or self.system.get(call.role) or call.system
        if system:
            messages.insert(0, {"role": "system", "content": system})
        body: JsonObject = {
            "model": self.model,
            "messages": messages,
            "seed": call.seed & 0x7FFFFFFF,
            **self.options,
        }
        if call.max_tokens:
            body["max_tokens"] = min(call.max_tokens, self.options.get("max_tokens", call.max_tokens))
        if call.stop:
            body["stop"] = list(call.stop)[:4]  # the protocol's limit
        if self._logprobs or call.keep_tokens == "text":
            body["logprobs"] = True
        if call.choices and self.choices == "guided":
            body["structured_outputs"] = {"choice": list(call.choices)}
        elif call.choices:
            told = f"Answer with exactly one of: {', '.join(call.choices)}"
            messages[-1] = {**messages[-1], "content": f"{messages[-1]['content']}\n\n{told}"}
        if self.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return body

    def _answer(self, call: Call, completion: Completion, dollars: float) -> Answer:
        clean = self._connection.clean
        thinking, text, closed = split_thinking(clean(completion.text))
        if completion.thinking and closed:
            thinking = f"<think>{clean(completion.thinking)}</think>\n{thinking}"
        if not text.strip():
            self._tell_empty(completion)
        if completion.ending == "stop":
            text = _closed(text, call.stop)
        if call.choices:
            text = _chosen(text, call.choices)
        tokens: dict[str, Sequence[object]] = {
            "text": [clean(text) for text, _ in completion.tokens],
            "logprob": [round(p, 4) for _, p in completion.tokens],
        }
        meta = ReplyMeta(
            policy=f"openai:{self.model}", finish_reason=completion.ending,
            tokens_in=completion.tokens_in, tokens_out=completion.tokens_out,
            cost=None if self.price is None else dollars, tokens=tokens if completion.tokens else None,
        )  # fmt: skip
        return Answer(thinking + text, meta)

    def identity(self) -> JsonObject:
        """Describe the policy, for the record of an evaluation. The weights behind an endpoint are unknown."""
        return {
            "model": self.model,
            "endpoint": self.url,
            "options": self.options,
            "system": self.system,
            "choices": self.choices,
        }

    def __repr__(self) -> str:
        return f"OpenAIPolicy({self.model!r}, {self.url!r})"


def checked_url(url: str) -> str:
    """Return the base URL, without a slash or `/chat/completions` at its end. A URL with a secret is refused, because
    traces and logs hold the URL. No message shows more of a refused URL than its host.
    """
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
    except ValueError:
        raise ValueError("the URL of an endpoint has no valid host, as http://host:8000/v1 has") from None
    query = any(SECRETS.search(name) for name, _ in parse_qsl(parts.query, keep_blank_values=True))
    if parts.username or parts.password or parts.fragment or query:
        raise ValueError(
            f"the URL of an endpoint at {host} holds a key or a password, which every trace would tell: "
            f"put it into the environment variable {variable(host)} or OPENAI_API_KEY"
        )
    try:
        bad = parts.port == 0
    except ValueError:
        bad = True
    if bad or not host or any(c.isspace() or not c.isprintable() for c in url):
        raise ValueError(
            f"the URL of an endpoint{f' at {host}' if host else ''} has no host, no valid port, or a blank in it; "
            "it is as http://host:8000/v1"
        )
    path = parts.path.rstrip("/").removesuffix("/chat/completions")
    return urlunsplit(parts._replace(path=path))


def variable(host: str) -> str:
    """Return the name of the environment variable for the key of a host."""
    return "OPENAI_API_KEY_" + re.sub(r"[^A-Z0-9]", "_", host.upper())


def key_for(url: str) -> str:
    """Return the key for an endpoint, from the environment."""
    for name in (variable(urlsplit(url).hostname or ""), "OPENAI_API_KEY"):
        if name in os.environ:
            return checked_key(os.environ[name], name)
    return ""


def checked_key(key: str, name: str) -> str:
    """Return the key without blanks around it. A key that no header can carry is an error that does not show the
    key.
    """
    key = key.strip()
    if not all("!" <= letter <= "~" for letter in key):
        raise ValueError(f"{name} holds characters that no key has (a blank, a line break, an accent)")
    return key


def _plain(message: Message) -> JsonObject:
    """Convert a message to the protocol's form. A message of role `"tool"` would need an id, so it gets the role
    user.
    """
    plain = {k: str(v) if isinstance(v, str) else v for k, v in message.items() if k != "node"}
    return {**plain, "role": "user"} if plain["role"] == "tool" else plain


def stopped_thinking(completion: Completion) -> bool:
    """Tell whether a stop string ended a reply inside of its thinking: the thinking is open, or there is nothing
    else.
    """
    thinking, text, closed = split_thinking(completion.text)
    alone = bool(completion.thinking or thinking) and not text.strip()
    return completion.ending == "stop" and (not closed or alone)


def _closed(text: str, stop: tuple[str, ...]) -> str:
    """Put the stop string back where its opening tag stands unclosed: endpoints leave it out, our texts hold
    it.
    """
    for s in stop:
        opening = s.replace("</", "<", 1)
        if s.startswith("</") and s not in text and opening in text:
            return text + s
    return text


def _chosen(text: str, choices: tuple[str, ...]) -> str:
    """Return the choice that a reply names, if it names exactly one. Otherwise return the reply, for the format to
    judge.
    """
    reply = text.strip()
    exact = [c for c in choices if c.strip().lower() == reply.lower().strip(" .!\"'")]
    return exact[0] if len(exact) == 1 else text
