"""A model behind a URL: requests in their turn, each tried again while that may help.

A failure that may pass (429, 5xx, a dropped connection, half an answer) is tried again: after the time that the server
names, else after a growing pause with chance in it. A pause that the server asks for holds for all requests. A failure
that cannot pass (a wrong key, an unknown model) is an error at once, with the server's words.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import random
import re
import ssl
import time
from collections.abc import Callable, Mapping
from email.utils import parsedate_to_datetime

import anyio
import httpx

from ..basics.failures import ModelFailure
from ..basics.hints import say_once
from .completion import Arrival, Completion, TooLarge, Unreadable, read_completion, sentence_of

TRANSIENT = (408, 409, 425, 429, 500, 502, 503, 504, 520, 522, 524, 529)
HOPELESS = (
    401,
    402,
    403,
    404,
    405,
)  # wrong key, account, model or path: no other request would succeed either
WORDS_SECONDS = 5.0  # for the words of an error
HASTY = 3
"""Attempts after which a pause has about a second at least, even if the server asks for less."""
OPTIONAL = ("stream_options", "stream", "logprobs", "seed", "stop")
"""Optional fields of a request. If a server does not know one, it is left out."""
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "SSL_CERT_FILE", "SSL_CERT_DIR")
DISTRUST = "TLS: "
"""Beginning of a cause that a new attempt does not change."""
LENGTH, ITS_NEW_NAME = "max_tokens", "max_completion_tokens"
"""The longest reply, and its name for servers that refuse the older one, as OpenAI's for reasoning models."""


class RemoteError(ModelFailure):
    """Raised when the endpoint cannot answer, and a new attempt would not help."""


class RemoteRefused(RemoteError):
    """Raised when the endpoint refuses every request with this key, this model or this path."""

    hopeless = True


class RemoteUnavailable(RemoteError):
    """Raised when the endpoint did not answer before the deadline: a failure of infrastructure, not of a
    role.
    """

    infrastructure = True


class Pace:
    """Limit of units per minute, spread evenly. A debt is paid off before the next request begins."""

    def __init__(self, per_minute: float | None) -> None:
        self.gap = 60.0 / per_minute if per_minute else 0.0
        self._free = 0.0

    def take(self, units: float) -> float:
        """Take units. Return the seconds until they may be used."""
        now = time.monotonic()
        begin = max(now, self._free)
        self._free = begin + units * self.gap
        return begin - now

    def correct(self, units: float) -> None:
        """Take more units than were estimated, or return some."""
        self._free += units * self.gap


class _Again(Exception):
    """Reason and time for a new attempt. `alive`: the server is reachable."""

    def __init__(self, why: str, after: float | None = None, alive: bool = False) -> None:
        super().__init__(why)
        self.after, self.alive = after, alive


class Connection:
    """Connection to one model at one URL. All asynchronous work here runs in one event loop."""

    idle = 30.0  # seconds of silence allowed within a stream

    def __init__(
        self, model: str, url: str, key: str, *, deadline: float, first_answer: float, concurrency: int,
        requests_per_minute: float | None = None, tokens_per_minute: float | None = None,
    ) -> None:  # fmt: skip
        """Set up. `first_answer`: seconds within which an endpoint must have answered any request at all."""
        self.model, self.url, self.key = model, url, key
        self.deadline, self.first_answer, self.concurrency = deadline, first_answer, concurrency
        self._requests, self._tokens = Pace(requests_per_minute), Pace(tokens_per_minute)
        self._answered = False
        self._silent = 0.0  # time since which no request was answered; 0: one was answered
        self._quiet: tuple[float, str] = (0.0, "")  # no request before this time, with the server's message
        self.without: set[str] = set()
        """Fields of OPTIONAL that the server does not know."""
        self._names: dict[str, str] = {}  # fields that this server calls otherwise
        self._open: tuple[asyncio.AbstractEventLoop, httpx.AsyncClient, asyncio.Semaphore] | None = None
        self._running = 0

    async def complete(
        self, body: Mapping[str, object], tokens: int, wasted: Callable[[int], None]
    ) -> Completion:
        """Answer one request. `tokens` is an estimate of its tokens. `wasted` is called with the tokens of failed
        attempts.
        """
        client, turn = self._client()
        async with turn:
            self._running += 1
            try:
                return await self._tries(client, body, tokens, wasted)
            finally:
                self._running -= 1

    async def _tries(
        self,
        client: httpx.AsyncClient,
        body: Mapping[str, object],
        tokens: int,
        wasted: Callable[[int], None],
    ) -> Completion:
        began = time.monotonic()
        for attempt in range(1, 1_000_000):
            began += await self._paced(tokens)  # waiting for our own limit does not count against the server
            began_waiting, (until, asked) = time.monotonic(), self._quiet
            if until - began >= self.deadline:
                raise self._put_off(until - began_waiting, asked)
            if until > began_waiting:
                await asyncio.sleep(until - began_waiting + random.uniform(0, 0.05 * (until - began_waiting)))
            arrival = Arrival(lambda: None)
            try:
                completion = await self._once(client, body, began + self.deadline - time.monotonic(), arrival)
            except BaseException as failure:  # a call that is cancelled is paid for, too
                if arrival.pieces:
                    wasted(arrival.pieces)
                else:
                    self._tokens.correct(-tokens)
                if not isinstance(failure, _Again):
                    raise
                pause, ends = self._pause(failure, attempt, began)
                if failure.after is not None and failure.after >= self.deadline:
                    raise self._put_off(failure.after, str(failure)) from None
                if time.monotonic() + pause >= ends:
                    since = min(began, self._silent or began)  # other calls may have waited before this one
                    raise self._unavailable(ends - since, attempt, str(failure)) from None
                if attempt == 2:
                    say_once(f"{self.url}: {failure}; it is tried again for up to {ends - began:.0f} s")
                await asyncio.sleep(pause)
                continue
            self._answered, self._silent = True, 0.0
            told = (completion.tokens_in or 0) + (completion.tokens_out or 0)
            self._tokens.correct(told - tokens if told else 0)
            return completion
        raise AssertionError("unreachable")

    async def _paced(self, tokens: int) -> float:
        """Wait until the limits of requests and tokens a minute allow one more. Return the seconds."""
        wait = max(self._requests.take(1), self._tokens.take(tokens))
        if wait:
            await asyncio.sleep(wait)
        return wait

    def _pause(self, failure: _Again, attempt: int, began: float) -> tuple[float, float]:
        """Return the pause after a failed attempt, and the time at which this request is given up."""
        now = time.monotonic()
        patience = self.deadline if self._answered else min(self.deadline, self.first_answer)
        self._silent = 0.0 if failure.alive else self._silent or now
        ends = began + self.deadline
        if self._silent:  # for any caller: later callers do not wait as long again
            ends = min(ends, self._silent + patience)
        grown = min(30.0, 0.5 * 2 ** min(attempt - 1, 10)) * random.uniform(0.5, 1)
        if failure.after is None:
            return grown, ends
        if now + failure.after > self._quiet[0]:
            self._quiet = (now + failure.after, str(failure))
        asked = failure.after + random.uniform(0, 0.05 * min(failure.after, 20.0))
        # a server may ask for no pause at all (0, a date of the past) again and again
        return (asked if attempt <= HASTY else max(asked, min(grown, 1.0))), ends

    def _unavailable(self, seconds: float, attempt: int, why: str) -> RemoteUnavailable:
        last = "the only try" if attempt == 1 else f"the last of {attempt} tries"
        return RemoteUnavailable(
            f"{self.url} gave no answer for {self.model!r} within {round(seconds, seconds < 2):g} s; {last}: {why}"
        )

    def _put_off(self, seconds: float, why: str) -> RemoteUnavailable:
        return RemoteUnavailable(
            f"{self.url} asks to wait for {seconds:,.0f} s, and a request for {self.model!r} has {self.deadline:g} s: {why}"
        )

    async def _once(
        self, client: httpx.AsyncClient, body: Mapping[str, object], left: float, arrival: Arrival
    ) -> Completion:
        """Send the request once."""
        body = {self._names.get(key, key): value for key, value in body.items() if key not in self.without}
        try:
            with anyio.fail_after(max(left, 0.1)):
                return await self._sent(client, body, arrival)
        except TimeoutError:
            raise _Again("no whole answer in time") from None
        except TooLarge as error:
            raise RemoteError(f"{self.url} sent {error}") from None
        except Unreadable as error:
            # if it has answered others, the server is there; else it may never speak this protocol
            raise _Again(self.told(str(error)), alive=self._answered) from None
        except (httpx.HTTPError, OSError, httpx.InvalidURL, httpx.StreamError) as error:
            cause = cause_of(error)
            if cause.startswith(DISTRUST):
                raise RemoteRefused(f"{self.url} is not called: {self.told(cause)}") from None
            raise _Again(self.told(cause)) from None

    async def _sent(
        self, client: httpx.AsyncClient, body: Mapping[str, object], arrival: Arrival
    ) -> Completion:
        async with client.stream("POST", self.path, content=json.dumps(body).encode()) as reply:
            if not reply.is_success:
                raise await self._refused(reply, body)
            if reply.headers.get("Content-Encoding", "identity") != "identity":
                raise RemoteRefused(f"{self.url} sent a compressed answer, which was not asked for")
            with anyio.CancelScope() as silence:

                def beat() -> None:
                    silence.deadline = anyio.current_time() + self.idle

                arrival.beat = beat
                return await read_completion(reply, arrival)
            raise Unreadable(f"a stream that fell silent for {self.idle:g} s")

    async def _refused(self, reply: httpx.Response, body: Mapping[str, object]) -> Exception:
        """Make the error for a status that is not a success."""
        status, words = reply.status_code, await self._words(reply)
        unknown = [name for name in OPTIONAL if name in body and _names(words, name)]
        if status in (400, 422) and LENGTH in body and ITS_NEW_NAME in words:
            self._names[LENGTH] = ITS_NEW_NAME
            return _Again(f"HTTP {status} {self.told(words):.200}", after=0.0, alive=True)
        if status in (400, 422) and unknown:
            self.without.add(unknown[0])
            if unknown[0] == "stream":
                self.without.add("stream_options")
            say_once(f"{self.url} does not know {unknown[0]!r}: it is asked without")
            return _Again(f"HTTP {status} {self.told(words):.200}", after=0.0, alive=True)
        if status in TRANSIENT and "insufficient_quota" not in words:
            after = _asked_pause(reply.headers)
            words = self.told(_sentence(words))
            return _Again(f"HTTP {status} {words:.200}", after, alive=status < 500 or after is not None)
        if reply.has_redirect_location:
            target = reply.headers["Location"].partition("?")[0]
            words = f"it redirects to {target}, and no redirect is followed: name the right URL"
        hopeless = status in HOPELESS or status == 429 or reply.has_redirect_location
        kind = RemoteRefused if hopeless else RemoteError
        words = self.told(_sentence(words))
        return kind(f"{self.url} refused the request for {self.model!r}: HTTP {status} {words:.500}")

    async def _words(self, reply: httpx.Response) -> str:
        """Return the beginning of an error's body, as far as it arrives soon."""
        raw = b""
        with anyio.move_on_after(WORDS_SECONDS):
            async for chunk in reply.aiter_raw():
                raw += chunk[: 4000 - len(raw)]
                if len(raw) >= 4000:
                    break
        return raw.decode(errors="replace")

    def clean(self, text: str) -> str:
        """Return a server's text without our key, which it may have repeated."""
        return text.replace(self.key, "[key]") if self.key else text

    def told(self, text: str) -> str:
        """Return a server's text for an error message: without the key, on one line, and without control characters."""
        return "".join(letter if letter.isprintable() else " " for letter in self.clean(text))

    @property
    def path(self) -> str:
        """Address of chat completions. A query of the URL (`?api-version=…`) stays at its end."""
        base, mark, query = self.url.partition("?")
        return f"{base.rstrip('/')}/chat/completions{mark}{query}"

    def _client(self) -> tuple[httpx.AsyncClient, asyncio.Semaphore]:
        """Return the client of the running event loop, and the semaphore of its requests."""
        loop = asyncio.get_running_loop()
        if self._open is None or self._open[0] is not loop:
            headers = {
                "Content-Type": "application/json", "Accept": "application/json, text/event-stream",
                "Accept-Encoding": "identity", "User-Agent": "unitymas",
            }  # fmt: skip
            if self.key:
                headers["Authorization"] = f"Bearer {self.key}"
            try:
                client = httpx.AsyncClient(  # no redirect is followed: it would give key and messages to another host
                    headers=headers, timeout=httpx.Timeout(None, connect=10.0), follow_redirects=False,
                    limits=httpx.Limits(max_keepalive_connections=self.concurrency),
                )  # fmt: skip
            except Exception as error:  # a proxy's URL may hold a password, so only names are told
                names = [name for name in PROXIES if os.environ.get(name) or os.environ.get(name.lower())]
                cause = f" ({error})" if isinstance(error, ImportError) else ""
                raise RemoteRefused(
                    f"{self.url} is not called: {type(error).__name__} at what the environment says of proxies and "
                    f"certificates{cause}; look at {', '.join(names) or 'its proxies'}"
                ) from None
            self._open = (loop, client, asyncio.Semaphore(self.concurrency))
        return self._open[1:]

    async def close(self) -> None:
        """Close idle connections. Requests that run keep theirs."""
        self._silent = 0.0  # later callers may wait again
        if self._open is not None and not self._running and self._open[0] is asyncio.get_running_loop():
            client, self._open = self._open[1], None
            await client.aclose()


def _names(words: str, field: str) -> bool:
    """Tell whether an error names a field of the request. Short names may be parts of other words, so they count in quotes."""
    return re.search(rf"[\"'`]{field}[\"'`]" if field in ("seed", "stop") else field, words) is not None


def _sentence(words: str) -> str:
    """Return the server's sentence from a JSON body."""
    try:
        return sentence_of(json.loads(words))
    except (ValueError, RecursionError):
        return words


def _asked_pause(headers: httpx.Headers) -> float | None:
    """Return the seconds that the server asks to wait. It may send a number or a date."""
    for name, unit in (("Retry-After-Ms", 1000.0), ("Retry-After", 1.0)):
        text = headers.get(name)
        if text is None:
            continue
        try:
            seconds = float(text) / unit
        except ValueError:
            try:
                seconds = parsedate_to_datetime(text).timestamp() - time.time()
            except (ValueError, TypeError, OverflowError, IndexError):  # the growing pause will do
                continue
        if seconds == seconds:  # not a number is no answer
            return max(0.0, seconds)
    return None


def cause_of(error: BaseException) -> str:
    """Return the operating system's message below the layers of a client, else the client's own message."""
    below: BaseException | None = error
    while below is not None:
        if isinstance(below, ssl.SSLCertVerificationError):
            return f"{DISTRUST}{below.verify_message or 'certificate not trusted'} (a certificate of your own: SSL_CERT_FILE)"
        if isinstance(below, ssl.SSLError) and below.reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST"):
            return f"{DISTRUST}no server for https answers there; is it http?"
        if isinstance(below, ssl.SSLError):
            return f"{type(below).__name__}: {below.reason or below}"
        if isinstance(below, OSError) and below.errno is not None and below.errno in errno.errorcode:
            return f"{type(below).__name__}: {os.strerror(below.errno)}"
        below = getattr(below, "exceptions", [below.__cause__ or below.__context__])[0]
    return f"{type(error).__name__}: {error or 'not in time'}"
