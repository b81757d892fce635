"""A bound that all clients share: one client cannot fill it, see `has_share`."""

from collections import Counter

from api_proc.errors import ApiError, overloaded
from protocol.fairness.shares import SHARE, has_share


class SharedBound:
    """A bound on what the requests of all clients hold together, of which each has a share."""

    def __init__(self, setting: str, limit: int, unit: str) -> None:
        """`setting` is the name of the bound, and `unit` what it counts, both for errors."""
        self.setting = setting
        self.limit = limit
        self._unit = unit
        self.total = 0
        self._held: Counter[str] = Counter()

    def has_room(self, more: int, freed: int = 0) -> bool:
        """Return whether the bound permits `more`, once `freed` is no longer held."""
        return self.total - freed + more <= self.limit

    def has_share(
        self, client: str | None, more: int, own: int = 0, *, freed: int = 0, freed_own: int = 0
    ) -> bool:
        """Return whether the share of a client permits `more`, once `freed` is no longer held.

        The client itself holds `freed_own` of that. None has no share. A request that holds `own`
        may have any size if it is the only one of its client.
        """
        held = 0 if client is None else self._held[client] - freed_own
        if client is None or held == own:
            return True
        return has_share(held, self.limit - self.total + freed, more)

    def add(self, client: str | None, more: int) -> None:
        """Count what a client takes, or returns if `more` is negative, whatever the bound is."""
        self.total += more
        if client is not None:
            self._held[client] += more
            if not self._held[client]:
                del self._held[client]

    def held_by(self, client: str) -> int:
        """Return what a client holds."""
        return self._held[client]

    def beyond_share(self, client: str | None, more: int) -> ApiError:
        """Return a 429 for a client whose share does not permit `more`."""
        held = 0 if client is None else self._held[client]
        free = self.limit - self.total
        return overloaded(
            f"{self.setting}: this client holds {held} of {self.limit} {self._unit}, {free} are"
            f" left for all, and this request adds {more}; a client may hold {SHARE} times what is"
            " then left"
        )
