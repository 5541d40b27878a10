# SPDX-License-Identifier: Apache-2.0
"""What is built to be installed: complete, and usable wherever a process happens to start."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.house_rules import ROOT, package

pytestmark = pytest.mark.slow

LEFT_OUT = {"build", "dist", "benchmarks", "tests"}
# No compiler: the C++ kernels are optional, and every installation of this checkout compiles them.
ENVIRONMENT = {**os.environ, "CC": "false", "CXX": "false"}
PROBE = """
import inspect
from vllm.engine.arg_utils import EngineArgs
import vllm_h2o.patches
from vllm_h2o.patches import ALWAYS
assert all(patch.is_applied for patch in ALWAYS)
assert "kv_policy" in inspect.signature(EngineArgs.__init__).parameters
print(vllm_h2o.__file__, vllm_h2o.patches.__file__)
"""
NO_LINK = "vllm_h2o/patches is not a link to the folder patches"


def python(*arguments: str, cwd: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    """A process of the environment's Python, whatever its exit status."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**ENVIRONMENT, **settings},
        capture_output=True,
        text=True,
        check=False,
    )


def build(source: Path, target: Path, *options: str) -> None:
    """Build what ``options`` ask for; without any, an sdist and a wheel from it."""
    command = ["-m", "build", "--no-isolation", "--outdir", str(target), *options]
    done = python(*command, str(source), cwd=source)
    assert done.returncode == 0, done.stderr[-2000:]


def shipped() -> Iterator[str]:
    """Files of the package that an installation needs, below the root of the repository."""
    for folder, _, files in os.walk(ROOT / "vllm_h2o", followlinks=True):
        for file in (Path(folder, name) for name in files):
            if file.suffix in {".py", ".cpp", ".h", ".html", ".md"} or file.name == "py.typed":
                yield str(file.relative_to(ROOT))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout, with the link, without what was compiled or measured in it."""
    source = tmp_path_factory.mktemp("package") / "source"
    source.mkdir()
    for entry in ROOT.iterdir():
        left_out = entry.name in LEFT_OUT or entry.name.startswith(".")
        if not left_out and not entry.name.endswith(".egg-info"):
            subprocess.run(["cp", "-R", str(entry), str(source)], check=True)
    for library in source.rglob("*.so"):
        library.unlink()
    return source


@pytest.fixture(scope="module")
def built(source: Path) -> Path:
    """A folder with an sdist, and with the wheel that is built of it."""
    build(source, source.parent / "dist")
    return source.parent / "dist"


@pytest.fixture(scope="module")
def site(built: Path) -> Path:
    """A folder in which the wheel is installed."""
    (wheel,) = built.glob("*.whl")
    site = built.parent / "site"
    install = ["-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site), str(wheel)]
    done = python(*install, cwd=built)
    assert done.returncode == 0, done.stderr[-2000:]
    return site


def test_nothing_is_left_out(built: Path) -> None:
    """Every module, every source of the kernels, the trace's page: in both."""
    (sdist,), (wheel,) = built.glob("*.tar.gz"), built.glob("*.whl")
    with tarfile.open(sdist) as archive:
        in_sdist = {name.partition("/")[2] for name in archive.getnames()}
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = set(archive.namelist())
    needed = set(shipped())
    assert {"vllm_h2o/patches/_patch.py", "vllm_h2o/py.typed"} <= needed
    assert needed <= in_sdist
    assert needed <= in_wheel
    assert "setup.py" in in_sdist


def test_wheel_holds_the_patches_once(built: Path) -> None:
    """Nothing is installed as a package ``patches``, which others may have."""
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        top = {name.partition("/")[0] for name in archive.namelist()}
    assert {name for name in top if not name.endswith(".dist-info")} == {"vllm_h2o"}


def test_wheel_of_the_checkout_is_that_of_the_sdist(built: Path, source: Path) -> None:
    """The one is built through the link, the other from files that the sdist has in its place."""
    build(source, source.parent / "direct", "--wheel")
    contents = []
    for folder in (built, source.parent / "direct"):
        (wheel,) = folder.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            contents.append({info.filename: info.CRC for info in archive.infolist()})
    assert contents[0] == contents[1]


def test_it_is_used_without_the_checkout_and_from_its_root(site: Path) -> None:
    """Elsewhere the wheel's package runs; at the root the folder hides it, and runs as well."""
    environment = {**os.environ, "PYTHONPATH": str(site)}
    places = {ROOT: ROOT, site.parent: site}
    processes = {
        place: subprocess.Popen(
            [sys.executable, "-c", PROBE],
            cwd=place,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for place in places
    }
    for place, process in processes.items():
        printed, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors[-2000:]
        home = places[place] / "vllm_h2o"
        files = [str(home / "__init__.py"), str(home / "patches/__init__.py")]
        assert printed.split()[-2:] == files


@pytest.mark.parametrize("place", ["root", "elsewhere"])
def test_patches_print_their_readme(site: Path, place: str) -> None:
    """``python -m vllm_h2o.patches`` runs from the checkout and from the wheel."""
    cwd = ROOT if place == "root" else site.parent
    done = python("-m", "vllm_h2o.patches", cwd=cwd, PYTHONPATH=str(site), VLLM_PLUGINS="")
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.endswith((ROOT / "patches/README.md").read_text(encoding="utf-8"))


def test_editable_installation_has_the_patches(source: Path) -> None:
    """It maps the package's name to its folder, and the link in it is followed."""
    environment = source.parent / "environment"
    venv.create(environment, symlinks=True)
    wheels = source.parent / "editable"
    wheels.mkdir()
    hook = "import sys; from setuptools.build_meta import build_editable as b; b(sys.argv[1])"
    done = python("-c", hook, str(wheels), cwd=source)
    assert done.returncode == 0, done.stderr[-2000:]
    interpreter = str(environment / "bin/python")
    pip = ["-m", "pip", "--python", interpreter, "install", "--quiet", "--no-deps"]
    done = python(*pip, *map(str, wheels.glob("*.whl")), cwd=wheels)
    assert done.returncode == 0, done.stderr[-2000:]
    host = find_spec("vllm")
    assert host is not None and host.origin is not None
    # A path in a .pth file brings vLLM, and not the editable installations next to it.
    (folder,) = environment.glob("lib/python*/site-packages")
    (folder / "host.pth").write_text(f"{Path(host.origin).parents[1]}\n")
    done = subprocess.run(
        [interpreter, "-c", "import vllm_h2o.patches as patches; print(patches.__file__)"],
        cwd=wheels,
        env={**os.environ, "PYTHONPATH": "", "VLLM_PLUGINS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split()[-1] == str(source / "vllm_h2o/patches/__init__.py")


@pytest.mark.parametrize(
    "command",
    [("-c", "import patches"), ("-c", "import patches._patch"), ("-m", "patches")],
    ids=" ".join,
)
def test_patches_under_another_name_are_refused(command: tuple[str, str]) -> None:
    """At the root of the repository ``patches`` is on the path; a second copy is not made."""
    done = python(*command, cwd=ROOT, VLLM_PLUGINS="")
    assert done.returncode != 0
    assert "patches is a second copy of the patches. Import vllm_h2o.patches" in done.stderr


def test_ruff_reads_each_file_once() -> None:
    """The patches are checked as files of their folder, not again through the link."""
    pytest.importorskip("ruff")
    done = python("-m", "ruff", "check", "--show-files", ".", cwd=ROOT)
    assert done.returncode == 0, done.stderr
    listed = Counter(str(Path(line).relative_to(ROOT)) for line in done.stdout.splitlines())
    assert {listed[module.path] for module in package()} == {1}
    assert not [file for file in listed if file.startswith("vllm_h2o/patches/")]


def test_mypy_reads_each_module_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The patches are modules of the package, under the name by which they are imported."""
    find_sources = pytest.importorskip("mypy.find_sources")
    options = pytest.importorskip("mypy.options").Options()
    options.namespace_packages = options.explicit_package_bases = True
    monkeypatch.chdir(ROOT)
    found = Counter(s.module for s in find_sources.create_source_list(["vllm_h2o"], options))
    assert found == Counter(module.dotted.removesuffix(".__init__") for module in package())


@pytest.fixture
def without_links(source: Path, tmp_path: Path) -> Path:
    """A clone on a file system without symbolic links: git writes a text file for each."""
    if shutil.which("git") is None:
        pytest.skip("there is no git")
    origin, clone = tmp_path / "origin", tmp_path / "clone"
    origin.mkdir()
    for name in ("vllm_h2o", "patches", "setup.py", "pyproject.toml", "README.md", "LICENSE"):
        subprocess.run(["cp", "-R", str(source / name), str(origin)], check=True)
    git = ["git", "-C", str(origin)]
    author = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    subprocess.run([*git, "init", "--quiet"], check=True)
    subprocess.run([*git, "add", "--all"], check=True)
    subprocess.run([*git, *author, "commit", "--quiet", "--message", "a"], check=True)
    options = ["--quiet", "--config", "core.symlinks=false"]
    subprocess.run(["git", "clone", *options, str(origin), str(clone)], check=True)
    assert (clone / "vllm_h2o/patches").read_text() == "../patches"
    return clone


def test_build_without_links_says_what_to_do(without_links: Path) -> None:
    """Nothing is built without the patches; the commands in the message mend the checkout."""
    done = python("-m", "build", "--wheel", "--no-isolation", ".", cwd=without_links)
    said = done.stdout + done.stderr
    assert done.returncode != 0
    assert f"error: {NO_LINK}" in said
    commands = re.findall(r"`(git [^`]+)`", said)
    assert len(commands) == 2
    for command in commands:
        subprocess.run(shlex.split(command), cwd=without_links, check=True)
    assert (without_links / "vllm_h2o/patches").is_symlink()
    assert python("setup.py", "--version", cwd=without_links).returncode == 0


def test_start_without_links_says_what_to_do(without_links: Path) -> None:
    """vLLM does not start: not with an import error that names a module."""
    place = str(without_links)
    done = python("-c", "from vllm import LLM", cwd=without_links.parent, PYTHONPATH=place)
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert "PatchError" in last and NO_LINK in last
    assert "`git checkout -- vllm_h2o/patches`" in last
