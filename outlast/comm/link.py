"""One slow link at a time for one axis: what several axes share with each other. No torch.

Two transfers that go over a host's interface at once get half of it each: both are done when the second one alone would
have been, and what waits for the first has waited twice as long. So an axis that begins a transfer first finishes what
another still has in flight on that link; transfers of one axis may overlap. Every rank begins its transfers in the same
order, so what one rank waits for has been begun by all.

Not covered: ranks of one host do not ask each other. They go through the same steps, so the same axis is at work on all of
them for most of the time; how far one is ahead of another nobody holds up.
"""

from typing import Protocol


class Flight(Protocol):
    """A transfer that has begun."""

    def wait(self) -> object:
        """Be done with it; at once, where that has been before."""
        ...


class Link:
    """A host's interface, as one rank on it uses it. Axes that cross hosts have one between them."""

    def __init__(self) -> None:
        self._flying: list[tuple[str, Flight]] = []

    def clear(self, axis: str) -> None:
        """Finish what other axes have in flight: before an axis begins a transfer."""
        others = [flight for name, flight in self._flying if name != axis]
        self._flying = [one for one in self._flying if one[0] == axis]
        for flight in others:
            flight.wait()

    def enter(self, axis: str, flight: Flight) -> None:
        """Note what an axis has begun, once the link is clear for it."""
        self._flying.append((axis, flight))

    def leave(self, flight: Flight) -> None:
        """Forget what its axis has waited for itself."""
        self._flying = [one for one in self._flying if one[1] is not flight]
