"""Checks that a webhook comes from the server, and has not been seen long ago."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import time
from typing import Any, Mapping

# Seconds by which the clocks of the two machines may differ, and within which a request is news.
TOLERANCE_SECONDS = 300
# A shorter secret is none: as when the variable that should hold it is empty.
MIN_SECRET_BYTES = 24


class InvalidWebhook(ValueError):
    """The request was not signed with this secret, or is too old."""


def verify_webhook(
    secret: str,
    headers: Mapping[str, str],
    body: bytes | bytearray | str,
    tolerance_seconds: float = TOLERANCE_SECONDS,
) -> dict[str, Any]:
    """Checks a request and returns its event. `secret` is the endpoint's, `whsec_…`; `headers` has
    the request's headers, in any case; `body` is its body as it came, as bytes or text."""
    names = {name.lower(): value for name, value in headers.items()}
    try:
        event_id, timestamp = names["webhook-id"], int(names["webhook-timestamp"])
        signatures = names["webhook-signature"].split()
        key = base64.b64decode(secret.split("whsec_", 1)[-1], validate=True)
    except (KeyError, ValueError) as error:
        raise InvalidWebhook(f"no signed webhook: {error}") from None
    if len(key) < MIN_SECRET_BYTES:
        raise InvalidWebhook("the secret is too short")
    if abs(time.time() - timestamp) > tolerance_seconds:
        raise InvalidWebhook("it is too old, or the clocks differ")
    sent = body.encode() if isinstance(body, str) else bytes(body)
    signed = f"{event_id}.{timestamp}.".encode() + sent
    made = "v1," + base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()
    if not any(hmac.compare_digest(made.encode(), it.encode()) for it in signatures):
        raise InvalidWebhook("no signature is made with this secret")
    event: dict[str, Any] = json.loads(sent)
    return event
