"""A run at a terminal while it is under way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from reflact import events
from reflact.report.story import Story
from reflact.report.visible import visible

Show = Callable[[events.Event], None]


@contextmanager
def watching(console: Console, *, bars: bool = True) -> Iterator[Show]:
    """Give a function that shows events as they come: with bars at a terminal, else in lines alone."""
    story = Story()

    def say(event: events.Event) -> None:
        line = story.tell(event)
        if line is not None:
            console.print(Text(visible(line)), soft_wrap=True)

    if not console.is_terminal or not bars:
        yield say
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        shown = _Bars(progress)

        def show(event: events.Event) -> None:
            shown.move(event)
            say(event)

        yield show


class _Bars:
    """One bar for each stage of a step that is under way."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._open: dict[tuple[int, events.Stage], TaskID] = {}

    def move(self, event: events.Event) -> None:
        """Move, open or close the bar that an event is about."""
        if not isinstance(event, events.Progress):
            return
        place = (event.step, event.stage)
        if place not in self._open:
            title = f"step {event.step:<3} {event.stage}"
            self._open[place] = self._progress.add_task(title, total=event.total)
        self._progress.update(self._open[place], completed=event.done, total=event.total)
        if event.done >= event.total:
            self._progress.remove_task(self._open.pop(place))
