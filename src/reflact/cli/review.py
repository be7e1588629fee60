"""Asks a person about candidates, at a terminal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from reflact.ports import Approver
    from reflact.records import CandidateReview


def create_approver() -> Approver:
    """Return an approver that shows a candidate's evidence and diff and asks at the terminal.

    An empty answer or ``y`` approves; ``n`` vetoes; any other text is a veto with that reason.

    Raises:
        UsageError: There is nobody to ask.
    """
    from reflact.errors import UsageError

    if not sys.stdin.isatty():
        raise UsageError("--review asks at a terminal, and standard input is none; leave it out")

    async def approve(review: CandidateReview) -> bool | str:
        import anyio.to_thread

        return await anyio.to_thread.run_sync(ask_approval, review, abandon_on_cancel=True)

    return approve


def ask_approval(review: CandidateReview) -> bool | str:
    """Show a review on standard error and read the answer."""
    from reflact.reporting.lines import escape_controls

    shown = f"\n{review.diff}\n{review.part} {review.step}: {review.verdict.reason}"
    typer.echo(escape_controls(shown), err=True)
    said = str(typer.prompt("take it? [Y/n/reason]", default="y", show_default=False, err=True)).strip()
    if said.lower() in {"y", "yes"}:
        return True
    return False if said.lower() in {"n", "no"} else said
