"""How a calibration is opened: what it learns from and holds out, whether it was begun, what it lacks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

from anyio import to_thread

from reflact.calibration.course import Course, Given, opened
from reflact.calibration.holding import Slices, Split, split, split_given
from reflact.calibration.ready import lacking
from reflact.calibration.replay import look_through
from reflact.calibration.reviewing import Reviewer, Standing
from reflact.calibration.settings import CalibratorSettings
from reflact.calibration.trace import Trace
from reflact.calibration_ports import CalibrationStore
from reflact.memory import ContrastPair
from reflact.memory_cards import Anchored
from reflact.memory_ports import CardStore
from reflact.prompts import PromptBook


class Store(CardStore, CalibrationStore, Protocol):
    """A store of cards and calibrations."""


class Opening:
    """Opens calibrations; nothing is asked and nothing is stored.

    Args:
        reviewer: Knows where pairs stand.
        store: Where pairs and calibrations are.
        writer: The identity of the model that writes and compares.
        settings: How pairs are made and tested.
        prompts: The prompts.
    """

    def __init__(
        self,
        reviewer: Reviewer,
        store: Store,
        *,
        writer: str,
        settings: CalibratorSettings,
        prompts: PromptBook,
    ) -> None:
        self._reviewer = reviewer
        self._store = store
        self._writer = writer
        self._settings = settings
        self._prompts = prompts

    def split(self, traces: Sequence[Trace], heldout: Sequence[Trace] | None, standing: Standing) -> Split:
        """Return what is learned from and what is held out; the rule's choice where the caller made none."""
        settings = self._settings
        if heldout is not None:
            return split_given(traces, heldout, taught=standing.taught)
        purposes = len({trace.purpose for trace in traces})
        return split(
            traces,
            taught=standing.taught,
            tests=standing.tests,
            slices=Slices.of(purposes, total=settings.slices, by=settings.slices_by),
            most=settings.most_held_out,
        )

    async def course(
        self,
        traces: Sequence[Trace],
        heldout: Sequence[Trace] | None,
        anchors: Sequence[ContrastPair],
        *,
        standing: Standing,
    ) -> Course:
        """Return the course of a calibration of these traces: new, stopped or over."""
        given = Given(
            traces,
            heldout,
            anchors,
            critic=self._reviewer.critic.identity,
            llm=self._writer,
            settings=self._settings,
            prompts=self._prompts,
        )
        identity = await to_thread.run_sync(lambda: given.identity)
        last = await self._store.calibration(identity)
        await look_through([*traces, *(heldout or ())])
        parts = self.split(traces, heldout, standing)
        return await opened(given, identity, parts, standing=standing, store=self._store, last=last)

    async def lacking(
        self,
        course: Course,
        traces: Sequence[Trace],
        heldout: Sequence[Trace] | None,
        anchors: Sequence[ContrastPair],
        *,
        standing: Standing,
    ) -> str | None:
        """Return in a sentence what is missing for a test; None where nothing is."""
        work = partial(
            lacking,
            course.parts,
            traces,
            heldout,
            standing=standing,
            anchored=Anchored.of(anchors),
            settings=self._settings,
        )
        return await to_thread.run_sync(work)
