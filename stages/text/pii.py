"""Finds personal data and secrets and puts what they were in their place. Apart, because each kind is a pattern and a proof:
the pattern finds candidates fast, the proof (a check digit, a numbering plan, an address range) keeps versions, dates and
hashes as they are. Placeholders are words, never somebody's address.
"""

import base64
import binascii
import ipaddress
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator

from phonenumbers import Leniency, PhoneNumberMatcher

from stages.text.curation import Pii

Check = Callable[[re.Match[str]], bool]

_EMAIL = re.compile(r"(?<![\w.+%-])[\w.+%-]{1,64}@(?:[^\W_](?:[\w-]{0,61}[^\W_])?\.)+[^\W\d_]{2,24}(?![\w@])(?!-\w)")
_NOBODY = re.compile(r"(?:^|\.)(?:example\.(?:com|net|org)|example|test|invalid|localhost|local)$", re.IGNORECASE)
_FILE = re.compile(
    r"\.(?:png|jpe?g|gif|webp|svg|ico|css|scss|html?|json|ya?ml|xml|txt|log|tgz|gz|whl|jar)$", re.IGNORECASE
)
_IPV4 = re.compile(r"(?:(?<=://)|(?<![\w.:/=~^-]))(?:\d{1,3}\.){3}\d{1,3}(?![\w-]|\.\w)")
_VERSION = re.compile(r"(?:\bv|ver|vers|version|release|build|section|chapter|§)[.:\s]*$", re.IGNORECASE)
_IPV6 = re.compile(r"(?<![\w:.])(?:[0-9A-Fa-f]{1,4}:){1,7}(?::?[0-9A-Fa-f]{1,4}){0,7}:?:?(?![\w:])")
_PREFIX_LENGTH = re.compile(r"/\d{1,3}(?![\w./])")
_GLOBAL_UNICAST = ipaddress.ip_network("2000::/3")
_CARD = re.compile(
    r"(?<![\w.+-])[2-6]\d{3}"
    r"(?:\d{9,15}|(?P<by>[ -])\d{4}(?P=by)\d{4}(?P=by)\d{4}|[ -]\d{6}[ -]\d{4,5})"
    r"(?![\w-]|\.\d)"
)
_ISSUERS = (
    (re.compile(r"4"), (16,)),  # Visa
    (re.compile(r"5[1-5]|222[1-9]|22[3-9]|2[3-6]|27[01]|2720"), (16,)),  # Mastercard
    (re.compile(r"3[47]"), (15,)),  # American Express
    (re.compile(r"3(?:0[0-5]|[689])"), (14, 16)),  # Diners
    (re.compile(r"6(?:011|4[4-9]|5)"), (16,)),  # Discover
    (re.compile(r"35(?:2[89]|[3-8])"), (16,)),  # JCB
    (re.compile(r"62"), (16, 17, 18, 19)),  # UnionPay
)
_IBAN_LENGTHS = {
    15: "NO", 16: "BE", 18: "DK FO FI GL NL SD FK", 19: "MK SI", 20: "AT BA EE KZ LT LU XK MN", 21: "CH HR LI LV",
    22: "BG BH CR DE GB GE IE ME RS VA", 23: "AE GI IL IQ OM SO TL", 24: "AD CZ ES MD PK RO SA SE SK TN VG",
    25: "LY PT ST", 26: "IS TR", 27: "BI DJ FR GR IT MC MR SM", 28: "AL AZ BY CY DO GT HU LB NI PL SV", 29: "BR EG PS QA UA",
    30: "JO KW MU YE", 31: "MT SC", 32: "LC", 33: "RU",
}  # fmt: skip
"""Length -> countries, from the registry of ISO 13616."""
_IBAN = re.compile(
    r"(?<!\w)(?:"
    + "|".join(
        rf"(?:{countries.replace(' ', '|')})\d\d(?:[ ]?[A-Z0-9]){{{length - 4}}}"
        for length, countries in _IBAN_LENGTHS.items()
    )
    + r")(?!\w)"
)
_PRIVATE_KEY = re.compile(
    r"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----"
    r"(?:(?s:.{0,20000}?)-----END (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----|[A-Za-z0-9+/=\s]*)"
)
_TOKEN = re.compile(
    r"(?<![\w-])(?:"
    r"(?:AKIA|ASIA)[A-Z0-9]{16}"  # AWS
    r"|gh[pousr]_[A-Za-z0-9]{36,255}|github_pat_\w{40,255}|glpat-[\w-]{20,64}"  # GitHub, GitLab
    r"|sk-(?:proj-|svcacct-|admin-|ant-[a-z0-9]{3,10}-|or-v1-)?[A-Za-z0-9_-]{32,255}"  # OpenAI, Anthropic, OpenRouter
    r"|xox[abeoprs]-[A-Za-z0-9-]{20,255}"  # Slack
    r"|AIza[\w-]{35}|ya29\.[\w-]{30,255}"  # Google
    r"|hf_[A-Za-z0-9]{34,64}|npm_[A-Za-z0-9]{36}|pypi-[\w-]{50,255}"  # registries
    r"|[sr]k_(?:live|test)_[A-Za-z0-9]{20,255}"  # Stripe
    r"|SG\.[\w-]{22}\.[\w-]{43}|dop_v1_[a-f0-9]{64}"  # SendGrid, DigitalOcean
    r")(?![\w-])"
)
_JWT = re.compile(r"(?<![\w.-])(eyJ[\w-]{10,})\.eyJ[\w-]{4,}\.[\w-]*(?![\w-])")

_DECIMAL = re.compile(r"[+＋]?\d{4,}\.\d+(?![.\d])")
"""+35236450.6 begins like a number in Luxembourg; a country's code has three digits at most."""
_FORMULA = re.compile(r"[+＋]\s|[+＋]?[\d\s().-]+[*/^%_=]")
"""A sum: `+ 2789545*x`."""


class Masker:
    """All kinds that one config asks for."""

    def __init__(self, cfg: Pii) -> None:
        self.cfg = cfg
        kinds: list[tuple[bool, str, str, re.Pattern[str], Check]] = [  # what holds others' shapes comes first
            (cfg.secrets, "SECRET", "-----BEGIN ", _PRIVATE_KEY, lambda match: True),
            (cfg.secrets, "SECRET", "eyJ", _JWT, _is_jwt),
            (cfg.secrets, "SECRET", "", _TOKEN, _is_random),
            (cfg.emails, "EMAIL", "@", _EMAIL, _is_somebodys),
            (cfg.ibans, "IBAN", r"[A-Z]{2}\d\d[ ]?[A-Z0-9]{4}", _IBAN, _is_iban),
            (cfg.payment_cards, "CARD", r"\d{4}[ -]?\d{4}", _CARD, _is_card),
            (cfg.ip_addresses, "IP", r"[0-9a-fA-F]:[0-9a-fA-F]{0,4}:", _IPV6, _is_public_v6),
            (cfg.ip_addresses, "IP", r"\d\.\d{1,3}\.\d{1,3}\.\d", _IPV4, _is_public_v4),
        ]
        self._kinds = [(kind, re.compile(hint), pattern, check) for on, kind, hint, pattern, check in kinds if on]
        # A `+` and seven digits, or with a region seven digits: lines without go by, which is 50 times as fast.
        self._phone_line = re.compile(
            r"(?:\d[^\w\n]{0,3}){6}\d" if cfg.phone_region else r"[+＋]\(?\d(?:[^\w\n]{0,3}\d){6}"
        )

    def mask(self, text: str) -> tuple[str, Counter[str]]:
        """(text with placeholders, how many of each kind: EMAIL, IP, PHONE, CARD, IBAN, SECRET)."""
        counts: Counter[str] = Counter()
        for kind, hint, pattern, is_one in self._kinds:
            if hint.search(text):  # most texts hold none: twice as fast
                text = pattern.sub(_replacement(kind, is_one, counts), text)
        if self.cfg.phone_numbers and self._phone_line.search(text):
            text = "".join(self._without_phones(text, counts))
        return text, counts

    def _without_phones(self, text: str, counts: Counter[str]) -> Iterator[str]:
        region = self.cfg.phone_region
        for line in text.splitlines(keepends=True):
            end = 0
            if self._phone_line.search(line):
                # Of numbers without a country the digits must also be grouped as that country does it.
                leniency = Leniency.STRICT_GROUPING if region else Leniency.VALID
                for match in PhoneNumberMatcher(line, region or "ZZ", leniency):
                    if _DECIMAL.match(line, match.start) or _FORMULA.match(line, match.start):
                        continue
                    counts["PHONE"] += 1
                    yield line[end : match.start] + "<PHONE>"
                    end = match.end
            yield line[end:]


def _replacement(kind: str, is_one: Check, counts: Counter[str]) -> Callable[[re.Match[str]], str]:
    def replace(match: re.Match[str]) -> str:
        if not is_one(match):
            return match[0]
        counts[kind] += 1
        return f"<{kind}>"

    return replace


def _is_somebodys(match: re.Match[str]) -> bool:
    local, _, domain = match[0].partition("@")
    if local.startswith(".") or local.endswith(".") or ".." in local or _NOBODY.search(domain) or _FILE.search(domain):
        return False
    return not (local == "git" and match.string[match.end() : match.end() + 1] in ("/", ":"))  # an address of code


def _is_public_v4(match: re.Match[str]) -> bool:
    if _VERSION.search(match.string, max(0, match.start() - 12), match.start()) or _is_network(match):
        return False
    try:
        address = ipaddress.IPv4Address(match[0])
    except ValueError:
        return False
    # 3.1.2.1 is a section, a version, or one of the public resolvers: nobody's own.
    return address.is_global and not address.is_multicast and max(address.packed) > 9


def _is_public_v6(match: re.Match[str]) -> bool:
    try:
        address = ipaddress.IPv6Address(match[0])
    except ValueError:
        return False
    return address.is_global and address in _GLOBAL_UNICAST and not _is_network(match)


def _is_network(match: re.Match[str]) -> bool:
    return (
        _PREFIX_LENGTH.match(match.string, match.end()) is not None
        and match.string[match.start() - 1 : match.start()] != "/"
    )


def _is_card(match: re.Match[str]) -> bool:
    digits = re.sub(r"\D", "", match[0])
    if not any(prefix.match(digits) and len(digits) in lengths for prefix, lengths in _ISSUERS):
        return False
    doubled = (sum(divmod(2 * int(digit), 10)) for digit in digits[-2::-2])
    return (sum(map(int, digits[::-2])) + sum(doubled)) % 10 == 0 and len(set(digits)) > 1


def _is_iban(match: re.Match[str]) -> bool:
    iban = match[0].replace(" ", "")
    return int("".join(str(int(sign, 36)) for sign in iban[4:] + iban[:4])) % 97 == 1


def _is_random(match: re.Match[str]) -> bool:
    """Letters and digits mixed: neither `sk-a-name-of-many-plain-words` nor `ghp_xxxxxxxx`."""
    body = match[0][4:]
    return any(map(str.isdigit, body)) and any(map(str.isalpha, body)) and len(set(body)) >= 8


def _is_jwt(match: re.Match[str]) -> bool:
    header = match[1]
    try:
        return "alg" in json.loads(base64.urlsafe_b64decode(header + "=" * (-len(header) % 4)))
    except (ValueError, binascii.Error):
        return False
