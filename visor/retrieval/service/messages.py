"""What a search request must look like, and what is said about one that does not."""

from __future__ import annotations

import difflib
import json
import unicodedata
from collections.abc import Collection
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from visor.retrieval.base import Query
from visor.retrieval.service.limits import Limits, Refused


def is_text(value: str) -> bool:
    """False when it holds half of a surrogate pair, which JSON can spell and UTF-8 cannot."""
    return not any("\ud800" <= character <= "\udfff" for character in value)


def _whole(value: str) -> str:
    if not is_text(value):
        raise ValueError("it holds half of a surrogate pair, which is no text")
    return value


Text = Annotated[str, AfterValidator(_whole)]


class _Wire(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class SearchFilter(_Wire):
    doc_ids: list[Text] | None = None


class SearchQuery(_Wire):
    """One query of a request."""

    id: Text
    text: Text
    top_k: int = Field(10, ge=0)
    exclude_page_ids: list[Text] = []
    filter: SearchFilter | None = None


class SearchRequest(_Wire):
    """Body of `POST /v1/search`."""

    queries: list[SearchQuery]
    expect_fingerprint: Text | None = None


def read_search(body: bytes, limits: Limits) -> SearchRequest:
    """Read a request's body. Raises Refused (413 for too much of something, 422 for anything odd)."""
    value = read_json(body)
    try:
        request = SearchRequest.model_validate(value)
    except ValidationError as error:
        raise Refused(422, _sentence(error)) from None
    _refuse_excess(request, limits)
    seen: set[str] = set()
    for query in request.queries:
        if query.id in seen:
            raise Refused(422, f"two queries have the id {query.id!r}; give each an id of its own.")
        seen.add(query.id)
    return request


def read_json(body: bytes) -> Any:
    """JSON without NaN, infinities and repeated keys. Raises Refused (422)."""
    try:
        return json.loads(
            body.decode("utf-8"), parse_constant=_refuse_constant, object_pairs_hook=_refuse_repeated
        )
    except UnicodeDecodeError as error:
        raise Refused(422, f"the body is not UTF-8: byte {error.start} cannot be read.") from None
    except RecursionError:
        raise Refused(422, "the body is nested too deeply.") from None
    except ValueError as error:
        raise Refused(422, f"the body is not JSON: {error}.") from None


def to_query(asked: SearchQuery, known_doc_ids: Collection[str]) -> tuple[Query, list[str]]:
    """The search that a query asks for, and those of its documents that the corpus does not hold.

    Ids are found in either Unicode spelling; the corpus has them composed (NFC).
    """
    excluded = frozenset(both for page_id in asked.exclude_page_ids for both in (page_id, _nfc(page_id)))
    doc_ids, unknown = None, []
    if asked.filter is not None and asked.filter.doc_ids is not None:
        found = {given: (given if given in known_doc_ids else _nfc(given)) for given in asked.filter.doc_ids}
        unknown = [given for given, doc_id in found.items() if doc_id not in known_doc_ids]
        doc_ids = frozenset(found.values())
    return Query(asked.text, asked.top_k, excluded, doc_ids), unknown


def _nfc(text: str) -> str:
    return unicodedata.normalize("NFC", text)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _refuse_repeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(n for n in names if names.count(n) > 1)!r} is there twice")
    return value


def _refuse_excess(request: SearchRequest, limits: Limits) -> None:
    if len(request.queries) > limits.max_queries:
        raise Refused(
            413,
            f"the request has {len(request.queries)} queries, more than {limits.max_queries}; send several.",
        )
    for position, query in enumerate(request.queries):
        if len(query.text) > limits.max_query_chars:
            raise Refused(
                413,
                f"queries[{position}].text has {len(query.text)} characters, more than "
                f"{limits.max_query_chars}.",
            )
        if query.top_k > limits.max_top_k:
            raise Refused(422, f"queries[{position}].top_k is {query.top_k}, more than {limits.max_top_k}.")


def _sentence(error: ValidationError) -> str:
    """The first complaint of a validation, with where it is; a misspelt field is told the nearest one."""
    first = error.errors(include_url=False, include_input=False)[0]
    where = ""
    for part in first["loc"]:
        where += f"[{part}]" if isinstance(part, int) else f"{'.' if where else ''}{_shown(str(part))}"
    if first["type"] == "extra_forbidden":
        known = (SearchRequest, SearchQuery, SearchFilter)
        names = [name for model in known for name in model.model_fields]
        near = difflib.get_close_matches(str(first["loc"][-1]), names, 1)
        return f"{where} is an unknown field{f'; did you mean {near[0]}?' if near else '.'}"
    if first["type"] == "missing":
        return f"{where} is missing."
    if first["type"] == "value_error":
        return f"{where}: {first['ctx']['error']}."
    return f"{where or 'the body'}: {first['msg'][:1].lower()}{first['msg'][1:]}."


def _shown(name: str) -> str:
    """A field name of the sender's, short and printable."""
    return (name if len(name) <= 60 else name[:59] + "…").encode("utf-8", "backslashreplace").decode()
