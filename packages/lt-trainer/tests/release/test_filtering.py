"""The filter of a bundle's texts: what is replaced, and what stays."""

import pytest

from lt_trainer.release.filtering import TextFilter

SECRETS = [
    "hf_" + "a" * 30,
    "sk-" + "b1" * 15,
    "ghp_" + "C" * 30,
    "AKIA" + "ABCDEFGH12345678",
    "-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----",
]


@pytest.mark.parametrize("secret", SECRETS)
def test_secrets_are_replaced_wherever_they_stand(secret: str) -> None:
    text_filter = TextFilter()
    filtered = text_filter.apply(f'{{"note": "{secret}", "loss": 3.25}}')
    assert filtered == '{"note": "<secret>", "loss": 3.25}'
    assert text_filter.counts["<secret>"] == 1


def test_a_password_in_an_address_is_replaced_alone() -> None:
    assert TextFilter().apply("s3://ada:hunter2@store/x") == "s3://<secret>@store/x"


def test_homes_hosts_users_and_folders_become_placeholders() -> None:
    text_filter = TextFilter(hosts=["node17.lab", "node17"], users=["ada"], folders=["/scratch/p1"], homes=["/own"])
    text = f"/{'home'}/ada/x /Users/grace/y /own/z /scratch/p1/run on node17.lab, node17: ada at 10.1.2.3, 127.0.0.1"
    assert text_filter.apply(text) == (
        "<home>/x <home>/y <home>/z <folder>/run on <host>, <host>: <user> at <host>, 127.0.0.1"
    )
    assert text_filter.counts == {"<home>": 3, "<host>": 3, "<user>": 1, "<folder>": 1, "<secret>": 0}


def test_words_that_only_contain_a_name_stay() -> None:
    text_filter = TextFilter(hosts=["vm"], users=["ada"], homes=["/own"], folders=["/scratch/p1"])
    text = "vmap adam adapter vm2 /owned /scratch/p12 torch 2.15.0 1.2.3.4.5 /x/own"
    assert text_filter.apply(text) == text


def test_filtered_text_is_not_changed_again() -> None:
    text_filter = TextFilter(hosts=["host"], users=["user"], homes=["/own"])
    once = text_filter.apply("host user /own/x hf_" + "a" * 30)
    assert TextFilter(homes=["/own"]).apply(once) == once
