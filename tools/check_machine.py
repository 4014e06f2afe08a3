"""See that the machine has what pip cannot install, or say in one line how to get it."""

import os
import shutil
import subprocess
import sys

MINIMUM = (3, 11)


def check_python() -> str:
    """Return what is wrong with the Python, or an empty string."""
    if sys.version_info < MINIMUM:
        return "Python 3.11 or newer is needed: install it and call make with PYTHON=python3.12."
    try:
        import venv  # noqa: F401, PLC0415 - Debian splits it off
    except ImportError:
        return "Python's venv module is missing: apt-get install python3-venv."
    return ""


def check_prometheus() -> str:
    """Install Prometheus where that needs no question; return what is missing, or nothing."""
    if shutil.which("prometheus") and shutil.which("promtool"):
        return ""
    if shutil.which("apt-get") and os.geteuid() == 0 and _install_with_apt():
        return ""
    how = "brew install prometheus" if sys.platform == "darwin" else "apt-get install prometheus"
    return f"prometheus and promtool are missing: {how} (as root)."


def _install_with_apt() -> bool:
    """Install without a question; package lists are fetched only if they are needed."""
    print("installing prometheus with apt-get (needed by the demo and the tests) ...", flush=True)  # noqa: T201
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    install = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", "prometheus"]
    for command in (install, ["apt-get", "update", "-qq"], install):
        subprocess.run(  # noqa: S603 - fixed commands
            command,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=False,
        )
        if shutil.which("prometheus") and shutil.which("promtool"):
            return True
    return False


def main() -> int:
    """Check what the first argument names."""
    problem = {"python": check_python, "prometheus": check_prometheus}[sys.argv[1]]()
    if problem:
        print(problem, file=sys.stderr)  # noqa: T201
    return 1 if problem else 0


if __name__ == "__main__":
    sys.exit(main())
