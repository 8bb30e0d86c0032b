"""Each kind is found in the shapes that people write, and what only looks like it stays.

No value here is a person's: numbers of test cards, examples of standards, resolvers' addresses.
"""

from collections import Counter

import pytest

from stages.text.curation import Pii
from stages.text.pii import Masker

RANDOM = "a1B2c3D4e5F6g7H8i9J0k1L2m3N4o5P6q7R8"
JWT = "eyJhbGciOiJIUzI1NiIsInR5cCI6IkpXVCJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9PlFUP0THsR8U"
KEY = "-----BEGIN {0}PRIVATE KEY-----\nMIIEvQIBADANBgkq+/hkiG9w0BAQ==\n-----END {0}PRIVATE KEY-----"

FOUND = {
    "EMAIL": {
        "write to jane.doe+lists@mail.corp.com, please": "write to <EMAIL>, please",
        "<jane@corp.co.uk>;bob_x@sub-domain.corp.io.": "<<EMAIL>>;<EMAIL>.",
        "josé@exämple.de": "<EMAIL>",
        "mailto:a@b.org?subject=x": "mailto:<EMAIL>?subject=x",
        '{"to": "jane@corp.com"}': '{"to": "<EMAIL>"}',
    },
    "IP": {
        "from 151.101.1.69 and http://151.101.65.69:8080/x": "from <IP> and http://<IP>:8080/x",
        "[151.101.1.69], then. http://151.101.1.69/24": "[<IP>], then. http://<IP>/24",
        "2606:4700:4700::1111 or 2001:4860:4860:0:0:0:0:8888": "<IP> or <IP>",
        "2a00::1": "<IP>",
        "[2606:4700:4700::1111]:443": "[<IP>]:443",
    },
    "PHONE": {
        "call +1 650-253-0000 or +49 30 901820.": "call <PHONE> or <PHONE>.",
        "+44 (0)20 7946 0958": "<PHONE>",
        "tel:+16502530000 +1.6502530000 +1.650.253.0000": "tel:<PHONE> <PHONE> <PHONE>",
        "first\n+33 1 42 68 53 00\nlast\n": "first\n<PHONE>\nlast\n",
    },
    "CARD": {
        "4111 1111 1111 1111": "<CARD>",
        "card 4111111111111111, exp 12/30": "card <CARD>, exp 12/30",
        "5500-0000-0000-0004 3782 822463 10005 378282246310005": "<CARD> <CARD> <CARD>",
        "in 2024 6011000990139424.": "in 2024 <CARD>.",
    },
    "IBAN": {
        "DE89 3704 0044 0532 0130 00 at a bank": "<IBAN> at a bank",
        "GB82WEST12345698765432": "<IBAN>",
        "IBAN: FR14 2004 1010 0505 0001 3M02 606.": "IBAN: <IBAN>.",
        "NO93 8601 1117 947 BANK": "<IBAN> BANK",
    },
    "SECRET": {
        "key=AKIAIOSFODNN7EXAMPLE": "key=<SECRET>",
        f"token ghp_{RANDOM}, github_pat_{RANDOM}_{RANDOM}": "token <SECRET>, <SECRET>",
        f"sk-{RANDOM} sk-proj-{RANDOM} sk-ant-api03-{RANDOM}-AA": "<SECRET> <SECRET> <SECRET>",
        f"hf_{RANDOM[:34]} npm_{RANDOM} sk_live_{RANDOM[:24]}": "<SECRET> <SECRET> <SECRET>",
        f"AIza{RANDOM[:35]} xoxb-123456789012-{RANDOM[:12]} glpat-{RANDOM[:20]}": "<SECRET> <SECRET> <SECRET>",
        f"Bearer {JWT}.": "Bearer <SECRET>.",
        "a\n" + KEY.format("RSA ") + "\nb": "a\n<SECRET>\nb",
        KEY.format(""): "<SECRET>",
        KEY.format("OPENSSH ").split("\n-----END")[0] + "\n(cut off)": "<SECRET>(cut off)",
    },
}

STAYS = {
    "reserved names": "jane@example.com, a@b.test, root@localhost, x@sub.example.org, a@b.invalid, me@printer.local",
    "code": "@app.route('/') def f(x: int) -> a[1:2]: std::vector<int> a::b x@y m @ n -1 +1 1e-5 0x7fffffff",
    "files and packages": "icon@2x.png react@18.2.0 git@github.com:a/b.git pkg@latest user@host",
    "versions": "v10.20.30.40 version 120.0.6099.109 Chrome/98.0.47.58 pkg==1.20.30.40 pkg-1.20.30.40 1.20.30.40.5 >=10.2.3.44",
    "sections": "3.1.2.1 and 1.2.3.4; resolvers 1.1.1.1 8.8.8.8",
    "addresses that are nobody's": "192.168.1.20 10.20.0.1 127.0.0.1 203.0.113.70 172.16.30.1 0.0.0.0 255.255.255.255 224.0.0.251",
    "networks": "192.52.193.0/24, 151.101.0.0/16 2620:4f:8000::/48",
    "formulas": "50719*x + 2789545*y + 116820*z +2789545*x + 148500*w +1416820 +49*30901820",
    "numbers out of range": "300.168.10.1 151.101.1.690 151.101.1",
    "IPv6 that is nobody's": "fe80::1 ::1 2001:db8::1 fc00::aaaa ff02::1 dead::beef",
    "times and hardware": "12:34:56 aa:bb:cc:dd:ee:ff 2024-01-01T00:00:00+01:00 10:30 1:2:3",
    "dates": "2024-01-01 01/02/2024 31.12.2024 20240101123000 1999-2005 12-31-2024 10:30:15",
    "numbers like phones": "+35236450.6 +12 +1234567 2+1234567890 (+1) 555 650-253-0000 +999 123 456 789 UTC+01:00 +0.12345678901",
    "check digits": "4111 1111 1111 1112 4111111111111112 DE89 3704 0044 0532 0130 01 GB82WEST12345698765431",
    "digits of other lengths": "4202165767276 4220315081820346526 411111111111 41111111111111111111",
    "digits that are no card": "0.4111111111111111 1700000000000000 0000000000000000",
    "a bank account of another length": "DE89 3704 0044 0532 0130",
    "hashes": "d41d8cd98f00b204e9800998ecf8427e 550e8400-e29b-41d4-a716-446655440000 sha256:" + "0a1b2c3d" * 8,
    "identifiers": "10.5281/zenodo.1234567 978-3-16-148410-0 arXiv:2112.11446 ISSN 2049-3630 CVE-2024-12345",
    "names like keys": "sk-learn-is-a-library-with-a-very-long-name sk-short ghp_short AKIA hf_model AIzaShort",
    "placeholders of keys": f"ghp_{'x' * 36} sk-{'X' * 40} AKIA{'X' * 16} xoxb-your-token-goes-here-please",
    "public keys": "-----BEGIN PUBLIC KEY-----\nMIIB\n-----END PUBLIC KEY-----\n-----BEGIN CERTIFICATE-----\nMIIB",
    "no token": "eyJhbcdefghijklm.eyJabcdefg.x",
    "placeholders": "<EMAIL> <IP> <PHONE> <CARD> <IBAN> <SECRET>",
    "empty": "",
}


@pytest.mark.parametrize("kind", FOUND)
def test_each_shape_is_masked_and_counted_and_what_stands_around_it_stays(kind: str) -> None:
    for text, masked in FOUND[kind].items():
        assert Masker(Pii()).mask(text) == (masked, Counter({kind: masked.count(f"<{kind}>")})), text


@pytest.mark.parametrize("case", STAYS)
def test_what_only_looks_like_it_stays(case: str) -> None:
    assert Masker(Pii()).mask(STAYS[case]) == (STAYS[case], Counter())


def test_numbers_without_a_country_are_found_only_where_one_is_named() -> None:
    text = "(650) 253-0000 or 650-253-0000; id 1234567890, 2024-01-01, 555-0199, 4111 1111 1111 1112"
    assert Masker(Pii()).mask(text) == (text, Counter())
    for line, masked in {
        "call (650) 253-0000 now": "call <PHONE> now",
        "650-253-0000": "<PHONE>",
        "id 1234567890, 2024-01-01, 555-0199": "id 1234567890, 2024-01-01, 555-0199",
        "6502530000123": "6502530000123",
    }.items():
        assert Masker(Pii(phone_region="US")).mask(line)[0] == masked
    assert Masker(Pii(phone_region="DE")).mask("Tel. 030 901820")[0] == "Tel. <PHONE>"


def test_masks_are_final_and_kinds_are_counted_apart() -> None:
    text = f"jane@corp.com, bob@corp.com, 151.101.1.69, {JWT}, 4111 1111 1111 1111, DE89370400440532013000, +1 650-253-0000"
    masked, counts = Masker(Pii()).mask(text)
    assert masked == "<EMAIL>, <EMAIL>, <IP>, <SECRET>, <CARD>, <IBAN>, <PHONE>"
    assert counts == {"EMAIL": 2, "IP": 1, "SECRET": 1, "CARD": 1, "IBAN": 1, "PHONE": 1}
    assert Masker(Pii()).mask(masked) == (masked, Counter())


@pytest.mark.parametrize(
    ("option", "kind"),
    [
        ("emails", "EMAIL"),
        ("ip_addresses", "IP"),
        ("phone_numbers", "PHONE"),
        ("payment_cards", "CARD"),
        ("ibans", "IBAN"),
        ("secrets", "SECRET"),
    ],
)
def test_each_kind_can_be_left_alone(option: str, kind: str) -> None:
    cfg = Pii()
    setattr(cfg, option, False)
    for text in FOUND[kind]:
        assert Masker(cfg).mask(text) == (text, Counter()), text


def test_a_long_text_of_near_misses_takes_no_longer_than_any_other() -> None:
    # Patterns that try again from each place would take minutes here.
    text = (
        "a." * 40_000
        + "@"
        + "a-" * 40_000
        + "1." * 40_000
        + "A1" * 40_000
        + "1:" * 40_000
        + "-----BEGIN PRIVATE KEY-----" * 500
    )
    masked, counts = Masker(Pii()).mask(text)
    assert not set(counts) - {"SECRET"} and len(masked) > 100_000


def test_a_config_that_masks_nothing_or_names_no_country_is_refused() -> None:
    with pytest.raises(ValueError, match="pii masks nothing"):
        Pii(emails=False, ip_addresses=False, phone_numbers=False, payment_cards=False, ibans=False, secrets=False)
    with pytest.raises(ValueError, match=r"pii\.phone_region must be two capital letters"):
        Pii(phone_region="usa")
