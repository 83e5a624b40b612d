"""YAML in which no key stands twice."""

from __future__ import annotations

import yaml


class UniqueKeys(yaml.constructor.SafeConstructor):
    """Part of a YAML loader. Equal keys of a mapping are an error, because PyYAML silently takes the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[object, object]:
        """Return the keys and values of a mapping."""
        keys: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in keys:
                raise yaml.MarkedYAMLError(
                    problem=f"the key {key.value!r} stands twice; leave one out", problem_mark=key.start_mark
                )
            if isinstance(key, yaml.ScalarNode):
                keys.add(key.value)
        return super().construct_mapping(node, deep)
