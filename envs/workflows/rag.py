"""Retrieval-augmented question answering, in the four published forms.

    rag            decompose -> retrieve -> answer
    rag-evidence   decompose -> retrieve -> up to three evidence agents side by side -> answer
    rag-summary    decompose -> retrieve -> one summary of all -> answer
    rag-rewrite    rewrite -> retrieve -> select -> answer

After a malformed decomposition there is no search, and the answerer answers from the question alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from ...agents.policies import Call
from ...agents.roles import Json, Role, Tags
from ..core.workflow import Episode, Outcome, Workflow
from .parts import ANSWER, PROMPTS, UNKNOWN, passages_text

Docs = Sequence[Mapping[str, str]]


def numbered(queries: Sequence[str], texts: Sequence[str]) -> str:
    """Return numbered sub-questions, each with its text."""
    return (
        "\n".join(f"{i}. {q}\n{t}" for i, (q, t) in enumerate(zip(queries, texts, strict=True), 1)) or "none"
    )


def decomposer(most: int) -> Role:
    """Return the role that splits a question into at most `most` sub-questions."""
    return Role(
        "decomposer", reply=Json("sub_queries", most=most, otherwise=(), texts=True), sees=("question",)
    )


ANSWERER = Role("answerer", reply=ANSWER, sees=("question", "found"))


class Rag(Workflow):
    """Team that decomposes the question, retrieves for each sub-question, and answers."""

    tools = ("retrieve",)
    prompts = PROMPTS / "rag.yaml"

    def __init__(self, max_queries: int = 3, top_k: int = 4) -> None:
        if max_queries < 1 or top_k < 1:
            raise ValueError(f"max_queries and top_k must be at least 1, got {max_queries} and {top_k}")
        self.max_queries, self.top_k = max_queries, top_k
        self.roles = (decomposer(max_queries), *self.middle(), ANSWERER)

    def middle(self) -> tuple[Role, ...]:
        """Return the roles between decomposer and answerer."""
        return ()

    def terms(self) -> Mapping[str, object]:
        """Return what prompts tell of the configuration."""
        return {"most": self.max_queries}

    async def run(self, ep: Episode) -> Outcome:
        """Play one episode."""
        queries = await self.ask_queries(ep)
        passages = await ep.all(*(ep.use("retrieve", query=q, k=self.top_k) for q in queries))
        return await self.answer(ep, numbered(queries, [passages_text(docs) for docs in passages]))

    async def ask_queries(self, ep: Episode) -> tuple[str, ...]:
        """Ask for the sub-questions. A malformed reply gives none."""
        queries: tuple[str, ...] = (await ep.act("decomposer", {"question": ep.task.question})).value
        return queries

    async def answer(self, ep: Episode, passages: str) -> Outcome:
        """Ask for the final answer: the last act of all four teams."""
        reply = await ep.act("answerer", {"question": ep.task.question, "found": passages})
        return Outcome(answer=reply.value)


class RagEvidence(Rag):
    """Team in which each sub-question has its own evidence agent. These agents act at the same time."""

    def middle(self) -> tuple[Role, ...]:
        """Return the roles between decomposer and answerer."""
        reply = Tags("sub_evidence", otherwise=UNKNOWN)
        sees = ("passages", "question", "query")
        return (Role("evidence", instances=self.max_queries, reply=reply, sees=sees),)

    async def run(self, ep: Episode) -> Outcome:
        """Play one episode."""
        queries = await self.ask_queries(ep)
        evidence = await ep.all(
            *(self.read(ep, a, q) for a, q in zip(ep.cast("evidence"), queries, strict=False))
        )
        return await self.answer(ep, numbered(queries, evidence))

    async def read(self, ep: Episode, agent: str, query: str) -> str:
        """Retrieve passages for one sub-question, and extract the evidence."""
        docs = await ep.use("retrieve", query=query, k=self.top_k)
        seen = {"passages": passages_text(docs), "question": ep.task.question, "query": query}
        evidence: str = (await ep.act(agent, seen)).value
        return evidence


class RagSummary(Rag):
    """Team in which one summarizer answers all sub-questions in one reply."""

    def __init__(self, max_queries: int = 5, top_k: int = 5) -> None:
        super().__init__(max_queries, top_k)

    def middle(self) -> tuple[Role, ...]:
        """Return the roles between decomposer and answerer."""
        reply = Json("sub_answers", most=self.max_queries, otherwise=(), texts=True)
        return (Role("summarizer", reply=reply, sees=("found", "question")),)

    async def run(self, ep: Episode) -> Outcome:
        """Play one episode."""
        queries = await self.ask_queries(ep)
        if not queries:
            return await self.answer(ep, "none")
        passages = await ep.all(*(ep.use("retrieve", query=q, k=self.top_k) for q in queries))
        told = numbered(queries, [passages_text(docs) for docs in passages])
        seen = {"found": told, "question": ep.task.question}
        answers = (await ep.act("summarizer", seen)).value
        padded = (*answers, *(UNKNOWN for _ in queries))[: len(queries)]
        return await self.answer(ep, numbered(queries, padded))


class RagRewrite(Workflow):
    """Team that rewrites the question as one query, retrieves, selects the useful passages, and answers."""

    tools = ("retrieve",)
    prompts = PROMPTS / "rag.yaml"
    roles = (
        Role("rewriter", reply=Tags("rewrite_query"), sees=("question",)),
        Role(
            "selector",
            reply=Tags("selected_docs", otherwise="none"),
            sees=("passages", "question", "query"),
        ),
        ANSWERER,
    )

    def __init__(self, top_k: int = 5) -> None:
        self.top_k = top_k

    async def run(self, ep: Episode) -> Outcome:
        """Play one episode."""
        question = ep.task.question
        query = (await ep.act("rewriter", {"question": question})).value or question
        docs = await ep.use("retrieve", query=query, k=self.top_k)
        seen = {"passages": passages_text(docs), "question": question, "query": query}
        chosen = (await ep.act("selector", seen)).value
        reply = await ep.act("answerer", {"question": question, "found": chosen})
        return Outcome(answer=reply.value)


# the expert ----------------------------------------------------------------------------------------------


def expert(call: Call) -> str:
    """Split the question into the task's hops, find each answer in the passages, and give the gold answer."""
    task = call.task
    question, gold = task.view["question"], task.reference["answers"][0]
    hops = task.reference.get("hops") or ({"question": question, "answer": gold, "title": ""},)
    if call.role == "decomposer":
        return json.dumps({"sub_queries": [h["question"] for h in hops]})
    if call.role == "rewriter":
        return f"<rewrite_query>{question} {' '.join(h['title'] for h in hops)}</rewrite_query>".replace(
            " <", "<"
        )
    if call.role == "evidence":
        asked = next((h["answer"] for h in hops if call.fields["query"] == h["question"]), gold)
        return f"<sub_evidence>{asked}</sub_evidence>"
    if call.role == "summarizer":
        return json.dumps({"sub_answers": [h["answer"] for h in hops]})
    if call.role == "selector":
        wanted = tuple(f"{h['title']}: " for h in hops if h["title"])
        lines = [line for line in call.fields["passages"].splitlines() if line.startswith(wanted)]
        return f"<selected_docs>{' '.join(lines) or 'none'}</selected_docs>"
    return f"<final_answer>{gold}</final_answer>"
