"""Install a requirements file into this interpreter, leaving alone what it already has.

    python tools/install_requirements.py requirements.txt

In a fresh environment every pin is installed as it stands. In one that sees a container's packages
(``make setup VENV_ARGS=--system-site-packages``) a package that is there stays, whatever its
version: torch, Transformer Engine and flash-attn of a container belong together.
"""

import subprocess
import sys
from importlib import metadata
from pathlib import Path


def missing(lines: list[str]) -> list[str]:
    """Return the lines whose package is not installed whole, or by us at another version."""
    wanted = []
    for line in lines:
        requirement = line.split("#")[0].strip()
        if not requirement:
            continue
        name, _, version = requirement.partition("==")
        try:
            found = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            wanted.append(requirement)
            continue
        # Files first, then the list of them, then this name: without it, an install was cut off.
        if found.read_text("INSTALLER") is None:
            wanted.append(requirement)
            continue
        ours = Path(sys.prefix) in Path(str(found.locate_file(""))).parents
        # A local version such as 2.13.0+cpu satisfies the pin 2.13.0.
        if ours and version and found.version.split("+")[0] != version:
            wanted.append(requirement)
        elif not ours and found.version.split("+")[0] != version:
            print(f"{name} {found.version} is installed already and stays (pinned: {version})")
    return wanted


def main() -> int:
    """Install what is missing; return pip's exit code."""
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_file():
        print("install_requirements: error: give one requirements file", file=sys.stderr)
        return 2
    wanted = missing(Path(sys.argv[1]).read_text(encoding="utf-8").splitlines())
    if not wanted:
        print(f"{sys.argv[1]}: all there")
        return 0
    print(f"installing {', '.join(wanted)}; torch alone may be hundreds of megabytes", flush=True)
    # pip's own progress: a bar on a terminal, a line for each package in a log.
    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check"]
    return subprocess.run([*command, *wanted]).returncode


if __name__ == "__main__":
    sys.exit(main())
