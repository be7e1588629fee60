"""Which version brought each line of a skill, over any tree of versions."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from reflact.records import SkillVersion, StepRecord
from reflact.reporting.lineage import (
    LineOrigin,
    VersionOrigin,
    blame_lines,
    group_lines,
    sort_commits,
    trace_versions,
)
from reflact.types import (
    AggregateResult,
    Belief,
    Edit,
    EditResult,
    GateAction,
    Measurement,
    RankedDecision,
    SelectResult,
    Split,
    Verdict,
)

FIRST = Edit(op="append", content="- first\n")
SECOND = Edit(op="append", content="* second\n  third")


def version(number: int) -> SkillVersion:
    return SkillVersion(number=number, skill_hash=f"{number:064}", origin="")


def step(
    number: int, *created: int, current: int, edits: tuple[Edit, ...] = (), chosen: int | None = None
) -> StepRecord:
    """A step that creates versions; with ``chosen``, the gate first returns to that version."""
    action: GateAction = "accept" if created else "reject"
    ranked = None
    if chosen is not None:
        action = "return"
        belief = Belief(skill_hash="", mean=0.5, deviation=0.1)
        ranked = RankedDecision(
            candidate=belief, current=belief, p_better=0.5, chosen=version(chosen).skill_hash
        )
    return StepRecord(
        step=number,
        epoch=1,
        skill_before="",
        item_ids=(),
        rollout=Measurement(skill_hash="", split=Split.train, n=0),
        n_failures=0,
        reports=(),
        merged=AggregateResult(),
        chosen=SelectResult(),
        edits=tuple(EditResult(edit=edit, status="applied") for edit in edits),
        candidate_hash="",
        verdict=Verdict(action=action, reason="", ranked=ranked),
        created_versions=tuple(map(version, created)),
        current=version(current),
        best=version(current),
    )


def test_versions_have_the_parent_that_was_current() -> None:
    """Of two versions of one step the second is made from the first; after a return the old one is the parent."""
    commits = [
        step(1, 1, 2, current=2),
        step(2, current=2),
        step(3, current=1, chosen=1),
        step(4, 3, current=3),
    ]
    origins = trace_versions([version(n) for n in (3, 0, 2, 1)], sort_commits(commits[::-1], ()))
    assert [origin.version.number for origin in origins] == [0, 1, 2, 3]
    assert [origin.parent for origin in origins] == [None, 0, 1, 1]
    assert [origin.record and origin.record.step for origin in origins] == [None, 1, 1, 4]


def test_lines_keep_the_origin_that_they_have_in_the_parent() -> None:
    edited = step(1, 1, current=1, edits=(FIRST, SECOND))
    origins = [
        VersionOrigin(version=version(0)),
        VersionOrigin(version=version(1), parent=0, record=edited),
        VersionOrigin(version=version(2), parent=1, record=step(2, 2, current=2)),
        VersionOrigin(version=version(3), parent=0, record=step(3, 3, current=3, edits=(FIRST,))),
    ]
    texts = {
        0: "old\n",
        1: "old\n\n- first\n- second\nthird\n",
        2: "old\n\n- second\nthird\nnew\n",
        3: "- first\nrest\n",
    }
    blamed = blame_lines(origins, texts)
    assert blamed[0] == (LineOrigin(version=0),)
    first, second = (LineOrigin(version=1, edit=edit) for edit in (FIRST, SECOND))
    assert blamed[1] == (LineOrigin(version=0), LineOrigin(version=1), first, second, second)
    assert blamed[2] == (LineOrigin(version=0), LineOrigin(version=1), second, second, LineOrigin(version=2))
    # The only edit of a step brought all of its lines, also those that were joined to others.
    assert blamed[3] == (LineOrigin(version=3, edit=FIRST),) * 2


def test_blocks_are_the_document_and_empty_lines_make_none() -> None:
    origins = [LineOrigin(version=n) for n in (1, 2, 2, 1, 1)]
    blocks = group_lines("a\n\nb\n \nc", origins)
    assert [(block.origin.version, block.text) for block in blocks] == [(1, "a\n\n"), (2, "b\n \n"), (1, "c")]


@given(st.lists(st.text("ab \n", max_size=12), min_size=1, max_size=6), st.randoms())
def test_each_line_has_one_origin_that_has_the_line(texts: list[str], random: object) -> None:
    """A line comes from its version or an ancestor, whose text has this line."""
    origins = [
        VersionOrigin(version=version(n), parent=random.randrange(n) if n else None)  # type: ignore[attr-defined]
        for n in range(len(texts))
    ]
    blamed = blame_lines(origins, dict(enumerate(texts)))
    for number, text in enumerate(texts):
        ancestors = [number]
        while (parent := origins[ancestors[-1]].parent) is not None:
            ancestors.append(parent)
        lines = text.splitlines()
        for line, origin in zip(lines, blamed[number], strict=True):
            assert origin.version in ancestors
            assert line in texts[origin.version].splitlines()
        assert "".join(block.text for block in group_lines(text, blamed[number])) == text
