"""`POST /admin/reload` where it is not to be had; what it does is in tests/posttrain/test_http_worker.py."""

from nanok3.serve.reload_api import _has_model


def test_only_a_folder_with_a_config_is_a_model(tmp_path):
    assert not _has_model(tmp_path)
    assert not _has_model(tmp_path / ("x" * 5000)), "a name that no file system takes"
    (tmp_path / "config.json").write_text("{}")
    assert _has_model(tmp_path)
