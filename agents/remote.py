"""A policy behind an OpenAI-compatible endpoint: `openai:MODEL@URL`.

    OpenAIPolicy.of("openai:gpt-4o-mini@https://api.openai.com/v1")
    OpenAIPolicy("Qwen/Qwen3-8B", "http://localhost:8000/v1", temperature=0.7)

Only the standard library is needed: each request runs in a thread. A failure that may pass (429, 5xx, a dropped
connection) is tried again, after the time that the server names or a growing pause, until the deadline. An endpoint
that has never answered gets 15 s. A failure that cannot pass (a wrong key, an unknown model) is an error at once, with
the server's words. Rollouts, evaluations and training then stop. They also stop where calls in a row fail alike
(`outage.py`). The key comes from OPENAI_API_KEY.

The server makes tokens of the messages. Contents go to it unchanged. For models in this process, control tokens in
contents (`<|im_end|>` in a passage) are plain text (`plain.py`). For a server this cannot be promised from here.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from .answers import Answer, ReplyMeta
from .failures import ModelFailure
from .policies import Call, Message
from .text.reading import split_thinking
from .threads import contained

TRANSIENT = (408, 409, 425, 429, 500, 502, 503, 504, 529)
REASONS = {"stop": "stop", "length": "length", "content_filter": "stop", "tool_calls": "stop"}


HOPELESS = (401, 402, 403, 404)  # wrong key, account, model or path: no other request would succeed either
LARGEST_ANSWER = 16 << 20


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect is an error: following it would give the key and the messages to another host."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirect)


class RemoteError(ModelFailure):
    """Raised when the endpoint cannot answer and asking again would not help."""


class RemoteRefused(RemoteError):
    """Raised when the endpoint refuses every request with this key, this model or this path."""

    hopeless = True


class RemoteUnavailable(RemoteError):
    """Raised when the endpoint did not answer before the deadline: a failure of infrastructure, not of a
    role.
    """

    infrastructure = True


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
        system: Mapping[str, str] | None = None,
        choices: str = "parse",
        **options: Any,
    ) -> None:
        """Set up the endpoint. `deadline`: seconds for one call, retries included. `options` go into every request (temperature, top_p …).

        `choices="guided"` has a vLLM server allow only the choices; "parse" tells the model and reads its answer.
        """
        if choices not in ("parse", "guided"):
            raise ValueError(f'choices must be "parse" or "guided", not {choices!r}')
        self.model, self.url = model, url.rstrip("/")
        self.key = api_key if api_key is not None else os.environ.get("OPENAI_API_KEY", "")
        self.deadline, self.choices, self.options = deadline, choices, options
        self.system = dict(system or {})
        self._answered = False
        self._silent = 0.0  # time since which no request was answered; 0: one was
        self._threads = ThreadPoolExecutor(concurrency, thread_name_prefix="openai")

    @classmethod
    def of(cls, name: str, **how: Any) -> OpenAIPolicy:
        """Make a policy of `openai:MODEL@URL`; the URL may be left out."""
        model, _, url = name.removeprefix("openai:").partition("@")
        if not model or (url and not url.startswith(("http://", "https://"))):
            raise ValueError(
                f"{name!r} is not of the form openai:MODEL@URL, with an http(s) URL such as http://host/v1"
            )
        return cls(model, url or "https://api.openai.com/v1", **how)

    def fix_shapes(self) -> None:
        """Refuse to promise the same bits again, which a deterministic evaluation asks of its players."""
        raise ValueError(
            f"{self!r}: a remote model does not promise the same reply twice; leave `deterministic` out"
        )

    async def act(self, call: Call) -> Answer:
        """Answer one call. Cancelling it stops its retries; a request on its way is left to end by itself."""
        body = self._body(call)
        began = time.monotonic()
        loop = asyncio.get_running_loop()
        for attempt in range(1_000_000):
            left = began + self.deadline - time.monotonic()
            outcome = await loop.run_in_executor(self._threads, contained(self._post), body, max(left, 0.1))
            if isinstance(outcome, dict):
                self._answered, self._silent = True, 0.0
                return self._answer(call, outcome)
            now = time.monotonic()
            patience = self.deadline if self._answered else min(self.deadline, self.first_answer)
            self._silent = 0.0 if outcome.alive else self._silent or now
            ends = began + self.deadline
            if self._silent:  # for any caller: later callers need not wait as long again
                ends = min(ends, self._silent + patience)
            pause = (
                outcome.after
                if outcome.after is not None
                else min(30.0, 0.5 * 2**attempt) * random.uniform(0.5, 1)
            )
            if now + pause >= ends:
                raise RemoteUnavailable(
                    f"{self.url} gave no answer for {self.model!r} within {max(now - began, ends - began):.3g} s; "
                    f"the last of {attempt + 1} tries: {outcome.why}"
                )
            await asyncio.sleep(pause)
        raise AssertionError("unreachable")

    def _body(self, call: Call) -> dict[str, Any]:
        messages = [_plain(m) for m in call.messages]
        system = self.system.get(call.agent) or self.system.get(call.role) or call.system
        if system:
            messages.insert(0, {"role": "system", "content": system})
        body: dict[str, Any] = {
            "model": self.model,
            "messages": messages,
            "seed": call.seed & 0x7FFFFFFF,
            **self.options,
        }
        if call.max_tokens:
            body["max_tokens"] = min(call.max_tokens, self.options.get("max_tokens", call.max_tokens))
        if call.stop:
            body["stop"] = list(call.stop)[:4]  # the protocol's limit
        if call.choices and self.choices == "guided":
            body["structured_outputs"] = {"choice": list(call.choices)}
        elif call.choices:
            told = f"Answer with exactly one of: {', '.join(call.choices)}"
            messages[-1] = {**messages[-1], "content": f"{messages[-1]['content']}\n\n{told}"}
        return body

    def _post(self, body: dict[str, Any], timeout: float) -> dict[str, Any] | _Again:
        headers = {"Content-Type": "application/json"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        request = urllib.request.Request(f"{self.url}/chat/completions", json.dumps(body).encode(), headers)
        try:
            with _OPENER.open(request, timeout=timeout) as reply:
                raw = reply.read(LARGEST_ANSWER + 1)
            if len(raw) > LARGEST_ANSWER:
                raise RemoteError(f"{self.url} sent more than {LARGEST_ANSWER >> 20} MB as an answer")
            answer = json.loads(raw)
        except urllib.error.HTTPError as error:
            words = _sentence(error.read(2000).decode(errors="replace"))
            if error.code in TRANSIENT:
                after = _seconds(error.headers.get("Retry-After"))
                return _Again(
                    f"HTTP {error.code} {words:.200}", after, alive=error.code < 500 or after is not None
                )
            kind = RemoteRefused if error.code in HOPELESS else RemoteError
            raise kind(
                f"{self.url} refused the request for {self.model!r}: HTTP {error.code} {words:.500}"
            ) from None
        except (OSError, ValueError, RecursionError) as error:  # no connection, a timeout, half an answer
            return _Again(f"{type(error).__name__}: {error}")
        if not isinstance(answer, dict) or not answer.get("choices"):
            return _Again(f"an answer without choices: {str(answer):.200}", alive=True)
        return answer

    def _answer(self, call: Call, answer: dict[str, Any]) -> Answer:
        first, usage = answer["choices"][0], answer.get("usage") or {}
        message = first["message"]
        thinking, text, closed = split_thinking(message.get("content") or "")
        apart = message.get("reasoning_content") or message.get(
            "reasoning"
        )  # servers with a reasoning parser
        if isinstance(apart, str) and closed:
            thinking = f"<think>{apart}</think>\n{thinking}"
        reason = REASONS.get(first.get("finish_reason"), "stop")
        if reason == "stop":
            text = _closed(text, call.stop)
        if call.choices:
            text = _chosen(text, call.choices)
        text = thinking + text
        meta = ReplyMeta(
            policy=f"openai:{self.model}",
            tokens_in=usage.get("prompt_tokens") or 0,
            tokens_out=usage.get("completion_tokens") or 0,
            finish_reason=reason,
        )
        return Answer(text, meta)

    def identity(self) -> dict[str, Any]:
        """Describe the policy, for the record of an evaluation. The weights behind an endpoint are unknown."""
        return {
            "model": self.model,
            "endpoint": re.sub(r"//[^/@]*@", "//", self.url),  # without a password
            "options": self.options,
            "system": self.system,
            "choices": self.choices,
        }

    def __repr__(self) -> str:
        return f"OpenAIPolicy({self.model!r}, {self.url!r})"


class _Again:
    """Reason why a request may be tried again, and when. `alive`: the server is there."""

    def __init__(self, why: str, after: float | None = None, alive: bool = False) -> None:
        self.why, self.after, self.alive = why, after, alive


def _sentence(body: str) -> str:
    """Take the server's sentence out of a JSON body."""
    try:
        told = json.loads(body)
        told = told.get("error", told)
        told = told if isinstance(told, str) else told.get("message") or told.get("detail") or body
    except (ValueError, AttributeError):
        return body
    return str(told)


def _seconds(header: str | None) -> float | None:
    try:
        return max(0.0, float(header)) if header else None
    except ValueError:  # an HTTP date: the growing pause will do
        return None


def _plain(message: Message) -> dict[str, Any]:
    """Turn a message into one of the protocol. Its role `"tool"` needs ids, so tools' results are told as the
    user.
    """
    plain = {k: str(v) if isinstance(v, str) else v for k, v in message.items() if k != "node"}
    return {**plain, "role": "user"} if plain["role"] == "tool" else plain


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
    """Return the choice that a reply names, if it names exactly one; otherwise the reply, for the format to
    judge.
    """
    reply = text.strip()
    exact = [c for c in choices if c.strip().lower() == reply.lower().strip(" .!\"'")]
    return exact[0] if len(exact) == 1 else text
