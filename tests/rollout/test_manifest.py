import json
import subprocess

import pytest

from rollout.fingerprints import (
    EDGE_BYTES,
    PROBE_QUERIES,
    checkpoint_fingerprint,
    code_fingerprint,
    retriever_fingerprint,
)
from rollout.manifest import (
    MixedRunError,
    RunManifest,
    differences,
    environment_fields,
    open_run,
    read_manifest,
)
from visor.retrieval.base import ScoredPage


def manifest(**fields) -> RunManifest:
    return RunManifest(
        **{"system": "visor", "judge": "rule", "episode": {"window": 2, "top_k": 10}, "seed": 1} | fields
    )


def test_a_resumed_run_with_the_same_manifest_goes_on(tmp_path):
    assert open_run(tmp_path / "run", manifest(created="a")) == []
    assert open_run(tmp_path / "run", manifest(created="b", arguments={"concurrency": 3})) == []
    assert read_manifest(tmp_path / "run").created == "a"


def test_another_manifest_is_refused_and_what_differs_is_named(tmp_path):
    open_run(tmp_path, manifest())
    other = manifest(episode={"window": None, "top_k": 10}, judge="model")
    with pytest.raises(MixedRunError) as error:
        open_run(tmp_path, other)
    assert "episode.window: 2 before, None now" in str(error.value)
    assert "judge: 'rule' before, 'model' now" in str(error.value)
    assert "top_k" not in str(error.value)
    assert len(open_run(tmp_path, other, allow_mixed=True)) == 2
    assert read_manifest(tmp_path).judge == "rule"
    assert json.loads((tmp_path / "manifest-2.json").read_text())["judge"] == "model"


def test_differences_see_added_and_removed_keys():
    assert differences(manifest(taec={}), manifest(taec={"switch": "on"})) == [
        "taec: {} before, None now",
        "taec.switch: None before, 'on' now",
    ]
    assert differences(manifest(), manifest()) == []


def test_a_layer_switched_on_or_off_is_one_line():
    layer = {"operators": "AM", "max_slots": 8, "admission": {"alpha": 0.5}}
    assert differences(manifest(), manifest(taec=layer)) == ["taec: off → AM"]
    assert differences(manifest(taec=layer), manifest()) == ["taec: AM → off"]
    assert differences(manifest(taec=layer), manifest(taec=layer | {"max_slots": 4})) == [
        "taec.max_slots: 8 before, 4 now"
    ]


def test_a_folder_without_a_manifest_is_no_run(tmp_path):
    with pytest.raises(ValueError, match="no run folder"):
        read_manifest(tmp_path)
    (tmp_path / "manifest.json").write_text('{"surprise": 1}')
    with pytest.raises(ValueError, match="not a run manifest"):
        read_manifest(tmp_path)


def test_environment_fields_see_the_dirty_flag(tmp_path):
    assert environment_fields(tmp_path)["git_commit"] is None
    git = ["git", "-C", str(tmp_path), "-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "x"], check=True)
    fields = environment_fields(tmp_path)
    assert len(fields["git_commit"]) == 40
    assert fields["git_dirty"] is False
    (tmp_path / "new").write_text("x")
    assert environment_fields(tmp_path)["git_dirty"] is True
    assert fields["packages"]["pillow"]


def test_code_fingerprint_follows_contents_and_names(tmp_path):
    (tmp_path / "visor").mkdir()
    (tmp_path / "visor" / "a.py").write_text("x = 1")
    first = code_fingerprint(tmp_path)
    (tmp_path / "visor" / "a.bin").write_text("ignored")
    assert code_fingerprint(tmp_path) == first
    (tmp_path / "visor" / "a.py").rename(tmp_path / "visor" / "b.py")
    renamed = code_fingerprint(tmp_path)
    (tmp_path / "visor" / "b.py").write_text("x = 2")
    assert len({first, renamed, code_fingerprint(tmp_path)}) == 3


def test_checkpoint_fingerprint_sees_config_and_both_ends_of_the_weights(tmp_path):
    with pytest.raises(ValueError, match=r"config\.json"):
        checkpoint_fingerprint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    weights = bytearray(3 * EDGE_BYTES)
    seen = set()
    for position in (0, -1, None):
        if position is not None:
            weights[position] += 1
        (tmp_path / "model.safetensors").write_bytes(weights)
        seen.add(checkpoint_fingerprint(tmp_path))
    assert len(seen) == 2
    (tmp_path / "config.json").write_text('{"a": 1}')
    assert checkpoint_fingerprint(tmp_path) not in seen


class FixedRetriever:
    name = "fixed"

    def __init__(self, order):
        self.order = order

    def search(self, query, k):
        return [ScoredPage(f"d#page={n}", 1.0) for n in self.order][:k]


def test_fingerprint_of_an_adapter_counts_its_base_model(tmp_path):
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    base.mkdir()
    adapter.mkdir()
    (base / "config.json").write_text("{}")
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(base)}))
    before = checkpoint_fingerprint(adapter)
    (base / "config.json").write_text('{"hidden_size": 8}')
    assert checkpoint_fingerprint(adapter) != before


def test_retriever_fingerprint_is_the_rank_order_of_the_first_five():
    first = retriever_fingerprint(FixedRetriever([1, 2, 3, 4, 5, 6]))
    assert len(first) == 16
    assert first == retriever_fingerprint(FixedRetriever([1, 2, 3, 4, 5, 7]))
    assert first != retriever_fingerprint(FixedRetriever([2, 1, 3, 4, 5, 6]))
    assert len(PROBE_QUERIES) == 8
