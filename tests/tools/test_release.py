"""Preparing a release and checking its tag, on a small workspace; an index of files answers for what is published."""

import json
import threading
from collections.abc import Callable, Iterator
from datetime import date
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from check_ranges import oldest_sibling_versions
from hypothesis import given, settings
from hypothesis import strategies as st
from members import ToolError, read_members
from package_index import published_versions
from packaging.version import Version
from release import last_tag, prepare_release, release_tag, uncommitted_files
from release_check import check_release, parse_tag
from small_workspace import git, replace_text, write_package
from version_bump import BumpLevel, bump_version, diff_api, required_bump

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
    for path, text in prepare_release(
        read_members(root), name, move, release_date=WHEN, widen=widen, root=root
    ).items():
        path.write_text(text)


def release(root: Path, commit: Callable[..., None], name: str, move: str, *, widen: bool = False) -> str:
    """Prepare, commit and tag."""
    write(root, name, move, widen=widen)
    commit()
    tag = release_tag(name, read_members(root)[name].version)
    git("tag", tag, cwd=root)
    return tag


def test_a_release_moves_the_version_and_cuts_the_changelog(small_workspace_dir: Path) -> None:
    before = (small_workspace_dir / "packages/lt-side/pyproject.toml").read_text()
    write(small_workspace_dir, "lt-side", "minor")
    assert read_members(small_workspace_dir)["lt-side"].version == Version("0.2.0")
    assert (small_workspace_dir / "packages/lt-side/pyproject.toml").read_text() == before.replace(
        '"0.1.0"', '"0.2.0"', 1
    )
    text = (small_workspace_dir / "packages/lt-side/CHANGELOG.md").read_text()
    assert "## [Unreleased]\n\n## [0.2.0] - 2026-03-04\n\n### Added\n\n- Something that is pending.\n" in text
    assert git("status", "--porcelain", cwd=small_workspace_dir).split() == [
        *("M", "packages/lt-side/CHANGELOG.md", "M", "packages/lt-side/pyproject.toml")
    ]


def test_the_moves() -> None:
    moves = {BumpLevel.PATCH: "1.2.4", BumpLevel.MINOR: "1.3.0", BumpLevel.MAJOR: "2.0.0"}
    assert {level: str(bump_version(Version("1.2.3"), level)) for level in BumpLevel} == moves


def test_a_first_release_keeps_its_version(small_workspace_dir: Path, commit: Callable[..., None]) -> None:
    """`## [0.1.0] - unreleased` becomes the release 0.1.0."""
    git("tag", "--delete", "lt-side-v0.1.0", cwd=small_workspace_dir)
    path = small_workspace_dir / "packages/lt-side/CHANGELOG.md"
    path.write_text("# C\n\n## [0.1.0] - unreleased\n\n### Added\n\n- All of it.\n")
    commit()
    with pytest.raises(ToolError, match="lt-side was never released; use first"):
        write(small_workspace_dir, "lt-side", "minor")
    assert release(small_workspace_dir, commit, "lt-side", "first") == "lt-side-v0.1.0"
    assert path.read_text().startswith("# C\n\n## [Unreleased]\n\n## [0.1.0] - 2026-03-04\n\n### Added\n")
    with pytest.raises(ToolError, match=r"was released as lt-side-v0\.1\.0; use major, minor or patch"):
        write(small_workspace_dir, "lt-side", "first")


def test_a_release_with_nothing_to_tell(small_workspace_dir: Path) -> None:
    replace_text(small_workspace_dir / "packages/lt-side/CHANGELOG.md", "- Something that is pending.\n", "")
    with pytest.raises(ToolError, match="no unreleased entries"):
        write(small_workspace_dir, "lt-side", "patch")
    assert git("status", "--porcelain", cwd=small_workspace_dir).split() == ["M", "packages/lt-side/CHANGELOG.md"]


def test_a_version_that_a_sibling_excludes_is_not_made_unasked(small_workspace_dir: Path) -> None:
    with pytest.raises(ToolError, match=r"lt-mid requires lt-base.*excludes lt-base 0\.2\.0; allow <0\.3 there"):
        write(small_workspace_dir, "lt-base", "minor")
    assert git("status", "--porcelain", cwd=small_workspace_dir) == ""
    write(small_workspace_dir, "lt-base", "patch")
    assert read_members(small_workspace_dir)["lt-base"].version == Version("0.1.1")


def test_widening_lets_the_siblings_have_it(small_workspace_dir: Path) -> None:
    write(small_workspace_dir, "lt-base", "minor", widen=True)
    members = read_members(small_workspace_dir)
    assert [str(r) for r in members["lt-mid"].dependencies] == ["lt-base<0.3,>=0.1"]
    assert "- Something that is pending.\n- Works with lt-base 0.2.\n" in (
        (small_workspace_dir / "packages/lt-mid/CHANGELOG.md").read_text()
    )
    write(small_workspace_dir, "lt-mid", "minor", widen=True)
    assert [str(r) for r in read_members(small_workspace_dir)["lt-top"].dependencies] == ["lt-mid[cli]<0.3,>=0.1"]


@pytest.mark.parametrize(
    ("change", "least", "version"),
    [
        ("function lt_side.stop\n", BumpLevel.MINOR, "0.2.0"),  # instead of go: a break
        ("function lt_side.go\nparameter lt_side.go(x) 0 required\n", BumpLevel.MINOR, "0.2.0"),
        ("function lt_side.go\nparameter lt_side.go(x) keyword = 1\n", BumpLevel.PATCH, "0.1.1"),
        ("function lt_side.go\nfunction lt_side.stop\n", BumpLevel.PATCH, "0.1.1"),
    ],
)
def test_the_public_names_say_how_far_to_move(
    small_workspace_dir: Path, change: str, least: BumpLevel, version: str
) -> None:
    (small_workspace_dir / "packages/lt-side/API.txt").write_text(change)
    if least > BumpLevel.PATCH:
        with pytest.raises(ToolError, match=r"move = patch: the API changed since lt-side-v0\.1\.0; use minor"):
            write(small_workspace_dir, "lt-side", "patch")
    write(small_workspace_dir, "lt-side", least.name.lower())
    assert str(read_members(small_workspace_dir)["lt-side"].version) == version


def test_levels_above_one() -> None:
    one = Version("1.4.0")
    assert required_bump(["- function a.b"], [], version=one) is BumpLevel.MAJOR
    assert required_bump([], ["+ function a.b"], version=one) is BumpLevel.MINOR
    assert required_bump([], [], version=one) is BumpLevel.PATCH


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
    breaks, added = diff_api(before, after)
    assert {line[2:] for line in [*breaks, *added] if line[0] == "+"} == set(after) - set(before)
    assert {line[2:] for line in breaks if line[0] == "-"} == set(before) - set(after)
    assert all(line[0] == "+" for line in added)
    assert diff_api(after, after) == ([], [])


def test_a_tag_that_may_be_released(small_workspace_dir: Path, commit: Callable[..., None], index: str) -> None:
    tag = release(small_workspace_dir, commit, "lt-mid", "patch")
    assert check_release(tag, read_members(small_workspace_dir), index=index, root=small_workspace_dir).name == "lt-mid"


@pytest.mark.parametrize(
    ("tag", "message"),
    [
        ("lt-mid-v0.1.2", r"the tag has 0\.1\.2, packages/lt-mid/pyproject.toml 0\.1\.1"),
        ("lt-mid-v0.1.1.0", r"the tag has 0\.1\.1\.0"),
        ("lt-side-v0.1.1", r"the tag has 0\.1\.1, packages/lt-side/pyproject.toml 0\.1\.0"),
        ("lt-unknown-v0.1.1", "write PACKAGE-vVERSION"),
        ("v0.1.1", "write PACKAGE-vVERSION"),
        ("lt-mid", "write PACKAGE-vVERSION"),
    ],
)
def test_a_wrong_tag(
    small_workspace_dir: Path, commit: Callable[..., None], index: str, tag: str, message: str
) -> None:
    release(small_workspace_dir, commit, "lt-mid", "patch")
    with pytest.raises(ToolError, match=message):
        check_release(tag, read_members(small_workspace_dir), index=index, root=small_workspace_dir)


def test_a_tag_of_another_commit(small_workspace_dir: Path, commit: Callable[..., None], index: str) -> None:
    tag = release(small_workspace_dir, commit, "lt-mid", "patch")
    commit("Later")
    with pytest.raises(ToolError, match="the tag is commit"):
        check_release(tag, read_members(small_workspace_dir), index=index, root=small_workspace_dir)


def test_a_changelog_that_was_forgotten(small_workspace_dir: Path, commit: Callable[..., None], index: str) -> None:
    """The version was moved by hand."""
    replace_text(small_workspace_dir / "packages/lt-mid/pyproject.toml", '"0.1.0"', '"0.1.1"')
    commit()
    with pytest.raises(ToolError) as caught:
        check_release("lt-mid-v0.1.1", read_members(small_workspace_dir), index=index, root=small_workspace_dir)
    assert "still has unreleased entries under ## [Unreleased]" in str(caught.value)
    assert "the newest release in packages/lt-mid/CHANGELOG.md is 0.1.0" in str(caught.value)


def test_a_range_that_excludes_what_stands_here(
    small_workspace_dir: Path, commit: Callable[..., None], index: str
) -> None:
    tag = release(small_workspace_dir, commit, "lt-side", "patch")
    write_package(small_workspace_dir, "lt-base", version="0.2.0")
    with pytest.raises(ToolError, match=r"ranges: lt-mid: .* excludes lt-base 0\.2\.0"):
        check_release(tag, read_members(small_workspace_dir), index=index, root=small_workspace_dir)


def test_a_sibling_that_is_not_released(small_workspace_dir: Path, commit: Callable[..., None], index: str) -> None:
    tag = release(small_workspace_dir, commit, "lt-top", "patch")
    with pytest.raises(ToolError, match=r"it requires lt-mid.*and the index has none; release lt-mid first"):
        check_release(tag, read_members(small_workspace_dir), index=index, root=small_workspace_dir)
    PUBLISHED["lt-mid"] = ["lt_mid-0.2.0.tar.gz"]
    with pytest.raises(ToolError, match=r"the index has 0\.2\.0; release lt-mid first"):
        check_release(tag, read_members(small_workspace_dir), index=index, root=small_workspace_dir)
    PUBLISHED["lt-mid"].append("lt_mid-0.1.0.tar.gz")
    assert check_release(tag, read_members(small_workspace_dir), index=index, root=small_workspace_dir).name == "lt-top"


def test_a_version_that_is_out_already(small_workspace_dir: Path, commit: Callable[..., None], index: str) -> None:
    tag = release(small_workspace_dir, commit, "lt-side", "patch")
    PUBLISHED["lt-side"] = ["lt_side-0.1.1-py3-none-any.whl"]
    with pytest.raises(ToolError, match=r"lt-side 0\.1\.1 is already published"):
        check_release(tag, read_members(small_workspace_dir), index=index, root=small_workspace_dir)


def test_a_tag_that_is_too_near_to_the_last_one(
    small_workspace_dir: Path, commit: Callable[..., None], index: str
) -> None:
    """The names changed after the version was chosen."""
    write(small_workspace_dir, "lt-side", "patch")
    (small_workspace_dir / "packages/lt-side/API.txt").write_text("function lt_side.stop\n")
    commit()
    with pytest.raises(ToolError, match=r"0\.1\.1 is too small a bump from 0\.1\.0, at least 0\.2\.0 is required"):
        check_release("lt-side-v0.1.1", read_members(small_workspace_dir), index=index, root=small_workspace_dir)


def test_a_tag_that_is_there_already_is_not_prepared_again(small_workspace_dir: Path) -> None:
    """An old checkout: what it calls the next version is out."""
    git("tag", "lt-side-v0.1.1", cwd=small_workspace_dir)
    with pytest.raises(ToolError, match=r"tag lt-side-v0\.1\.1 exists already"):
        write(small_workspace_dir, "lt-side", "patch")


def test_what_is_not_committed_is_seen(small_workspace_dir: Path) -> None:
    assert uncommitted_files(root=small_workspace_dir) == []
    (small_workspace_dir / "new.txt").write_text("git does not know it\n")
    assert uncommitted_files(root=small_workspace_dir) == []
    replace_text(small_workspace_dir / "packages/lt-mid/src/lt_mid/__init__.py", "...", "print(1)")
    assert uncommitted_files(root=small_workspace_dir) == ["packages/lt-mid/src/lt_mid/__init__.py"]


def test_tags_of_names_that_begin_alike(small_workspace_dir: Path) -> None:
    write_package(small_workspace_dir, "lt-base-v2")
    for tag in ("lt-base-v2-v7.0.0", "lt-base-vtrial"):
        git("tag", tag, cwd=small_workspace_dir)
    members = read_members(small_workspace_dir)
    assert parse_tag("lt-base-v2-v0.1.0", members)[0].name == "lt-base-v2"
    for version in ("0.9.0", "0.10.0", "0.2.0"):
        git("tag", f"lt-base-v{version}", cwd=small_workspace_dir)
    assert last_tag("lt-base", root=small_workspace_dir) == "lt-base-v0.10.0"
    assert last_tag("lt-base", root=small_workspace_dir, before=Version("0.9.0")) == "lt-base-v0.2.0"
    assert last_tag("lt-none", root=small_workspace_dir) is None


def test_what_an_index_has(index: str) -> None:
    PUBLISHED["lt-x"] = [
        "lt_x-0.10.0.tar.gz",
        "lt_x-0.9.0-py3-none-any.whl",
        "lt_x-0.9.0.tar.gz",
        "lt_x-0.9.0.tar.gz.asc",
    ]
    assert published_versions("lt-x", index=index) == [Version("0.9.0"), Version("0.10.0")]
    assert published_versions("lt-y", index=index) == []
    assert published_versions("lt-x", index=None) == []
    with pytest.raises(ToolError, match="give a simple index"):
        published_versions("lt-x", index="file:///etc")


@pytest.mark.parametrize("kind", ["json", "simple"])
def test_what_was_yanked_does_not_count_in_json_and_html(index: str, kind: str) -> None:
    PUBLISHED["lt-x"] = ["lt_x-0.1.0.tar.gz", "yanked:lt_x-0.2.0.tar.gz", "lt_x-0.1.1-py3-none-any.whl"]
    assert published_versions("lt-x", index=index.replace("simple", kind)) == [Version("0.1.0"), Version("0.1.1")]


@pytest.mark.parametrize(("kind", "message"), [("page", "returned text/plain"), ("down", "503")])
def test_an_index_that_does_not_say_what_it_has(index: str, kind: str, message: str) -> None:
    """It is not taken for one that has nothing: what is published would be published again."""
    PUBLISHED["lt-x"] = ["lt_x-0.1.0.tar.gz"]
    with pytest.raises(ToolError, match=message):
        published_versions("lt-x", index=index.replace("simple", kind))


def test_a_release_that_says_nothing(small_workspace_dir: Path, commit: Callable[..., None], index: str) -> None:
    tag = release(small_workspace_dir, commit, "lt-side", "patch")
    replace_text(small_workspace_dir / "packages/lt-side/CHANGELOG.md", "- Something that is pending.\n", "")
    git("tag", "--delete", tag, cwd=small_workspace_dir)
    commit()
    with pytest.raises(ToolError, match=r"lt-side/CHANGELOG\.md has no entry for 0\.1\.1"):
        check_release(tag, read_members(small_workspace_dir), index=index, root=small_workspace_dir)


def test_the_oldest_siblings_that_are_allowed(small_workspace_dir: Path, index: str) -> None:
    PUBLISHED["lt-base"] = [f"lt_base-{v}.tar.gz" for v in ("0.0.9", "0.1.0", "0.1.5", "0.2.0")]
    write_package(small_workspace_dir, "lt-base", version="0.1.6")
    members = read_members(small_workspace_dir)
    assert oldest_sibling_versions(members["lt-mid"], members, index=index) == {"lt-base": Version("0.1.0")}
    write_package(small_workspace_dir, "lt-mid", "lt-base>=0.1.1,<0.2")
    members = read_members(small_workspace_dir)
    assert oldest_sibling_versions(members["lt-mid"], members, index=index) == {"lt-base": Version("0.1.5")}
    assert oldest_sibling_versions(members["lt-mid"], members, index=None) == {"lt-base": Version("0.1.6")}
