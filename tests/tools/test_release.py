"""Preparing a release and checking its tag, on a small workspace; an index of files answers for what is published."""

import json
import threading
from collections.abc import Callable, Iterator
from datetime import date
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from check_ranges import floors
from hypothesis import given, settings
from hypothesis import strategies as st
from members import ToolError, read
from packaging.version import Version
from published import versions
from release import last_tag, prepare, tag_of, uncommitted
from release_check import check, parse_tag
from small_workspace import edit, git, write_package
from surface_levels import Level, bumped, compare, level_of

WHEN = date(2026, 3, 4)
PUBLISHED: dict[str, list[str]] = {}
"""Files by project, as the index answers; tests fill it."""


JSON = "application/vnd.pypi.simple.v1+json"


class _Index(BaseHTTPRequestHandler):
    """Answers with HTML; below /json/ with JSON, below /page/ with a page of another kind, below /down/ not at all."""

    def do_GET(self) -> None:
        kind = self.path.split("/")[1]
        files = PUBLISHED.get(self.path.strip("/").rpartition("/")[2])
        if kind == "json":
            listed = [{"filename": f.removeprefix("yanked:"), "yanked": f.startswith("yanked:")} for f in files or ()]
            page = json.dumps({"files": listed}).encode()
        else:
            page = "".join(map(_link, files or ())).encode()
        self.send_response(503 if kind == "down" else 404 if files is None else 200)
        kinds = {"json": JSON, "page": "text/plain"}
        self.send_header("Content-Type", kinds.get(kind, "text/html; charset=utf-8"))
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


def _link(file: str) -> str:
    name, yanked = file.removeprefix("yanked:"), " data-yanked='too early'" if file.startswith("yanked:") else ""
    return f"<a href='../../{name}#sha256=0'{yanked}>{name}</a>\n"


@pytest.fixture
def index() -> Iterator[str]:
    PUBLISHED.clear()
    PUBLISHED["lt-base"] = ["lt_base-0.1.0-py3-none-any.whl", "lt_base-0.1.0.tar.gz"]
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Index)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    address = f"http://127.0.0.1:{server.server_port}"
    yield f"{address}/simple"
    server.shutdown()
    thread.join()
    server.server_close()


def write(root: Path, name: str, move: str, *, widen: bool = False) -> None:
    for path, text in prepare(read(root), name, move, when=WHEN, widen=widen, root=root).items():
        path.write_text(text)


def release(root: Path, commit: Callable[..., None], name: str, move: str, *, widen: bool = False) -> str:
    """Prepare, commit and tag."""
    write(root, name, move, widen=widen)
    commit()
    tag = tag_of(name, read(root)[name].version)
    git("tag", tag, cwd=root)
    return tag


def test_a_release_moves_the_version_and_cuts_the_changelog(small: Path) -> None:
    before = (small / "packages/lt-side/pyproject.toml").read_text()
    write(small, "lt-side", "minor")
    assert read(small)["lt-side"].version == Version("0.2.0")
    assert (small / "packages/lt-side/pyproject.toml").read_text() == before.replace('"0.1.0"', '"0.2.0"', 1)
    text = (small / "packages/lt-side/CHANGELOG.md").read_text()
    assert "## [Unreleased]\n\n## [0.2.0] - 2026-03-04\n\n### Added\n\n- Something that is pending.\n" in text
    assert git("status", "--porcelain", cwd=small).split() == [
        *("M", "packages/lt-side/CHANGELOG.md", "M", "packages/lt-side/pyproject.toml")
    ]


def test_the_moves() -> None:
    moves = {Level.PATCH: "1.2.4", Level.MINOR: "1.3.0", Level.MAJOR: "2.0.0"}
    assert {level: str(bumped(Version("1.2.3"), level)) for level in Level} == moves


def test_a_first_release_keeps_its_version(small: Path, commit: Callable[..., None]) -> None:
    """`## [0.1.0] - unreleased` becomes the release 0.1.0."""
    git("tag", "--delete", "lt-side-v0.1.0", cwd=small)
    path = small / "packages/lt-side/CHANGELOG.md"
    path.write_text("# C\n\n## [0.1.0] - unreleased\n\n### Added\n\n- All of it.\n")
    commit()
    with pytest.raises(ToolError, match="lt-side was never released: say first"):
        write(small, "lt-side", "minor")
    assert release(small, commit, "lt-side", "first") == "lt-side-v0.1.0"
    assert path.read_text().startswith("# C\n\n## [Unreleased]\n\n## [0.1.0] - 2026-03-04\n\n### Added\n")
    with pytest.raises(ToolError, match=r"was released as lt-side-v0\.1\.0: say major, minor or patch"):
        write(small, "lt-side", "first")


def test_a_release_with_nothing_to_tell(small: Path) -> None:
    edit(small / "packages/lt-side/CHANGELOG.md", "- Something that is pending.\n", "")
    with pytest.raises(ToolError, match="nothing is pending"):
        write(small, "lt-side", "patch")
    assert git("status", "--porcelain", cwd=small).split() == ["M", "packages/lt-side/CHANGELOG.md"]


def test_a_version_that_a_sibling_excludes_is_not_made_unasked(small: Path) -> None:
    with pytest.raises(ToolError, match=r"lt-mid requires lt-base.*excludes lt-base 0\.2\.0: allow <0\.3 there"):
        write(small, "lt-base", "minor")
    assert git("status", "--porcelain", cwd=small) == ""
    write(small, "lt-base", "patch")
    assert read(small)["lt-base"].version == Version("0.1.1")


def test_widening_lets_the_siblings_have_it(small: Path) -> None:
    write(small, "lt-base", "minor", widen=True)
    members = read(small)
    assert [str(r) for r in members["lt-mid"].dependencies] == ["lt-base<0.3,>=0.1"]
    assert "- Something that is pending.\n- Works with lt-base 0.2.\n" in (
        (small / "packages/lt-mid/CHANGELOG.md").read_text()
    )
    write(small, "lt-mid", "minor", widen=True)
    assert [str(r) for r in read(small)["lt-top"].dependencies] == ["lt-mid[cli]<0.3,>=0.1"]


@pytest.mark.parametrize(
    ("change", "least", "version"),
    [
        ("function lt_side.stop\n", Level.MINOR, "0.2.0"),  # instead of go: a break
        ("function lt_side.go\nparameter lt_side.go(x) 0 required\n", Level.MINOR, "0.2.0"),
        ("function lt_side.go\nparameter lt_side.go(x) keyword = 1\n", Level.PATCH, "0.1.1"),
        ("function lt_side.go\nfunction lt_side.stop\n", Level.PATCH, "0.1.1"),
    ],
)
def test_the_public_names_say_how_far_to_move(small: Path, change: str, least: Level, version: str) -> None:
    (small / "packages/lt-side/API.txt").write_text(change)
    if least > Level.PATCH:
        with pytest.raises(ToolError, match=r"since lt-side-v0\.1\.0 lt-side changed what users see; say minor"):
            write(small, "lt-side", "patch")
    write(small, "lt-side", least.name.lower())
    assert str(read(small)["lt-side"].version) == version


def test_levels_above_one() -> None:
    one = Version("1.4.0")
    assert level_of(["- function a.b"], [], version=one) is Level.MAJOR
    assert level_of([], ["+ function a.b"], version=one) is Level.MINOR
    assert level_of([], [], version=one) is Level.PATCH


LINES = st.lists(
    st.builds(
        "{} a.{}({}) {}".format,
        st.just("parameter"),
        *[st.sampled_from("fgh")] * 2,
        st.sampled_from(["required", "= 1"]),
    ),
    unique=True,
)


@settings(deadline=None)
@given(LINES, LINES)
def test_nothing_that_is_lost_is_taken_for_an_addition(before: list[str], after: list[str]) -> None:
    breaks, added = compare(before, after)
    assert {line[2:] for line in [*breaks, *added] if line[0] == "+"} == set(after) - set(before)
    assert {line[2:] for line in breaks if line[0] == "-"} == set(before) - set(after)
    assert all(line[0] == "+" for line in added)
    assert compare(after, after) == ([], [])


def test_a_tag_that_may_be_released(small: Path, commit: Callable[..., None], index: str) -> None:
    tag = release(small, commit, "lt-mid", "patch")
    assert check(tag, read(small), index=index, root=small).name == "lt-mid"


@pytest.mark.parametrize(
    ("tag", "message"),
    [
        ("lt-mid-v0.1.2", r"the tag says 0\.1\.2, packages/lt-mid/pyproject.toml 0\.1\.1"),
        ("lt-mid-v0.1.1.0", r"the tag says 0\.1\.1\.0"),
        ("lt-side-v0.1.1", r"the tag says 0\.1\.1, packages/lt-side/pyproject.toml 0\.1\.0"),
        ("lt-unknown-v0.1.1", "write PACKAGE-vVERSION"),
        ("v0.1.1", "write PACKAGE-vVERSION"),
        ("lt-mid", "write PACKAGE-vVERSION"),
    ],
)
def test_a_wrong_tag(small: Path, commit: Callable[..., None], index: str, tag: str, message: str) -> None:
    release(small, commit, "lt-mid", "patch")
    with pytest.raises(ToolError, match=message):
        check(tag, read(small), index=index, root=small)


def test_a_tag_of_another_commit(small: Path, commit: Callable[..., None], index: str) -> None:
    tag = release(small, commit, "lt-mid", "patch")
    commit("Later")
    with pytest.raises(ToolError, match="the tag points at"):
        check(tag, read(small), index=index, root=small)


def test_a_changelog_that_was_forgotten(small: Path, commit: Callable[..., None], index: str) -> None:
    """The version was moved by hand."""
    edit(small / "packages/lt-mid/pyproject.toml", '"0.1.0"', '"0.1.1"')
    commit()
    with pytest.raises(ToolError) as caught:
        check("lt-mid-v0.1.1", read(small), index=index, root=small)
    assert "still has pending entries under ## [Unreleased]" in str(caught.value)
    assert "the newest release in packages/lt-mid/CHANGELOG.md is 0.1.0" in str(caught.value)


def test_a_range_that_excludes_what_stands_here(small: Path, commit: Callable[..., None], index: str) -> None:
    tag = release(small, commit, "lt-side", "patch")
    write_package(small, "lt-base", version="0.2.0")
    with pytest.raises(ToolError, match=r"ranges: lt-mid: .* excludes lt-base 0\.2\.0"):
        check(tag, read(small), index=index, root=small)


def test_a_sibling_that_is_not_released(small: Path, commit: Callable[..., None], index: str) -> None:
    tag = release(small, commit, "lt-top", "patch")
    with pytest.raises(ToolError, match=r"it requires lt-mid.*of which the index has none: release lt-mid first"):
        check(tag, read(small), index=index, root=small)
    PUBLISHED["lt-mid"] = ["lt_mid-0.2.0.tar.gz"]
    with pytest.raises(ToolError, match=r"the index has 0\.2\.0: release lt-mid first"):
        check(tag, read(small), index=index, root=small)
    PUBLISHED["lt-mid"].append("lt_mid-0.1.0.tar.gz")
    assert check(tag, read(small), index=index, root=small).name == "lt-top"


def test_a_version_that_is_out_already(small: Path, commit: Callable[..., None], index: str) -> None:
    tag = release(small, commit, "lt-side", "patch")
    PUBLISHED["lt-side"] = ["lt_side-0.1.1-py3-none-any.whl"]
    with pytest.raises(ToolError, match=r"lt-side 0\.1\.1 is published already"):
        check(tag, read(small), index=index, root=small)


def test_a_tag_that_is_too_near_to_the_last_one(small: Path, commit: Callable[..., None], index: str) -> None:
    """The names changed after the version was chosen."""
    write(small, "lt-side", "patch")
    (small / "packages/lt-side/API.txt").write_text("function lt_side.stop\n")
    commit()
    with pytest.raises(ToolError, match=r"0\.1\.1 is too near to 0\.1\.0, it has to be 0\.2\.0 at least"):
        check("lt-side-v0.1.1", read(small), index=index, root=small)


def test_a_tag_that_is_there_already_is_not_prepared_again(small: Path) -> None:
    """An old checkout: what it calls the next version is out."""
    git("tag", "lt-side-v0.1.1", cwd=small)
    with pytest.raises(ToolError, match=r"there is a tag lt-side-v0\.1\.1 already"):
        write(small, "lt-side", "patch")


def test_what_is_not_committed_is_seen(small: Path) -> None:
    assert uncommitted(root=small) == []
    (small / "new.txt").write_text("git does not know it\n")
    assert uncommitted(root=small) == []
    edit(small / "packages/lt-mid/src/lt_mid/__init__.py", "...", "print(1)")
    assert uncommitted(root=small) == ["packages/lt-mid/src/lt_mid/__init__.py"]


def test_tags_of_names_that_begin_alike(small: Path) -> None:
    write_package(small, "lt-base-v2")
    for tag in ("lt-base-v2-v7.0.0", "lt-base-vtrial"):
        git("tag", tag, cwd=small)
    members = read(small)
    assert parse_tag("lt-base-v2-v0.1.0", members)[0].name == "lt-base-v2"
    for version in ("0.9.0", "0.10.0", "0.2.0"):
        git("tag", f"lt-base-v{version}", cwd=small)
    assert last_tag("lt-base", root=small) == "lt-base-v0.10.0"
    assert last_tag("lt-base", root=small, before=Version("0.9.0")) == "lt-base-v0.2.0"
    assert last_tag("lt-none", root=small) is None


def test_what_an_index_has(index: str) -> None:
    PUBLISHED["lt-x"] = [
        "lt_x-0.10.0.tar.gz",
        "lt_x-0.9.0-py3-none-any.whl",
        "lt_x-0.9.0.tar.gz",
        "lt_x-0.9.0.tar.gz.asc",
    ]
    assert versions("lt-x", index=index) == [Version("0.9.0"), Version("0.10.0")]
    assert versions("lt-y", index=index) == []
    assert versions("lt-x", index=None) == []
    with pytest.raises(ToolError, match="address of a simple index"):
        versions("lt-x", index="file:///etc")


@pytest.mark.parametrize("kind", ["json", "simple"])
def test_what_was_yanked_does_not_count_in_json_and_html(index: str, kind: str) -> None:
    PUBLISHED["lt-x"] = ["lt_x-0.1.0.tar.gz", "yanked:lt_x-0.2.0.tar.gz", "lt_x-0.1.1-py3-none-any.whl"]
    assert versions("lt-x", index=index.replace("simple", kind)) == [Version("0.1.0"), Version("0.1.1")]


@pytest.mark.parametrize(("kind", "message"), [("page", "answers with text/plain"), ("down", "503")])
def test_an_index_that_does_not_say_what_it_has(index: str, kind: str, message: str) -> None:
    """It is not taken for one that has nothing: what is published would be published again."""
    PUBLISHED["lt-x"] = ["lt_x-0.1.0.tar.gz"]
    with pytest.raises(ToolError, match=message):
        versions("lt-x", index=index.replace("simple", kind))


def test_a_release_that_says_nothing(small: Path, commit: Callable[..., None], index: str) -> None:
    tag = release(small, commit, "lt-side", "patch")
    edit(small / "packages/lt-side/CHANGELOG.md", "- Something that is pending.\n", "")
    git("tag", "--delete", tag, cwd=small)
    commit()
    with pytest.raises(ToolError, match=r"lt-side/CHANGELOG\.md says nothing about 0\.1\.1"):
        check(tag, read(small), index=index, root=small)


def test_the_oldest_siblings_that_are_allowed(small: Path, index: str) -> None:
    PUBLISHED["lt-base"] = [f"lt_base-{v}.tar.gz" for v in ("0.0.9", "0.1.0", "0.1.5", "0.2.0")]
    write_package(small, "lt-base", version="0.1.6")
    members = read(small)
    assert floors(members["lt-mid"], members, index=index) == {"lt-base": Version("0.1.0")}
    write_package(small, "lt-mid", "lt-base>=0.1.1,<0.2")
    members = read(small)
    assert floors(members["lt-mid"], members, index=index) == {"lt-base": Version("0.1.5")}
    assert floors(members["lt-mid"], members, index=None) == {"lt-base": Version("0.1.6")}
