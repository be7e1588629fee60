"""Shows a run to a person: event lines, a live view, and a summary at the end."""
