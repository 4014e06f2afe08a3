"""Uids and generated names: unique, and the same in each run with the same seed."""

import random
import uuid
from typing import Final

_ALPHABET: Final = "bcdfghjklmnpqrstvwxz2456789"


class Names:
    """Draws identifiers from a seeded generator; callers hold the store's lock."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)  # noqa: S311 - nothing here is secret

    def uid(self) -> str:
        """Return a random UUID of version 4."""
        return str(uuid.UUID(int=self._random.getrandbits(128), version=4))

    def suffix(self, length: int = 5) -> str:
        """Return what the server puts behind a `generateName`."""
        return "".join(self._random.choice(_ALPHABET) for _ in range(length))

    def ip(self) -> str:
        """Return an address of a pod."""
        return f"10.1.{self._random.randrange(256)}.{self._random.randrange(1, 255)}"
