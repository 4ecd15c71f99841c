// Checks that a webhook comes from the server, and has not been seen long ago.

import { createHmac, timingSafeEqual } from "node:crypto";

// Seconds by which the clocks of the two machines may differ, and within which a request is news.
const TOLERANCE_SECONDS = 300;
// A shorter secret is none: as when the variable that should hold it is empty.
const MIN_SECRET_BYTES = 24;

/** The request was not signed with this secret, or is too old. */
export class InvalidWebhook extends Error {
  constructor(message) {
    super(message);
    this.name = "InvalidWebhook";
  }
}

function header(headers, name) {
  const value = typeof headers.get === "function" ? headers.get(name) : headers[name];
  if (typeof value !== "string") throw new InvalidWebhook(`no signed webhook: ${name} is missing`);
  return value;
}

/** Checks a request and returns its event. */
export function verifyWebhook(secret, headers, body, toleranceSeconds = TOLERANCE_SECONDS) {
  const id = header(headers, "webhook-id");
  const timestamp = Number(header(headers, "webhook-timestamp"));
  const signatures = header(headers, "webhook-signature").split(" ");
  // Written so that NaN is refused.
  if (!(Math.abs(Date.now() / 1000 - timestamp) <= toleranceSeconds)) {
    throw new InvalidWebhook("it is too old, or the clocks differ");
  }
  const text = secret.replace(/^whsec_/, "");
  const key = Buffer.from(text, "base64");
  if (key.length < MIN_SECRET_BYTES || !/^[A-Za-z0-9+/]+=*$/.test(text)) {
    throw new InvalidWebhook("the secret is not one");
  }
  const made = createHmac("sha256", key).update(`${id}.${timestamp}.`).update(body).digest();
  const fits = (signature) => {
    const [version, text = ""] = signature.split(",");
    const sent = Buffer.from(text, "base64");
    return version === "v1" && sent.length === made.length && timingSafeEqual(sent, made);
  };
  if (!signatures.some(fits)) throw new InvalidWebhook("no signature is made with this secret");
  return JSON.parse(Buffer.from(body).toString());
}
