"""Names that a manifest, an index or a listing gives stay inside the folder that they are names in."""

import pytest

from lt_data.errors import DataError
from lt_data.file_names import check_name

HOSTILE_NAMES = (
    *("", ".", "..", "/", "/etc/passwd", "../up", "a/../../up", "a/..", "./a", "a//b", "a/", "//host/share", "a\0b"),
    *("C:", "C:/up", "c:up", "\\up", "a\\..\\..\\up", "\\\\host\\share\\up", None, 7, b"a", ["a"]),
)


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_a_name_that_leads_out_of_its_folder_is_refused_with_its_source(name: object) -> None:
    with pytest.raises(DataError) as caught:
        check_name(name, "s3://bucket/manifest.json")
    assert str(caught.value).startswith("s3://bucket/manifest.json: ")
    assert repr(name) in str(caught.value)


@pytest.mark.parametrize("name", ["a", "a/b/c.bin", "..a", "a..", ".hidden/...", "größe 1.json", "ab:c", "a b", "~"])
def test_other_names_are_returned_as_they_are(name: str) -> None:
    assert check_name(name, "manifest.json") == name


def test_the_error_is_of_the_class_that_the_caller_gives() -> None:
    class OtherError(ValueError):
        pass

    with pytest.raises(OtherError, match=r"index\.json: file name '\.\./a'"):
        check_name("../a", "index.json", OtherError)
