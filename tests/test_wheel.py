# SPDX-License-Identifier: Apache-2.0
"""The wheel: what it holds, and that it works in an empty environment."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
from tests.house import ROOT

import llmcompressor


def run(*command: object, folder: Path) -> str:
    environment = {name: one for name, one in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(one) for one in command],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of this tree, built from a copy: builds leave files beside the sources."""
    folder = tmp_path_factory.mktemp("wheel")
    names = ["src", "pyproject.toml", "README.md", "LICENSE"]
    run("cp", "-r", *(ROOT / name for name in names), folder, folder=folder)
    run("find", folder, "-name", "*.egg-info", "-exec", "rm", "-r", "{}", "+", folder=folder)
    pip = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        "dist",
        ".",
    ]
    run(*pip, folder=folder)
    [found] = (folder / "dist").glob("*.whl")
    return found


def test_it_holds_the_package_alone(wheel: Path) -> None:
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    package = ROOT / "src" / "llmcompressor"
    own = {
        str(Path("llmcompressor") / file.relative_to(package))
        for file in package.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    assert held == own


def test_it_works_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "env", with_pip=False)
    python = tmp_path / "env" / "bin" / "python"
    [packages] = (tmp_path / "env" / "lib").glob("python*/site-packages")
    into = ["--quiet", "--no-deps", "--target", packages, wheel]
    run(sys.executable, "-m", "pip", "install", *into, folder=tmp_path)
    # its dependencies are those of this environment: they take minutes to install
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"))
    command = packages / "bin" / "llmcompressor"
    script = "import llmcompressor; print(llmcompressor.__file__)"
    assert run(python, "-P", "-c", script, folder=tmp_path).strip().startswith(str(packages))
    assert command.is_file()
    said = run(python, "-m", "llmcompressor", "--version", folder=tmp_path)
    assert said == f"llmcompressor {llmcompressor.__version__}\n"


@pytest.mark.slow
def test_it_installs_with_all_that_it_needs(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "env", with_pip=True)
    binaries = tmp_path / "env" / "bin"
    constraints = ["-c", ROOT / "constraints.txt"]
    run(binaries / "pip", "install", "--quiet", wheel, *constraints, folder=tmp_path)
    run(binaries / "pip", "check", folder=tmp_path)
    script = "import llmcompressor; print(llmcompressor.__file__)"
    assert str(tmp_path / "env") in run(binaries / "python", "-c", script, folder=tmp_path)
    assert "Reloaded" in run(binaries / "llmcompressor", "demo", folder=tmp_path)
