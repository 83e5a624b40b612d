"""The named choices of losses, where a config can be checked against them without loading torch."""

from __future__ import annotations

from typing import Literal

Aggregation = Literal["token-mean", "sequence-mean", "sequence-sum", "unit-mean"]
Estimator = Literal["k1", "k2", "k3"]
Importance = Literal["off", "truncate", "mask", "sequence-truncate"]
