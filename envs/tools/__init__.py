"""Tools and graders. `math_equal` and `verify_code` load what they need at first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .tool import Infrastructure, Result, Tool, tool
from .toolbox import Toolbox

if TYPE_CHECKING:
    from .code.verify import verify_code
    from .math.equal import math_equal

__all__ = ["Infrastructure", "Result", "Tool", "Toolbox", "math_equal", "tool", "verify_code"]


def __getattr__(name: str) -> object:
    if name == "math_equal":
        from .math.equal import math_equal

        return math_equal
    if name == "verify_code":
        from .code.verify import verify_code

        return verify_code
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
