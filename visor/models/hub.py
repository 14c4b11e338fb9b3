"""Models named by their place on the Hugging Face hub, `owner/name`, instead of by a folder."""

from __future__ import annotations

import re
from pathlib import Path

PROBE_SECONDS = 5.0
CONFIG = "config.json"


def is_hub_name(path: str | Path) -> bool:
    """True for `owner/name` where there is no such folder."""
    named = re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)) and not str(path).startswith(".")
    return bool(named) and not Path(path).is_dir()


def cached_folder(name: str) -> Path | None:
    """The folder of a hub model's files in the local cache; None when they are not there."""
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(name, CONFIG)
    return Path(config).parent if isinstance(config, str) else None


def check_reachable(name: str) -> None:
    """ValueError when a hub model is neither in the cache nor to be had from the hub.

    One request that is not repeated: the loaders of Transformers try each file of a model several times, and
    take minutes to find that there is no connection.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError

    if cached_folder(name):
        return
    try:
        get_hf_file_metadata(hf_hub_url(name, CONFIG), timeout=PROBE_SECONDS)
    except HfHubHTTPError as error:
        raise ValueError(
            f"{name}: there is no such folder, and the hub gives no model of this name ({_first_line(error)})"
        ) from error
    except Exception as error:  # the HTTP library's own kinds, which are no part of the hub's interface
        raise ValueError(
            f"{name}: there is no such folder, and the hub cannot be reached for a model of this name "
            f"({type(error).__name__}); give the path of a model folder"
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
