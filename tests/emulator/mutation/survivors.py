"""Why a surviving mutant is harmless, or why the emulator cannot see it; anything not listed here counts as missed."""

import re

# (kernel, mutant id) patterns -> (verdict, reason); the first match counts
REASONS: list[tuple[str, str, str, str]] = []


def explain(subject, record):
    """(verdict, reason) of a survivor."""
    for kernel, pattern, verdict, reason in REASONS:
        if re.search(kernel, subject) and re.search(pattern, record["id"]):
            return verdict, reason
    return "missed", "not explained"
