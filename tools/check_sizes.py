"""Look at what `sam build` made: sizes, versions, processor. Standard library only.

Lambda unpacks a function and its layers together into at most 250 MB; nodemend keeps under 100, for
the sake of cold starts. Functions are not built (SkipBuild): they are deployed from `functions/`.
"""

import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LAYERS: Mapping[str, str] = {
    "NodemendLayer": "layers/nodemend",
    "KubernetesLayer": "layers/kubernetes",
}
"""Source folder of each built layer."""
LIMIT = 100_000_000
ELF = b"\x7fELF"
AARCH64 = 183
"""`e_machine` of arm64, at byte 18 of an ELF header."""
PINNED = re.compile(r"^([A-Za-z0-9_.-]+)==([^\s;\\]+)", re.MULTILINE)


def size_of(folder: Path) -> int:
    """Return the bytes of all files below a folder, bytecode left out: Lambda gets none."""
    return sum(path.stat().st_size for path in files_of(folder))


def files_of(folder: Path) -> Iterator[Path]:
    """Yield the files below a folder that are deployed."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            yield path


def normal(name: str) -> str:
    """Return a distribution's name as indexes compare it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def locked_versions(lock: Path) -> dict[str, str]:
    """Return the versions of a lock file by distribution."""
    return {normal(name): version for name, version in PINNED.findall(lock.read_text())}


def built_versions(layer: Path) -> dict[str, str]:
    """Return the versions of the distributions in a built layer, from their metadata."""
    found = {}
    for metadata in layer.glob("python/*.dist-info/METADATA"):
        head = metadata.read_text(encoding="utf-8").split("\n\n", 1)[0]
        name, version = (
            re.search(rf"^{field}: (.+)$", head, re.MULTILINE) for field in ("Name", "Version")
        )
        if name and version:
            found[normal(name[1].strip())] = version[1].strip()
    return found


def version_problems(layer: Path, lock: Path) -> Iterator[str]:
    """The layer holds exactly what its lock file names."""
    locked, built = locked_versions(lock), built_versions(layer)
    for name in sorted(locked | built):
        if locked.get(name) != built.get(name):
            yield (
                f"{layer.name}: {name} is {built.get(name, 'missing')}, "
                f"the lock file says {locked.get(name, 'nothing')}"
            )


def binary_problems(layer: Path) -> Iterator[str]:
    """Every shared library and program is arm64's."""
    for path in files_of(layer):
        with path.open("rb") as file:
            head = file.read(20)
        is_library = path.suffix == ".so" or ".so." in path.name
        if is_library or head.startswith(ELF):
            machine = int.from_bytes(head[18:20], "little")
            if not head.startswith(ELF) or machine != AARCH64:
                yield f"{path.relative_to(layer.parent)}: is no arm64 binary (machine {machine})"


def content_problems(layer: Path, source: Path) -> Iterator[str]:
    """The package is in its layer as it is in the repository, and no ballast is in any."""
    package = source / source.name
    for path in files_of(package) if package.is_dir() else ():
        built = layer / "python" / path.relative_to(source)
        if not built.is_file():
            yield f"{layer.name}: {path.relative_to(source)} is missing"
        elif built.read_bytes() != path.read_bytes():
            yield f"{layer.name}: {path.relative_to(source)} is not what was built: sam build again"
    if list(layer.rglob("kubernetes/aio")):
        yield f"{layer.name}: kubernetes/aio is half of the client's size and unused"


def problems_of(build: Path, sources: Path) -> list[str]:
    """Return what is wrong with a build, one line each.

    Args:
        build: SAM's build folder.
        sources: root of the repository.
    """
    built = {path.name for path in build.iterdir() if (path / "python").is_dir()}
    lines = [f"{name}: was not built" for name in sorted(set(LAYERS) - built)]
    lines += [f"{name}: is not known here" for name in sorted(built - set(LAYERS))]
    for name in sorted(built & set(LAYERS)):
        layer, source = build / name, sources / LAYERS[name]
        lines += version_problems(layer, source / "requirements.lock")
        lines += binary_problems(layer)
        lines += content_problems(layer, source)
    sizes = sizes_of(build, sources)
    layers = sum(size for name, size in sizes.items() if name in LAYERS)
    function, largest = max(
        ((name, size) for name, size in sizes.items() if name not in LAYERS),
        key=lambda item: item[1],
    )
    if layers + largest > LIMIT:
        lines.append(f"layers with {function}: {layers + largest:,} bytes, limit {LIMIT:,}")
    return lines


def sizes_of(build: Path, sources: Path) -> dict[str, int]:
    """Return the unpacked bytes of each layer and function."""
    sizes = {name: size_of(build / name) for name in LAYERS}
    for app in sorted(sources.glob("functions/*/app.py")):
        sizes[app.parent.name] = size_of(app.parent)
    return sizes


def main() -> int:
    """Check the last build and print its sizes."""
    build = ROOT / ".aws-sam" / "build"
    if not build.is_dir():
        print("nothing is built: run sam build", file=sys.stderr)  # noqa: T201
        return 1
    sizes = sizes_of(build, ROOT)
    for name, size in sizes.items():
        print(f"{name:24} {size / 1e6:9.3f} MB")  # noqa: T201
    layers = sum(sizes[name] for name in LAYERS)
    largest = max(size for name, size in sizes.items() if name not in LAYERS)
    print(f"{'largest with layers':24} {(layers + largest) / 1e6:9.3f} MB of {LIMIT / 1e6:.0f}")  # noqa: T201
    lines = problems_of(build, ROOT)
    for line in lines:
        print(line, file=sys.stderr)  # noqa: T201
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
