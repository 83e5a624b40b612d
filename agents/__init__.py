"""Who speaks: roles and reply formats, policies and teams, chats, engines, the embedded tiny model."""

from pathlib import Path

TINY = Path(__file__).parent / "tiny"
"""The directory of the embedded model."""
