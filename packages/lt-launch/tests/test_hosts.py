"""Hostfiles: what a line may hold, and that the order of the lines is the order of the ranks."""

import pytest

from lt_launch.errors import LaunchError
from lt_launch.hosts import Host, parse_hostfile, read_hostfile, slots_per_host


def test_a_hostfile_with_everything() -> None:
    text = """
    # the first rack
    node1
    node2 slots=8 port=2222 user=ubuntu addr=10.0.0.2 env.NCCL_DEBUG=INFO  # the odd one
    "10.0.0.3" slots=4 env.A="b c"
    """
    assert parse_hostfile(text) == (
        Host(name="node1"),
        Host(name="node2", slots=8, port=2222, user="ubuntu", addr="10.0.0.2", env={"NCCL_DEBUG": "INFO"}),
        Host(name="10.0.0.3", slots=4, env={"A": "b c"}),
    )


def test_rank_order_is_the_order_of_the_lines_for_1_to_256_unpadded_names() -> None:
    """node10 sorts before node2 as text; nothing here sorts."""
    for count in range(1, 257):
        names = [f"trn1-{i}" for i in range(1, count + 1)]
        assert [host.name for host in parse_hostfile("\n".join(names))] == names


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no host in it"),
        ("# only\n\n", "no host in it"),
        ("a\nb\na\n", ":3: a is listed twice"),
        ("a slots=0", "'slots=0' of a"),
        ("a slots=x", "'slots=x' of a"),
        ("a port=65536", "'port=65536' of a"),
        ("a gpus=8", "'gpus=8' of a"),
        ("a slots", "'slots' of a"),
        ("-oProxyCommand=x", "not a host name"),
        ("a addr=-oProxyCommand=x", "'addr=-oProxyCommand=x' of a"),
        ("a user=-x", "'user=-x' of a"),
        ("a 'b", "No closing quotation"),
    ],
)
def test_lines_that_cannot_be_read_are_named_with_their_number(text: str, says: str) -> None:
    with pytest.raises(LaunchError) as caught:
        parse_hostfile(text, "hosts.txt")
    assert says in str(caught.value)
    assert str(caught.value).startswith("hosts.txt")


def test_slots_are_the_same_everywhere_or_an_error() -> None:
    assert slots_per_host(parse_hostfile("a slots=8\nb slots=8")) == 8
    assert slots_per_host(parse_hostfile("a\nb")) == 0
    with pytest.raises(LaunchError, match="a=8, b=not set"):
        slots_per_host(parse_hostfile("a slots=8\nb"))


def test_a_hostfile_that_is_not_there(tmp_path) -> None:
    with pytest.raises(LaunchError, match="cannot be read"):
        read_hostfile(tmp_path / "hosts")
