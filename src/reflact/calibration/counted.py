"""What a calibration's calls consume, counted where they are made: at the door to each model.

What a reply took that was refused counts like what a valid one took. A question that is cancelled before its
answer is not counted here: what it may have cost is in the books of the model's own store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from reflact.calibration.results import Consumed
from reflact.calls import Rendered, Reply, Sample
from reflact.errors import ModelError
from reflact.ports import LLM, R
from reflact.results import Usage

COUNTS = ("questions", "unanswered", "refused")


class Books:
    """Sums up what was consumed, by role and purpose."""

    def __init__(self) -> None:
        self._entries: dict[tuple[str, str], Consumed] = {}

    @property
    def entries(self) -> tuple[Consumed, ...]:
        """All that was booked, sorted by role and purpose."""
        return tuple(self._entries[key] for key in sorted(self._entries))

    @property
    def usage(self) -> Usage:
        """What all of it took."""
        return total(self.entries)

    def since(self, earlier: Iterable[Consumed]) -> tuple[Consumed, ...]:
        """Return what was booked beyond earlier entries of these books."""
        before = {(one.role, one.purpose): one for one in earlier}
        found = [_beyond(one, before.get((one.role, one.purpose))) for one in self.entries]
        return tuple(one for one in found if one.questions)

    def book(self, one: Consumed) -> None:
        """Add what a question took."""
        key = (one.role, one.purpose)
        sofar = self._entries.get(key)
        self._entries[key] = one if sofar is None else _summed(sofar, one)


class CountedLLM:
    """Implements ``ports.LLM`` by another one and books what its calls consume, also where they fail."""

    def __init__(self, llm: LLM, books: Books) -> None:
        self._llm = llm
        self._books = books

    @property
    def identity(self) -> str:
        """The other model's identity."""
        return self._llm.identity

    async def ask(
        self,
        prompt: Rendered,
        reply_type: type[R],
        *,
        sample: Sample,
        check: Callable[[R], None] | None = None,
    ) -> Reply[R]:
        """Ask the other model; see ``ports.LLM.ask``."""
        one = Consumed(role=sample.role, purpose=sample.purpose, questions=1)
        try:
            reply = await self._llm.ask(prompt, reply_type, sample=sample, check=check)
        except ModelError as error:
            refused = error.usage.calls
            self._books.book(
                one.model_copy(update={"usage": error.usage, "refused": refused, "unanswered": 1})
            )
            raise
        self._books.book(one.model_copy(update={"usage": reply.usage, "refused": reply.attempts - 1}))
        return reply


def total(entries: Iterable[Consumed]) -> Usage:
    """Return what several entries took together."""
    return sum((one.usage for one in entries), Usage())


def _summed(one: Consumed, other: Consumed) -> Consumed:
    counts = {name: getattr(one, name) + getattr(other, name) for name in COUNTS}
    return one.model_copy(update={**counts, "usage": one.usage + other.usage})


def _beyond(later: Consumed, earlier: Consumed | None) -> Consumed:
    if earlier is None:
        return later
    counts = {name: getattr(later, name) - getattr(earlier, name) for name in COUNTS}
    return later.model_copy(update={**counts, "usage": difference(later.usage, earlier.usage)})


def difference(later: Usage, earlier: Usage) -> Usage:
    """Return what was consumed between two looks at the same books."""
    usd = None if later.usd is None else later.usd - (earlier.usd or 0.0)
    names = ("calls", "input_tokens", "cached_tokens", "output_tokens", "uncounted")
    return Usage(usd=usd, **{name: getattr(later, name) - getattr(earlier, name) for name in names})
