"""A table whose entries are attributes: a compiler looks an attribute up when it comes to it, but a dict only once."""

from __future__ import annotations

from typing import Any


class AttributeTable:
    """Things by name, as attributes."""

    def keep(self, name: str, thing: Any) -> None:
        self.__dict__[name] = thing

    def forget(self, name: str) -> None:
        self.__dict__.pop(name, None)
