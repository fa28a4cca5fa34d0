"""Giving out a group's layers one at a time: mlx-lm copies and loads caches one by one, and knows nothing of groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

Group = TypeVar("Group")


class Handout(Generic[Group]):
    """Groups under way. Layer 0 makes one; the layers after it, in order, get the same one."""

    def __init__(self) -> None:
        self._under_way: list[tuple[Group, int]] = []

    def take(self, layer: int, layers: int, make: Callable[[], Group]) -> Group:
        """The group for `layer` of `layers`. Several may be under way, as long as they go on layer by layer.

        Raises ValueError if layers do not come in order.
        """
        if layer == 0:
            # What has got further than its first layer was given up.
            self._under_way = [(group, following) for group, following in self._under_way if following == 1]
            self._under_way.append((make(), 0))
        for number, (group, following) in enumerate(self._under_way):
            if following == layer:
                if layer + 1 == layers:
                    del self._under_way[number]
                else:
                    self._under_way[number] = (group, layer + 1)
                return group
        raise ValueError(f"layer {layer} of {layers} does not follow the one before it")
