"""Picture of one episode as a small SVG. Time runs down, each role has a colour and a lane, each line is a reply or a result.

It is readable at the width of a phone, and follows the reader's choice of light or dark.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from ...envs.core.trace import Trace
from ...envs.core.workflow import Node
from ...envs.faces.render import one_line, use_in_words
from .game_drawings import boards
from .html import escape

WIDTH, ROW, LANE, TOP = 460, 24, 15, 20
LETTERS = 52  # characters of a line, role and reply together
MOST = 16  # rows; a longer episode is cut in the middle
COLOURS = ("#3f51b5", "#00796b", "#c2185b", "#c75000", "#6a1b9a", "#5d7a12", "#5d4037")
IN_THE_DARK = ("#9fa8ff", "#4db6ac", "#f48fb1", "#ffb074", "#ce93d8", "#b5cc6a", "#c8a99d")
STYLE = """
svg{font:13px system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;background:#fff;color:#24292f}
svg{fill:#24292f}.who{font-weight:600}.tool,.cut,.foot{fill:#6e7781}.edge{fill:none;stroke:#b6bec8;stroke-width:1.5}
.good{fill:#1a7f37;font-weight:600;text-anchor:end}.bad{fill:#c0362c;font-weight:600;text-anchor:end}
.box{fill:#8c959f}.cell{fill:#fff;stroke:#c4ccd4}.wall{fill:#57606a}.dark{fill:#e3e8ee}.given{fill:#cfd8ff}.block{fill:#dfe7fd}
.in{text-anchor:middle;font-size:12px}.arrow{fill:none;stroke:#57606a;stroke-width:1.5}
@media(prefers-color-scheme:dark){svg{background:#1f2430}svg{fill:#dfe3ea}.tool,.cut,.foot{fill:#98a2b3}
.edge{stroke:#4d5666}.good{fill:#56d364}.bad{fill:#ff7b72}.cell{fill:#1f2430;stroke:#4d5666}.wall{fill:#8b949e}.dark{fill:#2d3446}
.given{fill:#38447a}.block{fill:#33406b}.arrow{stroke:#98a2b3}DARK}
"""
STYLE = "".join(f".c{i}{{fill:{colour}}}" for i, colour in enumerate(COLOURS)) + STYLE.replace(
    "DARK", "".join(f".c{i}{{fill:{colour}}}" for i, colour in enumerate(IN_THE_DARK))
).replace("\n", "")
_TAG = re.compile(r"</?\w+>")


def picture(trace: Trace, roles: Sequence[str]) -> str:
    """Return the SVG of an episode. `roles` gives the order of lanes and colours."""
    lanes = {role: number for number, role in enumerate(roles)}
    board, height = board_of(trace)
    top = TOP + (height + 22 if board else 0)
    rows = shown(trace.nodes)
    place = {node.id: top + ROW * row for row, node in enumerate(rows) if node is not None}
    parts = [edges(rows, place, lanes)]
    for row, node in enumerate(rows):
        y = top + ROW * row
        if node is None:
            parts.append(
                f'<text class="cut" x="{14 + LANE * len(lanes)}" y="{y + 4}">… {len(trace.nodes) - len(rows) + 1} more</text>'
            )
        else:
            parts.append(line(node, y, lanes, trace.rewards(node.id)))
    bottom = top + ROW * len(rows) + 10
    parts.append(f'<text class="foot" x="10" y="{bottom - 8}">{escape(one_line(ending(trace), 62))}</text>')
    title = f"An episode of {trace.env_id}: {', '.join(roles)}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom}" width="{WIDTH}" height="{bottom}" role="img">'
        f"<title>{escape(title)}</title><style>{STYLE}</style>{board}{''.join(parts)}</svg>\n"
    )


def shown(nodes: Sequence[Node]) -> list[Node | None]:
    """Return the nodes to draw, with None in place of the nodes that are left out in the middle."""
    if len(nodes) <= MOST:
        return list(nodes)
    return [*nodes[: MOST - 4], None, *nodes[-3:]]


def edges(rows: Sequence[Node | None], place: Mapping[str, int], lanes: Mapping[str, int]) -> str:
    """Draw lines from each node to its children, if both are drawn."""
    drawn = []
    for node in rows:
        for parent in node.parents if node is not None else ():
            if parent in place and node is not None:
                source = next(n for n in rows if n is not None and n.id == parent)
                x, y, to, below = across(source, lanes), place[parent], across(node, lanes), place[node.id]
                bend = min(ROW, below - y) / 2
                drawn.append(
                    f'<path class="edge" d="M{x} {y}C{x} {y + bend:g} {to} {below - bend:g} {to} {below}"/>'
                )
    return "".join(drawn)


def across(node: Node, lanes: Mapping[str, int]) -> int:
    """Return the horizontal place of a node's mark: the lane of its role. Tools are to the right of all roles."""
    return 14 + LANE * (lanes.get(node.role or "", len(lanes)))


def line(node: Node, y: int, lanes: Mapping[str, int], rewards: Mapping[str, float]) -> str:
    """Draw one row: the mark in its lane, the name, the text, and its rewards."""
    x, text = across(node, lanes), 14 + LANE * (len(lanes) + 1)
    letters = LETTERS - 2 * len(lanes)
    if node.kind == "use":
        asked, answer = use_in_words(node, 60)
        words = answer if node.tool not in ("world", "tools") else asked or answer
        mark = f'<rect class="box" x="{x - 4}" y="{y - 4}" width="8" height="8" rx="1.5"/>'
        name, style = node.tool or "", 'class="tool"'
    else:
        colour = f"c{lanes.get(node.role or '', 0) % len(COLOURS)}"
        mark = f'<circle class="{colour}" cx="{x}" cy="{y}" r="5.5"/>'
        words, name, style = plain(node.text or ""), node.agent or "", f'class="who {colour}"'
    earned = sum(rewards.values())
    sign = (
        f'<text class="{"good" if earned > 0 else "bad"}" x="{WIDTH - 8}" y="{y + 4}">{earned:+.3g}</text>'
        if earned
        else ""
    )
    cut = escape(one_line(words, max(8, letters - len(name) - (5 if sign else 0))))
    return f'{mark}<text x="{text}" y="{y + 4}"><tspan {style}>{escape(name)}</tspan> {cut}</text>{sign}'


def plain(text: str) -> str:
    """Return a reply without its tags, or the whole reply if nothing would be left."""
    return " ".join(_TAG.sub(" ", text).split()) or text


def ending(trace: Trace) -> str:
    """Return the outcome of the episode, in a line."""
    outcome = trace.outcome or {}
    if isinstance(outcome.get("answer"), str):
        return f"answer: {outcome['answer']}"
    if "solved" in outcome:
        return f"{'solved' if outcome['solved'] else 'not solved'} in {outcome.get('steps', '?')} moves"
    return "  ".join(f"{name} {value:.3g}" for name, value in list(trace.metrics.items())[:3])


def board_of(trace: Trace) -> tuple[str, int]:
    """Return the drawing of the game's board before and after, and its height; ("", 0) without a game."""
    moves = [node for node in trace.nodes if node.kind == "use" and node.tool == "world"]
    if not moves:
        return "", 0
    first: Mapping[str, object] = moves[0].args or {}
    last = moves[-1].result
    return boards(str(first["game"]), str(first["state"]), str(last["state"]), TOP - 8)
