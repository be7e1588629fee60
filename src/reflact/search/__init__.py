"""The search for a better document: sources of candidates, their race, the choice of a source."""
