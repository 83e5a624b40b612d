"""Policies behind endpoints of other servers."""

from .connection import RemoteError as RemoteError
from .connection import RemoteRefused as RemoteRefused
from .connection import RemoteUnavailable as RemoteUnavailable
from .openai_policy import OpenAIPolicy as OpenAIPolicy
