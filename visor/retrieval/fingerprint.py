"""What tells one retriever from another: what it is made of, and what it answers.

The behaviour is TAEC's retriever fingerprint ("what a run records"): the page ids that eight fixed probe
queries return. The identity is a hash of what the index was made with. Two retrievers of equal identity may
still answer differently (another machine, another build of a library), and the other way round; so a service
names both.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from visor.retrieval.base import Query

if TYPE_CHECKING:
    from visor.retrieval.base import BatchRetriever, Retriever
    from visor.retrieval.encoding import Encoder

PROBE_QUERIES = (
    "annual revenue by region",
    "how many participants took part in the study",
    "table of contents",
    "market share of the largest company in 2020",
    "figure showing the growth rate over time",
    "definition of the main term",
    "contact address and telephone number",
    "年度收入 统计 图表",
)
"""Ours; fixed for good, because every stored retriever fingerprint depends on them."""
PROBE_PAGES = 5
DIGITS = 16
VOLATILE = frozenset({"files", "hashes", "shards", "generation", "corpus", "path", "created"})
"""Fields of a manifest that differ between two builds of the same index: where its files are, and names."""
CANARY_TOLERANCE = {"float32": 1e-3}
REDUCED_PRECISION_TOLERANCE = 5e-2
"""Largest ‖a − b‖ / ‖a‖ between a query's vectors encoded alone (a) and in a batch (b), by dtype."""


@dataclass(frozen=True)
class Fingerprint:
    """The two parts, each of 16 hex digits; as text `BEHAVIOUR-IDENTITY`."""

    behaviour: str
    identity: str

    def __str__(self) -> str:
        return f"{self.behaviour}-{self.identity}"

    def matches(self, expected: str) -> bool:
        """True when `expected` is the whole text or the behaviour alone, as the manifest of a run has it."""
        return expected in (str(self), self.behaviour)


def retriever_fingerprint(retriever: Retriever) -> str:
    """The behaviour: 16 hex digits over the page ids, in rank order, that the probe queries return (k = 5).

    TAEC, "what a run records". Two runs whose retrievers differ in it are never put into one table.
    """
    ranked = [
        [hit.page_id for hit in retriever.search(query, PROBE_PAGES)][:PROBE_PAGES] for query in PROBE_QUERIES
    ]
    return hashlib.sha256(json.dumps(ranked, ensure_ascii=False).encode()).hexdigest()[:DIGITS]


def identity_fingerprint(manifest: Mapping[str, Any], libraries: Mapping[str, str] | None = None) -> str:
    """The identity: 16 hex digits over an index's manifest and the versions of the libraries that serve it.

    The manifest holds the retriever with its settings, the corpus's hash and, for vectors, the encoder with
    the hashes of its weights and processor. Building the same index again, or moving it, changes nothing.
    """
    content = {"manifest": _stable(manifest), "libraries": dict(libraries or {})}
    text = json.dumps(content, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:DIGITS]


def take_fingerprint(retriever: Retriever, manifest: Mapping[str, Any]) -> Fingerprint:
    """Both parts of a retriever opened from the index with this manifest."""
    identity = identity_fingerprint(manifest, _libraries(retriever))
    return Fingerprint(retriever_fingerprint(retriever), identity)


def check_canaries(retriever: BatchRetriever) -> None:
    """Ask the probe queries alone and as one batch; ValueError in words when the answers differ.

    A retriever with encoders is held to the vectors of the queries, within the tolerance of the dtype (a
    batch is padded, and sums are taken in another order); one without to equal pages and scores. What
    differs here would make an answer depend on who else is asking.
    """
    encoders = list(encoders_of(retriever))
    for encoder in encoders:
        _check_encoder(encoder)
    if encoders:
        return
    queries = [Query(text, PROBE_PAGES) for text in PROBE_QUERIES]
    for query, batched in zip(queries, retriever.search_batch(queries)):
        alone = retriever.search_batch([query])[0]
        if alone != batched:
            raise ValueError(
                f"the retriever {retriever.name!r} answers {query.text!r} with other pages or scores alone "
                "than in a batch, so its results would depend on who else is asking"
            )


def encoders_of(retriever: object) -> Iterator[Encoder]:
    """The encoders of a retriever (its `encoder`) and of those it is made of (its `parts`)."""
    encoder = getattr(retriever, "encoder", None)
    if encoder is not None:
        yield encoder
    for part in getattr(retriever, "parts", ()):
        yield from encoders_of(part)


def _stable(manifest: Mapping[str, Any]) -> dict[str, Any]:
    stable = {name: value for name, value in manifest.items() if name not in VOLATILE}
    if "settings" in stable:
        # Where the encoder is found; what it is has its hashes in `identity`.
        stable["settings"] = {n: v for n, v in stable["settings"].items() if n != "encoder"}
    if "parts" in stable:
        stable["parts"] = [_stable(part) for part in stable["parts"]]
    return stable


def _libraries(retriever: object) -> dict[str, str]:
    """Versions that serve now; the manifest has those that built."""
    versions: dict[str, str] = getattr(retriever, "libraries", dict)()
    for encoder in encoders_of(retriever):
        versions |= encoder.libraries()
    for part in getattr(retriever, "parts", ()):
        versions |= _libraries(part)
    return versions


def _check_encoder(encoder: Encoder) -> None:
    tolerance = CANARY_TOLERANCE.get(encoder.identity.dtype, REDUCED_PRECISION_TOLERANCE)
    batched = encoder.encode_queries(PROBE_QUERIES)
    for text, in_batch in zip(PROBE_QUERIES, batched):
        alone_TD = encoder.encode_queries([text])[0].vectors_TD.astype(np.float64)
        batch_TD = in_batch.vectors_TD.astype(np.float64)
        if alone_TD.shape != batch_TD.shape:
            difference = f"{len(alone_TD)} vectors alone and {len(batch_TD)} in a batch"
        else:
            norm = np.linalg.norm(alone_TD)
            distance = float(np.linalg.norm(alone_TD - batch_TD) / norm) if norm > 0 else 0.0
            if distance <= tolerance:
                continue
            difference = f"vectors that differ by {distance:.2g} of their length, more than {tolerance:g}"
        raise ValueError(
            f"the encoder {encoder.identity.name!r} gives the query {text!r} {difference} when it is encoded "
            f"alone and among {len(PROBE_QUERIES)}: its padding or its dtype ({encoder.identity.dtype}) "
            "changes results"
        )
