"""Agents: roles and reply formats, policies and teams, chats, engines, the embedded tiny model."""

from .names import TINY as TINY
from .names import model_path as model_path
