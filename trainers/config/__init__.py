"""The config of a run: one typed tree, importable without torch."""

from .schema import ConfigError as ConfigError
from .schema import RunConfig as RunConfig
