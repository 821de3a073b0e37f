"""The version that a build gives the package: from a clone, a tag, an archive, an sdist."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import jax_attn as ja
from helpers.paths import ROOT

FILES = ("pyproject.toml", ".git_archival.txt", ".gitattributes")
_READ = """
from scikit_build_core.metadata.setuptools_scm import dynamic_metadata
print(dynamic_metadata("version"))
"""


def version_in(folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _READ], cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def git(folder: Path, *arguments: str) -> bytes:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main")
    return subprocess.run(
        ["git", *identity, *arguments], cwd=folder, capture_output=True, check=True
    ).stdout


@pytest.fixture
def clone(tmp_path):
    for module in ("setuptools_scm", "scikit_build_core"):
        pytest.importorskip(module, reason=f"no {module}, which builds need")
    if shutil.which("git") is None or not (ROOT / ".gitattributes").exists():
        pytest.skip("no git, or no files of it")
    folder = tmp_path / "clone"
    folder.mkdir()
    for name in FILES:
        shutil.copy(ROOT / name, folder)
    git(folder, "init", "-q")
    git(folder, "add", ".")
    for message in ("one", "two", "three"):
        git(folder, "commit", "-q", "--allow-empty", "-m", message)
    return folder


def test_versions_of_clones(clone, tmp_path):
    assert version_in(clone) == "0.1.dev3"
    git(clone, "tag", "-a", "v0.2.0", "-m", "0.2.0", "HEAD~1")
    assert version_in(clone) == "0.2.1.dev1"
    git(clone, "tag", "-a", "v0.3.0", "-m", "0.3.0")
    assert version_in(clone) == "0.3.0"
    # CI clones without tags.
    shallow = tmp_path / "shallow"
    git(tmp_path, "clone", "-q", "--depth=1", "--no-tags", clone.as_uri(), str(shallow))
    assert version_in(shallow) == "0.1.dev1"
    # All wheels of a commit have one name, also from a checkout with changes.
    git(clone, "commit", "-q", "--allow-empty", "-m", "four")
    clean = version_in(clone)
    (clone / ".gitattributes").write_text("")
    assert version_in(clone) == clean == "0.3.1.dev1"


def test_versions_without_git(clone, tmp_path):
    def unpack(name):
        folder = tmp_path / name
        folder.mkdir()
        subprocess.run(["tar", "x"], cwd=folder, input=git(clone, "archive", "HEAD"), check=True)
        return folder

    assert version_in(unpack("without_tags")) == "0.1.dev0"
    git(clone, "tag", "-a", "v0.2.0", "-m", "0.2.0")
    archive = unpack("archive")
    assert version_in(archive) == "0.2.0"
    (archive / ".git_archival.txt").unlink()
    assert version_in(archive) == "0.1.dev0"
    (archive / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: jax_attn\nVersion: 0.4.0\n")
    assert version_in(archive) == "0.4.0"  # an sdist


def test_the_package_tells_its_version():
    assert ja.__version__[0].isdigit()
