"""What `sam build` made is looked at: each kind of wrong build is found."""

from pathlib import Path

import pytest

from tools import check_sizes

ARM64, AMD64 = 183, 62


def elf(machine: int) -> bytes:
    return b"\x7fELF" + bytes(14) + machine.to_bytes(2, "little") + bytes(44)


def write(path: Path, content: bytes | str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    root = tmp_path / "sources"
    write(root / "layers/nodemend/nodemend/__init__.py", '"""Package."""\n')
    write(root / "layers/nodemend/requirements.lock", "pydantic_core==2.46.5 \\\n    --hash=x\n")
    write(root / "layers/kubernetes/requirements.lock", "kubernetes==37.0.1 \\\n    --hash=x\n")
    write(root / "functions/drain_node/app.py", "x = 1\n")
    return root


@pytest.fixture
def build(tmp_path: Path) -> Path:
    root = tmp_path / "build"
    base, cluster = root / "NodemendLayer/python", root / "KubernetesLayer/python"
    write(base / "nodemend/__init__.py", '"""Package."""\n')
    write(base / "pydantic_core/core.so", elf(ARM64))
    write(
        base / "pydantic_core-2.46.5.dist-info/METADATA", "Name: pydantic-core\nVersion: 2.46.5\n"
    )
    write(cluster / "kubernetes/client.py", "")
    write(cluster / "kubernetes-37.0.1.dist-info/METADATA", "Name: kubernetes\nVersion: 37.0.1\n")
    return root


def test_good_build_has_no_problem(build, sources):
    assert check_sizes.problems_of(build, sources) == []


def test_binary_of_another_processor_is_found(build, sources):
    write(build / "NodemendLayer/python/yaml/_yaml.so", elf(AMD64))

    assert check_sizes.problems_of(build, sources) == [
        "NodemendLayer/python/yaml/_yaml.so: is no arm64 binary (machine 62)"
    ]


def test_library_that_is_no_binary_is_found(build, sources):
    write(build / "NodemendLayer/python/yaml/_yaml.so", "oops")

    assert "is no arm64 binary" in check_sizes.problems_of(build, sources)[0]


def test_the_clients_asynchronous_twin_is_found(build, sources):
    write(build / "KubernetesLayer/python/kubernetes/aio/client.py", "")

    assert "kubernetes/aio" in check_sizes.problems_of(build, sources)[0]


def test_version_that_the_lock_file_does_not_name_is_found(build, sources):
    write(sources / "layers/kubernetes/requirements.lock", "kubernetes==37.0.2\nsix==1.17.0\n")

    assert check_sizes.problems_of(build, sources) == [
        "KubernetesLayer: kubernetes is 37.0.1, the lock file says 37.0.2",
        "KubernetesLayer: six is missing, the lock file says 1.17.0",
    ]


def test_package_that_is_missing_or_old_in_the_layer_is_found(build, sources):
    write(sources / "layers/nodemend/nodemend/__init__.py", '"""Newer."""\n')
    write(sources / "layers/nodemend/nodemend/catalogue/ecc.yaml", "[]")

    assert check_sizes.problems_of(build, sources) == [
        "NodemendLayer: nodemend/__init__.py is not what was built: sam build again",
        "NodemendLayer: nodemend/catalogue/ecc.yaml is missing",
    ]


def test_layers_and_the_largest_function_together_are_too_large(build, sources, monkeypatch):
    total = sum(check_sizes.sizes_of(build, sources).values())
    monkeypatch.setattr(check_sizes, "LIMIT", total - 1)

    assert "layers with drain_node" in check_sizes.problems_of(build, sources)[0]
    monkeypatch.setattr(check_sizes, "LIMIT", total)
    assert check_sizes.problems_of(build, sources) == []


def test_layer_that_was_not_built_is_found(build, sources):
    (build / "KubernetesLayer").rename(build / "OtherLayer")

    lines = check_sizes.problems_of(build, sources)

    assert lines[:2] == ["KubernetesLayer: was not built", "OtherLayer: is not known here"]
