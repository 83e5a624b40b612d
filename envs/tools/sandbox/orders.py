"""Messages to a room of the sandbox, as JSON: its settings, and the programs to run."""

from __future__ import annotations

from typing import TypedDict


class CaseLimits(TypedDict):
    """Limits of a case. The host has checked the numbers."""

    time_limit: float
    wall_limit: float
    longest: float
    memory_mb: int
    processes: int
    open_files: int
    output_mb: int
    disk_mb: int


class CaseOrder(TypedDict):
    """Message with one program to run."""

    program: str
    stdin: str
    fn_name: str | None
    arguments: str
    limits: CaseLimits


class RoomConfig(TypedDict):
    """Settings of a room. The host sets all except the last two, which the room sets."""

    level: str
    group: list[int]
    room: str
    path: list[str]
    hidden: list[str]
    privileged: bool
    user: int
    threads_only: bool
    folder: str
    filter: bytes | None
