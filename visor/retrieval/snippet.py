"""The part of a page's text that shows why it was found."""

from __future__ import annotations

from visor.retrieval.tokenizer import tokenize


def snippet(text: str, query: str, width: int = 80) -> str:
    """One line of at most `width` characters from the line of `text` with most of the query's terms.

    Characters that a terminal would obey are replaced: page text comes from strangers.
    """
    terms = set(tokenize(query))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    best = max(lines, key=lambda line: len(terms & set(tokenize(line))), default="")
    best = "".join(character if character.isprintable() else " " for character in best)
    return best if len(best) <= width else best[: width - 1] + "…"
