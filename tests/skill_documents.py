"""Skill documents for property tests: well-formed ones with any of the protected regions, and wild texts."""

from __future__ import annotations

from hypothesis import assume
from hypothesis import strategies as st

from reflact.errors import SkillError
from reflact.skills import document as skills

FRONT = "---\nname: ledger\ndescription: Reads ledgers. Never guesses.\n---"
SLOW = "<!-- SLOW_UPDATE_START -->\nGuidance: check units.\n<!-- SLOW_UPDATE_END -->"
NOTES = "<!-- APPENDIX_START -->\n- Note: check signs.\n<!-- APPENDIX_END -->"
MARKERS = (
    "<!-- SLOW_UPDATE_START -->",
    "<!-- SLOW_UPDATE_END -->",
    "<!-- APPENDIX_START -->",
    "<!-- APPENDIX_END -->",
    "<!--APPENDIX_END-->",
)
PLAIN = (
    "Never",
    " retry",
    ".",
    " ",
    "\n",
    "\r\n",
    "\n\n",
    "- rule",
    "# Title\n",
    "a",
    "aa",
    "é",
    "e\u0301",
    "don't",
)
PLAIN += (
    "---",
    "--- \n",
    "_id",
    "7",
    "规则",
    "👩‍🔬",
    "\t",
    "<!-- x -->",
    "<!-- SLOW_",
    "UPDATE_START -->",
    "\u2028",
    "\r",
)

plain = st.lists(st.sampled_from(PLAIN), max_size=12).map("".join)
wild = st.lists(st.sampled_from((*PLAIN, *MARKERS)), max_size=14).map("".join) | st.text(max_size=20)


def well_formed(text: str) -> bool:
    """Whether a text is read as a skill document."""
    try:
        skills.check_document(text)
    except SkillError:
        return False
    return True


def protected(text: str) -> list[str]:
    """The text of each protected region, in order."""
    return [text[region.start : region.end] for region in skills.find_regions(text)]


@st.composite
def documents(draw: st.DrawFn) -> str:
    """A well-formed document with any of the protected regions."""
    front = draw(st.sampled_from(("", FRONT + "\n", FRONT.replace("\n", "\r\n") + "\r\n")))
    tails = draw(st.sampled_from(((), (SLOW,), (NOTES,), (SLOW, NOTES), (NOTES, SLOW))))
    text = front + draw(plain) + "".join("\n" + tail for tail in tails) + draw(st.sampled_from(("", "\n")))
    assume(well_formed(text))
    return text
