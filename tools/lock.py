"""Write the lock files: what is installed here, what the layers carry, what the SAM CLI needs.

One resolution rules: the layers take the versions of `requirements/dev.lock`, so that what the
tests ran is what is deployed.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMMON = ("--quiet", "--generate-hashes", "--no-annotate", "--no-header", "--no-emit-index-url")
ON_LAMBDA = ("--python-version", "3.13", "--python-platform", "aarch64-manylinux_2_28")
ONLY_ASYNC = {
    "aiohappyeyeballs",
    "aiohttp",
    "aiohttp-retry",
    "aiosignal",
    "attrs",
    "frozenlist",
    "multidict",
    "propcache",
    "yarl",
}
"""What only the Kubernetes client's asynchronous twin needs, which its layer leaves out."""

NAME = re.compile(r"^([A-Za-z0-9_.-]+)==", re.MULTILINE)


def compile_lock(source: str, target: str, *options: str) -> str:
    """Resolve a requirements source into a lock file and return its text."""
    path = ROOT / target
    command = ["uv", "pip", "compile", *COMMON, *options, source, "--output-file", str(path)]
    subprocess.run([sys.executable, "-m", *command], cwd=ROOT, check=True)  # noqa: S603 - ours
    return path.read_text()


def without(lock: str, names: set[str]) -> str:
    """Return the lock without the named packages."""
    blocks = re.split(r"(?m)^(?=[A-Za-z0-9])", lock)
    kept = (b for b in blocks if not (match := NAME.match(b)) or match.group(1) not in names)
    return "".join(kept)


def main() -> None:
    """Write all lock files."""
    dev = ("--universal", "--python-version", "3.11", "--extra", "dev")
    compile_lock("pyproject.toml", "requirements/dev.lock", *dev)
    same = ("--constraint", "requirements/dev.lock", *ON_LAMBDA)
    base = compile_lock("pyproject.toml", "layers/nodemend/requirements.lock", *same)
    target = "layers/kubernetes/requirements.lock"
    full = compile_lock("pyproject.toml", target, *same, "--extra", "kubernetes")
    (ROOT / target).write_text(without(full, set(NAME.findall(base)) | ONLY_ASYNC))
    sam = ("--universal", "--python-version", "3.11")
    compile_lock("requirements/sam.in", "requirements/sam.lock", *sam)


if __name__ == "__main__":
    main()
