"""Digests: of releases in test mode, where lost steps are made again, and of a release's terms."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from torch import Tensor

from vestige.errors import PrivacyError

if TYPE_CHECKING:
    from vestige.privacy.ledger_file import Account
    from vestige.release.door import Door


def compare_or_note(
    account: Account,
    name: str,
    before: str | None,
    values: Tensor,
    counts: tuple[float, ...] | None = None,
) -> None:
    """Compare a release with the one before a crash, or note its digest for such a case.

    The same noise over another sum would reveal the difference of the sums: PrivacyError.
    """
    digest = hashlib.blake2b(values.detach().cpu().numpy().tobytes(), digest_size=16)
    digest.update(repr(counts).encode())
    if before is None:
        account.note(name, digest.hexdigest())
    elif before != digest.hexdigest():
        values.zero_()
        raise PrivacyError(
            f"{name.rpartition(' of ')[0]} differs from the one that this run made before it was "
            "cut off: the same noise over another sum would reveal the difference. The data, the "
            "machine or the number of threads has changed; start a new run."
        )


def terms(door: Door, bounds: tuple[float, ...]) -> int:
    """A digest of what the next release goes by: processes that share a lot must agree."""
    spent = [event.key for event in door.own.events[-1:]]
    told = (bounds, door.noise.stds(bounds), door.count_noise, door.randomness.secure, spent)
    return int.from_bytes(hashlib.sha256(repr(told).encode()).digest()[:7], "big")
